"""How a function that has no gradient says so."""

from collections.abc import Callable

import jax

from jax_warp_decode.errors import UnsupportedError


def without_gradient(fn: Callable, message: str) -> Callable:
    """`fn`, unchanged, except that reverse-mode differentiation raises `UnsupportedError(message)` at trace time.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = without_gradient(jnp.floor, "floor: has no useful gradient")
      >>> float(f(1.5))
      1.0
      >>> try:
      ...     jax.grad(f)(1.5)
      ... except UnsupportedError as error:
      ...     print(error)
      floor: has no useful gradient
    """

    def refuse(*_):
        raise UnsupportedError(message)

    guarded = jax.custom_vjp(fn)
    guarded.defvjp(refuse, refuse)
    return guarded
