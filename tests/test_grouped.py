"""The grouped kernels of expert_centric without a GPU: interpreted with race detection, planned, compiled.

The interpreter runs everything but the inline pieces of kernels/grouped_simt.py, for which it has plain forms; those
pieces are compiled here, executed in tests/test_ptx.py, and run in tests/test_gpu_grouped.py. The kernels for Blackwell
have no such pieces; besides these tests, tests/test_aot.py compiles them. Nothing has run them.
"""

import dataclasses
import functools
import types

import aot
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_warp_decode import ArgumentError, UnsupportedError, moe
from jax_warp_decode.activations import get_activation
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels import grouped_simt
from jax_warp_decode.kernels.grouped_config import GroupedConfig, Tcgen05Config
from jax_warp_decode.paths import expert_centric, grouped_layer, grouped_plan, reference
from jax_warp_decode.routing import Routing

S = jax.ShapeDtypeStruct
CONFIG = GroupedConfig(widths=(16, 32), stages=3, ctas=2)
BLACKWELL = Tcgen05Config(stages=2)


@pytest.fixture
def interpreter(interpreter):
    """A tile may read beyond the last row: TMA fills with zeros, this one with NaN, and neither is stored."""
    return dataclasses.replace(interpreter, out_of_bounds_reads="uninitialized")


# ---------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("weights,activation", [("mxfp8", "silu"), ("bf16", "relu2")])
def test_layer_matches_the_oracle(interpreter, weights, activation):
    """Experts with tiles of both widths, slots that are not routed, NaN in all that nobody reads."""
    gated = activation == "silu"
    case = oracle.make_case(3, tokens=23, experts=4, hidden=256, intermediate=128 if gated else 256, k=2,
                            weights=weights, pattern="skipped", activation=activation, biases="f32" if gated else None)
    x, routing, experts = case.args()
    run = grouped_layer.op(get_activation(activation), (CONFIG, CONFIG), grouped_plan.plan, interpreter)
    y = run(x, routing, experts)
    oracle.assert_rounded_close(y.astype(x.dtype), case, oracle.Rounded(rows="bfloat16"))


@pytest.mark.parametrize("config", [CONFIG, BLACKWELL], ids=["hopper", "blackwell"])
def test_quantised_activations(interpreter, config):
    """Both projections get rows rounded to MXFP8, and the rows between groups, which nobody wrote, reach no result.

    Without either rounding, the result is some 5 % away from the separate stages, with both some 1 %.
    """
    case = oracle.make_case(6, tokens=9, experts=4, hidden=256, intermediate=128, k=2, weights="mxfp8",
                            pattern="skipped")
    x, routing, experts = case.args()
    silu = get_activation("silu")
    y = grouped_layer.op(silu, (config, config), grouped_plan.plan, interpreter, "mxfp8")(x, routing, experts)
    oracle.assert_close(y.astype(x.dtype), case.with_mxfp8_x(), h_dtype="mxfp8", unit=oracle.TENSOR_CORE_UNIT,
                        rounded=oracle.Rounded(rows="bfloat16"))
    want = np.asarray(expert_centric.stages(x, routing, experts, activation=silu, activation_format="mxfp8"))
    assert np.linalg.norm(np.asarray(y) - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("weights,activation", [("mxfp8", "silu"), ("bf16", "relu2")])
def test_layer_for_blackwell_matches_the_oracle(interpreter, weights, activation):
    """Sizes that are no multiple of a block, so that the last one begins inside the one before."""
    gated = activation == "silu"
    case = oracle.make_case(3, tokens=23, experts=4, hidden=320, intermediate=192 if gated else 320, k=2,
                            weights=weights, pattern="skipped", activation=activation, biases="f32" if gated else None)
    x, routing, experts = case.args()
    y = grouped_layer.op(get_activation(activation), (BLACKWELL,) * 2, grouped_plan.plan, interpreter)(
        x, routing, experts)
    oracle.assert_rounded_close(y.astype(x.dtype), case, oracle.Rounded(rows="bfloat16"))


def test_one_token_of_the_last_expert_on_blackwell(interpreter):
    """Nothing is read out of bounds: scales are loaded without TMA, which alone may do that."""
    strict = dataclasses.replace(interpreter, out_of_bounds_reads="raise")
    case = oracle.make_case(2, tokens=1, experts=2, hidden=320, intermediate=192, k=1, weights="mxfp8", poison=False)
    case = dataclasses.replace(case, ids=np.array([[1]], np.int32))
    y = grouped_layer.op(get_activation("silu"), (BLACKWELL,) * 2, grouped_plan.plan, strict)(*case.args())
    oracle.assert_rounded_close(y.astype(jnp.bfloat16), case, oracle.Rounded(rows="bfloat16"))


def test_a_row_of_nan_stays_alone_on_blackwell(interpreter):
    """Of three tokens, in the tiles of both experts."""
    case = oracle.make_case(1, tokens=3, experts=2, hidden=256, intermediate=128, k=1, poison=False)
    x, _, experts = case.args()
    routing = Routing(jnp.array([[1], [0], [0]]), jnp.ones((3, 1), jnp.float32))
    run = grouped_layer.op(get_activation("silu"), (BLACKWELL,) * 2, grouped_plan.plan, interpreter)
    y = np.asarray(run(x.at[1].set(jnp.nan), routing, experts))
    assert np.isnan(y).all(1).tolist() == [False, True, False] and np.isfinite(y[::2]).all()


@pytest.mark.parametrize("tokens,config", [(23, GroupedConfig(widths=(16,), stages=3, ctas=2)), (150, BLACKWELL)])
def test_several_tiles_of_an_expert(interpreter, tokens, config):
    """Two of them: the second ends with its expert, as the rows of the next one follow."""
    case = oracle.make_case(5, tokens=tokens, experts=2, hidden=256, intermediate=128, k=2)
    x, routing, experts = case.args()
    y = grouped_layer.op(get_activation("silu"), (config, config), grouped_plan.plan, interpreter)(x, routing, experts)
    oracle.assert_rounded_close(y.astype(x.dtype), case, oracle.Rounded(rows="bfloat16"))


def test_vmap_merges_tokens_and_maps_experts(monkeypatch):
    calls = []
    monkeypatch.setattr(grouped_layer, "layer", lambda x, routing, experts, **_: (
        calls.append(x.shape), moe(x, routing, experts, strategy="reference", out_dtype=jnp.float32))[1])
    case = oracle.make_case(4, tokens=4, experts=4, hidden=64, intermediate=64, k=2)
    x, routing, experts = case.args()
    run = grouped_layer.op(get_activation("gelu_tanh"), (CONFIG, CONFIG))  # no other test has this one
    pairs = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (x, routing))
    y = jax.vmap(run, in_axes=(0, 0, None))(*pairs, experts)
    oracle.assert_close(np.asarray(y).reshape(x.shape).astype(x.dtype), case)
    assert calls[-1] == (4, 64)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), experts)
    y = jax.vmap(run, in_axes=(None, None, 0))(x, routing, stacked)
    oracle.assert_close(np.asarray(y[1]).astype(x.dtype), case)


