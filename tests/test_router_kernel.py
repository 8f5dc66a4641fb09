"""The one-launch router, interpreted on the CPU with race detection, and its public entry.

The interpreter runs every warpgroup in a thread of its own and stands still if the CPU has too few, so the tests keep
to two of them. It knows neither PTX nor the shared memory of another CTA: the exchange between CTAs goes through global
memory there. As it is on a GPU, tests/test_ptx_clusters.py runs it, and on one tests/test_gpu_router.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.formats import quantize
from jax_warp_decode.kernels.router import RouterConfig, moe_router, normed_moe_router, refusal
from jax_warp_decode.route_tokens import norm_and_route, route_tokens
from jax_warp_decode.routers import ROUTERS, Router
from jax_warp_decode.routing import route

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def make(seed, tokens, experts, hidden, x_dtype="bf16", w_dtype="bf16"):
    """x [T, H], w_router [E, H] with logits of order one, and the exact logits [T, E]."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden)).astype(DTYPES[x_dtype])
    w = (rng.standard_normal((experts, hidden)) / np.sqrt(hidden)).astype(DTYPES[w_dtype])
    return jnp.asarray(x), jnp.asarray(w), x.astype(np.float64) @ w.astype(np.float64).T


def assert_routed(got, x, w, logits, k, renormalize):
    """The oracle's choice and weights, within the rounding of float32 logits."""
    ids, weights = map(np.asarray, got)
    assert (ids.dtype, weights.dtype, ids.shape) == (np.int32, np.float32, (len(logits), k))
    size = np.sqrt(np.square(x, dtype=np.float64) @ np.square(w, dtype=np.float64).T).max()
    error = oracle._sum_error(2 * x.shape[1], size, oracle.UNIT["float32"])
    ordered = -np.sort(-logits, axis=-1)[:, :k + 1]
    assert (ordered[:, :-1] - ordered[:, 1:] > 2 * error).all(), "a draw too close to tell, take another seed"
    want_ids, want = oracle.route(logits, k, renormalize)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2 * error + (logits.shape[1] + np.ptp(logits) + 16) * 2.0**-23)


@pytest.mark.parametrize("tokens, experts, hidden, k, config, renormalize", [
    (1, 8, 256, 1, RouterConfig(1, 1, 1), True),
    (2, 16, 256, 3, RouterConfig(2, 1, 1), True),  # two CTAs, two experts a warp
    (2, 16, 256, 3, RouterConfig(2, 1, 1), False),
    (1, 24, 512, 8, RouterConfig(1, 2, 2), False),  # two warpgroups
    (1, 72, 288, 4, RouterConfig(1, 1, 3), True),  # E no power of two, H off the step
    (1, 160, 256, 10, RouterConfig(2, 1, 1), False),  # more logits than one load a lane
])
def test_matches_the_oracle(interpreter, tokens, experts, hidden, k, config, renormalize):
    x, w, logits = make(experts, tokens, experts, hidden)
    got = moe_router(x, w, k, renormalize=renormalize, config=config, interpret=interpreter)
    assert_routed(got, x, w, logits, k, renormalize)


@pytest.mark.parametrize("x_dtype, w_dtype", [("bf16", "f32"), ("f16", "f16")])
def test_dtypes(interpreter, x_dtype, w_dtype):
    x, w, logits = make(3, 1, 8, 256, x_dtype, w_dtype)
    assert_routed(moe_router(x, w, 3, interpret=interpreter), x, w, logits, 3, True)


def assert_normed(got, x, gain, eps=1e-6):
    """h is the exact norm rounded once, up to the rounding of float32, which may move it across the middle of two."""
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * np.asarray(gain, np.float64)
    error = 2.0**-20 * np.abs(exact)
    low, high = ((exact + side * error).astype(np.float32).astype(x.dtype) for side in (-1, 1))
    got = np.asarray(got)
    assert got.dtype == x.dtype
    assert ((got >= np.minimum(low, high)) & (got <= np.maximum(low, high))).all()
    assert x.dtype == np.float32 or (got == exact.astype(np.float32).astype(x.dtype)).mean() > 0.99


