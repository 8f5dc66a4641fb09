"""The warp-decode strategy: two kernels, one [T, K, I] intermediate between them, nothing else."""

import functools

import jax
import jax.numpy as jnp

from jax_warp_decode.activations import Activation
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels import DownTensorConfig, checks, moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.paths.decode_op import decode_op
from jax_warp_decode.routing import Routing


def run(x: jax.Array, routing: Routing, experts: ExpertWeights, *, activation: Activation, layer=None,
        out_dtype=None, interpret=False) -> jax.Array:
    """The routed experts of one layer: x [T, H] -> y [T, H] in out_dtype, None for that of x.

    See `moe` for the arguments.

    Works under `jit`, `lax.scan` and `vmap` over tokens. The kernels have no derivative: differentiating raises
    `UnsupportedError`; train through strategy='expert_centric', from the same parameters.
    """
    return _op(activation, jnp.dtype(out_dtype or x.dtype), interpret)(x, routing, experts, layer)


def intermediate_dtype(experts: ExpertWeights, T: int, K: int):
    """float32 where it is nearly free: a bfloat16 one makes the error of a layer 1.4 times that of its rounding.

    With 2-byte weights it costs no time, with one-byte weights and short rows 2 to 3 % of a layer, on tensor cores.
    Elsewhere the down kernel takes 15 to 29 % longer, so it is bfloat16 (bench/NOTES.md); float16 has not the range.
    """
    if not isinstance(experts.w_up, QuantizedArray):
        return jnp.float32
    tensor = DownTensorConfig.heuristic(T, K, experts.hidden, experts.intermediate, experts.format)
    return jnp.float32 if tensor and jnp.float32 in checks.h_dtypes(experts.format) else jnp.bfloat16


def temporary_bytes(tokens: int, experts_per_token: int, experts: ExpertWeights) -> int:
    """Device memory that a call takes besides its arguments and result: the intermediate [T, K, I].

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> w = jax.ShapeDtypeStruct((8, 64, 128), jnp.bfloat16)
      >>> temporary_bytes(1, 2, ExpertWeights(w, w, jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16)))
      512
    """
    width = jnp.dtype(intermediate_dtype(experts, tokens, experts_per_token)).itemsize
    return tokens * experts_per_token * experts.intermediate * width


@functools.cache
def _op(activation: Activation, out_dtype, interpret):
    def layer_fn(x, routing, experts, layer):
        with jax.named_scope("gate_up"):
            h = moe_gate_up_3d_batched(
                x, routing.ids, experts.w_gate, experts.w_up, b_gate=experts.b_gate, b_up=experts.b_up, layer=layer,
                activation=activation, out_dtype=intermediate_dtype(experts, *routing.ids.shape),
                interpret=interpret)
        with jax.named_scope("down"):
            return moe_down_3d_batched(
                h, routing.ids, routing.weights, experts.w_down, b_down=experts.b_down, layer=layer,
                out_dtype=out_dtype, interpret=interpret)

    return decode_op("warp_decode", layer_fn)
