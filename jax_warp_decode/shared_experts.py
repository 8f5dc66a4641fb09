"""Experts that every token uses, as more experts of the same layer: the same kernels run them in the same launch.

y = sum_k weight_k expert_k(x) + gate(x) shared(x). The shared part becomes experts E, E + 1, .. of the layer, once,
when the weights are loaded; each call then gives every token one more slot per appended expert:

    experts = append_shared(routed, shared)                                              # at load
    y = moe(x, with_shared(route(logits, router), routed.num_experts, experts.num_experts, gate), experts)

Scaling factors and renormalisation belong to the router, so that they never reach the shared part. A shared expert that
is wider than the others is several of them: an activation works neuron by neuron, so that the sum over blocks of
neurons is the whole.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import (
    BIASES,
    MATRICES,
    ExpertWeights,
    Weight,
    check_experts,
    describe,
    is_float_array,
)
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.routing import Routing, float32_weights, int32_ids, is_routed

# Which axis of a tensor runs over the neurons; b_down has none.
NEURON_AXES = {"w_gate": -2, "w_up": -2, "w_down": -1, "b_gate": -1, "b_up": -1}


def append_shared(experts: ExpertWeights, shared: ExpertWeights) -> ExpertWeights:
    """The routed experts followed by the shared ones, [E + S * n, ..], n = I_shared / I.

    Everything is copied once, so call it when weights are loaded, not in a step. Under expert parallelism, appended
    experts are experts like any other: E + S * n must divide over the devices.

    Args:
      experts: E routed experts, of one layer or stacked.
      shared: S shared experts in the same format, with I_shared a multiple of I.

    Returns:
      `ExpertWeights`; a bias that only one of the two has is zero for the other.

    Raises:
      ArgumentError: another H or format, an I_shared that is no multiple of I, a gate on one side only, or a block of
        the format that the split would cut. Such shared experts can run in a `moe` call of their own, with
        `with_shared(None, 0, S, gate, tokens=T)` as routing, whose result is added.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> from jax_warp_decode.shared_experts import append_shared
      >>> w, wide = jnp.ones((8, 32, 64)), jnp.ones((1, 96, 64))
      >>> routed, shared = (ExpertWeights(w, w, w.swapaxes(1, 2)) for w in (w, wide))
      >>> append_shared(routed, shared).num_experts
      11
    """
    check_experts(experts)
    check_experts(shared, "shared")
    for name in ("hidden", "format", "layers"):
        got, want = getattr(shared, name), getattr(experts, name)
        if got != want:
            raise ArgumentError(f"shared: got {name} {got}, expected {want} as the routed experts have; run it in a "
                                "moe call of its own, or convert it")
    if (shared.w_gate is None) != (experts.w_gate is None):
        raise ArgumentError("shared.w_gate: expected a gate projection exactly if the routed experts have one")
    if shared.intermediate % experts.intermediate:
        raise ArgumentError(f"shared: got I = {shared.intermediate}, expected a multiple of I = {experts.intermediate} "
                            "of the routed experts; pad its neurons with zeros")
    shared = _split_neurons(shared, shared.intermediate // experts.intermediate)

    def join(name):
        parts = [getattr(e, name) for e in (experts, shared)]
        if all(part is None for part in parts):
            return None
        return jax.tree.map(lambda *a: jnp.concatenate(a, axis=experts.w_up.ndim - 3),
                            *(_zeros(name, e) if part is None else part
                              for part, e in zip(parts, (experts, shared), strict=True)))

    return ExpertWeights(**{name: join(name) for name in (*MATRICES, *BIASES)})


def with_shared(routing: Routing | None, first: int, end: int, gate: jax.Array | None = None, *,
                tokens: int | None = None) -> Routing:
    """The routing with a slot for every expert from `first` to `end` - 1, on which all tokens go.

    Args:
      routing: ids of routed experts, 0 to first - 1, and their weights, [..., K]; any other id means "not routed".
        None for no routed experts.
      first, end: numbers of the appended experts.
      gate: [..., 1] floats, the weight of the shared part (for Qwen3-Next sigmoid(x @ w_shared_gate)); None is 1.
      tokens: T, if routing is None.

    Returns:
      `Routing` [..., K + end - first].

    Raises:
      ArgumentError: no appended experts, a gate of another type or shape, or neither a routing nor `tokens`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import Routing
      >>> from jax_warp_decode.shared_experts import with_shared
      >>> routing = with_shared(Routing(jnp.array([[5, 8]]), jnp.array([[0.7, 0.3]])), 8, 9, jnp.array([[0.5]]))
      >>> routing.ids.tolist(), [round(w, 2) for w in routing.weights[0].tolist()]
      ([[5, -1, 8]], [0.7, 0.3, 0.5])
    """
    if not 0 <= first < end:
        raise ArgumentError(f"first, end: got {first} and {end}, expected 0 <= first < end")
    if routing is None:
        if tokens is None:
            raise ArgumentError("tokens: got None without a routing, expected T")
        routing = Routing(jnp.zeros((tokens, 0), jnp.int32), jnp.zeros((tokens, 0), jnp.float32))
    ids, weights = int32_ids(routing.ids), float32_weights(routing.weights)
    leading = ids.shape[:-1]
    if gate is None:
        gate = jnp.ones((*leading, 1), jnp.float32)
    if not is_float_array(gate) or gate.shape != (*leading, 1):
        raise ArgumentError(f"gate: got {describe(gate)}, expected floats {(*leading, 1)}, one for each token")
    # An id of `first` or more named no expert before; now it would name a shared one.
    ids = jnp.where(is_routed(ids, first), ids, jnp.int32(-1))
    shared = jnp.broadcast_to(jnp.arange(first, end, dtype=jnp.int32), (*leading, end - first))
    return Routing(jnp.concatenate([ids, shared], axis=-1), jnp.concatenate(
        [weights, jnp.broadcast_to(gate.astype(jnp.float32), shared.shape)], axis=-1))


def _split_neurons(experts: ExpertWeights, n: int) -> ExpertWeights:
    """S experts of n * I neurons as S * n experts of I."""
    if n == 1:
        return experts

    def split(name, w: Weight):
        axis = NEURON_AXES[name]
        if not isinstance(w, QuantizedArray):
            return _split(w, axis, n, w.ndim - (2 if name in BIASES else 3))
        block = w.spec.block_shape[axis]
        if block and w.shape[axis] // n % block:
            raise ArgumentError(f"shared.{name}: got {w.shape[axis]} neurons in blocks of {block} ({w.format}), which "
                                f"{n} parts of {w.shape[axis] // n} would cut; run it in a moe call of its own")
        return jax.tree.map(lambda a: _split(a, axis, n, w.ndim - 3), w)

    parts = {name: split(name, w) for name, w in (experts.weights | experts.biases).items() if name != "b_down"}
    if experts.b_down is not None:  # once for all parts
        b = jnp.stack([experts.b_down] + [jnp.zeros_like(experts.b_down)] * (n - 1), axis=-2)
        parts["b_down"] = b.reshape(*b.shape[:-3], -1, b.shape[-1])
    return dataclasses.replace(experts, **parts)


def _split(a: jax.Array, axis: int, n: int, expert_axis: int) -> jax.Array:
    """Cuts an axis into n parts and merges them into the axis of the experts; a scale of the whole axis is repeated."""
    axis += a.ndim
    if a.shape[axis] == 1:
        return jnp.repeat(a, n, axis=expert_axis)
    a = a.reshape(*a.shape[:axis], n, a.shape[axis] // n, *a.shape[axis + 1:])
    a = jnp.moveaxis(a, axis, expert_axis + 1)
    return a.reshape(*a.shape[:expert_axis], -1, *a.shape[expert_axis + 2:])


def _zeros(name: str, experts: ExpertWeights) -> jax.Array:
    size = experts.hidden if name == "b_down" else experts.intermediate
    return jnp.zeros((*experts.w_up.shape[:-2], size), jnp.float32)
