"""What an item of a grouped kernel is, a tile of one expert's rows and a block of its weight rows; and its result."""

import jax.numpy as jnp
from jax import lax

from jax_warp_decode.activations import Activation
from jax_warp_decode.kernels.grouped_config import FIELDS, ROW_ALIGNMENT


def locate(tiles_ref, item, blocks: int, block: int):
    """Of an item: expert, first weight row of the block, first row, rows. Inside a kernel, from the plan's tiles.

    Args:
      tiles_ref: int32 [FIELDS * most], see `grouped_plan.Plan`.
      item: int32, below tiles * blocks.
      blocks: of weight rows that an expert has, `block` rows each.
    """
    group = lax.div(item, jnp.int32(blocks)) * jnp.int32(FIELDS)
    expert, first, count, start, rows = (tiles_ref[group + jnp.int32(f)] for f in range(FIELDS))
    # The tiles of an expert follow each other on the same weights, which come from L2 then.
    local = item - first * jnp.int32(blocks)
    at = lax.div(local, count)
    number = local - at * count
    # Tiles of one expert are about equal: a narrower product may hold them all.
    share = lax.div(rows + count * jnp.int32(ROW_ALIGNMENT) - jnp.int32(1), count * jnp.int32(ROW_ALIGNMENT))
    done = number * share * jnp.int32(ROW_ALIGNMENT)
    rows = jnp.minimum(rows - done, share * jnp.int32(ROW_ALIGNMENT))
    return expert, at * jnp.int32(block), start + done, rows


def finish(activation: Activation | None, *sums):
    """Of the sums of gate and up, or of up or down alone, biases included: what is stored."""
    if activation is None:
        return sums[0]
    return activation.apply(*sums) if len(sums) == 2 else activation.apply(None, *sums)