@pytest.mark.parametrize("tokens, experts, hidden, config, x_dtype, w_dtype", [
    (2, 16, 512, RouterConfig(1, 2, 1), "bf16", "bf16"),  # a step for each of two warpgroups
    (1, 16, 768, RouterConfig(1, 1, 2), "f16", "bf16"),  # steps before and after the first loads
    (1, 8, 288, RouterConfig(1, 1, 3), "bf16", "f32"),  # H off the step, which is 128
])
def test_the_norm_comes_along(interpreter, tokens, experts, hidden, config, x_dtype, w_dtype):
    """And the router sees the normalised values as they are stored, so that nothing depends on who norms them."""
    x, w, _ = make(experts + hidden, tokens, experts, hidden, x_dtype, w_dtype)
    gain = jnp.asarray(np.random.default_rng(0).standard_normal(hidden), jnp.bfloat16)
    ids, weights, h = normed_moe_router(3 * x, gain, w, 3, eps=1e-6, config=config, interpret=interpreter)
    assert_normed(h, 3 * x, gain)
    want = moe_router(h, w, 3, config=config, interpret=interpreter)
    np.testing.assert_array_equal(ids, want[0])
    np.testing.assert_array_equal(weights, want[1])


def test_equal_rows_tie_exactly_and_the_lower_id_wins(interpreter):
    """Wherever they are: in other warps, rows of a warp, CTAs."""
    x, w, _ = make(5, 1, 32, 352)
    w = jnp.tile(w[:8], (4, 1))[jnp.asarray(np.random.default_rng(6).permutation(32))]
    ids, weights = moe_router(x, w, 8, config=RouterConfig(2, 1, 1), interpret=interpreter)
    logits = jnp.einsum("th,eh->te", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
    want = route(logits, 8)
    np.testing.assert_array_equal(ids, want.ids)
    rows = np.asarray(w.astype(jnp.float32))
    ties = [(a, b) for a, b in zip(range(7), range(1, 8), strict=True) if (rows[ids[0, a]] == rows[ids[0, b]]).all()]
    assert len(ties) == 6
    assert all(ids[0, a] < ids[0, b] and weights[0, a] == weights[0, b] for a, b in ties)


@pytest.mark.parametrize("renormalize", [True, False])
def test_special_values_do_as_in_route_and_stay_in_their_row(interpreter, renormalize):
    """Logits are x[0] * w[:, 0] here, so that a row of logits can be given; general requirement 1."""
    rows = np.array([[np.nan, 1, 2, 1], [np.inf, 1, 2, 3], [-np.inf, 0, -0.0, -300], [-np.inf] * 4, [np.nan] * 4],
                    np.float32)
    rows = np.concatenate([rows, rows - np.float32(1)], axis=1)
    got_ids, got_weights = [], []
    for row in rows:
        w = jnp.zeros((8, 256), jnp.float32).at[:, 0].set(row)
        x = jnp.zeros((1, 256), jnp.bfloat16).at[0, 0].set(1)
        ids, weights = moe_router(x, w, 3, renormalize=renormalize, interpret=interpreter)
        got_ids.append(ids[0])
        got_weights.append(weights[0])
    want = route(jnp.asarray(rows), 3, renormalize=renormalize)
    np.testing.assert_array_equal(np.array(got_ids), want.ids)
    np.testing.assert_allclose(np.array(got_weights), want.weights, rtol=1e-6)


@pytest.mark.parametrize("router", [Router(2, "topk_softmax"), Router(2)])
def test_a_nan_logit_of_any_expert_reaches_all_weights_of_its_token(interpreter, router):
    """Also with topk_softmax, whose weights in `route` look at the chosen experts alone. The choice is the same."""
    x, w, logits = make(10, 2, 8, 256)
    left_out = [e for e in range(8) if e not in np.argsort(-logits)[:, :2]][0]
    w = w.at[left_out].set(0).at[left_out, 5].set(np.nan)
    x = x.at[0, 5].set(0.0)  # 0 * NaN is NaN too
    one_launch = route_tokens(x, w, router, strategy="one_launch", interpret=interpreter)
    assert np.isnan(one_launch.weights).all()
    xla = route_tokens(x, w, router, strategy="xla")
    assert np.isfinite(xla.weights).all() == (router.scoring == "topk_softmax")
    np.testing.assert_array_equal(one_launch.ids, xla.ids)
    assert not (one_launch.ids == left_out).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_token_does_not_reach_its_neighbours(interpreter, bad):
    x, w, _ = make(8, 3, 8, 256)
    want = moe_router(x, w, 3, interpret=interpreter)
    got = moe_router(x.at[1].set(bad), w, 3, interpret=interpreter)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a[0::2], b[0::2])
    assert len(set(np.asarray(got[0][1]))) == 3


