"""The CUDA kernels of the grouped products: JAX's ragged dot for rows times weights, one of our own for outer products.

Both take bfloat16 operands and Hopper's wgmma. JAX's transposed ragged dot would be the second, but it asks the default
device for its core count, so that it cannot be traced, compiled or exported where that is a CPU, and it masks the rows
of neighbouring groups by multiplying with zero, which lets a NaN through.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# JAX's kernel stores any number of rows of a shared-memory tile through TMA, which wants them to start at 128 bytes:
# tiles of 64 two-byte columns. A tile of 96 columns compiles, and faults on the GPU.
MULTIPLE = 64
ROW_MULTIPLE = 8  # its shared-memory tiles hold rows in eights; rows are padded to that, in no group
OUTER_STEPS = 4  # depth of the outer product's pipeline through shared memory


@dataclasses.dataclass(frozen=True)
class GroupedGemmConfig:
    """Tiles of the CUDA kernel. One CTA owns block_m rows by block_n columns of the output at a time.

    Attributes:
      block_m: rows; at least 64, the M of Hopper's wgmma. Rows of other experts in the tile are computed in vain.
      block_n: columns; divides N.
      block_k: reduction step; divides K.
      max_concurrent_steps: depth of the pipeline through shared memory.
      grid_block_n: column tiles that run side by side on the same rows, so that these come from L2.
    """

    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int


def choose_config(m: int, n: int, groups: int) -> GroupedGemmConfig:
    """Tiles for M rows in `groups` groups and N output columns, a multiple of 64.

    Example:
      >>> choose_config(m=4096 * 8, n=768, groups=128)
      GroupedGemmConfig(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=6)
    """
    block_n = _tile(n)
    block_m = 128 if m > 64 * groups else 64
    # Both stay below the 227 KB of shared memory of a Hopper SM, output tile included.
    steps = 4 if block_m == 128 else 6
    side_by_side = max(b for b in range(1, 9) if n // block_n % b == 0)
    return GroupedGemmConfig(block_m, block_n, 64, steps, side_by_side)


def _tile(n):
    return 128 if n % 128 == 0 else 64


def product(rows: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """`grouped_gemm` (w [E, N, K] times rows of K) or, transposed, `grouped_gemm_transposed`, in bfloat16."""
    columns = w.shape[2 if transposed else 1]
    return kernel(choose_config(rows.shape[0], columns, w.shape[0]), transposed)(rows, w, group_sizes)


@functools.cache
def kernel(config: GroupedGemmConfig, transposed: bool = False):
    """JAX's ragged dot for one config, with a batching rule: (rows, w, group_sizes) -> float32."""

    @jax.jit  # equal layers share one trace, hence one compiled kernel
    def launch(rows, w, group_sizes):
        # Imported late: the module pulls in JAX's test utilities.
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

        m = rows.shape[0]
        rows = jnp.pad(rows, ((0, -m % ROW_MULTIPLE), (0, 0)))
        out = ragged_dot_mgpu.ragged_dot(
            rows, w, group_sizes=group_sizes, transpose_rhs=not transposed, **dataclasses.asdict(config))[:m]
        return out.astype(jnp.float32)  # as the scan; XLA fuses the cast into whatever reads the product

    batchable = jax.custom_batching.custom_vmap(launch)

    @batchable.def_vmap
    def _(size, mapped, rows, w, group_sizes):
        rows, group_sizes = _broadcast(size, mapped[::2], (rows, group_sizes))
        if mapped[1]:
            return lax.map(lambda args: batchable(*args), (rows, w, group_sizes)), True
        # Shared weights: the groups of all batch elements are merged, expert by expert.
        row = jnp.arange(rows.shape[1], dtype=jnp.int32)
        ends = lax.cumsum(group_sizes, axis=1)
        expert = jnp.sum(row[None, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        out = batchable(rows.reshape(-1, rows.shape[2])[order], w, jnp.sum(group_sizes, axis=0, dtype=jnp.int32))
        return jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*rows.shape[:2], -1), True

    return batchable


@jax.custom_batching.custom_vmap
def outer(a: jax.Array, b: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_outer` in bfloat16: a [M, N] and b [M, K] -> float32 [E, N, K].

    Rows are first copied so that every group starts at a multiple of 64 and is filled up with zeros: no tile holds rows
    of two experts, and nothing is masked inside the kernel. One CTA owns a tile of one expert's sum.
    """
    return _launch_outer(a, b, group_sizes)


@outer.def_vmap
def _(size, mapped, *args):
    return lax.map(lambda args: outer(*args), _broadcast(size, mapped, args)), True


@jax.jit
def _launch_outer(a, b, group_sizes):
    (m, n), k, groups, block = a.shape, b.shape[1], group_sizes.shape[0], MULTIPLE
    ends = lax.cumsum(group_sizes)
    blocks = lax.div(group_sizes + jnp.int32(block - 1), jnp.int32(block))
    block_ends = lax.cumsum(blocks)
    first_block = block_ends - blocks

    most_blocks = m // block + min(groups, m)
    of_block = jnp.arange(most_blocks, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(of_block[:, None] >= block_ends, axis=1, dtype=jnp.int32), jnp.int32(groups - 1))
    start = (ends - group_sizes)[expert] + (of_block - first_block[expert]) * jnp.int32(block)
    row = (start[:, None] + jnp.arange(block, dtype=jnp.int32)).reshape(-1)
    row = jnp.where(row < jnp.repeat(ends[expert], block), row, jnp.int32(m))  # m: none, filled with zeros
    a, b = (rows.at[row].get(mode="fill", fill_value=0, wrap_negative_indices=False) for rows in (a, b))

    block_n, block_k = _tile(n), _tile(k)

    def body(first_ref, blocks_ref, a_ref, b_ref, out_ref):
        i, j, e = (lax.axis_index(name) for name in ("n", "k", "expert"))
        first, count = first_ref[e], blocks_ref[e]

        def accumulate(acc):
            @pl.when(count > 0)
            def _():
                plgpu.emit_pipeline(
                    lambda _, a_tile, b_tile: plgpu.wgmma(acc, a_tile.transpose((1, 0)), b_tile),
                    grid=(count,),
                    in_specs=[
                        plgpu.BlockSpec((block, block_n), lambda r: (first + r, i), delay_release=1),
                        plgpu.BlockSpec((block, block_k), lambda r: (first + r, j), delay_release=1)],
                    max_concurrent_steps=OUTER_STEPS,
                )(a_ref, b_ref)
            return acc[...]

        total = pl.run_scoped(accumulate, plgpu.ACC((block_n, block_k)))

        @functools.partial(pl.run_scoped, tile=plgpu.SMEM((block_n, block_k), dtype=out_ref.dtype))
        def _(tile):
            tile[...] = total.astype(tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                tile, out_ref.at[e, pl.ds(i * block_n, block_n), pl.ds(j * block_k, block_k)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    launch = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((groups, n, k), jnp.bfloat16),
        grid=(n // block_n, k // block_k, groups),
        grid_names=("n", "k", "expert"),
        kernel_name="moe_grouped_outer",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup))
    return launch(first_block, blocks, a, b).astype(jnp.float32)


def _broadcast(size, mapped, args):
    return tuple(a if m else jnp.broadcast_to(a, (size, *a.shape)) for a, m in zip(args, mapped, strict=True))
