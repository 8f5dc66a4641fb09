"""Warp decode with every weight format on a real GPU: pytest --gpu tests/test_gpu_formats.py."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_kernel_formats

from jax_warp_decode import ArgumentError, ExpertWeights, Routing, dequantize, moe
from jax_warp_decode.activations import get_activation
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
from jax_warp_decode.measure import inputs
from jax_warp_decode.paths import warp_decode
from jax_warp_decode.presets import Preset

pytestmark = pytest.mark.gpu

# (E, H, I, K): real sizes, blocks of 128 cut at the edge, and rows shorter than four lanes' usual chunks.
SHAPES = {"qwen3-30b": (16, 2048, 768, 8), "gpt-oss": (4, 2880, 2880, 2), "gemma4": (8, 2816, 704, 4),
          "odd": (4, 352, 96, 2), "short": (4, 64, 32, 2)}


@functools.cache
def make(shape, format):
    """Random experts, those with odd numbers poisoned."""
    E, H, I, K = SHAPES[shape]
    preset = Preset(name=shape, hidden=H, intermediate=I, num_experts=E, experts_per_token=K, format=format)
    return jax.tree.map(lambda a: a.at[1::2].set(bad(a)), inputs.make_experts(jax.random.key(0), preset, format))


def bad(a):
    """NaN; 255, which is NaN as a scale, in bytes."""
    return {"uint8": 255, "int8": 127}.get(a.dtype.name, jnp.nan)


def make_routing(shape, tokens):
    """Even experts, and about a quarter of the slots not routed."""
    E, _, _, K = SHAPES[shape]
    rng = np.random.default_rng(tokens)
    ids = 2 * np.stack([rng.permutation(E // 2)[:K] for _ in range(tokens)])
    ids = np.where(rng.random(ids.shape) < 0.25, rng.choice([-1, E, 2**31 - 1], ids.shape), ids)
    ids[0, 0] = 0
    return Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random(ids.shape) + 0.1, jnp.float32))


@jax.jit
def one_expert(w, e):
    return dequantize(w[e])


def product(v, w, b, e):
    """Of rows v with expert e, in float64."""
    if w is None:
        return None
    bias = 0 if b is None else np.asarray(b[e], np.float64)
    return np.asarray(v, np.float64) @ np.asarray(one_expert(w, e), np.float64).T + bias


def check(x, routing, experts, activation="silu", gate_up=None, down=None, stored=jnp.bfloat16):
    """Both kernels apart, each fed with the same operands as a computation in float64."""
    h = moe_gate_up_3d_batched(x, routing.ids, experts.w_gate, experts.w_up, b_gate=experts.b_gate, b_up=experts.b_up,
                               activation=activation, config=gate_up)
    rounded = h.astype(stored)
    y = moe_down_3d_batched(rounded, routing.ids, routing.weights, experts.w_down, b_down=experts.b_down,
                            out_dtype=jnp.float32, config=down)
    ids, weights = np.asarray(routing.ids), np.asarray(routing.weights)
    want_h, want_y = np.zeros(h.shape), np.zeros(y.shape)
    for e in range(experts.num_experts):
        rows, slots = np.nonzero(ids == e)
        if len(rows):
            projected = (product(np.asarray(x)[rows], w, b, e)
                         for w, b in ((experts.w_gate, experts.b_gate), (experts.w_up, experts.b_up)))
            want_h[rows, slots] = oracle.ACTIVATIONS[activation].apply(*projected)
            share = product(np.asarray(rounded)[rows, slots], experts.w_down, experts.b_down, e)
            np.add.at(want_y, rows, weights[rows, slots][:, None] * share)
    # Sums of n products of random signs, in float32 and any order; h is a product of two of them.
    for got, want, n in ((h, want_h, x.shape[1]), (y, want_y, experts.intermediate)):
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        assert error < 4 * 2.0**-24 * math.sqrt(2 * n), error
    assert not np.asarray(h)[(ids < 0) | (ids >= experts.num_experts)].any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", inputs.FORMATS)
def test_every_format_and_shape(format, shape):
    experts = make(shape, format)
    check(jax.random.normal(jax.random.key(1), (3, experts.hidden), jnp.bfloat16), make_routing(shape, 3), experts)


@pytest.mark.parametrize("shape", ["qwen3-30b", "gpt-oss", "gemma4"])
@pytest.mark.parametrize("format", row_products.FORMATS)
def test_tensor_cores(format, shape):
    experts = make(shape, format)
    x = jax.random.normal(jax.random.key(1), (3, experts.hidden), jnp.bfloat16)
    for gate_up, down in (((1, 1), (1, 1, 8, 1)), ((2, 1), (2, 1, 4, 2)), ((1, 2), (1, 2, 8, 3)),
                          ((1, 1), (1, 1, 16, 2))):
        gate_up, down = GateUpTensorConfig(*gate_up), DownTensorConfig(*down)
        try:
            gate_up.check(experts.hidden, experts.intermediate, experts.num_experts, format)
        except ArgumentError:  # 2880 and 704 are not multiples of every tile under one row of scales
            continue
        for stored in (jnp.bfloat16,) if format == "mxfp4" else (jnp.bfloat16, jnp.float32):
            check(x, make_routing(shape, 3), experts, gate_up=gate_up, down=down, stored=stored)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("format", ["bf16", "mxfp8", "fp8_block128"])
def test_a_layer_rounds_once(format, tokens):
    """The intermediate keeps what the result can show."""
    experts, routing = make("qwen3-30b", format), make_routing("qwen3-30b", tokens)
    x = jax.random.normal(jax.random.key(tokens), (tokens, experts.hidden), jnp.bfloat16)
    exact = np.asarray(moe(x.astype(jnp.float32), routing, experts, strategy="reference"), np.float64)
    once, got = (np.asarray(y, np.float64) for y in (
        exact.astype(jnp.bfloat16), moe(x, routing, experts, strategy="warp_decode")))
    assert np.linalg.norm(got - exact) <= 1.05 * np.linalg.norm(once - exact)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_tensor", "int4_group32"])
def test_float16_activations(format):
    experts = make("gemma4", format)
    check(jax.random.normal(jax.random.key(0), (2, experts.hidden), jnp.float16), make_routing("gemma4", 2), experts)


@pytest.mark.parametrize("lanes", [32, 16, 8, 4])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_block128", "int4_group32"])
def test_every_config(format, lanes):
    x, routing = jax.random.normal(jax.random.key(1), (2, 2816), jnp.bfloat16), make_routing("gemma4", 2)
    for rows, unroll in ((1, 1), (2, 5)):
        down_lanes = 16 if lanes == 32 and format in ("mxfp4", "int4_group32") else lanes  # 704 columns
        check(x, routing, make("gemma4", format), gate_up=GateUpConfig(lanes, rows, unroll),
              down=DownConfig(down_lanes, rows, unroll))


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "fp8_block128"])
@pytest.mark.parametrize("activation", ["clamped_swiglu", "relu2"])
def test_biases_and_activations_without_a_gate(activation, format):
    experts, (E, H, I, _) = make("gpt-oss", format), SHAPES["gpt-oss"]
    keys = jax.random.split(jax.random.key(3), 3)
    bias = lambda key, n: jax.random.normal(key, (E, n), jnp.bfloat16).at[1::2].set(jnp.nan)
    gated = get_activation(activation).gated
    experts = ExpertWeights(experts.w_gate if gated else None, experts.w_up, experts.w_down,
                            bias(keys[0], I) if gated else None, bias(keys[1], I), bias(keys[2], H))
    x = jax.random.normal(keys[0], (3, H), jnp.bfloat16)
    check(x, make_routing("gpt-oss", 3), experts, activation=activation)


@pytest.mark.parametrize("format", ["mxfp4", "fp8_block128", "nvfp4"])
def test_a_layer_of_a_stack(format):
    """The bits of the layer alone, between poisoned layers."""
    experts, routing = make("odd", format), make_routing("odd", 3)
    x = jax.random.normal(jax.random.key(0), (3, 352), jnp.bfloat16)
    stack = jax.tree.map(lambda a: jnp.stack([jnp.full_like(a, bad(a)), a, jnp.full_like(a, bad(a))]), experts)
    run = functools.partial(warp_decode.run, activation=get_activation("silu"))
    alone = np.asarray(run(x, routing, experts), np.float32)
    np.testing.assert_array_equal(np.asarray(run(x, routing, stack, layer=jnp.int32(1)), np.float32), alone)
    assert not np.asarray(run(x, routing, stack, layer=jnp.int32(3)), np.float32).any()


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("format", test_kernel_formats.MX)
def test_every_scale_byte(format, lanes):
    test_kernel_formats.check_scale_bytes(format, lanes=lanes)


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_every_value_byte(format, lanes):
    test_kernel_formats.check_value_bytes(format, lanes)


@pytest.mark.parametrize("strategy", ["warp_decode", "expert_centric"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_scales_of_blocks_may_be_bfloat16(strategy, tokens):
    """A layer of them has the bits of one whose float32 scales have the same values."""
    experts, routing = make("qwen3-30b", "fp8_block128"), make_routing("qwen3-30b", tokens)
    x = jax.random.normal(jax.random.key(tokens), (tokens, experts.hidden), jnp.bfloat16)
    narrow, wide = (jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(dtype) if a.dtype == jnp.float32 else a,
                                 experts) for dtype in (jnp.bfloat16, jnp.float32))
    got, want = (np.asarray(moe(x, routing, e, strategy=strategy), np.float32) for e in (narrow, wide))
    assert narrow.w_up.scales.dtype == jnp.bfloat16 and want.any()
    np.testing.assert_array_equal(got, want)
