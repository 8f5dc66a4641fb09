"""The warp-decode strategy: two kernels, one [T, K, I] intermediate between them, nothing else."""

import functools

import jax
import jax.numpy as jnp

from jax_warp_decode.activations import Activation
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.routing import Routing


def run(x: jax.Array, routing: Routing, experts: ExpertWeights, *, activation: Activation, layer=None,
        out_dtype=None, interpret=False) -> jax.Array:
    """The routed experts of one layer: x [T, H] -> y [T, H] in out_dtype, None for that of x.

    See `moe` for the arguments.

    Works under `jit`, `lax.scan` and `vmap` over tokens. The kernels have no derivative: differentiating raises
    `UnsupportedError`; train through strategy='expert_centric', from the same parameters.
    """
    op = without_gradient(_batchable(activation, jnp.dtype(out_dtype or x.dtype), interpret), (
        "strategy: 'warp_decode' has no gradient; it is the decode path. Use strategy='expert_centric' or 'reference' "
        "where you differentiate, with the same ExpertWeights"))
    return op(x, routing, experts, layer)


def intermediate_dtype(experts: ExpertWeights):
    """float32 where it is free: with 2-byte weights it costs no time and halves the error of a bfloat16 intermediate.

    With 1-byte weights a lane meets 64 bytes of a float32 intermediate per load, which collide in the L1 banks and
    slow the down kernel, so it stays bfloat16 there (bench/NOTES.md).
    """
    return jnp.bfloat16 if isinstance(experts.w_up, QuantizedArray) else jnp.float32


@functools.cache
def _batchable(activation: Activation, out_dtype, interpret):
    """The layer with a batching rule: mapped tokens become more tokens of one launch."""

    @jax.custom_batching.custom_vmap
    def op(x, routing, experts, layer):
        with jax.named_scope("gate_up"):
            h = moe_gate_up_3d_batched(
                x, routing.ids, experts.w_gate, experts.w_up, layer=layer, activation=activation,
                out_dtype=intermediate_dtype(experts), interpret=interpret)
        with jax.named_scope("down"):
            return moe_down_3d_batched(
                h, routing.ids, routing.weights, experts.w_down, layer=layer, out_dtype=out_dtype, interpret=interpret)

    @op.def_vmap
    def _(size, mapped, x, routing, experts, layer):
        x_mapped, routing_mapped, *weights_mapped = mapped
        if any(jax.tree.leaves(weights_mapped)):
            raise UnsupportedError(
                "experts: vmap over expert weights or layers is not supported by strategy 'warp_decode'; map over x "
                "and routing only (in_axes=None for the rest), or loop with lax.scan or lax.map")

        def merged(a, is_mapped):
            a = a if is_mapped else jnp.broadcast_to(a, (size, *a.shape))
            return a.reshape(-1, *a.shape[2:])

        flat_x = merged(x, x_mapped)
        y = op(flat_x, jax.tree.map(merged, routing, routing_mapped), experts, layer)
        return y.reshape(size, *x.shape[1 if x_mapped else 0:]), True

    return op
