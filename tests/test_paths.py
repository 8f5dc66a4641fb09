"""The two XLA strategies, "reference" and "expert_centric", against the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode import ArgumentError, ExpertWeights, QuantizedArray, Routing, UnsupportedError, moe
from jax_warp_decode.paths import grouped_kernels

SMALL = dict(tokens=5, experts=6, hidden=64, intermediate=96, k=3)
PATHS = {
    "reference": dict(strategy="reference"),
    "expert_centric": dict(strategy="expert_centric"),
    "expert_centric-mxfp8": dict(strategy="expert_centric", activation_format="mxfp8"),
}
EXACT_ACTIVATIONS = ("reference", "expert_centric")
STORED = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@functools.cache  # one compilation per path and shape, whatever the routing
def layer(path):
    return jax.jit(functools.partial(moe, **PATHS[path]))


def run(case, path):
    return layer(path)(*case.args())


def assert_right(y, case, path, x_dtype="bf16"):
    """Within the derived bound, which depends on how the path stores the intermediate."""
    if path == "expert_centric-mxfp8":
        oracle.assert_close(y, case.with_mxfp8_x(), h_dtype="mxfp8")
    else:
        oracle.assert_close(y, case, h_dtype="float32" if path == "reference" else STORED[x_dtype])


def row_errors(y, case):
    """Relative L2 error of each row that is not zero."""
    y = np.asarray(y, np.float64)
    size = np.linalg.norm(case.exact, axis=1)
    assert not y[size == 0].any()
    return np.linalg.norm(y - case.exact, axis=1)[size > 0] / size[size > 0]


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pattern", oracle.PATTERNS)
@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_every_routing_pattern_and_weight_format(path, pattern, weights):
    # Idle experts, idle rows and the weights of skipped slots hold NaN.
    case = oracle.make_case(1, **SMALL, pattern=pattern, weights=weights)
    assert_right(run(case, path), case, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("x_dtype,weights", [("f32", "f32"), ("f32", "bf16"), ("f32", "mxfp8"), ("f16", "f16"),
                                             ("f16", "mxfp8")])
def test_every_activation_dtype(path, x_dtype, weights):
    case = oracle.make_case(2, **SMALL, pattern="skipped", x_dtype=x_dtype, weights=weights)
    assert_right(run(case, path), case, path, x_dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 33, 129])
def test_every_number_of_tokens(path, tokens):
    case = oracle.make_case(3, **{**SMALL, "tokens": tokens}, pattern="skipped")
    y = run(case, path)
    assert y.shape == (tokens, SMALL["hidden"]) and y.dtype == jnp.bfloat16
    if tokens:
        assert_right(y, case, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("hidden,intermediate", [(96, 96), (64, 352), (128, 704)])
def test_sizes_that_no_large_tile_divides(path, hidden, intermediate):
    # Case D01: only expert 1 is used, its neighbours hold NaN; rows 0 and 2 are zero and must stay exactly zero.
    case = oracle.make_case(4, tokens=3, experts=3, hidden=hidden, intermediate=intermediate, k=1)
    w = {name: getattr(case, name).copy() for name in ("w_gate", "w_up", "w_down")}
    for name, shape in (("w_gate", (intermediate, hidden)), ("w_up", (intermediate, hidden)),
                        ("w_down", (hidden, intermediate))):
        w[name][[0, 2]] = np.nan
        w[name][1] = np.random.default_rng(5).standard_normal(shape) / 8
    x = case.x.copy()
    x[[0, 2]] = 0
    case = dataclasses.replace(case, x=x, ids=np.ones((3, 1), np.int32), weights=np.ones((3, 1), np.float32), **w)
    y = np.asarray(run(case, path), np.float32)
    assert not y[[0, 2]].any() and y[1].any()
    assert_right(y.astype(ml_dtypes.bfloat16), case, path)


@pytest.mark.parametrize("path", EXACT_ACTIVATIONS)
def test_sizes_of_any_kind_on_a_cpu(path):  # a GPU refuses them, see below
    case = oracle.make_case(6, tokens=9, experts=4, hidden=7, intermediate=5, k=2, pattern="skipped")
    assert_right(run(case, path), case, path)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("factor", [2.0**-20, 2.0**20])
def test_float16_activations_with_weights_beyond_float16(weights, factor):
    """The weights are not squeezed into float16: what the layer returns fits, so it is right."""
    x, routing, experts = oracle.make_case(30, **SMALL, x_dtype="f16", poison=False).args()
    scaled = ExpertWeights(*(w.astype(jnp.bfloat16) for w in (experts.w_gate, experts.w_up)),
                           experts.w_down.astype(jnp.bfloat16) * jnp.bfloat16(factor))
    scaled = scaled.quantize("mxfp8") if weights == "mxfp8" else scaled
    routing = Routing(routing.ids, routing.weights / factor)
    want = np.asarray(moe(x, routing, scaled, strategy="reference"), np.float64)
    got = np.asarray(moe(x, routing, scaled, strategy="expert_centric"), np.float64)
    assert np.linalg.norm(got - want) < 2.0**-9 * np.linalg.norm(want)  # float16 rounds by 2^-11



@pytest.mark.parametrize("path", EXACT_ACTIVATIONS)
def test_float16_intermediate_beyond_its_range(path):
    # Case D09: 300 * 300 * 1e-3 = 90, with an intermediate of 90000 > 65504.
    w = np.zeros((1, 32, 32), np.float16)
    w_down = w.copy()
    w[0, 0, 0], w_down[0, :, 0] = 300, 1e-3
    experts = ExpertWeights(jnp.asarray(w), jnp.asarray(w), jnp.asarray(w_down))
    x = jnp.zeros((1, 32), jnp.float16).at[0, 0].set(1)
    y = moe(x, Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))), experts, **PATHS[path])
    np.testing.assert_allclose(np.asarray(y, np.float64), 90, rtol=1e-2)


@pytest.mark.parametrize("path", PATHS)
def test_x64_mode_changes_nothing(path):
    case = oracle.make_case(7, **SMALL, pattern="skipped")
    want = np.asarray(run(case, path))
    with jax.enable_x64(True):
        x, routing, experts = case.args()
        routing = Routing(routing.ids.astype(jnp.int64), routing.weights.astype(jnp.float64))
        got = layer(path)(x, routing, experts)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), want)


def test_mxfp8_activations_cost_accuracy():
    # The claim behind bf16 activations: the conventional MXFP8 path has several times the error.
    case = oracle.make_case(8, tokens=16, experts=8, hidden=256, intermediate=128, k=4, weights="mxfp8")
    error = {path: np.median(row_errors(run(case, path), case)) for path in PATHS}
    assert error["expert_centric-mxfp8"] > 5 * error["expert_centric"]
    assert error["expert_centric"] < 5e-3
    assert error["reference"] < 2.5e-3  # one rounding to bfloat16


# ------------------------------------------------------------------------------------------------------- influence


@pytest.mark.parametrize("path", PATHS)
def test_nan_row_and_nan_expert_reach_only_their_tokens(path):
    case = oracle.make_case(9, tokens=6, experts=6, hidden=64, intermediate=64, k=2, poison=False)
    case = dataclasses.replace(case, ids=np.array([[0, 1], [1, 2], [3, 1], [4, 5], [0, 4], [2, 0]], np.int32))
    x, w_down = case.x.copy(), case.w_down.copy()
    x[2] = np.nan
    w_down[5] = np.nan  # used by token 3 alone
    got = np.asarray(run(dataclasses.replace(case, x=x, w_down=w_down), path), np.float32)
    clean = np.asarray(run(case, path), np.float32)
    assert np.isnan(got[2]).all() and np.isnan(got[3]).all()
    np.testing.assert_array_equal(got[[0, 1, 4, 5]], clean[[0, 1, 4, 5]])


@pytest.mark.parametrize("path", PATHS)
def test_a_row_depends_only_on_itself(path):
    # Case D08: prefixes and permutations of a batch give the same rows, whatever group they fall into.
    case = oracle.make_case(10, tokens=33, experts=60, hidden=32, intermediate=32, k=4, pattern="skipped")
    y = np.asarray(run(case, path), np.float32)
    for rows in (np.arange(1), np.arange(17), np.random.default_rng(11).permutation(33)):
        part = dataclasses.replace(case, x=case.x[rows], ids=case.ids[rows], weights=case.weights[rows])
        np.testing.assert_array_equal(np.asarray(run(part, path), np.float32), y[rows])


@pytest.mark.parametrize("path", PATHS)
def test_skipped_slots_after_a_dirty_run(path):
    # Case D03: rows that nobody writes must not show what an earlier call left in their buffers.
    case = oracle.make_case(12, **SMALL, pattern="skipped")
    x, routing, experts = case.args()
    layer(path)(jnp.full_like(x, 1e4), routing, experts).block_until_ready()
    assert_right(layer(path)(x, routing, experts), case, path)


# -------------------------------------------------------------------------------------------------- transformations


@pytest.mark.parametrize("path", PATHS)
def test_vmap_and_scan_over_tokens(path):
    case = oracle.make_case(13, **{**SMALL, "tokens": 6}, pattern="skipped")
    x, routing, experts = case.args()
    xs, routings = jax.tree.map(lambda a: a.reshape(3, 2, *a.shape[1:]), (x, routing))
    y = jax.vmap(layer(path), in_axes=(0, 0, None))(xs, routings, experts)
    assert_right(y.reshape(x.shape), case, path)
    _, y = jax.lax.scan(lambda carry, step: (carry, layer(path)(*step, experts)), None, (xs, routings))
    assert_right(y.reshape(x.shape), case, path)


@pytest.mark.parametrize("path", EXACT_ACTIVATIONS)
def test_gradients_match_differences_of_the_oracle(path):
    # Case D02. The oracle runs in float64, so that a central difference is good to many digits.
    case = oracle.make_case(14, **{**SMALL, "tokens": 4, "experts": 4, "k": 2}, x_dtype="f32", weights="f32")
    case = dataclasses.replace(case, ids=np.array([[0, 1], [1, 2], [2, 0], [0, 1]], np.int32),
                               **{n: np.nan_to_num(getattr(case, n), nan=0.125) for n in ("w_gate", "w_up", "w_down")})
    rng = np.random.default_rng(15)
    c = rng.standard_normal(case.x.shape)

    @jax.jit
    @jax.grad
    def gradients(a):
        experts = ExpertWeights(a["w_gate"], a["w_up"], a["w_down"])
        y = moe(a["x"], Routing(jnp.asarray(case.ids), a["weights"]), experts, **PATHS[path])
        return jnp.sum(jnp.float32(c) * y)

    names = ["x", "weights", "w_gate", "w_up", "w_down"]
    inputs = {n: jnp.asarray(getattr(case, n)) for n in names}
    got = jax.tree.map(lambda g: np.asarray(g, np.float64), gradients(inputs))
    for name in names:
        value = getattr(case, name).astype(np.float64)
        direction = rng.standard_normal(value.shape)
        step = 1e-5 * direction
        ahead, behind = (dataclasses.replace(case, **{name: value + s}).exact for s in (step, -step))
        want = np.sum(c * (ahead - behind)) / 2e-5
        size = np.linalg.norm(got[name])
        assert size > 0 and abs(np.sum(got[name] * direction) - want) < 1e-4 * size
    for name in names[2:]:
        assert not got[name][3].any()  # nobody is routed to expert 3


@pytest.mark.parametrize("path", EXACT_ACTIVATIONS)
def test_gradients_with_nan_where_nothing_is_routed(path):
    case = oracle.make_case(16, **SMALL, pattern="skipped", x_dtype="f32", weights="f32")
    x, routing, experts = case.args()

    def loss(x, weights, experts):
        return jnp.sum(jnp.square(layer(path)(x, Routing(routing.ids, weights), experts)))

    dx, dw, d_experts = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, routing.weights, experts)
    routed = case.routed()
    assert np.isfinite(dx).all() and not np.asarray(dx)[~routed.any(1)].any()
    assert np.isfinite(dw).all() and not np.asarray(dw)[~routed].any()
    idle = np.setdiff1d(np.arange(case.num_experts), case.ids)
    for d in jax.tree.leaves(d_experts):
        assert np.isfinite(d).all() and not np.asarray(d)[idle].any()


@pytest.mark.parametrize("path", EXACT_ACTIVATIONS)
def test_gradient_for_x_through_quantised_weights(path):
    case = oracle.make_case(17, **SMALL, weights="mxfp8", poison=False)
    x, routing, experts = case.args()
    dense = jax.tree.map(lambda w: w.dequantize(jnp.float32), experts, is_leaf=lambda w: isinstance(w, QuantizedArray))

    def loss(x, experts, path):
        return jnp.sum(jnp.square(layer(path)(x, routing, experts).astype(jnp.float32)))

    got = np.asarray(jax.grad(loss)(x, experts, path), np.float32)
    want = np.asarray(jax.grad(loss)(x.astype(jnp.float32), dense, "reference"))
    assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("path", EXACT_ACTIVATIONS)
def test_no_tokens_under_grad(path):
    case = oracle.make_case(18, **{**SMALL, "tokens": 0}, poison=False)
    x, routing, experts = case.args()
    dx = jax.grad(lambda x: jnp.sum(moe(x, routing, experts, **PATHS[path]).astype(jnp.float32)))(x)
    assert dx.shape == x.shape


# ------------------------------------------------------------------------------------------------------- refusals


def test_quantised_activations_have_no_silent_zero_gradient():
    x, routing, experts = oracle.make_case(19, **SMALL, poison=False).args()
    with pytest.raises(UnsupportedError, match="activation_format.*no gradient"):
        jax.grad(lambda x: jnp.sum(moe(x, routing, experts, **PATHS["expert_centric-mxfp8"]).astype(jnp.float32)))(x)


def test_mxfp8_activations_need_whole_blocks():
    x, routing, experts = oracle.make_case(20, tokens=2, experts=4, hidden=64, intermediate=48, k=2).args()
    with pytest.raises(UnsupportedError, match="activation_format: 'mxfp8'.*I = 48"):
        moe(x, routing, experts, **PATHS["expert_centric-mxfp8"])
    with pytest.raises(ArgumentError, match="activation_format"):
        moe(x, routing, experts, strategy="reference", activation_format="mxfp8")


def test_a_gpu_refuses_sizes_of_its_kernel(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, routing, experts = oracle.make_case(21, tokens=2, experts=4, hidden=96, intermediate=64, k=2).args()
    with pytest.raises(UnsupportedError, match=r"\[E, 64, 96\].*multiples of 64.*reference"):
        moe(x, routing, experts, **PATHS["expert_centric"])


# ----------------------------------------------------------------------------------------------- the kernel on CUDA


def lower_for_cuda(layers, *, tokens, experts, hidden, intermediate, k):
    shape = jax.ShapeDtypeStruct
    up, down = (shape((experts, *s), jnp.bfloat16) for s in ((intermediate, hidden), (hidden, intermediate)))
    weights = ExpertWeights(up, up, down)
    routing = Routing(shape((tokens, k), jnp.int32), shape((tokens, k), jnp.float32))

    def model(x, routings, layers):
        for r, e in zip(routings, layers, strict=True):
            x = moe(x, r, e, strategy="expert_centric")
        return x

    traced = jax.jit(model).trace(shape((tokens, hidden), jnp.bfloat16), [routing] * layers, [weights] * layers)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kernels, size", [
    (3, dict(tokens=8, experts=128, hidden=2048, intermediate=768, k=8)),  # ours: plan, gate/up, down
    (2, dict(tokens=100, experts=16, hidden=256, intermediate=64, k=4)),  # JAX's: gate and up share one
    (3, dict(tokens=7, experts=4, hidden=2880, intermediate=1408, k=2)),  # 14 rows: not in eights
    (2, dict(tokens=33, experts=16, hidden=256, intermediate=64, k=4)),
])
def test_cuda_runs_one_kernel_per_shape_and_nothing_dense(kernels, size):
    text = lower_for_cuda(3, **size)
    assert text.count("@mosaic_gpu_v2") == kernels, "three layers add none"
    assert "ragged_dot(" not in text and "stablehlo.dot_general" not in text


@pytest.mark.parametrize("sizes,n,k", [
    ([[1, 0, 63, 6]], 192, 128),
    ([[64, 64, 0, 40]], 64, 64),
    ([[0, 0, 0, 0]], 64, 64),
    ([[3, 0, 2, 1], [0, 0, 9, 0]], 64, 64),
])
def test_cuda_kernel_interpreted(sizes, n, k):
    # Each row of sizes is one element of a vmap with shared weights. Rows in no group and idle experts hold NaN.
    rng = np.random.default_rng(22)
    sizes = np.array(sizes, np.int32)
    m = int(sizes.sum(1).max()) + 5
    rows = rng.standard_normal((len(sizes), m, k)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal((sizes.shape[1], n, k)).astype(ml_dtypes.bfloat16)
    w[sizes.sum(0) == 0] = np.nan
    want = np.full((len(sizes), m, n), np.nan)
    for b, e in np.ndindex(sizes.shape):
        group = slice(sizes[b, :e].sum(), sizes[b, :e + 1].sum())
        want[b, group] = rows[b, group].astype(np.float64) @ w[e].astype(np.float64).T
    covered = ~np.isnan(want[..., 0])
    rows[~covered] = np.nan
    kernel = grouped_kernels.kernel(grouped_kernels.choose_config(m, n, len(w)))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out = jax.vmap(kernel, in_axes=(0, None, 0))(jnp.asarray(rows), jnp.asarray(w), jnp.asarray(sizes))
    np.testing.assert_allclose(np.asarray(out)[covered], want[covered], rtol=2**-8, atol=1e-4)
