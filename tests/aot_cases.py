"""Every warp-decode kernel variant that the deviceless compile looks at; see aot.py."""

import functools
import itertools

import jax
import jax.numpy as jnp

from bench.tune_router import aot_cases as router_cases
from jax_warp_decode import tuning
from jax_warp_decode.activations import ACTIVATIONS, get_activation
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.explain import KERNELS
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels import (
    DownConfig,
    DownTensorConfig,
    GateUpConfig,
    GateUpTensorConfig,
    moe_down_3d_batched,
    moe_gate_up_3d_batched,
    router,
)
from jax_warp_decode.kernels.grouped_config import Tcgen05Config
from jax_warp_decode.paths import grouped_kernels, grouped_layer, warp_decode
from jax_warp_decode.routing import Routing

# (H, I, E, K): Qwen3-30B-A3B, gpt-oss-20b, Gemma4-26B (H, I off the tile), Mixtral-8x7B, the bundled model.
SHAPES = {"qwen3-30b": (2048, 768, 128, 8), "gpt-oss-20b": (2880, 2880, 32, 4), "gemma4-26b": (2816, 704, 128, 8),
          "mixtral-8x7b": (4096, 14336, 8, 2), "tiny-docs": (256, 64, 16, 4), "odd": (352, 96, 3, 3)}
S = jax.ShapeDtypeStruct
# Ids, routing weights and scale bytes are narrow loads, at most this many per kernel; weights and activations are wide.
LIMITS = dict(max_narrow_loads=26)
TENSOR = dict(max_barriers=4, max_shared=64)  # dots on the tensor cores have activations and sums in shared memory


def _weight(fmt, *shape):
    return FORMATS[fmt].structs(shape) if fmt in FORMATS else S(shape, {"bf16": jnp.bfloat16, "f16": jnp.float16}[fmt])


def limits_of(T, K, H, I, fmt):
    """Of a layer whose kernels take the rule of thumb."""
    tensor = any(type(tuning.rule_of_thumb(kinds, T, K, H, I, fmt)) is kinds[1] for kinds in KERNELS.values())
    return LIMITS | (TENSOR if tensor else {})


def layer_case(name, fmt, T, x_dtype=jnp.bfloat16):
    """A whole layer: two kernels, and no temporary but the [T, K, I] intermediate."""
    H, I, E, K = SHAPES[name]
    x = S((T, H), x_dtype)
    experts = ExpertWeights(_weight(fmt, E, I, H), _weight(fmt, E, I, H), _weight(fmt, E, H, I))
    routing = Routing(S((T, K), jnp.int32), S((T, K), jnp.float32))
    run = functools.partial(warp_decode.run, activation=get_activation("silu"))
    limits = dict(limits_of(T, K, H, I, fmt), max_temp_bytes=max(warp_decode.temporary_bytes(T, K, experts), 256))
    return f"layer-{name}-{fmt}-T{T}", run, (x, routing, experts), limits


def stacked_case(name, fmt, L):
    """A scan over stacked layers: no temporary but what one layer needs, so that no layer is sliced out."""
    H, I, E, K = SHAPES[name]
    experts = ExpertWeights(_weight(fmt, L, E, I, H), _weight(fmt, L, E, I, H), _weight(fmt, L, E, H, I))

    def run(x, routing, experts):
        def step(x, layer):
            return x + warp_decode.run(x, routing, experts, activation=get_activation("silu"), layer=layer), None

        return jax.lax.scan(step, x, jnp.arange(L, dtype=jnp.int32))[0]

    args = S((1, H), jnp.bfloat16), Routing(S((1, K), jnp.int32), S((1, K), jnp.float32)), experts
    limits = dict(limits_of(1, K, H, I, fmt), max_temp_bytes=2 * 4 * K * I)
    return f"stacked-{name}-{fmt}-L{L}", run, args, limits


def small(case):
    """The case with two rows a warp and one step at a time, which compiles fast."""
    name, run, args, limits = case
    configs = GateUpConfig(16, 2, 1), DownConfig(16, 2, 1)

    def run_small(*args):
        with tuning.override(*configs):
            return run(*args)

    return f"{name}-small", run_small, args, limits


def format_cases():
    """A layer in every other format; blocks of 128 that steps do not divide; chunks of short rows, met by float16."""
    limits = dict(max_narrow_loads=80)  # scales are more or wider, and the loads of nvfp4 are 8 bytes
    for case in (layer_case("qwen3-30b", "mxfp4", 1), layer_case("gemma4-26b", "fp8_block128", 8),
                 layer_case("odd", "mxfp4", 1, jnp.float16)):
        yield *case[:3], case[3] | limits
    for fmt in ("mxfp8_e5m2", "nvfp4", "fp8_block128", "fp8_channel", "fp8_tensor", "int8_channel", "int4_group32"):
        yield small(layer_case("qwen3-30b", fmt, 1))


def bias_cases():
    """A stack of gpt-oss layers as they are published, biases and all; experts without a gate."""
    H, I, E, K = SHAPES["gpt-oss-20b"]
    weights = (_weight("mxfp4", 24, E, n, m) for n, m in ((I, H), (I, H), (H, I)))
    experts = ExpertWeights(*weights, *(S((24, E, n), jnp.bfloat16) for n in (I, I, H)))
    run = functools.partial(warp_decode.run, activation=get_activation("clamped_swiglu"), layer=3)
    x, ids = S((1, H), jnp.bfloat16), S((1, K), jnp.int32)
    yield small(("bias-gpt-oss-20b", run, (x, Routing(ids, S((1, K), jnp.float32)), experts),
                 dict(LIMITS, max_temp_bytes=2 * K * I)))
    relu2 = functools.partial(moe_gate_up_3d_batched, activation="relu2")
    yield "gate_up-relu2", relu2, (x, ids, None, _weight("bf16", E, I, H)), LIMITS


