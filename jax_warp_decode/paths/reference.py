"""The reference strategy: plain XLA in float32, one expert after the other. Slow, exact, runs anywhere."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode import varying
from jax_warp_decode.activations import Activation
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.gradients import widen
from jax_warp_decode.routing import Routing


def run(x: jax.Array, routing: Routing, experts: ExpertWeights, *, activation: Activation,
        out_dtype=None) -> jax.Array:
    """The routed experts of one layer: x [T, H] -> y [T, H] in out_dtype, None for that of x.

    See `moe` for the arguments.

    Every operand is widened to float32 and every product has full float32 precision (no tf32 on a GPU), so that only
    the cast of y rounds. A scan over the experts widens one expert at a time: work grows with T * E, not
    T * K. Works under `jit`, `vmap`, `lax.scan` and differentiation in both modes; the backward pass recomputes each
    expert. Tokens and experts without a routed slot have no influence, whatever bits they hold, and an expert that
    nobody is routed to has a gradient of exactly zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, Routing
      >>> from jax_warp_decode.activations import get_activation
      >>> w = jnp.full((2, 1, 1), 1e3)
      >>> experts = ExpertWeights(w, w / 1e6, jnp.full((2, 1, 1), 3.0))     # silu(1000) * 0.001 = 1
      >>> run(jnp.ones((1, 1)), Routing(jnp.array([[1, -1]]), jnp.array([[0.5, jnp.nan]])), experts,
      ...     activation=get_activation("silu")).tolist()
      [[1.5]]
    """
    with jax.named_scope("reference"):
        x32 = x.astype(jnp.float32)
        step = functools.partial(_add_expert, x32, routing, activation)
        ids = jnp.arange(experts.num_experts, dtype=jnp.int32)
        # Without the checkpoint, the backward pass would keep the float32 copy of every expert.
        y = varying.like(jnp.zeros_like(x32), x, routing, experts)
        y, _ = lax.scan(jax.checkpoint(step, prevent_cse=False), y, (ids, experts))
        return y.astype(out_dtype or x.dtype)


def _add_expert(x, routing, activation, y, expert):
    """Adds one expert's share: y [T, H], expert = (its id, its weights without the E axis) -> y, None."""
    expert_id, weights = expert
    chosen = routing.ids == expert_id
    share = jnp.sum(_select(chosen, routing.weights), axis=1, keepdims=True)
    # Selects, not multiplications by zero: 0 * NaN is NaN. The same selects keep NaN out of the gradients, so the
    # weights of an unused expert are replaced too.
    used = jnp.any(chosen, axis=1, keepdims=True)
    rows, any_used = _select(used, x), jnp.any(used)

    def project(rows, w, b):
        if w is None:
            return None
        out = _matmul(rows, _select(any_used, widen(w, jnp.float32)))
        return out if b is None else out + _select(any_used, b.astype(jnp.float32))

    h = activation.apply(project(rows, weights.w_gate, weights.b_gate), project(rows, weights.w_up, weights.b_up))
    return y + _select(used, project(h, weights.w_down, weights.b_down)) * share, None


def _select(keep: jax.Array, a: jax.Array) -> jax.Array:
    return jnp.where(keep, a, jnp.float32(0))


def _matmul(rows: jax.Array, w: jax.Array) -> jax.Array:
    """rows [T, K] and w [N, K] -> [T, N], all float32."""
    return lax.dot_general(rows, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
