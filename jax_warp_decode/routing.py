"""Routing: which experts serve a token and with what weight. Everything is float32 at every batch size."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_warp_decode.errors import ArgumentError

_INT32_MIN = np.int32(-(2**31))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Experts and weights of T tokens with K slots each.

    Attributes:
      ids: [T, K] integers. An id outside [0, E) means that the slot is not routed: it adds exactly zero, whatever its
        weight holds. Ids of a token may repeat; each slot counts.
      weights: [T, K] floats, applied to the expert's output as float32.

    Construction checks nothing, so that a pytree transform may hold other leaves; `check` does.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.routing import Routing
      >>> r = Routing(jnp.array([[0, 5], [7, -1]], jnp.int16), [[0.6, 0.4], [0.7, 0.3]]).check(tokens=2, num_experts=8)
      >>> r.ids.dtype, r.weights.dtype
      (dtype('int32'), dtype('float32'))
    """

    ids: jax.Array
    weights: jax.Array

    def check(self, tokens: int, num_experts: int) -> "Routing":
        """The same routing with ids as int32 [T, K] and weights as float32 [T, K].

        Ids may have any integer dtype; those beyond int32 become -1 (not routed), which is what they mean. (Without x64
        mode, `jax.jit` cuts 64-bit NumPy arguments to 32 bits before they get here.)

        Raises:
          ArgumentError: for ids that are not integers, weights that are not real numbers, shapes other than [T, K],
            a T other than `tokens`, or K outside 1..`num_experts`.
        """
        ids, weights = int32_ids(self.ids), float32_weights(self.weights)
        if ids.ndim != 2 or ids.shape[0] != tokens:
            raise ArgumentError(
                f"routing.ids: got shape {ids.shape}, expected [T, K] with T = {tokens} tokens as in x; reshape "
                f"leading axes into T, or use jax.vmap")
        if weights.shape != ids.shape:
            raise ArgumentError(f"routing.weights: got shape {weights.shape}, expected {ids.shape} = [T, K] as in ids")
        if not 1 <= ids.shape[1] <= num_experts:
            raise ArgumentError(
                f"routing.ids: got K = {ids.shape[1]} slots per token, expected 1 to E = {num_experts}, the number of "
                f"experts")
        return Routing(ids, weights)


def route(logits: jax.Array, k: int, *, renormalize: bool = True) -> Routing:
    """Softmax router: softmax over all experts in float32, the k largest, optionally renormalised to sum to one.

    This is the router of Qwen3-MoE (`norm_topk_prob` = `renormalize`) and, renormalised, of Mixtral
    (arXiv:2401.04088). Renormalised weights equal a softmax over the chosen logits.

    The ids of a token are distinct and in range for any input bits, best first, ties to the lower id; -0 and 0 tie, and
    NaN ranks below everything. Weights are finite for finite logits; where all scores vanish (a row of -inf) they are
    zero. A NaN or +inf logit gives NaN weights in its row, so that it stays visible.

    Args:
      logits: [T, E] floats; converted to float32.
      k: experts per token, 1 to E.
      renormalize: whether the chosen scores are divided by their sum.

    Returns:
      Routing with ids int32 [T, k] and weights float32 [T, k].

    Raises:
      ArgumentError: for logits that are not a float array [T, E], or k out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.routing import route
      >>> r = route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), 2)
      >>> r.ids.tolist(), [round(w, 4) for w in r.weights[0].tolist()]
      ([[0, 1]], [0.7311, 0.2689])
    """
    is_array = hasattr(logits, "dtype")
    if not is_array or not jnp.issubdtype(logits.dtype, jnp.floating) or logits.ndim != 2 or logits.shape[1] == 0:
        got = f"{logits.dtype} {logits.shape}" if is_array else type(logits).__name__
        raise ArgumentError(
            f"logits: got {got}, expected a floating array [T, E] with E >= 1; use jax.vmap for more axes")
    experts = logits.shape[1]
    try:
        k = operator.index(k)
    except TypeError:
        raise ArgumentError(f"k: got {k!r}, expected a static integer from 1 to E = {experts}") from None
    if not 1 <= k <= experts:
        raise ArgumentError(f"k: got {k}, expected 1 to E = {experts}, the number of experts in logits {logits.shape}")
    return Routing(*_softmax_top_k(jnp.asarray(logits), k, bool(renormalize)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _softmax_top_k(logits, k, renormalize):
    z = logits.astype(jnp.float32)
    ids = lax.top_k(_order_key(z), k)[1]
    largest = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    exp = jnp.exp(z - jnp.where(jnp.isneginf(largest), np.float32(0), largest))
    chosen = jnp.take_along_axis(exp, ids, axis=-1)
    total = jnp.sum(chosen if renormalize else exp, axis=-1, keepdims=True)
    # Scores that are all zero stay zero; NaN is not equal to zero and passes through.
    return ids.astype(jnp.int32), chosen / jnp.where(total == 0, np.float32(1), total)


def _order_key(z: jax.Array) -> jax.Array:
    """float32 -> int32 with the same order, except that -0 equals 0 and NaN is lowest.

    Choosing on integers gives distinct ids for any bits on every backend. Choosing on logits instead of scores keeps
    the order of experts whose scores underflow or round to the same float32.
    """
    bits = lax.bitcast_convert_type(z, jnp.int32)
    key = jnp.where(bits < 0, _INT32_MIN - bits, bits)
    return jnp.where(jnp.isnan(z), _INT32_MIN, key)


def int32_ids(ids, name: str = "routing.ids") -> jax.Array:
    """Integer ids of any dtype as int32; a value that int32 cannot hold becomes -1, never another expert's id."""
    if not hasattr(ids, "dtype"):
        ids = np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ArgumentError(f"{name}: got dtype {ids.dtype}, expected an integer dtype such as int32")
    if ids.dtype.itemsize >= 4 and ids.dtype != jnp.int32:
        # On the host for NumPy input: without x64, jnp would drop the upper half of an int64 and make it a valid id.
        xp = np if isinstance(ids, np.ndarray | np.generic) else jnp
        ids = xp.where((ids >= 0) & (ids <= 2**31 - 1), ids.astype(jnp.int32), np.int32(-1))
    return jnp.asarray(ids.astype(jnp.int32))


def float32_weights(weights, name: str = "routing.weights") -> jax.Array:
    """Floating routing weights of any dtype, or a nested list, as float32."""
    if not hasattr(weights, "dtype"):
        try:
            weights = np.asarray(weights, np.float32)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{name}: got {type(weights).__name__}, expected a floating array or nested list [T, K]"
            ) from None
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ArgumentError(
            f"{name}: got dtype {weights.dtype}, expected a floating dtype; it is used as float32")
    return jnp.asarray(weights.astype(jnp.float32))
