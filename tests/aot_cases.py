"""Every warp-decode kernel variant that the deviceless compile looks at; see aot.py."""

import functools
import itertools

import jax
import jax.numpy as jnp

from jax_warp_decode.activations import get_activation
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels import DownConfig, GateUpConfig, moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.paths import warp_decode
from jax_warp_decode.routing import Routing

# (H, I, E, K): Qwen3-30B-A3B, gpt-oss-20b, Gemma4-26B (H, I off the tile), Mixtral-8x7B, the bundled model.
SHAPES = {"qwen3-30b": (2048, 768, 128, 8), "gpt-oss-20b": (2880, 2880, 32, 4), "gemma4-26b": (2816, 704, 128, 8),
          "mixtral-8x7b": (4096, 14336, 8, 2), "tiny-docs": (256, 64, 16, 4), "odd": (352, 96, 3, 3)}
S = jax.ShapeDtypeStruct
# Ids, routing weights and scale bytes are narrow loads, at most this many per kernel; weights and activations are wide.
LIMITS = dict(max_narrow_loads=26)


def _weight(fmt, *shape):
    if fmt != "mxfp8":
        return S(shape, {"bf16": jnp.bfloat16, "f16": jnp.float16}[fmt])
    return QuantizedArray(S(shape, jnp.float8_e4m3fn), S((*shape[:-1], shape[-1] // 32), jnp.uint8), "mxfp8")


def layer_case(name, fmt, T, x_dtype=jnp.bfloat16):
    """A whole layer: two kernels, and no temporary but the [T, K, I] intermediate."""
    H, I, E, K = SHAPES[name]
    x = S((T, H), x_dtype)
    experts = ExpertWeights(_weight(fmt, E, I, H), _weight(fmt, E, I, H), _weight(fmt, E, H, I))
    routing = Routing(S((T, K), jnp.int32), S((T, K), jnp.float32))
    run = functools.partial(warp_decode.run, activation=get_activation("silu"))
    intermediate = T * K * I * jnp.dtype(warp_decode.intermediate_dtype(experts)).itemsize
    return f"layer-{name}-{fmt}-T{T}", run, (x, routing, experts), dict(LIMITS, max_temp_bytes=max(intermediate, 256))


def config_cases():
    """Kernels away from the heuristic's choice: narrower lanes, and an unroll that leaves steps over."""
    H, I, E, K = SHAPES["qwen3-30b"]
    ids, weights = S((2, K), jnp.int32), S((2, K), jnp.float32)
    for fmt, lanes in itertools.product(("bf16", "mxfp8"), (16, 8, 4)):
        x, h = S((2, H), jnp.bfloat16), S((2, K, I), jnp.float32)
        w, w_down = _weight(fmt, E, I, H), _weight(fmt, E, H, I)
        gate_up = functools.partial(moe_gate_up_3d_batched, config=GateUpConfig(lanes, 2, 3))
        down = functools.partial(moe_down_3d_batched, config=DownConfig(lanes, 1, 5))
        yield f"gate_up-{fmt}-lanes{lanes}", gate_up, (x, ids, w, w), LIMITS
        yield f"down-{fmt}-lanes{lanes}", down, (h, ids, weights, w_down), LIMITS


def aot_cases():
    for name, (fmt, T) in itertools.product(SHAPES, (("bf16", 1), ("mxfp8", 8))):
        yield layer_case(name, fmt, T)
    yield layer_case("qwen3-30b", "bf16", 8)
    yield layer_case("qwen3-30b", "mxfp8", 1)
    yield layer_case("qwen3-30b", "f16", 1, jnp.float16)
    yield from config_cases()
