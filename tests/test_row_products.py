"""Warp decode with dots on the tensor cores, its PTX executed on the CPU, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_warp_decode import ArgumentError, ExpertWeights, dequantize, quantize, tuning
from jax_warp_decode.explain import KERNELS
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels import (
    DownConfig,
    DownTensorConfig,
    GateUpConfig,
    GateUpTensorConfig,
    moe_down_3d_batched,
    moe_gate_up_3d_batched,
    row_products,
)
from jax_warp_decode.paths import warp_decode

E, K, T = 4, 3, 2
U = 2.0**-24


def weight(seed, format, *shape):
    """Random experts of different sizes, the last one poisoned."""
    w = jax.random.normal(jax.random.key(seed), (E, *shape)) * 2.0 ** jnp.arange(-20, 20, 10).reshape(E, 1, 1)
    return jax.tree.map(lambda a: a.at[E - 1].set(255 if a.dtype == jnp.uint8 else jnp.nan), quantize(w, format))


def exact(w):
    return np.asarray(dequantize(w), np.float64)


def routing():
    rng = np.random.default_rng(0)
    ids = np.array([[1, -1, 0], [2, 0, E]], np.int32)
    return ids, rng.random((T, K)).astype(np.float32) + np.float32(0.1)


def activations(seed, *shape, dtype):
    """Of sizes that differ by block and by value, one row of the last axis with NaN in it."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 3, shape)
    return jnp.asarray(x * np.repeat(2.0 ** rng.integers(-3, 4, (*shape[:-1], shape[-1] // 32)), 32, -1), dtype)


def bound(n, sizes):
    """Of a sum of n products, of which `sizes` are the absolute sums: float32, in any order."""
    return (n + 8) * U * sizes


@pytest.mark.parametrize(("format", "H", "I", "config", "biased", "activation", "dtype"), [
    ("mxfp8", 320, 64, (2, 1), False, "silu", jnp.bfloat16),
    ("mxfp4", 576, 32, (1, 2), True, "relu2", jnp.float16),
    ("fp8_block128", 384, 128, (1, 1), True, "gelu_tanh", jnp.bfloat16),
])
def test_gate_up(machines, format, H, I, config, biased, activation, dtype):
    gated = activation != "relu2"
    w_gate, w_up = (weight(seed, format, I, H) for seed in (1, 2))
    b_up = jax.random.normal(jax.random.key(3), (E, I), jnp.bfloat16) if biased else None
    ids, _ = routing()
    x = activations(4, T, H, dtype=dtype)
    h = moe_gate_up_3d_batched(x, ids, w_gate if gated else None, w_up, b_up=b_up, activation=activation,
                               config=GateUpTensorConfig(*config))
    act = oracle.ACTIVATIONS[activation]
    wide = np.asarray(x, np.float64)
    for t, k in np.ndindex(T, K):
        got, e = np.asarray(h[t, k], np.float64), ids[t, k]
        if not 0 <= e < E:
            assert not got.any()
            continue
        bias = 0 if b_up is None else np.asarray(b_up[e], np.float64)
        gate, up = exact(w_gate)[e] @ wide[t], exact(w_up)[e] @ wide[t] + bias
        want = act.apply(gate, up) if gated else act.apply(None, up)
        e_up = bound(H, np.abs(exact(w_up)[e]) @ np.abs(wide[t]) + np.abs(bias))
        e_gate = bound(H, np.abs(exact(w_gate)[e]) @ np.abs(wide[t]))
        # Slopes: at most 1.2 in the gate and |gate| in up; 2 |up| without a gate.
        allowed = np.abs(gate) * e_up + 1.2 * np.abs(up) * e_gate if gated else 2 * np.abs(up) * e_up
        assert (np.abs(got - want) <= 1.1 * allowed + 8 * U * np.abs(want)).all()


@pytest.mark.parametrize(("format", "H", "I", "config", "dtype"), [
    ("mxfp8", 64, 576, (2, 1, 4, 2), jnp.float32),
    ("mxfp8", 32, 512, (2, 1, 16, 2), jnp.float32),
    ("mxfp4", 96, 320, (1, 2, 8, 1), jnp.bfloat16),
    ("fp8_block128", 128, 640, (1, 1, 4, 1), jnp.float16),
])
def test_down(machines, format, H, I, config, dtype):
    w = weight(1, format, H, I)
    b_down = jax.random.normal(jax.random.key(3), (E, H), jnp.bfloat16) if format == "mxfp4" else None
    ids, weights = routing()
    h = activations(4, T, K, I, dtype=dtype).at[0, 1].set(jnp.nan)  # of a slot that is not routed
    y = moe_down_3d_batched(h, ids, weights, w, b_down=b_down, out_dtype=jnp.float32, config=DownTensorConfig(*config))
    for t in range(T):
        want, allowed = np.zeros(H), np.zeros(H)
        for k in np.flatnonzero((ids[t] >= 0) & (ids[t] < E)):
            own, row, share = exact(w)[ids[t, k]], np.asarray(h[t, k], np.float64), np.float64(weights[t, k])
            bias = np.zeros(H) if b_down is None else np.asarray(b_down[ids[t, k]], np.float64)
            want += share * (own @ row + bias)
            allowed += bound(I + K, share * (np.abs(own) @ np.abs(row) + np.abs(bias)))
        assert (np.abs(np.asarray(y[t], np.float64) - want) <= allowed).all()


def test_scales_of_blocks_may_be_bfloat16(machines):
    """They give the bits that float32 ones of the same value do, also where one of two weights has them."""
    def scaled(w, dtype):
        return dataclasses.replace(w, scales=w.scales.astype(jnp.bfloat16).astype(dtype))

    w_gate, w_up, w_down = (weight(seed, "fp8_block128", *shape) for seed, shape in enumerate(
        [(128, 384), (128, 384), (256, 384)]))
    ids, weights = routing()
    x, h = activations(4, T, 384, dtype=jnp.bfloat16), activations(5, T, K, 384, dtype=jnp.float32)

    def run(gate, up, down):
        return (moe_gate_up_3d_batched(x, ids, scaled(w_gate, gate), scaled(w_up, up), config=GateUpTensorConfig(1, 1)),
                moe_down_3d_batched(h, ids, weights, scaled(w_down, down), config=DownTensorConfig(1, 1, 4, 1)))

    wide, narrow = jnp.float32, jnp.bfloat16
    want = run(wide, wide, wide)
    assert np.isfinite(np.asarray(want[1], np.float32)).all() and np.asarray(want[0]).any()
    for dtypes in ((narrow, narrow, narrow), (narrow, wide, narrow)):
        for got, expected in zip(run(*dtypes), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_every_byte(machines, format):
    """Rows with one weight each, which the activation picks: all scale bytes, then all value bytes."""
    ids, weights = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    zeros = quantize(jnp.zeros((1, 256, 64)), format)
    h = jnp.zeros((1, 1, 64), jnp.bfloat16).at[0, 0, 5].set(1.5)

    def run(values, scales):
        def like(a, stored):
            return stored if a.dtype == stored.dtype else jax.lax.bitcast_convert_type(stored, a.dtype)

        w = dataclasses.replace(zeros, values=like(zeros.values, values), scales=like(zeros.scales, scales))
        y = moe_down_3d_batched(h, ids, weights, w, out_dtype=jnp.float32, config=DownTensorConfig(2, 1, 4, 1))
        return np.asarray(y[0]), exact(w)[0, :, 5] * 1.5

    place, one = (5, 0x38) if format == "mxfp8" else (2, 0x20)  # two four-bit values a byte, the odd one above
    every, of_one = np.arange(256, dtype=np.uint8), np.full(256, one, np.uint8)
    for values, scales in ((of_one, every), (every, np.full(256, 127, np.uint8))):
        stored = jnp.zeros(zeros.values.shape, jnp.uint8).at[0, :, place].set(values)
        got, want = run(stored, jnp.full(zeros.scales.shape, 127, jnp.uint8).at[0, :, 0].set(scales))
        np.testing.assert_array_equal(got, want.astype(np.float32))


def test_a_layer_of_a_stack_and_a_token_with_nan(machines):
    """A NaN in one token's row leaves the other's bits as they are; a layer of a stack gives those of its weights."""
    w = [weight(seed, "mxfp8", 64, 64) for seed in (1, 2)]
    ids, weights = routing()
    config = dict(config=GateUpTensorConfig(1, 1))
    x = activations(4, T, 64, dtype=jnp.bfloat16)
    clean = moe_gate_up_3d_batched(x, ids, w[0], w[1], **config)
    poisoned = moe_gate_up_3d_batched(x.at[0, 7].set(jnp.nan), ids, w[0], w[1], **config)
    assert np.array_equal(clean[1], poisoned[1]) and np.isnan(poisoned[0, 0]).all()
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *w)
    down = dict(out_dtype=jnp.float32, config=DownTensorConfig(1, 1, 4, 1))
    h = activations(5, T, K, 64, dtype=jnp.bfloat16)
    assert np.array_equal(moe_down_3d_batched(h, ids, weights, stack, layer=1, **down),
                          moe_down_3d_batched(h, ids, weights, w[1], **down))
    beyond = jax.jit(lambda layer: moe_down_3d_batched(h, ids, weights, stack, layer=layer, **down))(2)
    assert not np.asarray(beyond).any()


@pytest.mark.parametrize(("config", "words"), [
    (GateUpTensorConfig(0, 1), "tiles=0"),
    (GateUpTensorConfig(3, 1), "96 rows to divide 64"),
    (DownTensorConfig(1, 1, 4, 1), "got DownTensorConfig, expected GateUpConfig or GateUpTensorConfig"),
])
def test_configs_that_do_not_fit(config, words):
    x, w = jnp.ones((1, 64), jnp.bfloat16), weight(0, "mxfp8", 64, 64)
    with pytest.raises(ArgumentError, match=words):
        moe_gate_up_3d_batched(x, np.zeros((1, 1), np.int32), w, w, config=config)


def test_other_formats_and_the_interpreter_are_refused():
    x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
    ids, config = np.zeros((1, 1), np.int32), GateUpTensorConfig(1, 1)
    with pytest.raises(ArgumentError, match=f"bf16 weights, expected {' or '.join(row_products.FORMATS)}"):
        moe_gate_up_3d_batched(x, ids, w, w, config=config)
    with pytest.raises(ArgumentError, match="in the interpreter, expected GateUpConfig"):
        moe_gate_up_3d_batched(x, ids, *[weight(0, "mxfp8", 64, 64)] * 2, config=config, interpret=True)


@pytest.mark.parametrize(("format", "T", "I", "gate_up", "down", "h"), [
    ("bf16", 8, 768, GateUpConfig, DownConfig, "float32"),
    ("mxfp8", 8, 768, GateUpConfig, DownTensorConfig, "float32"),
    ("fp8_block128", 1, 768, GateUpConfig, DownTensorConfig, "float32"),
    ("mxfp8", 8, 1536, GateUpConfig, DownConfig, "bfloat16"),  # h fills shared memory
    ("mxfp4", 1, 768, GateUpConfig, DownTensorConfig, "bfloat16"),
    ("mxfp4", 2, 768, GateUpTensorConfig, DownTensorConfig, "bfloat16"),
    ("mxfp4", 2, 6144, GateUpTensorConfig, DownConfig, "bfloat16"),
    ("nvfp4", 2, 768, GateUpConfig, DownConfig, "bfloat16"),  # the tensor-core kernels have no such row
])
def test_tensor_cores_are_the_rule_where_they_win(format, T, I, gate_up, down, h):
    """And with them a float32 intermediate, if down is fast with it. The interpreter cannot run them."""
    w = lambda *s: FORMATS[format].structs(s) if format in FORMATS else jax.ShapeDtypeStruct(s, jnp.bfloat16)
    experts = ExpertWeights(w(4, I, 2048), w(4, I, 2048), w(4, 2048, I))
    sizes = dict(T=T, K=8, H=2048, I=I, format=format)
    for (kernel, kinds), kind in zip(KERNELS.items(), (gate_up, down), strict=True):
        assert type(tuning.rule_of_thumb(kinds, **sizes)) is kind
        assert type(tuning.find(kernel, kinds, None, interpret=True, **sizes).config) is kinds[0]
    assert jnp.dtype(warp_decode.intermediate_dtype(experts, T, 8)).name == h


@pytest.mark.parametrize(("T", "H", "I", "config"), [
    (1, 2048, 768, (1, 1, 16, 2)), (2, 2048, 768, (2, 1, 16, 2)), (4, 2048, 768, (2, 1, 8, 1)),
    (1, 2048, 640, (1, 1, 8, 1)),  # five groups of columns in two parts
    (1, 2816, 704, (1, 1, 8, 1)), (1, 128, 64, (1, 1, 8, 1)),  # more CTAs than SMs, and fewer
])
def test_sixteen_warps_are_the_rule_where_every_multiprocessor_has_one_cta(T, H, I, config):
    assert DownTensorConfig.heuristic(T, 8, H, I, "mxfp8") == DownTensorConfig(*config)
