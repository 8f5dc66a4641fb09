"""shared_decode without a GPU: interpreted with race detection against the float64 oracle, lowered and compiled.

The interpreter runs everything but the inline pieces of kernels/shared_simt.py, for which it has plain forms; those
pieces are compiled here and run in tests/test_gpu_shared.py.
"""

import dataclasses
import functools
import types

import aot
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from jax_warp_decode import ArgumentError, UnsupportedError
from jax_warp_decode.activations import get_activation
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import FORMATS, QuantizedArray, quantize
from jax_warp_decode.kernels import shared_common, shared_half, shared_simt
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.kernels.shared_down import moe_down_shared
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
from jax_warp_decode.kernels.stream_format import STREAM_FORMATS
from jax_warp_decode.paths import shared_decode
from jax_warp_decode.routing import Routing

S = jax.ShapeDtypeStruct
run = functools.partial(shared_decode.run, activation=get_activation("silu"))


def assert_close(y, case):
    oracle.assert_close(y, case, h_dtype=oracle.shared_h_dtype(case), unit=oracle.TENSOR_CORE_UNIT)


# ---------------------------------------------------------------------------------------------------------- results


def test_layer_matches_the_oracle(interpreter):
    """Slots that are not routed, NaN in all that must not be read, K = 2 slots on 3 experts."""
    case = oracle.make_case(
        1, tokens=2, experts=3, hidden=128, intermediate=64, k=2, weights="mxfp8", pattern="skipped")
    assert_close(run(*case.args(), interpret=interpreter), case)


@pytest.mark.parametrize("weights, x_dtype", [
    ("f16", "f16"), ("f16", "bf16"), ("nvfp4", "f16"), ("fp8_channel", "bf16"), ("fp8_tensor", "bf16"),
    ("int8_channel", "bf16"), ("int4_group32", "bf16")])
def test_every_kind_of_scale(interpreter, weights, x_dtype):
    """Scales of blocks that multiply values or sums, of rows and of experts; none; and activations in float16."""
    case = oracle.make_case(7, tokens=2, experts=3, hidden=128, intermediate=64, k=2, weights=weights, x_dtype=x_dtype,
                            pattern="skipped", biases="f32")
    assert_close(run(*case.args(), interpret=interpreter), case)


@pytest.mark.parametrize("weights, scales", [("int4_group32", jnp.float32), ("fp8_block128", jnp.bfloat16),
                                             ("fp8_channel", jnp.bfloat16)])
def test_scales_of_another_dtype(interpreter, weights, scales):
    rng = np.random.default_rng(8)
    w = quantize(jnp.asarray(rng.standard_normal((16, 256, 256)), jnp.bfloat16), weights)
    w = dataclasses.replace(w, scales=w.scales.astype(scales))
    h = jnp.asarray(rng.standard_normal((1, 2, 256)), jnp.bfloat16)
    check_down(h, jnp.array([[3, 15]]), jnp.array([[1.0, -2.0]]), w, interpret=interpreter)


def stacked(w, layer, layers=3):
    """[layers, ..] with w in one layer and NaN in the others, what `layer` must not read."""
    def stack(a):
        nan = jnp.full(a.shape, jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else -1, a.dtype)
        return jnp.stack([a if n == layer else nan for n in range(layers)])

    return jax.tree.map(stack, w)


@pytest.mark.parametrize("weights, wgmma", [("bf16", True), ("bf16", False), ("mxfp4", True)])
def test_several_passes_warpgroups_panels_a_short_ring_stacked_layers_and_biases(interpreter, weights, wgmma):
    """Ten tokens on the same expert take two passes of eight; two warpgroups share the columns, in two panels."""
    case = oracle.make_case(2, tokens=10, experts=2, hidden=256, intermediate=128, k=1, weights=weights, pattern="same",
                            biases="bf16")
    x, routing, experts = case.args()
    stack = experts.map(lambda w: stacked(w, 1))
    config = SharedConfig(tokens=8, chunk=64, stages=2, warpgroups=2, ctas_per_sm=1, wgmma=wgmma)
    gate_up = functools.partial(
        moe_gate_up_shared, x, routing.ids, stack.w_gate, stack.w_up, b_gate=stack.b_gate, b_up=stack.b_up, layer=1,
        config=dataclasses.replace(config, panels=2), interpret=interpreter)
    if weights == "bf16":  # the down kernel of the next test has it
        oracle.assert_hidden_close(gate_up(), case, unit=oracle.TENSOR_CORE_UNIT)
        return
    y = moe_down_shared(gate_up(out_dtype=jnp.float32), routing.ids, routing.weights, stack.w_down,
                        b_down=stack.b_down, layer=1, config=config, interpret=interpreter)
    assert_close(y, case)


