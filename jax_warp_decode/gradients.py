"""What has a gradient, what has none, and how a function says so."""

from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.formats import QuantizedArray, dequantize


def without_gradient(fn: Callable, message: str) -> Callable:
    """`fn`, unchanged, but differentiating it, in either mode, raises `UnsupportedError(message)` at trace time.

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


def widen(w: jax.Array | QuantizedArray, dtype) -> jax.Array:
    """An expert weight as a plain array of `dtype`; a quantised one refuses to be differentiated.

    Decoding works on bits, so that its derivative would be zero, silently.
    """
    if not isinstance(w, QuantizedArray):
        return dequantize(w, dtype)
    return of_quantised(lambda w: dequantize(w, dtype), w)


def of_quantised(fn: Callable, w: QuantizedArray):
    """fn(w), which refuses to be differentiated."""
    return without_gradient(fn, (
        f"experts: got {w.format} weights to differentiate, which have no gradient; differentiate x and the routing "
        "weights only, or train dense weights and quantise them afterwards"))(w)


def reverse_only(tree, message: str):
    """The same pytree of float arrays; forward-mode differentiation of what follows raises `UnsupportedError(message)`.

    A function with `jax.custom_vjp` inside has no forward mode, and JAX's own error names neither function nor way
    out. Here, tangents pass through a linear primitive whose transpose is the identity and which cannot be evaluated:
    reverse mode only ever transposes it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = lambda x: jnp.square(reverse_only(x, "square: reverse mode only"))
      >>> float(jax.grad(f)(3.0))
      6.0
      >>> try:
      ...     jax.jvp(f, (3.0,), (1.0,))
      ... except UnsupportedError as error:
      ...     print(error)
      square: reverse mode only
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _reverse_only.bind(*leaves, message=message))


def _refuse(*_, message, **__):
    raise UnsupportedError(message)


def _differentiate(primals, tangents, *, message):
    nonzero = [t for t in tangents if not isinstance(t, ad.Zero)]
    through = iter(_tangents.bind(*nonzero, message=message))
    return (_reverse_only.bind(*primals, message=message),
            [t if isinstance(t, ad.Zero) else next(through) for t in tangents])


def _primitive(name, evaluate):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, message: list(avals))
    primitive.def_impl(evaluate)
    return primitive


_reverse_only = _primitive("reverse_only", lambda *args, message: list(args))
mlir.register_lowering(_reverse_only, lambda ctx, *args, message: args)
batching.primitive_batchers[_reverse_only] = (
    lambda args, axes, *, message: (_reverse_only.bind(*args, message=message), axes))
ad.primitive_jvps[_reverse_only] = _differentiate

# Batched or evaluated, tangents belong to forward mode; reverse mode transposes them away first.
_tangents = _primitive("reverse_only_tangents", _refuse)
mlir.register_lowering(_tangents, _refuse)
batching.primitive_batchers[_tangents] = _refuse
ad.deflinear2(_tangents, lambda cotangents, *_, message: list(cotangents))