def config_cases():
    """Kernels away from the heuristic's choice: narrower lanes, and an unroll that leaves steps over."""
    H, I, E, K = SHAPES["qwen3-30b"]
    ids, weights = S((2, K), jnp.int32), S((2, K), jnp.float32)
    for fmt, lanes in (("bf16", 16), ("mxfp8", 4)):
        x, h = S((2, H), jnp.bfloat16), S((2, K, I), jnp.float32)
        w, w_down = _weight(fmt, E, I, H), _weight(fmt, E, H, I)
        gate_up = functools.partial(moe_gate_up_3d_batched, config=GateUpConfig(lanes, 2, 3))
        down = functools.partial(moe_down_3d_batched, config=DownConfig(lanes, 1, 5))
        yield f"gate_up-{fmt}-small", gate_up, (x, ids, w, w), LIMITS
        yield f"down-{fmt}-small", down, (h, ids, weights, w_down), LIMITS


def tensor_cases():
    """Dots on the tensor cores that are asked for."""
    H, I, E, K = SHAPES["qwen3-30b"]
    limits = dict(TENSOR, max_narrow_loads=12)
    gate_up = functools.partial(moe_gate_up_3d_batched, config=GateUpTensorConfig(1, 1))
    down = functools.partial(moe_down_3d_batched, config=DownTensorConfig(1, 1, 8, 1))
    x, h = S((1, H), jnp.bfloat16), S((1, K, I), jnp.float32)
    ids, weights = S((1, K), jnp.int32), S((1, K), jnp.float32)
    w, w_down = _weight("mxfp4", E, I, H), _weight("mxfp8", E, H, I)
    yield "gate_up-mxfp4-tensor", gate_up, (x, ids, w, w), limits
    yield "down-mxfp8-tensor", down, (h, ids, weights, w_down), limits
    wide = functools.partial(moe_down_3d_batched, config=DownTensorConfig(2, 1, 16, 2))
    yield "down-mxfp8-tensor-16-warps", wide, (h, ids, weights, w_down), dict(limits, max_registers=128)


def activation_cases():
    """Every gated activation lowers inside a kernel."""
    H, I, E, K = SHAPES["tiny-docs"]
    w, args = _weight("bf16", E, I, H), (S((1, H), jnp.bfloat16), S((1, K), jnp.int32))
    for name, activation in ACTIVATIONS.items():
        if activation.gated and name != "silu":
            yield f"gate_up-{name}", functools.partial(moe_gate_up_3d_batched, activation=name), (*args, w, w), LIMITS


def hopper_cases():
    """What exists for Hopper only: the outer products of the backward pass, in tiles of 128 and of 64 columns."""
    limits = dict(
        min_wide_loads=0, min_shuffles=0, max_barriers=9, max_shared=16, max_narrow_loads=2, max_registers=168)
    for n, k, m in ((768, 2048, 8192), (64, 256, 33)):
        args = S((m, n), jnp.bfloat16), S((m, k), jnp.bfloat16), S((16,), jnp.int32)
        yield f"grouped_outer-{n}x{k}", grouped_kernels.outer, args, limits


def blackwell_cases():
    """What exists for Blackwell only: large batches by tcgen05, of sizes that blocks do not divide. Gathered rows of x
    take no memory of their own."""
    T, H, I, E, K = 256, 2880, 2880, 32, 4
    x, routing = S((T, H), jnp.bfloat16), Routing(S((T, K), jnp.int32), S((T, K), jnp.float32))
    for fmt, activation, biases in (("bf16", "situ", ()), ("mxfp8", "clamped_swiglu", (I, I, H))):
        weights = (_weight(fmt, E, n, m) for n, m in ((I, H), (I, H), (H, I)))
        experts = ExpertWeights(*weights, *(S((E, n), jnp.bfloat16) for n in biases))
        run = grouped_layer.op(get_activation(activation), (Tcgen05Config(),) * 2)
        yield f"grouped-blackwell-{fmt}", run, (x, routing, experts), dict(
            min_wide_loads=0, min_shuffles=0, max_barriers=47, max_shared=124, max_narrow_loads=54,
            max_temp_bytes=grouped_layer.temporary_bytes(T, K, experts) + 2**20)


def aot_cases():
    for name, (fmt, T) in itertools.product(SHAPES, (("bf16", 1), ("mxfp8", 8))):
        yield layer_case(name, fmt, T)
    yield layer_case("qwen3-30b", "bf16", 8)
    yield layer_case("qwen3-30b", "mxfp8", 1)
    yield layer_case("qwen3-30b", "f16", 1, jnp.float16)
    yield stacked_case("qwen3-30b", "bf16", 48)
    yield stacked_case("qwen3-30b", "mxfp8", 48)
    yield from format_cases()
    yield from bias_cases()
    yield from config_cases()
    yield from tensor_cases()
    yield from activation_cases()
    yield from router_cases()
    yield from router.aot_cases()