SIZES = [(300, 128, 8, 32), (7, 300, 2, 16), (64, 2, 2, 48)]


@pytest.mark.parametrize("tokens,experts,k,widest", SIZES)
def test_every_slot_has_a_row_of_its_own_in_a_tile_of_its_expert(tokens, experts, k, widest):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-2, experts + 2, (tokens, k)).astype(np.int32)
    plan = jax.jit(grouped_plan.plan, static_argnums=(1, 2))(ids, experts, widest)
    position, token = np.asarray(plan.position), np.asarray(plan.token)
    routed = (ids >= 0) & (ids < experts)
    assert (token[position[routed]] == np.nonzero(routed)[0]).all()
    assert len(set(position[routed])) == routed.sum()
    assert token.size == grouped_plan.most_rows(tokens * k, experts, widest) and position.max() < token.size
    found, total = {}, int(plan.total[0])
    tiles = np.asarray(plan.tiles).reshape(-1, 5)
    assert total <= len(tiles)
    for n, (e, first, count, start, rows) in enumerate(tiles[:total]):
        assert start % 8 == 0 and 0 <= n - first < count == -(-rows // widest) and rows > 0
        found[e] = set(range(start, start + rows))
    for e in range(experts):
        assert found.get(e, set()) == set(position[ids == e])
    # Tokens of an expert keep their order: a row of y does not depend on how the sort breaks ties.
    for e in found:
        assert (np.diff(token[np.sort(position[ids == e])]) >= 0).all()


# -------------------------------------------------------------------------------------------------------- gradients


def test_biases_have_gradients():
    """Against the reference in float32; an expert without rows has exactly zero."""
    case = oracle.make_case(5, tokens=6, experts=4, hidden=64, intermediate=32, k=2, weights="f32", x_dtype="f32",
                            biases="f32", poison=False)
    x, routing, experts = case.args()
    routing = Routing(jnp.minimum(routing.ids, 2), routing.weights)

    def loss(path, x, weights, experts):
        y = path.run(x, Routing(routing.ids, weights), experts, activation=get_activation("silu"))
        return jnp.sum(jnp.sin(y))

    got, want = (jax.grad(functools.partial(loss, path), (0, 1, 2))(x, routing.weights, experts)
                 for path in (expert_centric, reference))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)
    for g in (got[2].b_gate, got[2].b_up, got[2].b_down):
        assert np.asarray(g[:3]).any(1).all() and not np.asarray(g[3]).any()


# --------------------------------------------------------------------------------------------------- what is refused


