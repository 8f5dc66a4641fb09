"""Routing: which experts serve a token and with what weight. Everything is float32 at every batch size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import describe, is_float_array, plain_or
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.routers import Router, choose_experts


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
      >>> r = Routing(jnp.array([[0, 5], [7, -1]], jnp.int16), [[0.6, 0.4], [0.7, 0.3]]).check(tokens=2)
      >>> r.ids.dtype, r.weights.dtype
      (dtype('int32'), dtype('float32'))
    """

    ids: jax.Array
    weights: jax.Array

    def check(self, tokens: int) -> "Routing":
        """The same routing with ids as int32 [T, K] and weights as float32 [T, K].

        Ids may have any integer dtype; those beyond int32 become -1 (not routed), which is what they mean. (Without x64
        mode, `jax.jit` cuts 64-bit NumPy arguments to 32 bits before they get here.)

        Raises:
          ArgumentError: for ids that are not integers, weights that are not real numbers, shapes other than [T, K],
            a T other than `tokens`, or K = 0.
        """
        ids, weights = int32_ids(self.ids), float32_weights(self.weights)
        if ids.ndim != 2 or ids.shape[0] != tokens:
            raise ArgumentError(
                f"routing.ids: got shape {ids.shape}, expected [T, K] with T = {tokens} tokens as in x; reshape "
                f"leading axes into T, or use jax.vmap")
        if weights.shape != ids.shape:
            raise ArgumentError(f"routing.weights: got shape {weights.shape}, expected {ids.shape} = [T, K] as in ids")
        if ids.shape[1] < 1:
            raise ArgumentError("routing.ids: got K = 0 slots per token, expected at least 1")
        return Routing(ids, weights)


def route(
    logits: jax.Array,
    router: int | Router,
    *,
    renormalize: bool | None = None,
    bias: jax.Array | None = None,
    correction_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
) -> Routing:
    """Chooses K experts per token from router logits and weighs them, in float32 at every batch size.

    The ids of a token are distinct and in range for any input bits, best first, ties to the lower id; -0 and 0 tie, and
    NaN ranks below everything. Weights are finite for finite logits; where all chosen scores vanish (a row of -inf)
    they are zero. With a softmax over all experts, a NaN or +inf logit gives NaN weights in its row, so that it stays
    visible ("topk_softmax" sees the chosen ones alone); no row influences another.

    Args:
      logits: [T, E] floats, converted to float32.
      router: `Router`, for example a row of `ROUTERS`; or K for the router of Qwen3-MoE: softmax over all experts, the
        K largest, renormalised to sum to one.
      renormalize: with an integer `router` only: False keeps the softmax values (`norm_topk_prob` of Qwen3-MoE).
      bias: [E] added to the logits (gpt-oss).
      correction_bias: [E] added to the scores for the choice alone, never part of a weight (DeepSeek-V3
        `e_score_correction_bias`). Its gradient is zero.
      expert_scale: [E] factor on the weights of each expert, after renormalisation (Gemma-4 `per_expert_scale`).

    Returns:
      Routing with ids int32 [T, K] and weights float32 [T, K].

    Raises:
      ArgumentError: logits or biases of the wrong type or shape, K above the number of eligible experts, groups that do
        not divide E.

    Source: Mixtral (arXiv:2401.04088), DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), gpt-oss (arXiv:2508.10925).

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.routers import Router
      >>> from jax_warp_decode.routing import route
      >>> r = route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), 2)
      >>> r.ids.tolist(), [round(w, 4) for w in r.weights[0].tolist()]
      ([[0, 1]], [0.7311, 0.2689])
      >>> gpt_oss = Router(2, "topk_softmax")
      >>> route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), gpt_oss, bias=jnp.array([0.0, 0.0, 3.0, 0.0])).ids.tolist()
      [[2, 0]]
    """
    if not is_float_array(logits) or logits.ndim != 2 or logits.shape[1] == 0:
        raise ArgumentError(f"logits: got {describe(logits)}, expected a floating array [T, E] with E >= 1; "
                            f"{plain_or(logits, 'use jax.vmap for more axes')}")
    experts = logits.shape[1]
    router = as_router(router, renormalize)
    router.check(experts)
    arrays = dict(bias=bias, correction_bias=correction_bias, expert_scale=expert_scale)
    for name, array in arrays.items():
        if array is not None and (not is_float_array(array) or array.shape != (experts,)):
            raise ArgumentError(
                f"{name}: got {describe(array)}, expected a floating array ({experts},) = [E] as in logits "
                f"{logits.shape}")
    return Routing(*choose_experts(router, jnp.asarray(logits), *arrays.values()))


def as_router(router: int | Router, renormalize: bool | None = None) -> Router:
    """The `Router` that the arguments of `route` mean."""
    if isinstance(router, str):
        raise ArgumentError(f"router: got {router!r}, expected a Router, such as Router(8, 'sigmoid') or a row of "
                            "ROUTERS, or the number of experts per token")
    if not isinstance(router, Router):
        return Router(router, renormalize=renormalize is None or renormalize)
    if renormalize is not None:
        raise ArgumentError(
            f"renormalize: got {renormalize} beside a Router, expected None; set it with "
            f"dataclasses.replace(router, renormalize={renormalize})")
    return router


def int32_ids(ids, name: str = "routing.ids") -> jax.Array:
    """Integer ids of any dtype as int32; a value that int32 cannot hold becomes -1, never another expert's id."""
    if not hasattr(ids, "dtype"):
        try:
            ids = np.asarray(ids)
        except (TypeError, ValueError):  # such as rows of several lengths
            raise ArgumentError(
                f"{name}: got {type(ids).__name__}, expected an integer array or nested list [T, K]") from None
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
    if isinstance(weights, QuantizedArray):
        raise ArgumentError(f"{name}: got {describe(weights)}, expected a floating array; dequantise it")
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ArgumentError(
            f"{name}: got dtype {weights.dtype}, expected a floating dtype; it is used as float32")
    return jnp.asarray(weights.astype(jnp.float32))


def is_routed(ids: jax.Array, num_experts: int) -> jax.Array:
    """Which slots of int32 ids go to one of E = `num_experts` experts: bool of the same shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.routing import is_routed
      >>> is_routed(jnp.array([0, 7, -1, 8]), 8).tolist()
      [True, True, False, False]
    """
    return (ids >= 0) & (ids < jnp.int32(num_experts))


def expected_experts(experts: int, per_token: float, tokens: int) -> float:
    """How many experts `tokens` tokens touch on average, if each chooses `per_token` of them (or all) evenly.

    Example:
      >>> from jax_warp_decode.routing import expected_experts
      >>> round(expected_experts(128, 8, 8), 1), round(expected_experts(128, 8, 128), 1)
      (51.6, 128.0)
    """
    return experts * (1 - (1 - min(1.0, per_token / experts)) ** tokens)
