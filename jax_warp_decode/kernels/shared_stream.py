"""One product for all slots: rows of activations times the weights of their experts, each weight read once.

What the two kernels of `shared_decode` have in common. A *group* is an expert with up to `tokens` of its slots; an
expert with more slots has several groups, which follow each other on the same rows, so that all but the first read
these from L2. An *item* is 64 weight rows of one group. The CTAs stay resident; each owns a contiguous range of items,
whose columns its warpgroups share out. Each warpgroup streams its weights through a ring of its own, in shared memory,
that never drains between items:

    plan     from the ids, in every CTA: which experts have slots, in ascending order (no sort, no extra launch)
    gather   when the group changes: the activation rows of its slots, as the N operand, to shared memory
    stream   TMA -> ring -> wgmma: 64 weight rows as M, the group's slots as N, float32 sums
    finish   sums to shared memory, transposed, and added in order; the result of a slot goes to its own row by TMA

Only rows of routed slots are ever gathered and only their columns stored, so that other rows have no influence, and a
slot's result does not depend on the others: the wgmma sums of a column are its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, shared_mxfp8, shared_simt
from jax_warp_decode.kernels.expert_index import ExpertIndex
from jax_warp_decode.kernels.shared_common import ROWS, TILE, SharedConfig, plan_tables, scale_lines, table_lengths


@functools.cache
def build(name: str, slots: int, source_rows: int, index: ExpertIndex, n: int, cols: int, itemsize: int, matrices: int,
          finish, wide: bool, config: SharedConfig, ctas: int, interpret):
    """The kernel: (ids [slots], source [source_rows, cols], *layer, *values, *scales) -> float32 [slots, n].

    Args:
      name: of the kernel.
      source_rows: slots, or a divisor of it: then neighbouring slots share a row.
      index, n, cols, itemsize: of the weights.
      matrices: 1, or 2 for two weights of the same shape that meet in `finish`, 32 rows of each in an item.
      finish: float32 [tokens, 64 / matrices] of each matrix -> the same shape, what is stored.
      wide: the source is float32, else bfloat16.
      config: checked.
      ctas: resident CTAs.
    """
    tokens, chunk, stages, warpgroups = config.tokens, config.chunk, config.stages, config.warpgroups
    rows, steps_per_item, blocks = ROWS // matrices, cols // chunk // warpgroups, n * matrices // ROWS
    threads, E = 128 * warpgroups, index.num_experts
    scaled, divisor = itemsize == 1, slots // source_rows
    swizzle = 128 if chunk * itemsize % 128 == 0 else 64
    lines, scale_buffers = scale_lines(cols, rows), config.scale_buffers(cols)
    lengths = table_lengths(slots, E, tokens)
    inline = functools.partial(_inline, interpret)

    def body(ids_ref, source_ref, *refs):
        layer_refs, refs = refs[:index.num_operands], refs[index.num_operands:]
        weight_refs, refs = refs[:matrices * (1 + scaled)], refs[matrices * (1 + scaled):]
        out_ref, ring, operand, sums, results, table, full, *extra = refs
        wg = lax.axis_index("wg")
        ring = ring.at[wg]
        value_refs, scale_refs = weight_refs[:matrices], weight_refs[matrices:]
        ids_s, count_s, expert_s, first_s, passes_s, slots_s, factors_s, total_s = (
            table.at[pl.ds(sum(lengths[:i]), length)] for i, length in enumerate(lengths))
        scale_ring, scales_full = extra[:2] if scaled else (None, None)

        def meet():
            """A barrier among the warpgroups of the CTA."""
            if interpret is None:
                inline(shared_simt.meet(threads))
            else:
                plgpu.barrier_arrive(extra[-1])
                plgpu.barrier_wait(extra[-1])

        def full_at(stage):
            return full.at[wg * jnp.int32(stages) + stage]

        def scales_at(at):
            buffer = lax.rem(at, jnp.int32(scale_buffers))
            return scale_ring.at[buffer], scales_full.at[buffer]

        _plan(interpret, wg, meet, ids_ref, ids_s, count_s, expert_s, first_s, passes_s, total_s, tokens=tokens,
              experts=E, slots=slots, threads=threads)
        items, first_expert = total_s[0] * jnp.int32(blocks), jnp.int32(0)
        if layer_refs:
            layer = layer_refs[0][0]
            items = jnp.where((layer >= 0) & (layer < index.layers), items, 0)
            first_expert = layer * jnp.int32(E)
        cta = lax.axis_index("cta")
        begin = lax.div(cta * items, jnp.int32(ctas))
        end = lax.div((cta + jnp.int32(1)) * items, jnp.int32(ctas))

        def locate(item):
            """Expert, row block and pass of an item. The passes over the same rows follow each other."""
            group = lax.div(item, jnp.int32(blocks))
            passes = passes_s[group]
            local = item - first_s[group] * jnp.int32(blocks)
            block = lax.div(local, passes)
            return expert_s[group], block, local - block * passes

        def row_block(item):
            """Of `rows` rows, in the flattened weights."""
            expert, block, _ = locate(item)
            return (first_expert + expert) * jnp.int32(n // rows) + block

        def request(stage, cursor):
            """Starts the copies of one stage; with the first of an item, those of its scales.

            The cursor is what to copy, and what is returned the next: item, turn along the columns, block of rows.
            """
            item, turn, tile = cursor
            row = tile * jnp.int32(rows)

            @pl.when(item < end)
            def _():
                column = (turn * jnp.int32(warpgroups) + wg) * jnp.int32(chunk)
                for m, ref in enumerate(value_refs):
                    plgpu.copy_gmem_to_smem(ref.at[pl.ds(row, rows), pl.ds(column, chunk)],
                                            ring.at[stage, pl.ds(m * rows, rows)], full_at(stage))
                if scaled:
                    @pl.when(column == 0)  # the first warpgroup's
                    def _():
                        buffer, barrier = scales_at(item - begin)
                        line = lax.div(row, jnp.int32(32)) * jnp.int32(cols // 64)
                        for m, ref in enumerate(scale_refs):
                            plgpu.copy_gmem_to_smem(ref.at[pl.ds(line, lines)], buffer.at[m], barrier)

            last = turn == steps_per_item - 1
            following = item + last.astype(jnp.int32)
            tile = lax.cond(last & (following < end), lambda: row_block(following), lambda: tile)
            return following, jnp.where(last, jnp.int32(0), turn + jnp.int32(1)), tile

        def multiply(item, turn, stage, cursor, accumulator, total):
            """One stage. `accumulator` holds the sums of bfloat16 weights, `total` those of MXFP8."""
            k = turn * jnp.int32(warpgroups) + wg
            plgpu.barrier_wait(full_at(stage))
            if scaled:
                weights = _load(interpret, ring.at[stage], chunk=chunk, swizzle=swizzle)
                free = stage
            else:
                for part in range(chunk // TILE):
                    n_operand = operand.at[k * jnp.int32(chunk // TILE) + jnp.int32(part)]
                    plgpu.wgmma(accumulator, ring.at[stage, :, pl.ds(part * TILE, TILE)], n_operand.transpose((1, 0)))
                plgpu.wgmma_wait(chunk // TILE)  # the products of the stage before
                free = jnp.where(stage == 0, jnp.int32(stages), stage) - jnp.int32(1)
            if interpret is None:
                inline(shared_simt.barrier)
            else:
                plgpu.commit_smem()  # all that the interpreter takes for an order between a read and a copy
            cursor = request(free, cursor)
            if scaled:
                total = _multiply(interpret, weights, scales_at(item - begin)[0], operand, k, total, tokens=tokens,
                                  chunk=chunk, cols=cols, rows=rows, lines=lines)
            return jnp.where(stage == stages - 1, jnp.int32(0), stage + jnp.int32(1)), cursor, total

        def one_item(item, carry):
            previous, stage, cursor = carry
            expert, block, pass_ = locate(item)
            group = expert * jnp.int32(slots) + pass_

            @pl.when(group != previous)
            def _():
                _gather(interpret, wg, meet, expert, pass_, ids_s, slots_s, factors_s, source_ref, operand,
                        tokens=tokens, slots=slots, cols=cols, divisor=divisor, wide=wide, scaled=scaled,
                        threads=threads)

            if scaled:
                plgpu.barrier_wait(scales_at(item - begin)[1])
                zero = plgpu.layout_cast(jnp.zeros((ROWS, tokens), jnp.float32), plgpu.Layout.WGMMA)
                stage, cursor, total = lax.fori_loop(
                    jnp.int32(0), jnp.int32(steps_per_item),
                    lambda turn, c: multiply(item, turn, c[0], c[1], None, c[2]), (stage, cursor, zero))
            else:
                def product(accumulator):
                    at = lax.fori_loop(
                        jnp.int32(0), jnp.int32(steps_per_item),
                        lambda turn, c: multiply(item, turn, *c, accumulator, None)[:2], (stage, cursor))
                    return *at, accumulator[...]

                stage, cursor, total = pl.run_scoped(product, plgpu.ACC((ROWS, tokens), jnp.float32))
            # Two buffers in turn: nobody writes the one that the first warpgroup reads before it comes to `meet` again.
            buffer = sums.at[lax.rem(item - begin, jnp.int32(2))]
            if interpret is None:
                rescale, factors = (shared_mxfp8.rescale, [factors_s]) if scaled else (None, [])
                inline(shared_simt.spread(rows, rescale), total, buffer.at[wg], *factors,
                       arg_types=(plgpu.Layout.WGMMA, REF, REF)[:2 + scaled])
            else:
                if scaled:
                    total = shared_mxfp8.rescale_plain(total, factors_s[pl.ds(0, tokens)])
                buffer[wg] = total.reshape(matrices, rows, tokens).swapaxes(1, 2)
            meet()

            @pl.when(wg == 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the item before have left
                inline(shared_simt.barrier)
                results[...] = finish(*(sum(buffer[w, m] for w in range(warpgroups)) for m in range(matrices)))
                plgpu.commit_smem()
                lax.fori_loop(jnp.int32(0), slots_s[tokens], lambda j, _: plgpu.copy_smem_to_gmem(
                    results.at[j], out_ref.at[slots_s[j], pl.ds(block * jnp.int32(rows), rows)]), None)

            return group, stage, cursor

        # A stage of MXFP8 is free once it is in registers; else the last one waits for the products before it.
        cursor = begin, jnp.int32(0), lax.cond(begin < end, lambda: row_block(begin), lambda: jnp.int32(0))
        cursor = lax.fori_loop(jnp.int32(0), jnp.int32(stages if scaled else stages - 1), request, cursor)
        lax.fori_loop(begin, end, one_item, (jnp.int32(-1), jnp.int32(0), cursor))
        plgpu.wait_smem_to_gmem(0)

    def tiled(*shape, dtype=jnp.bfloat16, swizzle=128):
        return plgpu.SMEM(shape, dtype, transforms=(
            plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)))

    scratch = [
        tiled(warpgroups, stages, ROWS, chunk, dtype=jnp.float8_e4m3fn if scaled else jnp.bfloat16, swizzle=swizzle),
        tiled(cols // TILE, tokens, TILE, dtype=jnp.float16 if scaled else jnp.bfloat16),
        plgpu.SMEM((2, warpgroups, matrices, tokens, rows), jnp.float32),
        plgpu.SMEM((tokens, rows), jnp.float32),
        plgpu.SMEM((sum(lengths),), jnp.int32),
        plgpu.Barrier(num_arrivals=matrices, num_barriers=warpgroups * stages),
    ]
    if scaled:
        scratch += [plgpu.SMEM((scale_buffers, matrices, lines, 64), jnp.uint8),
                    plgpu.Barrier(num_arrivals=matrices, num_barriers=scale_buffers)]
    if interpret is not None:
        scratch.append(plgpu.Barrier(num_arrivals=warpgroups))
    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((slots, n), jnp.float32),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )), f"{name}: {checks.NO_GRADIENT}")


# ------------------------------------------------------------------------- inline code, or its form for the interpreter


def _inline(interpret, code, *args, arg_types=()):
    if interpret is None:
        plgpu.inline_mgpu(arg_types=arg_types)(code)(*args)


REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())


def _tiles(swizzle: int, itemsize: int):
    return plgpu.RefType((plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)))


def _plan(interpret, wg, meet, ids, ids_s, count_s, expert_s, first_s, passes_s, total_s, *, tokens, experts, slots,
          threads):
    if interpret is None:
        code = shared_simt.plan(tokens, experts, slots, threads)
        return _inline(None, code, ids, ids_s, count_s, expert_s, first_s, passes_s, total_s, arg_types=(REF,) * 7)

    @pl.when(wg == 0)
    def _():
        tables = plan_tables(ids[...], experts, tokens)
        for ref, values in zip((expert_s, first_s, passes_s), tables, strict=False):
            ref[pl.ds(0, len(values))] = values
        ids_s[pl.ds(0, slots)] = ids[...]
        total_s[0] = tables[3]

    return meet()


def _gather(interpret, wg, meet, expert, pass_, ids_s, slots_s, factors_s, source, operand, *, tokens, slots, cols,
            divisor, wide, scaled, threads):
    if interpret is None:
        _inline(None, shared_simt.select(tokens, slots, threads), expert, pass_, ids_s, slots_s,
                arg_types=(SCALAR, SCALAR, REF, REF))
        if scaled:
            code = shared_mxfp8.gather(tokens, cols, divisor, wide, threads)
            return _inline(None, code, source, slots_s, operand, factors_s, arg_types=(REF, REF, _tiles(128, 2), REF))
        code = shared_simt.gather(tokens, cols, divisor, wide, threads)
        return _inline(None, code, source, slots_s, operand, arg_types=(REF, REF, _tiles(128, 2)))
    meet()

    @pl.when(wg == 0)
    def _():
        hit = ids_s[pl.ds(0, slots)] == expert
        rank = lax.cumsum(hit.astype(jnp.int32)) - 1 - pass_ * tokens
        count = jnp.clip(rank[-1] + 1, 0, tokens)
        wanted = jnp.minimum(jnp.arange(tokens, dtype=jnp.int32), count - 1)[:, None]
        number = jnp.arange(slots, dtype=jnp.int32)
        slot = jnp.sum(jnp.where(hit & (rank == wanted), number, 0), axis=1, dtype=jnp.int32)
        slots_s[pl.ds(0, tokens)] = slot
        slots_s[tokens] = count
        gathered = source[...][slot // divisor]
        if scaled:
            gathered, factors_s[pl.ds(0, tokens)] = shared_mxfp8.to_float16(gathered)
        operand[...] = gathered.astype(operand.dtype).reshape(tokens, cols // TILE, TILE).swapaxes(0, 1)

    return meet()


def _load(interpret, values, *, chunk, swizzle):
    if interpret is not None:
        return values[...]
    size = shared_mxfp8.words_of(chunk)
    return plgpu.inline_mgpu(
        arg_types=(_tiles(swizzle, 1),),
        return_type=plgpu.ShapeDtypeStruct((size,), jnp.int32, plgpu.Layout.WG_STRIDED((size,), vec_size=1)),
    )(shared_mxfp8.load(chunk, swizzle))(values)


def _multiply(interpret, weights, scales, operand, k, total, *, tokens, chunk, cols, rows, lines):
    if interpret is not None:
        return shared_mxfp8.multiply_plain(weights, scales[...], operand[...], k, total, chunk=chunk, rows=rows)
    words = plgpu.Layout.WG_STRIDED((shared_mxfp8.words_of(chunk),), vec_size=1)
    return plgpu.inline_mgpu(
        arg_types=(words, REF, _tiles(128, 2), SCALAR, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct((ROWS, tokens), jnp.float32, plgpu.Layout.WGMMA),
    )(shared_mxfp8.multiply(tokens, chunk, cols, rows, lines * 64))(weights, scales, operand, k, total)