def test_sizes_and_formats_that_go_another_way():
    def experts(fmt, I, H, dtype=jnp.bfloat16):
        make = (lambda *s: FORMATS[fmt].structs(s)) if fmt in FORMATS else (lambda *s: S(s, dtype))
        return ExpertWeights(make(4, I, H), make(4, I, H), make(4, H, I))

    assert grouped_layer.refusal(jnp.bfloat16, experts("bf16", 128, 256)) == ""
    assert grouped_layer.refusal(jnp.bfloat16, experts("mxfp8", 704, 2816)) == ""
    for args, word in (((jnp.float32, experts("bf16", 128, 256)), "float32"),
                       ((jnp.bfloat16, experts("f16", 128, 256, jnp.float16)), "f16"),
                       ((jnp.bfloat16, experts("bf16", 96, 256)), "I = 96"),
                       ((jnp.bfloat16, experts("bf16", 64, 128)), "H = 128")):
        assert word in grouped_layer.refusal(*args)


@pytest.mark.parametrize("config", [GroupedConfig((32, 16), 3), GroupedConfig((24,), 3), GroupedConfig((256,), 2),
                                    GroupedConfig((), 3), GroupedConfig((192,), 4), GroupedConfig((32,), 1),
                                    GroupedConfig((32,), 3, ctas=0), Tcgen05Config(1), Tcgen05Config(5)])
def test_configs_that_cannot_run(config):
    with pytest.raises(ArgumentError, match="config"):
        config.check(2)


def test_two_stages_are_too_few_for_gathered_rows():
    case = oracle.make_case(0, tokens=2, experts=2, hidden=256, intermediate=128, k=1)
    run = grouped_layer.op(get_activation("silu"), (GroupedConfig((16,), 2),) * 2, grouped_plan.plan)
    with pytest.raises(ArgumentError, match="config: .*gathered rows, stages must be 3"):
        jax.eval_shape(run, *case.args())


def test_heuristic_fits_every_load():
    for slots in (1, 8, 256, 2048, 8192, 32768, 65536, 10**6):
        for experts in (8, 32, 128, 512):
            for itemsize in (1, 2):
                config = GroupedConfig.heuristic(slots, experts, itemsize)
                config.check(itemsize)
                assert config.stages >= 3, "gathered rows are one step late"


# ---------------------------------------------------------------------------------------------------------- compiled


def aot_cases():
    """A layer as CUDA gets it: H and I that leave parts of blocks over."""
    T, H, I, E, K = 256, 2816, 704, 128, 8
    make = FORMATS["mxfp8"].structs
    experts = ExpertWeights(make((E, I, H)), make((E, I, H)), make((E, H, I)))
    args = S((T, H), jnp.bfloat16), Routing(S((T, K), jnp.int32), S((T, K), jnp.float32)), experts
    yield "grouped-mxfp8", functools.partial(moe, strategy="expert_centric"), args, dict(
        min_wide_loads=0, min_shuffles=0, max_barriers=99, max_shared=999,
        max_temp_bytes=grouped_layer.temporary_bytes(T, K, experts) + 2**22)
    # An intermediate so wide that a rounded copy of it would not fit where the results go.
    H, I = 768, 2048
    experts = ExpertWeights(make((E, I, H)), make((E, I, H)), make((E, H, I)))
    rounded = functools.partial(moe, strategy="expert_centric", activation_format="mxfp8")
    yield "grouped-mxfp8-rounded", rounded, (S((T, H), jnp.bfloat16), args[1], experts), dict(
        min_wide_loads=0, min_shuffles=0, max_barriers=99, max_shared=999,
        max_temp_bytes=grouped_layer.temporary_bytes(T, K, experts) + 2**16)


@pytest.mark.skipif(bool(aot.missing_tools()), reason=aot.missing_tools() or "-")
def test_compiles_for_hopper_with_no_more_temporaries_than_told():
    reports = aot.compile_cases(["test_grouped:aot_cases"], ["sm_90a"])
    assert [report.case for report in reports] == ["grouped-mxfp8", "grouped-mxfp8-rounded"]
    for report in reports:
        assert {"moe_grouped_gate_up", "moe_grouped_down"} <= {k.name for k in report.kernels} and not report.problems


def test_hoppers_kernels_refuse_to_compile_for_blackwell(monkeypatch):
    monkeypatch.setattr(grouped_simt.utils, "get_arch", lambda: types.SimpleNamespace(major=10, minor=0))
    make = lambda *s: S(s, jnp.bfloat16)  # noqa: E731
    experts = ExpertWeights(make(4, 128, 256), make(4, 128, 256), make(4, 256, 128))
    args = make(9, 256), Routing(S((9, 2), jnp.int32), S((9, 2), jnp.float32)), experts
    fn = functools.partial(moe, strategy="expert_centric", activation="gelu_erf")  # not lowered before in this process
    with pytest.raises(UnsupportedError, match="9.0"):
        jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
