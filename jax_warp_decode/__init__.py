"""Mixture-of-Experts decode for JAX on NVIDIA GPUs: warp decode and the paths around it."""

from jax_warp_decode import serialization as _serialization  # noqa: F401  lets jax.export store our pytrees
from jax_warp_decode.activations import ACTIVATIONS, Activation, SwiGLU
from jax_warp_decode.choose import STRATEGIES, Choice, available_strategies, choose
from jax_warp_decode.errors import ArgumentError, CheckpointError, UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.explain import Explanation, explain, explain_config
from jax_warp_decode.formats import FORMATS, QuantizedArray, dequantize, quantize
from jax_warp_decode.kernels import moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.moe import moe
from jax_warp_decode.parallel import ExpertSharding, moe_local, moe_sharded
from jax_warp_decode.partitioned import moe_partitioned
from jax_warp_decode.route_tokens import route_tokens
from jax_warp_decode.routers import ROUTERS, Router
from jax_warp_decode.routing import Routing, route
from jax_warp_decode.shared_experts import append_shared, with_shared

__version__ = "0.1.0"

__all__ = [
    # the op and its arguments
    "moe", "Routing", "ExpertWeights", "ACTIVATIONS", "Activation", "SwiGLU",
    "append_shared", "with_shared",
    # routers
    "route", "route_tokens", "Router", "ROUTERS",
    # on a mesh
    "ExpertSharding", "moe_sharded", "moe_local", "moe_partitioned",
    # number formats
    "FORMATS", "QuantizedArray", "quantize", "dequantize",
    # strategies
    "STRATEGIES", "Choice", "choose", "available_strategies", "explain", "Explanation",
    "explain_config",
    # the kernels themselves
    "moe_gate_up_3d_batched", "moe_down_3d_batched",
    # errors
    "ArgumentError", "UnsupportedError", "CheckpointError",
]
