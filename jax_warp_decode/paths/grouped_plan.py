"""What the grouped kernels work on: slots sorted by expert, in groups that start at multiples of 8, and their tiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode.kernels import grouped_sort
from jax_warp_decode.kernels.grouped_config import ROW_ALIGNMENT

# For indices that come from a sort: without it, XLA adds kernels that wrap and clamp them.
IN_BOUNDS: dict[str, Any] = dict(mode="promise_in_bounds", wrap_negative_indices=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows of T * K slots.

    Attributes:
      token: int32 [R], the token of each row; of rows in no group, any.
      position: int32 [T, K], the row of each slot; of slots that are not routed, any.
      tiles: int32 [5 * most], of each tile: expert, that expert's first tile, how many it has, its first row, and
        how many it has.
      total: int32 [1], tiles.
    """

    token: jax.Array
    position: jax.Array
    tiles: jax.Array
    total: jax.Array


def most_rows(slots: int, experts: int, widest: int) -> int:
    """R: rows of all groups with their alignment, and at least one tile."""
    padding = min(slots, experts) * (ROW_ALIGNMENT - 1)
    return max(-(-(slots + padding) // ROW_ALIGNMENT) * ROW_ALIGNMENT, widest)


def most_tiles(slots: int, experts: int, widest: int) -> int:
    return min(slots, experts) + slots // widest


def plan(ids: jax.Array, experts: int, widest: int) -> Plan:
    """The plan of ids [T, K] for tiles of up to `widest` rows; ids outside [0, experts) are not routed.

    Example:
      >>> import jax.numpy as jnp
      >>> p = plan(jnp.array([[2, -1], [0, 2], [2, 9]]), experts=4, widest=16)
      >>> p.position.tolist()[1], p.total.tolist(), p.tiles.reshape(-1, 5).tolist()[:2]
      ([0, 9], [2], [[0, 0, 1, 0, 1], [2, 1, 1, 8, 3]])
    """
    slots, E = ids.size, jnp.int32(experts)
    rows = most_rows(slots, experts, widest)
    flat = ids.reshape(-1)
    expert = jnp.where((flat >= 0) & (flat < E), flat, E)
    # A radix sort takes one pass per byte of its key.
    key = next(d for d in (jnp.uint8, jnp.uint16, jnp.uint32) if experts <= jnp.iinfo(d).max)
    number = jnp.arange(slots, dtype=jnp.int32)
    expert, order = lax.sort((expert.astype(key), number), num_keys=1, is_stable=True)
    expert = expert.astype(jnp.int32)

    of_expert = jnp.arange(experts, dtype=jnp.int32)
    sizes = jnp.sum(expert[:, None] == of_expert, axis=0, dtype=jnp.int32)
    padded = (sizes + jnp.int32(ROW_ALIGNMENT - 1)) & jnp.int32(-ROW_ALIGNMENT)
    count = (sizes + jnp.int32(widest - 1)) // jnp.int32(widest)
    start, first = _before(padded), _before(count)

    shift = jnp.append(start - _before(sizes), jnp.int32(rows))  # not routed: beyond the last row
    row = number + shift.at[expert].get(**IN_BOUNDS)
    token = jnp.zeros(rows, jnp.int32).at[row].set(
        order // jnp.int32(ids.shape[1]), mode="drop", unique_indices=True, wrap_negative_indices=False)
    position = jnp.zeros(slots, jnp.int32).at[order].set(
        jnp.minimum(row, jnp.int32(rows - 1)), unique_indices=True, **IN_BOUNDS)

    tile = jnp.arange(most_tiles(slots, experts, widest), dtype=jnp.int32)[:, None]
    mine = (tile >= first) & (tile < first + count)
    fields = jnp.stack([of_expert, first, count, start, sizes], axis=1)
    tiles = jnp.sum(jnp.where(mine[:, :, None], fields, jnp.int32(0)), axis=1, dtype=jnp.int32)
    return Plan(token, position.reshape(ids.shape), tiles.reshape(-1), jnp.sum(count, dtype=jnp.int32)[None])


def plan_on_gpu(ids: jax.Array, experts: int, widest: int) -> Plan:
    """`plan` in one kernel where the counts fit shared memory. Hopper or newer."""
    if experts > grouped_sort.MOST_EXPERTS:
        return plan(ids, experts, widest)
    kernel = grouped_sort.build(ids.size, ids.shape[1], experts, widest, most_rows(ids.size, experts, widest),
                                most_tiles(ids.size, experts, widest))
    token, position, tiles, total = kernel(ids.reshape(-1))
    return Plan(token, position.reshape(ids.shape), tiles, total)


def _before(values: jax.Array) -> jax.Array:
    """Sum of the values before each: one fused reduction, where a cumulative sum is several kernels."""
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None, :] < index[:, None], values[None, :], jnp.int32(0)), axis=1, dtype=jnp.int32)
