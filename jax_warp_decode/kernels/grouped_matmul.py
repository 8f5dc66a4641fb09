"""Rows sorted by expert times the weights of their experts, on Hopper: gate and up with the activation, or down.

Weights are the M operand of wgmma and rows of tokens the N operand, both straight from shared memory, both in the order
that they have in memory. A *tile* is up to `widths[-1]` rows of one expert, an *item* a tile and 256 weight rows: 128
each of gate and up, or 256 of down. The CTAs stay resident and take items in turn. In a CTA, one warpgroup requests
copies and two multiply, 64 + 64 weight rows each:

    TMA -> ring of `stages` x (256 weight rows + the rows of the tile) x 64 columns -> wgmma, float32 sums
    finish: bias, activation, one rounding -> shared memory, transposed by stmatrix -> TMA

The ring never drains between items. A tile with few rows takes a narrower product, the least of `widths` that holds it.
What a copy reads beyond a group's last row goes to columns of the product that are not stored: rows are independent.
The rows of a group start at a multiple of 8, so that whole swizzled blocks of 8 rows can be stored; see `grouped_plan`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.activations import Activation
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, grouped_items, grouped_simt
from jax_warp_decode.kernels.grouped_config import (
    BLOCK,
    PART,
    ROW_ALIGNMENT,
    TILE,
    WARPGROUPS,
    GroupedConfig,
)
from jax_warp_decode.kernels.kernel_format import MX_BLOCK, e8m0_to_f32

REGISTERS = {False: (40, 232), True: (56, 224)}  # of a thread that requests copies and of one that multiplies


@functools.cache
def build(name: str, n: int, cols: int, itemsize: int, matrices: int, biases: int, activation: Activation | None,
          gathered: bool, config: GroupedConfig, interpret):
    """The kernel: (tiles, total, *token, rows, *weights, *scales, *biases) -> bfloat16 [R, n].

        tiles int32 [FIELDS * most], total int32 [1]   from `grouped_plan`
        rows bfloat16 [R, cols]                        groups start at multiples of 8; R at least widths[-1]
        token int32 [R], rows bfloat16 [T, cols]       if `gathered`: row r is rows[token[r]]
        weights `matrices` x bfloat16 or float8_e4m3fn [E, n, cols]
        scales  with float8 weights, `matrices` x uint8 [E, n, cols / 32]
        biases  `biases` x float32 [E, N], N >= n, a multiple of the block: 128 with two matrices, else 256

    Args:
      name: of the kernel.
      itemsize: bytes of a weight: 2, or 1 for MXFP8.
      matrices: 2 for gate and up, which meet in the activation; else 1.
      biases: 0, or one for each matrix.
      activation: what follows the product, None for nothing.
    """
    config.check(itemsize)
    if gathered and config.stages < 3:
        raise ArgumentError(f"config: got {config}; with gathered rows, stages must be 3 at least")
    scaled = itemsize == 1
    widths, stages, ctas = config.widths, config.stages, config.ctas
    steps = -(-cols // TILE)
    block = BLOCK // matrices
    blocks = -(-n // block)

    finish = functools.partial(grouped_items.finish, activation)
    producer, consumer = REGISTERS[gathered]

    def body(tiles_ref, total_ref, *refs):
        token_refs, rows_ref, refs = refs[:gathered], refs[gathered], refs[gathered + 1:]
        weight_refs, refs = refs[:matrices], refs[matrices:]
        scale_refs, refs = refs[:matrices * scaled], refs[matrices * scaled:]
        bias_refs, refs = refs[:biases], refs[biases:]
        out_ref, weight_ring, row_ring, staging, full, empty, *widened = refs
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        items = total_ref[0] * jnp.int32(blocks)
        mine = lax.div(items - cta + jnp.int32(ctas - 1), jnp.int32(ctas))

        def tile(i):
            """Of the CTA's i-th item: expert, first weight row of the block, first row, rows."""
            return grouped_items.locate(tiles_ref, cta + i * jnp.int32(ctas), blocks, block)

        def first(i):
            """Stage of the first step of the CTA's i-th item. Later ones count: a remainder is slow."""
            return lax.rem(i * jnp.int32(steps), jnp.int32(stages))

        def after(stage):
            return jnp.where(stage == stages - 1, jnp.int32(0), stage + jnp.int32(1))

        def before(stage):
            return jnp.where(stage == 0, jnp.int32(stages), stage) - jnp.int32(1)

        def of_width(rows, then):
            """then(width) with the least width that holds the rows."""
            for i, width in enumerate(widths):
                fits = rows <= width if i + 1 < len(widths) else True
                beyond = rows > widths[i - 1] if i else True
                pl.when(fits & beyond)(functools.partial(then, width)) if len(widths) > 1 else then(width)

        @pl.when(wg == WARPGROUPS)
        def _():
            plgpu.set_max_registers(producer, action="decrease")

            def request(i, k, stage, expert, weight_row):
                """Waits until the stage is free and starts the copies of weights to it: step, columns."""
                step = i * jnp.int32(steps) + k

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                columns = pl.ds(k * jnp.int32(TILE), TILE)
                for m, ref in enumerate(weight_refs):
                    plgpu.copy_gmem_to_smem(ref.at[expert, pl.ds(weight_row, block), columns],
                                            weight_ring.at[stage, pl.ds(m * block, block)], full.at[stage])
                return step, columns

            def copy_item(i, _):
                expert, weight_row, row, rows = tile(i)

                def one_step(k, stage):
                    _, columns = request(i, k, stage, expert, weight_row)
                    of_width(rows, lambda width: plgpu.copy_gmem_to_smem(
                        rows_ref.at[pl.ds(row, width), columns], row_ring.at[stage, pl.ds(0, width)], full.at[stage]))
                    return after(stage)

                lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, first(i))

            def gather_item(i, _):
                expert, weight_row, row, rows = tile(i)

                def then(width):
                    tokens = _tokens(interpret, token_refs[0], row, width)

                    def one_step(k, stage):
                        step, _ = request(i, k, stage, expert, weight_row)
                        _gather(interpret, rows_ref, tokens, k, row_ring.at[stage, pl.ds(0, width)], width, cols)

                        @pl.when(step > 0)
                        def _():  # the rows of the step before have had its time to arrive
                            _gathered(interpret, 1)
                            plgpu.barrier_arrive(full.at[before(stage)])

                        return after(stage)

                    lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, first(i))

                of_width(rows, then)

            lax.fori_loop(jnp.int32(0), mine, gather_item if gathered else copy_item, None)
            if gathered:
                @pl.when(mine > 0)
                def _():
                    _gathered(interpret, 0)
                    plgpu.barrier_arrive(full.at[before(first(mine))])
            if interpret is not None:  # that of jax 0.11 wants to see every stage freed
                used = mine * jnp.int32(steps)
                lax.fori_loop(jnp.maximum(used - jnp.int32(stages), 0), used, lambda use, _: plgpu.barrier_wait(
                    empty.at[lax.rem(use, jnp.int32(stages))]), None)

        @pl.when(wg < WARPGROUPS)
        def _():
            plgpu.set_max_registers(consumer, action="increase")

            def release(stage):
                plgpu.barrier_arrive(empty.at[stage])

            def multiply(i, width, expert, weight_row):
                """Sums float32 [64, width] of the warpgroup's two parts."""
                row = weight_row + wg * jnp.int32(PART)

                def scales_of(k):
                    return _scales(interpret, scale_refs, expert, row, k, n, cols)

                def parts(stage):
                    return [weight_ring.at[stage, pl.ds(wg * jnp.int32(PART) + jnp.int32(p * WARPGROUPS * PART), PART)]
                            for p in range(2)]

                def products(*sums):
                    def one_step(k, stage):
                        plgpu.barrier_wait(full.at[stage])
                        n_operand = row_ring.at[stage, pl.ds(0, width)].transpose((1, 0))
                        for acc, part in zip(sums, parts(stage), strict=True):
                            plgpu.wgmma(acc, part, n_operand)
                        plgpu.wgmma_wait(2)  # the products of the step before

                        @pl.when(k > 0)
                        def _():
                            release(before(stage))

                        return after(stage)

                    end = lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, first(i))
                    out = tuple(acc[...] for acc in sums)
                    release(before(end))
                    return out

                def widened_products(*sums):
                    def one_step(k, carry):
                        stage, scales = carry
                        following = scales_of(jnp.minimum(k + jnp.int32(1), jnp.int32(steps - 1)))
                        plgpu.barrier_wait(full.at[stage])
                        n_operand = row_ring.at[stage, pl.ds(0, width)].transpose((1, 0))
                        operands = [_widen(interpret, part, scales, p, *(ref.at[wg, p] for ref in widened))
                                    for p, part in enumerate(parts(stage))]
                        for acc, operand in zip(sums, operands, strict=True):
                            plgpu.wgmma(acc, operand, n_operand)
                        # Registers of operands must not change before; meanwhile the other warpgroup widens.
                        plgpu.wgmma_wait(0)
                        release(stage)
                        return after(stage), following

                    lax.fori_loop(jnp.int32(0), jnp.int32(steps), one_step, (first(i), scales_of(jnp.int32(0))))
                    return tuple(acc[...] for acc in sums)

                accumulators = [plgpu.ACC((PART, width), jnp.float32)] * 2
                return pl.run_scoped(widened_products if scaled else products, *accumulators)

            def store(results, row, rows, width):
                """Pairs of a column and [64, width], as rows, to `out`: in chunks that take turns in two buffers."""
                starts = range(0, width, config.chunk)
                for turn, ((column, value), start) in enumerate(itertools.product(results, starts)):
                    count = min(config.chunk, width - start)
                    buffer = staging.at[wg, turn % 2]
                    plgpu.wait_smem_to_gmem(min(turn, 1), wait_read_only=True)
                    _transpose(interpret, value, buffer.at[pl.ds(0, count)], start, count)

                    def copy(first_row, count, column=column, start=start, buffer=buffer):
                        plgpu.copy_smem_to_gmem(
                            buffer.at[pl.ds(first_row, count)],
                            out_ref.at[pl.ds(row + jnp.int32(start + first_row), count), pl.ds(column, PART)],
                            commit_group=False)

                    inside = column < n
                    whole = rows > start + count - ROW_ALIGNMENT
                    pl.when(inside & whole)(functools.partial(copy, 0, count))
                    for r in range(0, count - ROW_ALIGNMENT, ROW_ALIGNMENT):
                        pl.when(inside & jnp.logical_not(whole) & (rows > start + r))(
                            functools.partial(copy, r, ROW_ALIGNMENT))
                    plgpu.commit_smem_to_gmem_group()

            def with_bias(value, ref, expert, at, width):
                if interpret is None:
                    b = plgpu.load(ref.at[expert, pl.ds(at, PART)], layout=plgpu.Layout.WGMMA.reduce(1),
                                   optimized=False)
                else:
                    b = ref[expert, pl.ds(at, PART)]
                return value + lax.broadcast_in_dim(b, (PART, width), (0,))

            def one_item(i, info):
                expert, weight_row, row, rows = info
                following = tile(jnp.minimum(i + jnp.int32(1), mine - jnp.int32(1)))  # loads that have time to arrive

                def then(width):
                    sums = multiply(i, width, expert, weight_row)
                    column = weight_row + wg * jnp.int32(PART)
                    columns = [column, column if matrices == 2 else column + jnp.int32(WARPGROUPS * PART)]
                    if biases:
                        sums = [with_bias(s, ref, expert, at, width)
                                for s, ref, at in zip(sums, bias_refs * (2 // biases), columns, strict=True)]
                    if matrices == 2:
                        store([(column, finish(*sums))], row, rows, width)
                    else:
                        store([(at, finish(s)) for at, s in zip(columns, sums, strict=True)], row, rows, width)

                of_width(rows, then)
                return following

            @pl.when(mine > 0)
            def _():
                lax.fori_loop(jnp.int32(0), mine, one_item, tile(jnp.int32(0)))
                plgpu.wait_smem_to_gmem(0)

    def tiled(*shape, dtype=jnp.bfloat16):
        return plgpu.SMEM(shape, dtype, transforms=_transforms(jnp.dtype(dtype).itemsize))

    scratch = [
        tiled(stages, BLOCK, TILE, dtype=jnp.float8_e4m3fn if scaled else jnp.bfloat16),
        tiled(stages, config.widest, TILE),
        tiled(WARPGROUPS, 2, config.chunk, PART),
        plgpu.Barrier(num_arrivals=matrices + 1, num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if scaled and interpret is not None:
        scratch.append(tiled(WARPGROUPS, 2, PART, TILE))

    @jax.jit
    def launch(tiles, total, *operands):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((operands[0].shape[0], n), jnp.bfloat16),
            grid=(ctas,),
            grid_names=("cta",),
            num_threads=WARPGROUPS + 1,
            thread_name="wg",
            scratch_types=scratch,
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(
                unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=interpret,
        )(tiles, total, *operands)

    return without_gradient(launch, f"{name}: {checks.NO_GRADIENT}")


def _transforms(itemsize):
    return plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(TILE * itemsize)


# ------------------------------------------------------------------------- inline code, or its form for the interpreter


def _transpose(interpret, value, buffer, start, count):
    """Columns start .. of float32 [64, N] -> bfloat16 [count, 64] in shared memory, visible to TMA."""
    if interpret is None:
        tiles = plgpu.RefType(_transforms(2))
        plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, tiles))(grouped_simt.transpose(start, count))(value, buffer)
    else:
        buffer[...] = value[:, start:start + count].T.astype(jnp.bfloat16)
        plgpu.commit_smem()


def _tokens(interpret, token, row, width):
    """The tokens of `width` rows from `row` on; in a kernel, those of the rows that a thread copies."""
    if interpret is not None:
        return token[...][jnp.minimum(row + jnp.arange(width, dtype=jnp.int32), token.shape[0] - 1)]
    size = width * 8
    return plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((size,), jnp.int32, plgpu.Layout.WG_STRIDED((size,), vec_size=1)),
    )(grouped_simt.tokens(width, token.shape[0]))(row, token)


def _gather(interpret, rows, tokens, step, target, width, cols):
    """Starts to copy 64 columns of the rows of `tokens` to shared memory."""
    if interpret is not None:
        target[...] = rows[:, pl.ds(step * jnp.int32(TILE), TILE)][tokens]
        return plgpu.commit_smem()
    words = plgpu.Layout.WG_STRIDED((width * 8,), vec_size=1)
    arg_types = plgpu.RefType(), words, plgpu.Layout.WG_SPLAT(()), plgpu.RefType(_transforms(2))
    return plgpu.inline_mgpu(arg_types=arg_types)(grouped_simt.gather(cols))(rows, tokens, step, target)


def _gathered(interpret, pending):
    """Waits for all but the last `pending` calls of `_gather` and shows what came to wgmma."""
    if interpret is None:
        plgpu.inline_mgpu()(grouped_simt.gathered(pending))()


def _scales(interpret, refs, expert, row, step, n, cols):
    """Scale bytes of the weights that a thread holds in a step; for the interpreter, uint8 [2, 64, 2]."""
    if interpret is not None:
        blocks = pl.ds(step * jnp.int32(TILE // MX_BLOCK), TILE // MX_BLOCK)
        starts = (row, row) if len(refs) == 2 else (row, row + jnp.int32(WARPGROUPS * PART))
        return jnp.stack([ref[expert, pl.ds(start, PART), blocks] for ref, start in zip(refs * 2, starts)])
    scalar, words = plgpu.Layout.WG_SPLAT(()), 4 * 128
    return plgpu.inline_mgpu(
        arg_types=(scalar,) * 3 + (plgpu.RefType(),) * len(refs),
        return_type=plgpu.ShapeDtypeStruct((words,), jnp.int32, plgpu.Layout.WG_STRIDED((words,), vec_size=1)),
    )(grouped_simt.load_scales(n, cols, len(refs)))(expert, row, step, *refs)


def _widen(interpret, values, scales, part, target=None):
    """E4M3 [64, 64] with the scales of `_scales` -> bfloat16 [64, 64] in registers."""
    if interpret is not None:
        factors = jnp.repeat(e8m0_to_f32(scales[part]), MX_BLOCK, axis=1)
        target[...] = (values[...].astype(jnp.float32) * factors).astype(jnp.bfloat16)
        plgpu.commit_smem()
        return target  # the interpreter has no wgmma with an operand in registers
    words = plgpu.Layout.WG_STRIDED((4 * 128,), vec_size=1)
    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_transforms(1)), words),
        return_type=plgpu.ShapeDtypeStruct((PART, TILE), jnp.bfloat16, plgpu.Layout.WGMMA),
    )(grouped_simt.widen(part))(values, scales)
