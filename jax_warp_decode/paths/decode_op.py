"""What the two decode strategies share: batching over tokens, and how they refuse gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.gradients import without_gradient


def decode_op(name: str, layer_fn: Callable) -> Callable:
    """layer_fn(x [T, H], routing, experts, layer) -> y [T, H] with rules for `vmap` and, a refusal, for gradients.

    Under `vmap`, mapped tokens become more tokens of one launch; mapped experts or layers are refused.

    Args:
      name: of the strategy, for error messages.
      layer_fn: runs the kernels.
    """

    @jax.custom_batching.custom_vmap
    def op(x, routing, experts, layer):
        return layer_fn(x, routing, experts, layer)

    @op.def_vmap
    def _(size, mapped, x, routing, experts, layer):
        x_mapped, routing_mapped, *weights_mapped = mapped
        if any(jax.tree.leaves(weights_mapped)):
            raise UnsupportedError(
                f"experts: vmap over expert weights or layers is not supported by strategy {name!r}; map over x and "
                "routing only (in_axes=None for the rest), or loop with lax.scan or lax.map")

        def merged(a, is_mapped):
            a = a if is_mapped else jnp.broadcast_to(a, (size, *a.shape))
            return a.reshape(-1, *a.shape[2:])

        y = op(merged(x, x_mapped), jax.tree.map(merged, routing, routing_mapped), experts, layer)
        return y.reshape(size, *x.shape[1 if x_mapped else 0:]), True

    return without_gradient(op, (
        f"strategy: {name!r} has no gradient; it is a decode path. Use strategy='expert_centric' or 'reference' where "
        "you differentiate, with the same ExpertWeights"))
