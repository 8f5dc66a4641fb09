"""Activations between the up and the down projection: one table, used by every path and inside the kernels."""

import dataclasses
from collections.abc import Callable

import jax

from jax_warp_decode.errors import ArgumentError


def _silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate * jax.lax.logistic(gate) * up


@dataclasses.dataclass(frozen=True)
class Activation:
    """A gated activation: `apply(gate, up)` in float32, elementwise, usable inside a kernel body."""

    name: str
    apply: Callable[[jax.Array, jax.Array], jax.Array]


ACTIVATIONS = {a.name: a for a in (Activation("silu", _silu),)}


def get_activation(name: str) -> Activation:
    """Looks up an activation by name.

    Args:
      name: a key of `ACTIVATIONS`, for example "silu" (SwiGLU, Shazeer 2020, arXiv:2002.05202).

    Raises:
      ArgumentError: for an unknown name.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.activations import get_activation
      >>> float(get_activation("silu").apply(jnp.float32(64), jnp.float32(0.5)))
      32.0
    """
    if name not in ACTIVATIONS:
        raise ArgumentError(f"activation: got {name!r}, expected one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]