def test_jit_vmap_scan_and_x64(interpreter):
    x, w, _ = make(9, 2, 8, 256)
    fn = lambda x: moe_router(x, w, 2, interpret=interpreter)
    want = fn(x)
    pairs = x.reshape(2, 1, 256)
    mapped = jax.jit(jax.vmap(fn))(pairs)
    scanned = jax.lax.scan(lambda carry, x: (carry, fn(x)), 0, pairs)[1]
    for got in (mapped, scanned):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.reshape(2, 2), b)
    with jax.enable_x64(True):
        wide = fn(x)
        assert (wide[0].dtype, wide[1].dtype) == (jnp.int32, jnp.float32)
        np.testing.assert_array_equal(wide[0], want[0])


def test_no_tokens():
    """D10."""
    ids, weights = moe_router(jnp.zeros((0, 256), jnp.bfloat16), jnp.zeros((8, 256), jnp.bfloat16), 3)
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 3), jnp.int32, (0, 3), jnp.float32)


def test_the_heuristic_fits_every_size_that_is_not_refused():
    for experts in range(8, 513, 8):
        for hidden, tokens in itertools.product((256, 352, 2880, 7168), (1, 8, 40)):
            config = RouterConfig.heuristic(tokens, experts, hidden, 2)
            assert 2 <= config.cluster <= 16 and config.warpgroups <= 5 and config.unroll >= 1
            assert (1 <= config.rows(experts) <= 4) is (refusal(experts, hidden, 2) == "")
    for experts in (4, 60, 100):  # one CTA alone could hold them, but has no cluster
        assert "multiple of 8" in refusal(experts, 2048, 2)
    for experts in (8, 16, 32, 64, 72, 96, 128, 160, 192, 256, 320, 384, 512):
        assert refusal(experts, 2048, 2) == ""


@pytest.mark.parametrize("tokens, experts, cluster, warpgroups", [
    (1, 128, 16, 2), (4, 128, 16, 2), (8, 128, 8, 2), (40, 128, 8, 2), (1, 256, 16, 2), (8, 256, 8, 4), (8, 512, 16, 4),
    (1, 64, 16, 1)])
def test_eight_tokens_take_clusters_of_eight(tokens, experts, cluster, warpgroups):
    """As bench/results/router-sweep.json has it; with more experts a warp would have more than two."""
    config = RouterConfig.heuristic(tokens, experts, 2048, 2)
    assert (config.cluster, config.warpgroups) == (cluster, warpgroups)


@pytest.mark.parametrize("gain, words", [
    (jnp.ones(128, jnp.bfloat16), r"got bfloat16 \(128,\), expected \[H\] = \[256\]"),
    (quantize(jnp.ones(256), "mxfp8"), r"got mxfp8 \(256,\), expected \[H\]"),
    (jnp.ones(256, jnp.int8), "got int8"), ([1.0], "got list"), (None, "got NoneType")])
def test_a_gain_that_does_not_fit_is_named(gain, words):
    with pytest.raises(ArgumentError, match=f"^gain: {words}"):
        normed_moe_router(GOOD["x"], gain, GOOD["w_router"], 2, eps=1e-6, interpret=True)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("experts, hidden, renormalize", [(128, 2048, True), (72, 2880, False), (512, 7168, True)])
def test_lowers_to_one_launch(experts, hidden, renormalize, normed):
    """The exchange that the interpreter cannot run, PTX and all: it lowers, and nothing but one kernel comes out."""
    fn = functools.partial(normed_moe_router, eps=1e-6) if normed else moe_router
    x, *gain, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16)
                   for shape in ((2, hidden), *[(hidden,)] * normed, (experts, hidden)))
    lowered = jax.jit(functools.partial(fn, k=8, renormalize=renormalize)).trace(x, *gain, w).lower(
        lowering_platforms=("cuda",)).as_text()
    assert lowered.count("stablehlo.custom_call") == 1
    assert not [op for op in ("dot", "sort", "reduce", "while", "add") if f"stablehlo.{op}" in lowered]


GOOD = dict(x=jnp.zeros((1, 256), jnp.bfloat16), w_router=jnp.zeros((8, 256), jnp.bfloat16), k=2)


