"""Leading batch axes: [..., H] is a batch of tokens, and the op works on [T, H]."""

import math

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.routing import Routing, float32_weights, int32_ids


def as_array(x, hidden: int | None = None) -> jax.Array:
    """x as a floating array [..., H], with H = `hidden` if that is given.

    Raises:
      ArgumentError: it is none.

    Example:
      >>> from jax_warp_decode.batch_axes import as_array
      >>> as_array([[1.0, 2.0]], hidden=2).shape
      (1, 2)
    """
    expected = "a floating array [..., H]" + (f" with H = {hidden}" if hidden else "")
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        raise ArgumentError(f"x: got {type(x).__name__}, expected {expected}") from None
    if (array.ndim < 1 or not jnp.issubdtype(array.dtype, jnp.floating)
            or hidden is not None and array.shape[-1] != hidden):
        raise ArgumentError(f"x: got {array.dtype}{list(array.shape)}, expected {expected}")
    return array


def check_numbers(x: jax.Array, routing: Routing, strategy: str) -> None:
    """Refuses symbolic sizes (`jax.export.symbolic_shape`), which a choice of kernels cannot follow.

    Raises:
      UnsupportedError: with the way out.
    """
    sizes = *x.shape, *getattr(routing.ids, "shape", ())  # a list has none, and no symbols
    if strategy != "reference" and not all(isinstance(size, int) for size in sizes):
        raise UnsupportedError(f"x: got the symbolic shape {x.shape}, expected numbers, as kernels and their choice "
                               "depend on them; export once for every batch size, or take strategy='reference'")


def matching(x: jax.Array, routing: Routing) -> Routing:
    """The routing as int32 ids and float32 weights, with the leading axes of x.

    Raises:
      ArgumentError: x has no axis, or ids or weights have other leading axes than x.
    """
    ids, weights = int32_ids(routing.ids), float32_weights(routing.weights)
    leading = x.shape[:-1]
    for name, a in (("ids", ids), ("weights", weights)):
        if a.ndim < 1 or a.shape[:-1] != leading:
            raise ArgumentError(
                f"routing.{name}: got shape {a.shape}, expected ({', '.join(map(str, (*leading, 'K')))}) = [..., K] to "
                f"match x {x.shape} = [..., H]; reshape one of them, or map over the extra axes with jax.vmap")
    return Routing(ids, weights)


def merge(x: jax.Array, routing: Routing) -> tuple[jax.Array, Routing]:
    """x [..., H] and a routing [..., K] with the same leading axes -> [T, H] and [T, K], T their product.

    Raises:
      ArgumentError: as `matching`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import Routing, batch_axes
      >>> x, routing = batch_axes.merge(
      ...     jnp.zeros((2, 3, 64)), Routing(jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3, 4))))
      >>> x.shape, routing.ids.shape
      ((6, 64), (6, 4))
    """
    routing, tokens = matching(x, routing), math.prod(x.shape[:-1])
    x, ids, weights = (a.reshape(tokens, a.shape[-1]) for a in (x, routing.ids, routing.weights))
    return x, Routing(ids, weights)