def test_vmap_merges_tokens():
    """H = 192: the last piece of the sum over slots overlaps another, which race detection would report."""
    case = oracle.make_case(4, tokens=2, experts=2, hidden=192, intermediate=64, k=1)
    x, routing, experts = case.args()
    pairs = jax.tree.map(lambda a: a.reshape(2, 1, *a.shape[1:]), (x, routing))
    y = jax.vmap(functools.partial(run, interpret=True), in_axes=(0, 0, None))(*pairs, experts)
    assert_close(np.asarray(y).reshape(x.shape), case)


def test_scales_of_blocks_that_begin_anywhere(interpreter):
    """3 scales a row of blocks, which are copied in lines of 4; the last expert's lie at the end of the array."""
    rng = np.random.default_rng(5)
    w = quantize(jnp.asarray(rng.standard_normal((16, 128, 384)), jnp.bfloat16), "fp8_block128")
    h = jnp.asarray(rng.standard_normal((1, 3, 384)), jnp.bfloat16)
    ids, weights = jnp.array([[1, 14, 15]]), jnp.array([[1.0, -2.0, 0.5]])
    check_down(h, ids, weights, w, interpret=interpreter)


def check_down(h, ids, weights, w, **options):
    """One token's down projection against the exact one."""
    y = moe_down_shared(h, ids, weights, w, out_dtype=jnp.float32, **options)
    w, h, weights = (np.asarray(a, np.float64) for a in (w.dequantize(jnp.float32)[ids[0]], h[0], weights[0]))
    want, size = (np.einsum("knm,km,k->n", *parts) for parts in ((w, h, weights), map(np.abs, (w, h, weights))))
    assert np.all(np.abs(np.asarray(y[0], np.float64) - want) <= h.shape[1] * oracle.TENSOR_CORE_UNIT * size)


def read_back(w, column):
    """Column `column` of every row of w [1, n, cols] through the down kernel: y[n] = w[0, n, column]."""
    h = jnp.zeros((1, 1, w.shape[2]), jnp.float32).at[0, 0, column].set(1)
    return np.asarray(moe_down_shared(h, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), w, out_dtype=jnp.float32))[0]


