"""The conventional strategy: sort the slots by expert, multiply group by group, put the rows back.

Eight stages, in order: route (the caller's), `align`, `gather`, `quantise`, `gate_up`, `activate`, `down`, `combine`.
With MXFP8 activations, `quantise` runs a second time before `down`. Each is a function of its own and a named scope.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode.activations import Activation
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import FORMATS, dequantize
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.paths.grouped_gemm import grouped_gemm
from jax_warp_decode.routing import Routing

# For indices that come from a sort: without it, XLA adds kernels that wrap and clamp them.
IN_BOUNDS = dict(mode="promise_in_bounds", wrap_negative_indices=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alignment:
    """The T * K slots in the order of their experts; slots that are not routed come last, in no group.

    Attributes:
      order: int32 [T * K], the slot (token * K + k) in each row.
      position: int32 [T, K], the row of each slot.
      group_sizes: int32 [E], rows of each expert.
    """

    order: jax.Array
    position: jax.Array
    group_sizes: jax.Array


def run(x: jax.Array, routing: Routing, experts: ExpertWeights, *, activation: Activation,
        activation_format: str | None = None) -> jax.Array:
    """The routed experts of one layer: x [T, H] -> y [T, H] in x.dtype. See `moe` for the arguments.

    With bfloat16 x (and weights that are not float16), products take bfloat16 operands and accumulate in float32. On a
    GPU the result of each projection and the intermediate are rounded to bfloat16, elsewhere only the intermediate.
    float16 and float32 are computed in float32, whose range no intermediate leaves: exact, but a scan over all experts.
    The combine is float32 in a fixed order: a row of y does not depend on the other tokens.

    With activation_format="mxfp8", rows are quantised to MXFP8 before both projections, as conventional MXFP8 serving
    does (OCP MX v1.0). E4M3 times a power of two is exact in bfloat16, so this has the numerics of an MXFP8 x MXFP8
    product with float32 accumulation. It has no gradient.

    Temporaries: gathered rows [T * K, H] and intermediates [T * K, I]. Quantised weights are widened before
    each product, all E experts at once.

    Raises:
      UnsupportedError: sizes the grouped GEMM cannot take on a GPU, or H or I that is no multiple of 32 with MXFP8
        activations.

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
    if x.shape[0] == 0:
        return jnp.zeros_like(x)
    if activation_format:
        _check_blocks(activation_format, experts)
    alignment = align(routing.ids, experts.num_experts)
    rows = gather(x, alignment)
    if activation_format:
        rows = quantise(rows, activation_format)
    dtype = operand_dtype(x.dtype, experts.format)
    gate, up = gate_up(rows, experts, alignment, dtype)
    h = activate(gate, up, activation)
    if activation_format:
        h = quantise(h, activation_format)
    out = down(h, experts, alignment, dtype)
    return combine(out, alignment, routing, experts.num_experts).astype(x.dtype)


def operand_dtype(x_dtype, weight_format: str):
    """What both projections compute in: bfloat16 for bfloat16 x, unless the weights are float16; else float32."""
    return jnp.bfloat16 if jnp.dtype(x_dtype) == jnp.bfloat16 and weight_format != "f16" else jnp.float32


@jax.named_scope("align")
def align(ids: jax.Array, num_experts: int) -> Alignment:
    """Sorts the slots of ids [T, K] by expert (stable). Nothing is padded: the grouped GEMM takes any group size."""
    E = jnp.int32(num_experts)
    expert = jnp.where(_routed(ids, num_experts), ids, E).reshape(-1)
    slot = jnp.arange(expert.size, dtype=jnp.int32)
    expert, order = lax.sort((expert, slot), num_keys=1, is_stable=True)
    position = jnp.zeros_like(order).at[order].set(slot, unique_indices=True, **IN_BOUNDS).reshape(ids.shape)
    is_mine = expert[:, None] == jnp.arange(num_experts, dtype=jnp.int32)
    return Alignment(order, position, jnp.sum(is_mine, axis=0, dtype=jnp.int32))


@jax.named_scope("gather")
def gather(x: jax.Array, alignment: Alignment) -> jax.Array:
    """Copies x [T, H] into one row per slot, [T * K, H], in the order of the experts."""
    K = alignment.position.shape[1]
    return x.at[alignment.order // jnp.int32(K)].get(**IN_BOUNDS)


@jax.named_scope("quantise")
def quantise(rows: jax.Array, format: str) -> jax.Array:
    """Rounds rows [M, N] to a block format along N; returns the float32 values the format can hold."""
    # Rounding has a derivative of zero: without the guard, every gradient behind it would silently vanish.
    rounded = without_gradient(
        lambda rows: dequantize(FORMATS[format].quantize(rows), jnp.float32),
        "activation_format: quantised activations have no gradient; differentiate with activation_format=None")
    return rounded(rows)


@jax.named_scope("gate_up")
def gate_up(rows: jax.Array, experts: ExpertWeights, alignment: Alignment, dtype) -> tuple[jax.Array, jax.Array]:
    """Both projections of rows [M, H] in `dtype`; two float32 [M, I]."""
    return tuple(_project(rows, w, alignment.group_sizes, dtype) for w in (experts.w_gate, experts.w_up))


@jax.named_scope("activate")
def activate(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """The gated activation in float32: [M, I] and [M, I] -> [M, I]."""
    return activation.apply(gate, up)


@jax.named_scope("down")
def down(h: jax.Array, experts: ExpertWeights, alignment: Alignment, dtype) -> jax.Array:
    """The down projection of h [M, I] in `dtype`; float32 [M, H]."""
    return _project(h, experts.w_down, alignment.group_sizes, dtype)


@jax.named_scope("combine")
def combine(out: jax.Array, alignment: Alignment, routing: Routing, num_experts: int) -> jax.Array:
    """Weighted sum of the K rows of each token, float32 [M, H] -> float32 [T, H], in the order of the slots."""
    routed = _routed(routing.ids, num_experts)
    weights = jnp.where(routed, routing.weights, jnp.float32(0))
    y = jnp.zeros((routed.shape[0], out.shape[1]), jnp.float32)
    for k in range(routed.shape[1]):
        # Rows of slots that are not routed were never written: select before the product, in the gradient too.
        slot = out.at[alignment.position[:, k]].get(**IN_BOUNDS)
        y += jnp.where(routed[:, k, None], slot, jnp.float32(0)) * weights[:, k, None]
    return y


def _routed(ids: jax.Array, num_experts: int) -> jax.Array:
    return (ids >= 0) & (ids < jnp.int32(num_experts))


def _project(rows, w, group_sizes, dtype):
    return grouped_gemm(rows.astype(dtype), dequantize(w, dtype), group_sizes)


def _check_blocks(format, experts):
    block = FORMATS[format].block
    bad = [f"{name} = {d}" for name, d in (("H", experts.hidden), ("I", experts.intermediate)) if d % block]
    if bad:
        raise UnsupportedError(f"activation_format: {format!r} needs H and I to be multiples of {block}, got "
                               f"{', '.join(bad)}; use activation_format=None")
