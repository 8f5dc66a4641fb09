"""Biases of experts over rows sorted by expert: `spread` copies them to the rows, `collect` sums the rows.

Each is the derivative of the other. Everything is float32, on every device: the products of the backward pass round
their operands and results to bfloat16 on a GPU, which a plain sum need not.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 32  # rows of one expert that are summed at once


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(rows: int, b: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The bias [E, N] of the expert of each of M rows, float32 [M, N]; zero for rows in no group.

    Example:
      >>> import jax.numpy as jnp
      >>> spread(4, jnp.array([[0.5], [2.0]]), jnp.array([1, 2])).tolist()
      [[0.5], [2.0], [2.0], [0.0]]
    """
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    expert = jnp.sum(row >= lax.cumsum(group_sizes), axis=1, dtype=jnp.int32)  # E in no group
    return _rows(b.astype(jnp.float32), expert)


@jax.custom_vjp
def collect(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sums the rows [M, N] of each expert, float32 [E, N]; rows in no group do not count, whatever they hold.

    A tree of fixed order: blocks of `BLOCK` rows of one expert, then blocks of these sums, until one is left. Work
    and memory are those of one pass over M + E * BLOCK rows, and nothing is added atomically.

    Example:
      >>> import jax.numpy as jnp
      >>> collect(jnp.array([[1.0], [2.0], [3.0], [jnp.nan]]), jnp.array([1, 2])).tolist()
      [[1.0], [5.0]]
    """
    rows, most = rows.astype(jnp.float32), rows.shape[0]  # most: rows that an expert may have
    while most > 1:
        rows, group_sizes = _sum_blocks(rows, group_sizes)
        most = -(-most // BLOCK)
    first = lax.cumsum(group_sizes) - group_sizes
    return _rows(rows, jnp.where(group_sizes > 0, first, jnp.int32(rows.shape[0])))


spread.defvjp(lambda rows, b, sizes: (spread(rows, b, sizes), (b, sizes)),
              lambda rows, saved, cotangent: (collect(cotangent, saved[1]).astype(saved[0].dtype), None))
collect.defvjp(lambda rows, sizes: (collect(rows, sizes), (rows, sizes)),
               lambda saved, cotangent: (
                   spread(saved[0].shape[0], cotangent, saved[1]).astype(saved[0].dtype), None))


def _sum_blocks(rows, group_sizes):
    """The sums of blocks of rows, in the order of the experts, and how many blocks each expert has."""
    m, groups = rows.shape[0], group_sizes.shape[0]
    ends = lax.cumsum(group_sizes)
    blocks = lax.div(group_sizes + jnp.int32(BLOCK - 1), jnp.int32(BLOCK))
    block_ends = lax.cumsum(blocks)
    block = jnp.arange(m // BLOCK + min(groups, m), dtype=jnp.int32)
    expert = jnp.sum(block[:, None] >= block_ends, axis=1, dtype=jnp.int32)
    end = _rows(ends, expert)  # 0 for blocks of no expert, so that none of their rows is taken
    start = _rows(ends - group_sizes, expert) + (block - _rows(block_ends - blocks, expert)) * jnp.int32(BLOCK)
    row = start[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)
    return jnp.sum(_rows(rows, jnp.where(row < end[:, None], row, jnp.int32(m))), axis=1), blocks


def _rows(a, index):
    return a.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