@pytest.mark.parametrize("change, error, message", [
    (dict(x=jnp.zeros(256, jnp.bfloat16)), ArgumentError, r"^x: got shape \(256,\), expected \[T, H\]"),
    (dict(x=jnp.zeros((1, 256))), ArgumentError, r"^x: got dtype float32, expected bfloat16 or float16; call"),
    (dict(x=[1.0]), ArgumentError, r"^x: got list"),
    (dict(w_router=jnp.zeros((8, 512), jnp.bfloat16)), ArgumentError, r"^w_router: got shape \(8, 512\), .*\(8, 256\)"),
    (dict(w_router=jnp.zeros((8, 256), jnp.int8)), ArgumentError, r"^w_router: got dtype int8"),
    (dict(w_router=quantize(jnp.zeros((8, 256)), "mxfp8")), ArgumentError,
     r"^w_router: got mxfp8 \(8, 256\), expected bfloat16 or float16 or float32; dequantise it"),
    (dict(x=quantize(jnp.zeros((1, 256)), "mxfp8")), ArgumentError, r"^x: got mxfp8 \(1, 256\), .*; dequantise it"),
    (dict(k=9), ArgumentError, r"^k: got 9, expected at most 8 \(E = 8"),
    (dict(k=0), ArgumentError, r"^k: got 0, expected at least 1"),
    (dict(config=RouterConfig(4, 1, 1)), ArgumentError, r"^config: got RouterConfig\(cluster=4.* for E = 8"),
    (dict(config=RouterConfig(32, 1, 1)), ArgumentError, r"^config: .*cluster in \(1, 2, 4, 8, 16\)"),
    (dict(config=RouterConfig(1, 1, 1.5)), ArgumentError, r"^config: got unroll=1.5, expected an integer"),
    (dict(config=RouterConfig(1, 1, "1")), ArgumentError, r"^config: got unroll='1', expected an integer"),
    (dict(config=RouterConfig(1, 1.0, 1)), ArgumentError, r"^config: got warpgroups=1.0, expected an integer"),
    (dict(config=RouterConfig(True, 1, 1)), ArgumentError, r"^config: got cluster=True, expected an integer"),
    (dict(config=7), ArgumentError, r"^config: got int, expected RouterConfig"),
    (dict(w_router=jnp.zeros((6, 256), jnp.bfloat16)), UnsupportedError, r"^w_router: got E = 6, .*multiple of 8"),
    (dict(w_router=jnp.zeros((2048, 256), jnp.bfloat16)), UnsupportedError, r"^w_router: got E = 2048, .*up to 512"),
    (dict(x=jnp.zeros((1, 128), jnp.bfloat16), w_router=jnp.zeros((8, 128), jnp.bfloat16)), UnsupportedError,
     r"^w_router: got H = 128, expected a multiple of 32 of at least 256; call route_tokens"),
])
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(moe_router, **{**GOOD, **change}, interpret=True))


def test_without_a_gpu_it_says_so_where_it_would_run():
    """And says nothing where it is traced for another machine, `test_lowers_to_one_launch`."""
    with pytest.raises(UnsupportedError, match="^moe_router: cannot run: JAX sees no NVIDIA GPU .*pass interpret=T"):
        moe_router(**GOOD)


def test_gradients_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="moe_router: has no gradient.*differentiate route"):
        jax.grad(lambda x: moe_router(x, GOOD["w_router"], 2, interpret=True)[1].sum().astype(jnp.bfloat16))(GOOD["x"])


# ---------------------------------------------------------------------------------------------------- the public entry


@pytest.mark.parametrize("router", [Router(3), Router(3, "softmax", False), Router(3, "topk_softmax", False)])
def test_both_strategies_agree(interpreter, router):
    x, w, _ = make(11, 2, 8, 256)
    want = route_tokens(x, w, router, strategy="xla")
    got = route_tokens(x, w, router, strategy="one_launch", interpret=interpreter)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5)


def launches(*args, **options):
    fn = functools.partial(route_tokens, router=options.pop("router", 2), interpret=True, **options)
    return "moe_router" in str(jax.make_jaxpr(fn)(*args))


def test_auto_takes_the_kernel_for_few_tokens_of_its_routers():
    x, w, _ = make(12, 8, 8, 256)
    assert launches(x, w)
    many = jnp.zeros((9, 256), jnp.bfloat16)
    others = [dict(router=ROUTERS["minimax-m3"]), dict(router=Router(2, scale=2.0)), dict(bias=jnp.zeros(8)),
              dict(router=Router(1, n_group=2)), dict(expert_scale=jnp.ones(8)), dict(strategy="xla")]
    assert not launches(many, w) and not launches(x.astype(jnp.float32), w)
    for options in others:
        assert not launches(x, w, **options), options


