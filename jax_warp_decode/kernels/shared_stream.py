"""One product for all slots: rows of activations times the weights of their experts, each weight read once.

What the two kernels of `shared_decode` have in common. A *group* is an expert with up to `tokens` of its slots; an
expert with more slots has several groups, each with a read of its own. An *item* is 64 weight rows of one group. The
CTAs own a contiguous range of items each, whose columns their warpgroups share out. Each warpgroup streams its weights
through a ring of its own, in shared memory, that never drains between items:

    plan     from the ids, in every CTA: which experts have slots, in ascending order, and which (no extra launch)
    gather   when the group changes: the activation rows of its slots, as the N operand, to shared memory
    stream   TMA -> ring -> tensor cores: 64 weight rows as M, the group's slots as N, float32 sums
    finish   sums of the warpgroups added in order, through shared memory; the result of a slot goes to its own row

Only rows of routed slots are ever gathered and only their columns stored, so that other rows have no influence, and a
slot's result does not depend on the others: the sums of a column are its own.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, shared_half, shared_mma, shared_simt
from jax_warp_decode.kernels.expert_index import ExpertIndex
from jax_warp_decode.kernels.shared_common import (
    ROWS,
    TILE,
    SharedConfig,
    plan_tables,
    scale_lines,
    table_lengths,
)
from jax_warp_decode.kernels.simt import WARPGROUP
from jax_warp_decode.kernels.stream_format import STREAM_FORMATS


@functools.cache
def build(name: str, slots: int, source_rows: int, index: ExpertIndex, n: int, cols: int, format: str, matrices: int,
          biases: tuple[bool, ...], finish, wide: bool, out_dtype, config: SharedConfig, ctas: int, interpret):
    """The kernel: (ids [slots], source [source_rows, cols], *layer, *values, *scales, *factors, *biases) -> out_dtype
    [slots, n]; scales of the ring and factors as `shared_common.weight_operands` has them, if the format has any.

    Args:
      name: of the kernel.
      source_rows: slots, or a divisor of it: then neighbouring slots share a row.
      index, n, cols, format: of the weights; format is a key of `STREAM_FORMATS`.
      matrices: 1, or 2 for two weights of the same shape that meet in `finish`, 32 rows of each in an item.
      biases: which matrices have one, [E * n].
      finish: float32 [tokens, 64 / matrices] of each matrix -> the same shape, what is stored.
      wide: the source is float32, else bfloat16.
      config: checked.
      ctas: how many.
    """
    tokens, chunk, stages, warpgroups = config.tokens, config.chunk, config.stages, config.warpgroups
    rows, columns, blocks = ROWS // matrices, cols // config.panels, n * matrices // ROWS
    steps_per_panel, steps_per_item = columns // chunk // warpgroups, cols // chunk // warpgroups
    threads, E = 128 * warpgroups, index.num_experts
    row_format, divisor = STREAM_FORMATS[format], slots // source_rows
    half, scaled, factor = row_format.half, row_format.ring is not None, row_format.factor
    wgmma = config.wgmma and not half  # else sums stay in registers, and a stage is free once it is there, too
    stored = chunk // row_format.packing  # array elements of a row of a stage
    row_bytes = stored * row_format.dtype.itemsize
    swizzle = next(s for s in (128, 64, 32) if row_bytes % s == 0)
    scale_buffers = config.scale_buffers(cols)
    lines, line = scale_lines(row_format.ring, cols, rows) if row_format.ring else (0, 0)
    lengths = table_lengths(slots, E, tokens)
    inline = functools.partial(_inline, interpret)
    rescale = shared_half.rescale(format) if half else None
    finished = shared_simt.Finish(rescale, bool(factor), any(biases))
    alone = matrices == warpgroups == 1  # nothing to add: results go straight from registers to memory
    vec = next(v for v in (4, 2) if tokens * rows % (WARPGROUP * v) == 0)
    flat = plgpu.Layout.WG_STRIDED((tokens, rows), vec_size=vec)

    def body(ids_ref, source_ref, *refs):
        layer_refs, refs = refs[:index.num_operands], refs[index.num_operands:]
        value_refs, refs = refs[:matrices], refs[matrices:]
        scale_refs, refs = refs[:matrices * scaled], refs[matrices * scaled:]
        factor_refs, refs = refs[:matrices * bool(factor)], refs[matrices * bool(factor):]
        bias_refs, refs = refs[:sum(biases)], refs[sum(biases):]
        out_ref, ring, operand, sums, table, full, *extra = refs
        wg = lax.axis_index("wg")
        ring = ring.at[wg]
        drawn_s, count_s, from_s, expert_s, place_s, info_s, order_s, factors_s, total_s = (
            table.at[pl.ds(sum(lengths[:i]), length)] for i, length in enumerate(lengths))
        scale_ring, scales_full = extra[:2] if scaled else (None, None)

        def meet():
            """A barrier among the warpgroups of the CTA."""
            if interpret is None:
                inline(shared_simt.meet(threads))
            else:
                plgpu.barrier_arrive(extra[-1])
                plgpu.barrier_wait(extra[-1])

        results = None if interpret is None else extra[-2]

        def full_at(stage):
            return full.at[wg * jnp.int32(stages) + stage]

        def scales_at(at):
            buffer = lax.rem(at, jnp.int32(scale_buffers))
            return scale_ring.at[buffer], scales_full.at[buffer]

        _plan(interpret, wg, meet, ids_ref, drawn_s, count_s, from_s, expert_s, place_s, info_s, order_s, total_s,
              tokens=tokens, experts=E, slots=slots, threads=threads, wgmma=wgmma)
        items, first_expert = total_s[0] * jnp.int32(blocks), jnp.int32(0)
        if layer_refs:
            layer = layer_refs[0][0]
            items = jnp.where((layer >= 0) & (layer < index.layers), items, 0)
            first_expert = layer * jnp.int32(E)
        cta = lax.axis_index("cta")
        begin = lax.div(cta * items, jnp.int32(ctas))
        end = lax.div((cta + jnp.int32(1)) * items, jnp.int32(ctas))

        def scales_of(row):
            """Of the rows from `row` on: their first line, and where in it they begin."""
            shared, block = row_format.ring.rows, row_format.ring.cols
            if shared == 1:  # 32 rows fill whole lines
                return lax.div(row, jnp.int32(ROWS // 2)) * jnp.int32(ROWS // 2 * cols // block // line), jnp.int32(0)
            at = lax.div(row, jnp.int32(shared)) * jnp.int32(cols // block)
            first = jnp.minimum(lax.div(at, jnp.int32(line)), jnp.int32(scale_refs[0].shape[0] - lines))
            return first, at - first * jnp.int32(line)

        def row_block(item):
            """Of `rows` rows, in the flattened weights."""
            group = lax.div(item, jnp.int32(blocks))
            return (first_expert + expert_s[group]) * jnp.int32(n // rows) + item - group * jnp.int32(blocks)

        def request(stage, cursor):
            """Starts the copies of one stage; with the first of an item, those of its scales.

            The cursor is what to copy, and what is returned the next: item, turn along the columns, block of rows.
            """
            item, turn, tile = cursor
            row = tile * jnp.int32(rows)

            @pl.when(item < end)
            def _():
                column = (turn * jnp.int32(warpgroups) + wg) * jnp.int32(stored)
                for m, ref in enumerate(value_refs):
                    plgpu.copy_gmem_to_smem(ref.at[pl.ds(row, rows), pl.ds(column, stored)],
                                            ring.at[stage, pl.ds(m * rows, rows)], full_at(stage))
                if scaled:
                    @pl.when(column == 0)  # the first warpgroup's
                    def _():
                        buffer, barrier = scales_at(item - begin)
                        first, _ = scales_of(row)
                        for m, ref in enumerate(scale_refs):
                            plgpu.copy_gmem_to_smem(ref.at[pl.ds(first, lines)], buffer.at[m], barrier)

            last = turn == steps_per_item - 1
            following = item + last.astype(jnp.int32)
            tile = lax.cond(last & (following < end), lambda: row_block(following), lambda: tile)
            return following, jnp.where(last, jnp.int32(0), turn + jnp.int32(1)), tile

        def multiply(item, begins, panel, turn, stage, cursor, accumulator, total=None):
            """One stage. `accumulator` holds the sums of wgmma, `total` those of mma.sync."""
            part = turn * jnp.int32(warpgroups) + wg
            k = panel * jnp.int32(steps_per_panel * warpgroups) + part
            plgpu.barrier_wait(full_at(stage))
            if half:
                scales = (scales_at(item - begin)[0], begins, k) if scaled else ()
                total = _multiply(interpret, ring.at[stage], operand, part, total, scales, format=format, tokens=tokens,
                                  chunk=chunk, cols=cols, rows=rows, swizzle=swizzle)
                free = stage
            elif not wgmma:
                total = _multiply_dense(interpret, ring.at[stage], operand, part, total, tokens=tokens, chunk=chunk)
                free = stage
            else:
                for tile in range(chunk // TILE):
                    n_operand = operand.at[part * jnp.int32(chunk // TILE) + jnp.int32(tile)]
                    plgpu.wgmma(accumulator, ring.at[stage, :, pl.ds(tile * TILE, TILE)], n_operand.transpose((1, 0)))
                plgpu.wgmma_wait(chunk // TILE)  # the products of the stage before
                free = jnp.where(stage == 0, jnp.int32(stages), stage) - jnp.int32(1)
            if interpret is None:
                inline(shared_simt.barrier)
            else:
                plgpu.commit_smem()  # all that the interpreter takes for an order between a read and a copy
            cursor = request(free, cursor)
            return jnp.where(stage == stages - 1, jnp.int32(0), stage + jnp.int32(1)), cursor, total

        def one_item(item, carry):
            previous, stage, cursor = carry
            group = lax.div(item, jnp.int32(blocks))
            row = (item - group * jnp.int32(blocks)) * jnp.int32(rows)
            expert, place, info = expert_s[group], place_s[group], info_s[group]
            size = info & jnp.int32(0xFFFF)

            def each_panel(carry, accumulator=None):
                """Gathers and multiplies."""
                def panel(p, carry):
                    @pl.when((group != previous) | (config.panels > 1))
                    def _():
                        _gather(interpret, wg, meet, expert, place, info, p * jnp.int32(columns), drawn_s, order_s,
                                factors_s, source_ref, operand, tokens=tokens, slots=slots, cols=cols, columns=columns,
                                divisor=divisor, wide=wide, format=format, threads=threads)

                    carry = lax.fori_loop(
                        jnp.int32(0), jnp.int32(steps_per_panel),
                        lambda turn, c: multiply(item, begins, p, turn, *c[:2], accumulator, *c[2:])[:len(c)], carry)
                    if config.panels > 1 and wgmma:
                        plgpu.wgmma_wait(0)  # before the next panel
                    return carry

                if config.panels == 1:
                    return panel(jnp.int32(0), carry)
                return lax.fori_loop(jnp.int32(0), jnp.int32(config.panels), panel, carry)

            first = (first_expert + expert) * jnp.int32(n) + row
            begins = scales_of(first)[1] if scaled else jnp.int32(0)
            of_factor = first if factor == "row" else first_expert + expert
            per_row = ()  # values of the rows of a thread, for `finished`
            if factor_refs and interpret is None:
                per_row += (_load_rows((True,) * matrices, rows, half, factor == "row", of_factor, factor_refs),)
            if bias_refs and interpret is None:
                per_row += (_load_rows(biases, rows, half, True, first, bias_refs),)
            if scaled:
                plgpu.barrier_wait(scales_at(item - begin)[1])
            if not wgmma:
                zero = plgpu.layout_cast(jnp.zeros((ROWS, tokens), jnp.float32), plgpu.Layout.WGMMA)
                stage, cursor, total = each_panel((stage, cursor, zero))
            else:
                stage, cursor, total = pl.run_scoped(
                    lambda accumulator: (*each_panel((stage, cursor), accumulator), accumulator[...]),
                    plgpu.ACC((ROWS, tokens), jnp.float32))
            if alone and interpret is None:
                types = plgpu.Layout.WGMMA, *(SCALAR,) * 3, *(REF,) * 3, *(PER_THREAD for _ in per_row)
                inline(shared_simt.scatter_sums(n, finished), total, place, size, row, order_s, out_ref, factors_s,
                       *per_row, arg_types=types)
                return group, stage, cursor
            # Two buffers in turn: nobody writes the one that the first warpgroup reads before it comes to `meet` again.
            buffer = sums.at[lax.rem(item - begin, jnp.int32(2))]
            if interpret is None:
                inline(shared_simt.spread(rows, finished), total, wg, buffer.at[wg], factors_s, *per_row,
                       arg_types=(plgpu.Layout.WGMMA, SCALAR, REF, REF, *(PER_THREAD for _ in per_row)))
            else:
                if half:
                    scale = _plain_factors(factor, factor_refs, of_factor, rows) if factor else None
                    total = shared_half.rescale_plain(format, total, factors_s[pl.ds(0, tokens)], scale)
                buffer[wg] = total.reshape(matrices, rows, tokens).swapaxes(1, 2)
            meet()

            def load(w, m):
                if interpret is None:
                    return plgpu.load(buffer.at[w, m], layout=flat, optimized=False)
                return buffer[w, m]

            @pl.when(wg == 0)
            def _():
                sums_of = [sum(load(w, m) for w in range(warpgroups)) for m in range(matrices)]
                if interpret is not None:
                    tables = iter(bias_refs)
                    sums_of = [total + next(tables)[pl.ds(first, rows)].astype(jnp.float32) if there else total
                               for there, total in zip(biases, sums_of, strict=True)]
                result = finish(*sums_of)
                result = result.astype(out_dtype)
                if interpret is None:
                    inline(shared_simt.scatter(n, rows, vec), result, place, size, row, order_s, out_ref,
                           arg_types=(flat, SCALAR, SCALAR, SCALAR, REF, REF))
                    return
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                results[...] = result
                plgpu.commit_smem()
                lax.fori_loop(jnp.int32(0), size, lambda j, _: plgpu.copy_smem_to_gmem(
                    results.at[j], out_ref.at[order_s[place + j], pl.ds(row, rows)]), None)

            return group, stage, cursor

        # With wgmma the last stage waits for the products before it.
        cursor = begin, jnp.int32(0), lax.cond(begin < end, lambda: row_block(begin), lambda: jnp.int32(0))
        cursor = lax.fori_loop(jnp.int32(0), jnp.int32(stages - 1 if wgmma else stages), request, cursor)
        if interpret is None:  # while the first copies are under way
            inline(shared_simt.sort(E, slots, threads), drawn_s, from_s, order_s, arg_types=(REF,) * 3)
        lax.fori_loop(begin, end, one_item, (jnp.int32(-1), jnp.int32(0), cursor))
        if interpret is not None:
            plgpu.wait_smem_to_gmem(0)

    def tiled(*shape, dtype=jnp.bfloat16, swizzle=128):
        return plgpu.SMEM(shape, dtype, transforms=(
            plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)))

    scratch = [
        tiled(warpgroups, stages, ROWS, stored, dtype=row_format.dtype, swizzle=swizzle),
        tiled(columns // TILE, tokens, TILE, dtype=jnp.float16 if half else jnp.bfloat16),
        plgpu.SMEM((2, warpgroups, matrices, tokens, rows), jnp.float32),
        plgpu.SMEM((sum(lengths),), jnp.int32),
        plgpu.Barrier(num_arrivals=matrices, num_barriers=warpgroups * stages),
    ]
    if row_format.ring:
        scratch += [plgpu.SMEM((scale_buffers, matrices, lines, line), row_format.ring.dtype),
                    plgpu.Barrier(num_arrivals=matrices, num_barriers=scale_buffers)]
    if interpret is not None:
        scratch += [plgpu.SMEM((tokens, rows), out_dtype), plgpu.Barrier(num_arrivals=warpgroups)]
    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((slots, n), out_dtype),
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
PER_THREAD = plgpu.Layout.WG_STRIDED((2 * WARPGROUP,), vec_size=1)


def _tiles(swizzle: int, itemsize: int):
    return plgpu.RefType((plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)))


def _plan(interpret, wg, meet, ids, drawn_s, count_s, from_s, expert_s, place_s, info_s, order_s, total_s, *, tokens,
          experts, slots, threads, wgmma):
    if interpret is None:
        code = shared_simt.plan(tokens, experts, slots, threads, wgmma)
        return _inline(None, code, ids, drawn_s, count_s, from_s, expert_s, place_s, info_s, total_s,
                       arg_types=(REF,) * 8)

    @pl.when(wg == 0)
    def _():
        *tables, total = plan_tables(ids[...], experts, tokens)
        for ref, values in zip((expert_s, place_s, info_s, order_s), tables, strict=True):
            ref[pl.ds(0, len(values))] = values
        total_s[0] = total

    return meet()


def _gather(interpret, wg, meet, expert, place, info, first, drawn_s, order_s, factors_s, source, operand, *, tokens,
            slots, cols, columns, divisor, wide, format, threads):
    size, pass_ = info & jnp.int32(0xFFFF), (info >> 16) - jnp.int32(1)
    if interpret is None:
        @pl.when(pass_ >= 0)
        def _():
            _inline(None, shared_simt.select(tokens, slots, threads), expert, pass_, place, drawn_s, order_s,
                    arg_types=(SCALAR, SCALAR, SCALAR, REF, REF))

        if STREAM_FORMATS[format].half:
            code = shared_half.gather(format, tokens, cols, columns, divisor, wide, threads)
            return _inline(None, code, place, size, first, source, order_s, operand, factors_s,
                           arg_types=(SCALAR, SCALAR, SCALAR, REF, REF, _tiles(128, 2), REF))
        code = shared_simt.gather(tokens, cols, columns, divisor, wide, threads)
        return _inline(None, code, place, size, first, source, order_s, operand,
                       arg_types=(SCALAR, SCALAR, SCALAR, REF, REF, _tiles(128, 2)))
    meet()

    @pl.when(wg == 0)
    def _():
        slot = order_s[pl.ds(place, tokens)]
        slot = jnp.where(jnp.arange(tokens) < size, slot, jnp.int32(0))
        gathered = source[...][slot // divisor]
        if STREAM_FORMATS[format].half:
            gathered, factors_s[pl.ds(0, tokens)] = shared_half.to_float16(gathered)
        gathered = lax.dynamic_slice_in_dim(gathered.astype(operand.dtype), first, columns, 1)
        operand[...] = gathered.reshape(tokens, columns // TILE, TILE).swapaxes(0, 1)

    return meet()


def _load_rows(present, rows, permuted, each, first, refs):
    return plgpu.inline_mgpu(
        arg_types=(SCALAR, *(REF for _ in refs)),
        return_type=plgpu.ShapeDtypeStruct((2 * WARPGROUP,), jnp.float32, PER_THREAD),
    )(shared_simt.load_rows(present, rows, permuted, int(each)))(first, *refs)


def _plain_factors(factor, refs, first, rows):
    """The scales of the 64 rows of an item, [64, 1]."""
    of_matrix = [ref[pl.ds(first, rows)] if factor == "row" else jnp.full((rows,), ref[first]) for ref in refs]
    return jnp.concatenate(of_matrix).astype(jnp.float32)[:, None]


def _multiply_dense(interpret, values, operand, part, total, *, tokens, chunk):
    if interpret is not None:
        rows = lax.dynamic_slice_in_dim(operand[...], part * jnp.int32(chunk // TILE), chunk // TILE, 0)
        rows = rows.swapaxes(0, 1).reshape(tokens, chunk)
        return total + jnp.dot(values[...], rows.T, preferred_element_type=jnp.float32)
    return plgpu.inline_mgpu(
        arg_types=(_tiles(128, 2), _tiles(128, 2), SCALAR, plgpu.Layout.WGMMA),
        return_type=plgpu.ShapeDtypeStruct((ROWS, tokens), jnp.float32, plgpu.Layout.WGMMA),
    )(shared_mma.multiply(tokens, chunk))(values, operand, part, total)


def _multiply(interpret, values, operand, part, total, scales, *, format, tokens, chunk, cols, rows, swizzle):
    """scales: () or those of the item, where they begin, and which stage of a row this is."""
    if interpret is not None:
        ring, begins, step = (scales[0][...], *scales[1:]) if scales else (None, None, None)
        return shared_half.multiply_plain(format, values[...], operand[...], part, total, ring, begins, step,
                                          chunk=chunk, cols=cols, rows=rows)
    scale_bytes = math.prod(scales[0].shape[1:]) * scales[0].dtype.itemsize if scales else 0  # of a matrix
    code = shared_half.multiply(format, tokens, chunk, cols, rows, scale_bytes, swizzle)
    itemsize = STREAM_FORMATS[format].dtype.itemsize
    return plgpu.inline_mgpu(
        arg_types=(_tiles(swizzle, itemsize), _tiles(128, 2), SCALAR, plgpu.Layout.WGMMA,
                   *(REF, SCALAR, SCALAR)[:len(scales)]),
        return_type=plgpu.ShapeDtypeStruct((ROWS, tokens), jnp.float32, plgpu.Layout.WGMMA),
    )(code)(values, operand, part, total, *scales)