def check_every_byte(part, column):
    """Row r holds byte r in one column: an int8, two int4, two E2M1, or the scale of 16 E2M1."""
    rows, stored = np.arange(256), np.zeros((1, 256, 64), np.uint8)
    half = rows & 15 if column % 2 == 0 else rows >> 4  # of a packed byte
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    one, packed = np.ones((1, 1, 1), np.float32), np.zeros((1, 256, 32), np.uint8)
    if part == "int8":
        stored[0, :, column] = rows
        w = QuantizedArray(stored.view(np.int8), np.full((1, 256, 1), 0.5, np.float32), "int8_channel")
        want = rows.astype(np.uint8).view(np.int8) * 0.5
    elif part == "int4":
        packed[0, :, column // 2] = rows
        w = QuantizedArray(packed, np.full((1, 256, 2), 0.25, ml_dtypes.bfloat16), "int4_group32")
        want = (half - 8.0) * 0.25
    elif part == "e2m1":
        packed[0, :, column // 2] = rows
        w = QuantizedArray(packed, np.full((1, 256, 4), 2.0, ml_dtypes.float8_e4m3fn), "nvfp4", one * 3)
        want = e2m1[half & 7] * np.where(half & 8, -1, 1) * 6
    else:
        packed[0, :, column // 2] = 0x33  # 1.5
        scales = np.zeros((1, 256, 4), np.uint8)
        scales[0, :, column // 16] = rows
        w = QuantizedArray(packed, scales.view(ml_dtypes.float8_e4m3fn), "nvfp4", one)
        want = rows.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 1.5
    np.testing.assert_array_equal(read_back(jax.tree.map(jnp.asarray, w), column), want.astype(np.float32))


EVERY_BYTE = [("int8", 5), ("int8", 34), ("int4", 0), ("int4", 45), ("e2m1", 23), ("e2m1", 62), ("nvfp4 scales", 7),
              ("nvfp4 scales", 20), ("nvfp4 scales", 41), ("nvfp4 scales", 63)]


def large_row(exponent=121):
    """What `check_down` takes, with a row whose factor is beyond one float32."""
    rng = np.random.default_rng(6)
    h = jnp.asarray(rng.standard_normal((1, 1, 64)) * 2.0**exponent, jnp.bfloat16)
    assert shared_half.to_float16(h)[1].item() > 254
    w = quantize(jnp.asarray(rng.standard_normal((2, 128, 64)) / 64, jnp.bfloat16), "mxfp8")
    return h, jnp.array([[1]]), jnp.array([[0.5]]), w


def test_rows_near_the_largest_float32(interpreter):
    check_down(*large_row(), interpret=interpreter)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("exponent", [-120, -30, 0, 40, 127])
def test_rows_as_float16(exponent, dtype):
    """Exact (bfloat16) or rounded to 11 bits; far smaller values are within 2^-39 of the row's largest."""
    rng = np.random.default_rng(exponent + 200)
    x = rng.uniform(-1, 1, 4096) * np.exp2(exponent - rng.integers(0, 60, 4096))
    x = np.concatenate([x, [np.exp2(exponent), 0]])
    x = np.asarray(jnp.asarray(x, jnp.float32).astype(dtype), np.float64)
    values, factor = shared_half.to_float16(jnp.asarray(x, dtype))
    got = np.asarray(values, np.float64) * 2.0 ** (int(factor) - 127 - shared_half.SHIFT)
    largest = np.max(np.abs(x))
    exact, rounding = (-31, 0) if dtype == jnp.bfloat16 else (-28, 2.0**-11 * np.abs(x))
    normal = np.abs(x) >= np.maximum(2.0**exact * largest, 2.0**-126)  # the CPU flushes smaller float32 to zero
    assert np.all(np.abs(got - x)[normal] <= np.broadcast_to(rounding, x.shape)[normal])
    assert np.all(np.abs(got - x) <= rounding + 2.0**-39 * largest + 2.0**-126)


def test_rows_with_inf_and_nan_as_float16():
    x = jnp.array([[jnp.inf, 1.0, -2.0], [jnp.nan, 1.0, 3e38], [1.0, 2.0, 4.0]], jnp.bfloat16)
    values, factor = (np.asarray(a) for a in shared_half.to_float16(x))
    assert np.isposinf(values[0, 0]) and np.isnan(values[1, 0]) and np.isfinite(values[:, 1:]).all()
    np.testing.assert_array_equal(values[2] * 2.0 ** (factor[2] - 127.0 - shared_half.SHIFT), [1, 2, 4])


@pytest.mark.parametrize("tokens", [8, 24])
@pytest.mark.parametrize("pattern", ["uniform", "skipped", "same", "repeated", "none", "full or not"])
def test_groups(pattern, tokens):
    """Every routed slot is in exactly one group of its expert, experts ascend, and no group is empty."""
    rng = np.random.default_rng(tokens)
    if pattern == "full or not":
        ids = rng.permutation(np.repeat(np.arange(6), [0, 1, tokens - 1, tokens, tokens + 1, 2 * tokens + 1]))
    else:
        ids = oracle.make_ids(rng, 40, 6, 4, pattern).reshape(-1)
    expert, place, info, order, total = map(np.asarray, shared_common.plan_tables(jnp.asarray(ids), 6, tokens))
    counts = [np.sum(ids == e) for e in range(6)]
    want = [(e, (q + 1) * (c > tokens), np.flatnonzero(ids == e)[q * tokens:(q + 1) * tokens].tolist())
            for e, c in enumerate(counts) for q in range(-(-c // tokens))]
    assert total == len(want) <= len(expert) == shared_common.most_groups(len(ids), 6, tokens)
    got = [(expert[g], info[g] >> 16, order[place[g]:place[g] + (info[g] & 0xFFFF)].tolist()) for g in range(total)]
    assert got == want


# -------------------------------------------------------------------------------------------------- without running


def weight(format, *shape):
    """Of a row of STREAM_FORMATS."""
    name, _, scale_dtype = format.partition(" ")
    if name in FORMATS:
        return FORMATS[name].structs(shape, scale_dtype or None)
    return S(shape, STREAM_FORMATS[name].dtype)


def layer(format, T, H, I, E, K):
    """Arguments of a layer, as shapes."""
    experts = ExpertWeights(weight(format, E, I, H), weight(format, E, I, H), weight(format, E, H, I))
    return S((T, H), jnp.bfloat16), Routing(S((T, K), jnp.int32), S((T, K), jnp.float32)), experts


SHAPES = {"qwen3-30b": (2048, 768, 128, 8), "gpt-oss": (2880, 2880, 32, 4), "gemma4": (2816, 704, 128, 8),
          "deepseek-v3": (7168, 2048, 256, 8), "minimax-m3": (6144, 3072, 128, 4), "mixtral": (4096, 14336, 8, 2),
          "tiny": (128, 64, 4, 1)}


@pytest.mark.parametrize("T", [1, 128])
@pytest.mark.parametrize("format", STREAM_FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_heuristic_fits_every_shape(shape, format, T):
    H, I, E, K = SHAPES[shape]
    if format.startswith("fp8_block128") and (H % 128 or I % 128):
        return
    if format == "int4_group32 float32" and (shape, T) in (("deepseek-v3", 128), ("mixtral", 1), ("mixtral", 128)):
        with pytest.raises(UnsupportedError, match="scales of 64 weight rows"):  # a few times 57 KB and more
            SharedConfig.heuristic(T, K, E, max(H, I), format, 1 + (H > I))
        return
    for cols, matrices in ((H, 2), (I, 1)):
        config = SharedConfig.heuristic(T, K, E, cols, format, matrices)
        shared_common.check_config(config, cols, format, T * K, E, matrices)


@pytest.mark.parametrize("x64", [False, True])
def test_lowers_for_cuda_on_a_machine_without_one(x64):
    with jax.enable_x64(x64):
        lowered = jax.jit(run).trace(*layer("mxfp8", 16, 2880, 704, 32, 4)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 3


# Shared memory and barriers are this design; registers must leave room for the CTAs of an SM.
LIMITS = dict(max_barriers=30, max_shared=400, min_shuffles=5, min_wide_loads=0)


def aot_cases():
    x, routing, experts = layer("mxfp8", 128, 2048, 768, 128, 8)  # of each kernel and way to decode
    yield ("gate_up-mxfp8", moe_gate_up_shared, (x, routing.ids, experts.w_gate, experts.w_up),
           dict(LIMITS, max_registers=224, max_temp_bytes=256))
    for format in ("f16", "nvfp4", "int8_channel", "int4_group32"):
        x, routing, experts = layer(format, 64, 2048, 768, 128, 8)
        yield (f"gate_up-{format}", moe_gate_up_shared, (x, routing.ids, experts.w_gate, experts.w_up),
               dict(LIMITS, max_registers=168, max_temp_bytes=256))
    x, routing, experts = layer("mxfp4", 8, 2880, 2880, 32, 4)
    yield ("down-mxfp4", moe_down_shared, (S((8, 4, 2880), jnp.float32), routing.ids, routing.weights, experts.w_down),
           dict(LIMITS, max_registers=168, min_shuffles=0, max_temp_bytes=4 * 32 * 2880))
    x, routing, experts = layer("bf16", 128, 2048, 768, 128, 8)
    config = dataclasses.replace(SharedConfig.heuristic(128, 8, 128, 2048, "bf16", 2), wgmma=False)
    yield ("gate_up-bf16 by mma.sync", functools.partial(moe_gate_up_shared, config=config),
           (x, routing.ids, experts.w_gate, experts.w_up), dict(LIMITS, max_registers=128, max_temp_bytes=256))
    x, routing, experts = layer("bf16", 8, 2816, 704, 128, 8)
    yield ("down-bf16", moe_down_shared, (S((8, 8, 704), jnp.float32), routing.ids, routing.weights, experts.w_down),
           dict(LIMITS, max_registers=128, min_shuffles=0, max_temp_bytes=4 * 64 * 2816))


needs_tools = pytest.mark.skipif(bool(aot.missing_tools()), reason=aot.missing_tools() or "-")


def aot_cases_without_wgmma():
    return [case for case in aot_cases() if not case[0].endswith("bf16")]


@needs_tools
@pytest.mark.parametrize("cases, arch", [
    ("aot_cases", "sm_90a"), ("aot_cases_without_wgmma", "sm_100a"), ("aot_cases_without_wgmma", "sm_103a")])
def test_compiles_without_spills(cases, arch):
    reports = aot.compile_cases([f"test_shared:{cases}"], [arch])
    assert len(reports) == len(list(globals()[cases]()))
    assert not [problem for report in reports for problem in report.problems]


def test_what_needs_wgmma_is_refused_for_blackwell(monkeypatch):
    monkeypatch.setattr(shared_simt.utils, "get_arch", lambda: types.SimpleNamespace(major=10, minor=0))
    x, routing, experts = layer("bf16", 3, 128, 64, 4, 2)
    fn = functools.partial(moe_gate_up_shared, activation="gelu_tanh")  # not lowered before in this process
    with pytest.raises(UnsupportedError, match="wgmma=False"):
        jax.jit(fn).trace(x, routing.ids, experts.w_gate, experts.w_up).lower(lowering_platforms=("cuda",))


# --------------------------------------------------------------------------------------------------------- bad input


def refused(error, words, fn, *args, **options):
    with pytest.raises(error) as caught:
        jax.eval_shape(functools.partial(fn, **options), *args)
    assert all(word in str(caught.value) for word in words), caught.value


def test_refusals():
    x, routing, experts = layer("bf16", 4, 128, 64, 4, 2)
    refused(UnsupportedError, ["w_gate", "[.., 96, 128]", "128"], run, *layer("bf16", 4, 128, 96, 4, 2))
    refused(UnsupportedError, ["x", "float16 with bf16 weights"], run, S(x.shape, jnp.float16), routing, experts)
    int4 = layer("int4_group32", 4, 128, 64, 4, 2)[2]
    mixed = dataclasses.replace(int4, w_up=weight("int4_group32 float32", 4, 64, 128))
    refused(UnsupportedError, ["w_up", "int4_group32 float32"], run, x, routing, mixed)
    for E, H, I in ((64, 192, 128), (1, 128, 128), (9, 128, 384), (4, 128, 128)):  # no whole blocks; 1 scale; 27; 4
        odd = layer("fp8_block128", 4, H, I, E, 1)
        refused(UnsupportedError, ["w_gate", "multiples of 128 and at least"], run, *odd)
    refused(UnsupportedError, ["H = 64"], run, *layer("bf16", 4, 64, 64, 4, 2))
    refused(UnsupportedError, ["columns"], run, *layer("bf16", 4, 128, 2**20, 2, 1))
    refused(UnsupportedError, ["slots"], run, *layer("bf16", 5000, 128, 64, 4, 2))
    for config in (SharedConfig(12, 64, 4, 1, 1), SharedConfig(8, 96, 4, 1, 1), SharedConfig(8, 64, 1, 1, 1),
                   SharedConfig(8, 64, 4, 3, 1), SharedConfig(64, 128, 12, 1, 2), SharedConfig(8.0, 64, 4, 1, 1),
                   SharedConfig(8, 64, 4, 1, 1, waves=1.5), SharedConfig(8, 64, 4, 1, 1, wgmma="no")):
        refused(ArgumentError, ["config"], moe_gate_up_shared, x, routing.ids, experts.w_gate, experts.w_up,
                config=config)
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(run(x, routing, experts))), x)
    with pytest.raises(UnsupportedError, match="vmap over expert weights"):
        stacked = jax.tree.map(lambda w: S((2, *w.shape), w.dtype), experts)
        jax.eval_shape(jax.vmap(functools.partial(run, x_of, routing_of(routing)), in_axes=(0,)), stacked)


x_of = jnp.ones((4, 128), jnp.bfloat16)


def routing_of(shapes):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def test_what_it_can_take():
    """`refusal` says the same as a call, without one."""
    _, _, experts = layer("mxfp8", 8, 2048, 768, 128, 8)
    assert shared_decode.refusal(128, 8, experts) == ""
    assert "slots" in shared_decode.refusal(2048, 8, experts)
    assert shared_decode.refusal(8, 8, experts, x_dtype=jnp.float16) == ""
    assert "float32" in shared_decode.refusal(8, 8, experts, x_dtype=jnp.float32)
    assert "float16" in shared_decode.refusal(8, 8, layer("bf16", 8, 2048, 768, 128, 8)[2], x_dtype=jnp.float16)
    assert "gate" in shared_decode.refusal(8, 8, ExpertWeights(None, experts.w_up, experts.w_down))
    assert "multiples of 64" in shared_decode.refusal(8, 2, layer("bf16", 4, 128, 96, 4, 2)[2])


def test_no_tokens():
    x, routing, experts = layer("bf16", 0, 128, 64, 4, 2)
    assert jax.eval_shape(run, x, routing, experts).shape == (0, 128)
