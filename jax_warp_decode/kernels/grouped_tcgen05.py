"""Rows sorted by expert times the weights of their experts, on data-centre Blackwell: as `grouped_matmul`, by tcgen05.

Compiled and interpreted only, never run: no Blackwell GPU was at hand. Nothing in it is tuned.

Rows of tokens are the M operand and weights the N operand, both from shared memory, both in the order that they have in
memory. An item is a tile of up to 128 rows of one expert, and 256 weight rows: 128 each of gate and up, or 256 of down.
A CTA owns an item, with one warpgroup, and a second one for MXFP8:

    warp 0     TMA -> ring of `stages` x (128 rows + 256 weight rows) x 64 columns
    second     MXFP8 of a stage -> bfloat16 in a ring of as many stages
    warp 1     ring -> tcgen05 -> float32 sums [128, 256] in tensor memory, half of it
    warps 0-3  bias, activation, one rounding, 32 columns at a time -> shared memory -> TMA

What a copy reads beyond a group's last row goes to sums that are not stored: rows are independent.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.activations import Activation
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, grouped_items
from jax_warp_decode.kernels.grouped_config import BLOCK, CHUNK, FIELDS, PART, ROW_ALIGNMENT, TILE, Tcgen05Config
from jax_warp_decode.kernels.kernel_format import MX_BLOCK, e8m0_to_f32


@functools.cache
def build(name: str, n: int, cols: int, itemsize: int, matrices: int, biases: int, activation: Activation | None,
          config: Tcgen05Config, interpret):
    """The kernel: (tiles, total, rows, *weights, *scales, *biases) -> bfloat16 [R, n].

        tiles int32 [FIELDS * most], total int32 [1]   from `grouped_plan`
        rows bfloat16 [R, cols]                        groups start at multiples of 8; R at least 128
        weights `matrices` x bfloat16 or float8_e4m3fn [E, n, cols], cols a multiple of 64
        scales  with float8 weights, `matrices` x uint8 [E, n, cols / 32]
        biases  `biases` x float32 [E, N], N >= n
        n is a multiple of 64, and at least the block: 128 with two matrices, else 256

    Args:
      name: of the kernel.
      itemsize: bytes of a weight: 2, or 1 for MXFP8.
      matrices: 2 for gate and up, which meet in the activation; else 1.
      biases: 0, or one for each matrix.
      activation: what follows the product, None for nothing.
    """
    config.check(itemsize)
    scaled = itemsize == 1
    width, stages = config.widest, config.stages
    steps = cols // TILE
    block = BLOCK // matrices
    blocks = -(-n // block)

    finish = functools.partial(grouped_items.finish, activation)

    def body(tiles_ref, total_ref, rows_ref, *refs):
        weight_refs, refs = refs[:matrices], refs[matrices:]
        scale_refs, refs = refs[:matrices * scaled], refs[matrices * scaled:]
        bias_refs, refs = refs[:biases], refs[biases:]
        out_ref, weight_ring, row_ring, staging, sums, full, empty, done, *widened = refs

        def copy_item(expert, weight_row, row):
            def one_step(k, _):
                stage = lax.rem(k, jnp.int32(stages))

                @pl.when(k >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                @pl.when(k < steps)
                def _():
                    columns = pl.ds(k * jnp.int32(TILE), TILE)
                    plgpu.copy_gmem_to_smem(rows_ref.at[pl.ds(row, width), columns], row_ring.at[stage], full.at[stage])
                    for m, ref in enumerate(weight_refs):
                        plgpu.copy_gmem_to_smem(ref.at[expert, pl.ds(weight_row, block), columns],
                                                weight_ring.at[stage, pl.ds(m * block, block)], full.at[stage])

            # Until all stages are free again: no barrier may end with an arrival that nobody waited for (interpreter).
            lax.fori_loop(jnp.int32(0), jnp.int32(steps + stages), one_step, None)

        def multiply_item():
            def one_step(k, _):
                stage = lax.rem(k, jnp.int32(stages))
                plgpu.barrier_wait(full.at[stage])
                operand = weight_ring
                if scaled:
                    operand, ready = widened
                    plgpu.barrier_wait(ready.at[stage])
                plgpu.tcgen05_mma(sums, row_ring.at[stage], operand.at[stage].transpose((1, 0)), empty.at[stage],
                                  accumulate=k > 0)

            lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, None)
            plgpu.tcgen05_commit_arrive(done)

        def widen_item(expert, weight_row):
            """MXFP8 -> bfloat16 in shared memory. A stage that is full again was read by the product before it."""
            wide_ring, ready = widened

            def one_step(k, _):
                stage = lax.rem(k, jnp.int32(stages))
                plgpu.barrier_wait(full.at[stage])
                for part in range(0, BLOCK, PART):
                    m, row = divmod(part, block)
                    values = _load(weight_ring.at[stage, pl.ds(part, PART)], plgpu.Layout.WGMMA).astype(jnp.float32)
                    halves = []
                    for half in range(TILE // MX_BLOCK):
                        at = pl.ds(weight_row + jnp.int32(row), PART), k * jnp.int32(TILE // MX_BLOCK) + half
                        scale = _load(scale_refs[m].at[expert, *at], plgpu.Layout.WGMMA.reduce(1))
                        columns = values[:, half * MX_BLOCK:(half + 1) * MX_BLOCK]
                        halves.append(columns * lax.broadcast_in_dim(e8m0_to_f32(scale), columns.shape, (0,)))
                    wide_ring[stage, pl.ds(part, PART)] = jnp.concatenate(halves, axis=1).astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[stage])

            lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, None)

        def load(m, expert, weight_row, column):
            """Sums float32 [128, 32] of a matrix, from a column of the block on, with their bias."""
            value = plgpu.async_load_tmem(sums.at[:, pl.ds(m * block + column, CHUNK)], layout=plgpu.Layout.TCGEN05)
            if not biases:
                return value
            at = pl.ds(weight_row + jnp.int32(column), CHUNK)
            b = _load(bias_refs[m].at[expert, at], plgpu.Layout.TCGEN05.reduce(0))
            return value + plgpu.layout_cast(lax.broadcast_in_dim(b, (width, CHUNK), (1,)), plgpu.Layout.TCGEN05)

        def store(value, buffer, column, row, rows):
            """[128, 32] through shared memory to the rows of the tile, in runs of 2^i rows."""
            buffer[...] = value.astype(jnp.bfloat16)
            plgpu.commit_smem()
            size = width
            while size >= ROW_ALIGNMENT:
                first = (rows // jnp.int32(2 * size)) * jnp.int32(2 * size)

                @pl.when((rows & jnp.int32(size)) > 0)
                def _(size=size, first=first):
                    plgpu.copy_smem_to_gmem(buffer.at[pl.ds(first, size)],
                                            out_ref.at[pl.ds(row + first, size), pl.ds(column, CHUNK)],
                                            commit_group=False)

                size //= 2
            plgpu.commit_smem_to_gmem_group()

        def own(item):
            expert, own_row, row, rows = grouped_items.locate(tiles_ref, item, blocks, block)
            weight_row = jnp.minimum(own_row, jnp.int32(n - block))  # the last block may begin inside the one before
            if scaled:
                pl.when(lax.axis_index("wg") == 1)(lambda: widen_item(expert, weight_row))

            @pl.when(lax.axis_index("wg") == 0)
            def _():
                @plgpu.warp_map
                def _(warp):
                    pl.when(warp == 0)(lambda: copy_item(expert, weight_row, row))
                    pl.when(warp == 1)(multiply_item)

                plgpu.barrier_wait(done)
                # Up to a multiple of 8: the group's own space.
                space = (rows + jnp.int32(ROW_ALIGNMENT - 1)) & jnp.int32(-ROW_ALIGNMENT)
                for turn, column in enumerate(range(0, block, CHUNK)):
                    @pl.when(weight_row + jnp.int32(column) >= own_row)
                    def _(turn=turn, column=column):
                        value = finish(*(load(m, expert, weight_row, column) for m in range(matrices)))
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        store(value, staging.at[turn % 2], weight_row + jnp.int32(column), row, space)
                plgpu.wait_smem_to_gmem(0)

        item = lax.axis_index("item")
        pl.when(item < total_ref[0] * jnp.int32(blocks))(lambda: own(item))

    def tiled(*shape, dtype=jnp.bfloat16):
        swizzle = plgpu.SwizzleTransform(shape[-1] * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, shape[-1])), swizzle))

    scratch = [
        tiled(stages, BLOCK, TILE, dtype=jnp.float8_e4m3fn if scaled else jnp.bfloat16),
        tiled(stages, width, TILE),
        tiled(2, width, CHUNK),
        plgpu.TMEM((width, BLOCK), jnp.float32),
        plgpu.Barrier(num_arrivals=matrices + 1, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
        plgpu.Barrier(orders_tensor_core=True),
    ]
    if scaled:
        scratch += [tiled(stages, BLOCK, TILE), plgpu.Barrier(num_barriers=stages)]

    @jax.jit
    def launch(tiles, total, *operands):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((operands[0].shape[0], n), jnp.bfloat16),
            grid=(tiles.shape[0] // FIELDS * blocks,),
            grid_names=("item",),
            num_threads=1 + scaled,
            thread_name="wg",
            scratch_types=scratch,
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=interpret,
        )(tiles, total, *operands)

    return without_gradient(launch, f"{name}: {checks.NO_GRADIENT}")


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)