@pytest.mark.parametrize("launch, tokens, dtype, options", [
    ("normed_moe_router", 2, jnp.bfloat16, {}),
    ("rms_norm", 9, jnp.bfloat16, {}), ("rms_norm", 2, jnp.float32, {}),
    ("rms_norm", 2, jnp.bfloat16, dict(bias=jnp.zeros(8))),
])
def test_the_norm_is_a_launch_of_its_own_where_the_router_cannot_take_it(launch, tokens, dtype, options):
    x, w, _ = make(15, tokens, 8, 256)
    gain = jnp.asarray(np.random.default_rng(1).standard_normal(256), jnp.bfloat16)
    fn = functools.partial(norm_and_route, router=Router(2), eps=1e-6, interpret=True, **options)
    h, routing = fn(x.astype(dtype), gain, w)
    assert launch in str(jax.make_jaxpr(fn)(x.astype(dtype), gain, w))
    assert_normed(h, x.astype(dtype), gain)
    want = route_tokens(h, w, Router(2), strategy="xla")
    np.testing.assert_array_equal(routing.ids, want.ids)
    np.testing.assert_allclose(routing.weights, want.weights, rtol=1e-5)


def test_every_router_runs_from_tokens():
    x, w, logits = make(13, 3, 64, 96)
    bias = jnp.asarray(np.random.default_rng(14).uniform(-1, 1, 64), jnp.float32)
    for family in ("gpt-oss", "deepseek-v3", "deepseek-v4"):
        array = {"gpt-oss": "bias"}.get(family, "correction_bias")
        got = route_tokens(x, w, ROUTERS[family], **{array: bias})
        want = route(jnp.asarray(logits, jnp.float32), ROUTERS[family], **{array: bias})
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_allclose(got.weights, want.weights, rtol=1e-4)


@pytest.mark.parametrize("change, error, message", [
    (dict(strategy="fast"), ArgumentError, r"^strategy: got 'fast', expected one of \['auto', 'one_launch', 'xla'\]"),
    (dict(strategy="one_launch"), UnsupportedError, r"^strategy: 'one_launch' cannot run: JAX sees no NVIDIA GPU"),
    (dict(strategy="one_launch", interpret=True, bias=jnp.zeros(8)), UnsupportedError, r"takes no bias; strategy="),
    (dict(strategy="one_launch", interpret=True, router=Router(2, "sigmoid")), UnsupportedError, r"not 'sigmoid'"),
    (dict(x=jnp.zeros((1, 1, 256))), ArgumentError, r"^x: got float32 \(1, 1, 256\), .*vmap"),
    (dict(w_router=jnp.zeros((8, 255))), ArgumentError, r"^w_router: got shape \(8, 255\), expected \[E, 256\]"),
    (dict(w_router=quantize(jnp.zeros((8, 256)), "mxfp8")), ArgumentError,
     r"^w_router: got mxfp8 \(8, 256\), expected a floating array \[E, H\]; dequantise it"),
    (dict(w_router=quantize(jnp.zeros((8, 256)), "mxfp8"), interpret=True), ArgumentError, r"^w_router: got mxfp8"),
    (dict(w_router=jnp.zeros((0, 256)), router=1), ArgumentError, r"^w_router: got shape \(0, 256\), .* E >= 1"),
    (dict(w_router=jnp.zeros((0, 256), jnp.bfloat16), router=1, interpret=True), ArgumentError, r"^w_router: got sha"),
    (dict(w_router=jnp.zeros((8, 256), jnp.float8_e4m3fn), strategy="one_launch", interpret=True), UnsupportedError,
     r"w_router is float8_e4m3fn, not bfloat16, float16 or float32; strategy="),
    (dict(interpret="yes"), ArgumentError, r"^interpret: got 'yes', expected True or False"),
    (dict(router=9), ArgumentError, r"^k: got 9, expected 1 to 8"),
])
def test_bad_arguments_of_the_entry(change, error, message):
    good = dict(x=GOOD["x"], w_router=GOOD["w_router"], router=2)
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(route_tokens, **{**good, **change}))
