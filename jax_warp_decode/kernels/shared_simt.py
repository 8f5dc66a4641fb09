"""Per-thread pieces of the shared-expert kernels that Pallas cannot say, as inline Mosaic GPU code.

Up to `gather` all threads of a CTA work together, then those of a warpgroup:

    plan          which experts have slots: a histogram in shared memory and a scan over the experts
    sort          the slots ordered by expert
    select        where an expert has several groups, the slots of one, in ascending order
    gather        the rows of a group's slots as the N operand of wgmma, in the swizzled layout that it wants
    load_rows     biases, or scales, of the rows of a thread
    spread        a wgmma accumulator to shared memory, transposed
    scatter_sums  a wgmma accumulator to the rows of its slots
    scatter       finished results to the rows of their slots

What all but bfloat16 weights need instead of `gather` and wgmma is in `shared_half`, and what bfloat16 ones need on
GPUs without wgmma in `shared_mma`. The interpreter cannot run any of them; `shared_stream` has a plain form of each for
it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, vector

from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int

UNROLL = 4  # loads of a thread in flight


def barrier(_ctx) -> None:
    """Among the threads of a warpgroup."""
    mgpu.warpgroup_barrier()


def meet(threads: int):
    """Among all threads of a CTA."""
    return lambda _ctx: simt.meet(threads)


# ----------------------------------------------------------------------------------------------- who needs which expert


def plan(tokens: int, experts: int, slots: int, threads: int, wgmma: bool):
    """Fills the tables of the groups (up to `tokens` slots of one expert), see `shared_common.plan_tables`.

    Each slot draws a number within its expert from a counter, in no certain order; `sort` and `select` use it.
    """

    padded_experts = -(-experts // LANES) * LANES

    def body(_ctx, ids, drawn_s, count_s, from_s, expert_s, place_s, info_s, total_s):
        if wgmma and utils.get_arch().major != 9:
            raise UnsupportedError(
                f"config: got wgmma=True for compute capability {utils.get_arch()}, which needs 9.0 (Hopper), as a "
                "process without a GPU compiles for; take wgmma=False, or strategy='warp_decode'")
        t, lane = simt.thread(), simt.thread() % LANES

        @simt.loop(-(-padded_experts // threads))
        def _(i):
            e = i * threads + t
            with mgpu.when(e < padded_experts):
                simt.put(count_s, e, Int(0))

        simt.meet(threads)

        @_each_slot(slots, threads)
        def _(numbers):
            found = [(s, simt.select(s < slots, simt.at(ids, s.min(slots - 1)), Int(-1))) for s in numbers]
            drawn = []
            for s, e in found:
                routed = arith.andi(e >= 0, e < experts)
                number = Int(utils.inline_ptx(_DRAW, (Int(simt.address(count_s)) + e * 4).v,
                                              arith.extui(simt.i32(), routed), result_types=simt.i32(),
                                              has_side_effects=True))
                drawn.append((s, simt.select(routed, number << 16 | e, Int(-1))))
            for s, value in drawn:
                with mgpu.when(s < -(-slots // LANES) * LANES):
                    simt.put(drawn_s, s, value)

        simt.meet(threads)

        with mgpu.when(t < LANES):
            scan(lane, count_s, from_s, expert_s, place_s, info_s, total_s)
        simt.meet(threads)

    def scan(lane, count_s, from_s, expert_s, place_s, info_s, total_s):
        """The first warp's: scans of slots and passes at once; those of UNROLL chunks of experts overlap."""
        total = Int(0)
        for start in range(0, padded_experts, LANES * UNROLL):
            found = []
            for e in (lane + first for first in range(start, min(start + LANES * UNROLL, padded_experts), LANES)):
                count = simt.at(count_s, e)
                both = ((count + (tokens - 1)) // tokens) << 16 | count
                found.append((e, count, both, simt.scan(both, lane)))
            for e, count, both, inclusive in found:
                before, passes = total + inclusive - both, both >> 16
                first, place = before >> 16, before & 0xFFFF
                simt.put(from_s, e, place)

                @simt.loop(passes)
                def _(q, e=e, count=count, passes=passes, first=first, place=place):
                    number = simt.select(passes.equals(1), Int(0), q + 1)
                    simt.put(expert_s, first + q, e)
                    simt.put(place_s, first + q, place + q * tokens)
                    simt.put(info_s, first + q, number << 16 | (count - q * tokens).min(tokens))

                total = total + simt.last_lane(inclusive)
        with mgpu.when(lane.equals(0)):
            simt.put(total_s, Int(0), total >> 16)

    return body


# Expert ids are below 2^16 - 1, slots and groups below 2^15.
_DRAW = """{
    .reg .pred routed;
    .reg .b32 number;
    setp.ne.b32 routed, $2, 0;
    mov.b32 number, 0;
    @routed atom.shared.add.u32 number, [$1], 1;
    mov.b32 $0, number;
}"""
AHEAD = 8  # slots that a thread loads before it looks at the first


def _each_slot(slots: int, threads: int):
    """Calls body with the numbers of up to AHEAD slots of this thread at a time; may go beyond the last."""

    def decorate(body):
        turns = -(-slots // threads)
        ahead = min(AHEAD, turns)

        @simt.loop(-(-turns // ahead))
        def _(i):
            body([(i * ahead + u) * threads + simt.thread() for u in range(ahead)])

    return decorate


def sort(experts: int, slots: int, threads: int):
    """The slots of every expert together, ordered by expert, to order_s; within an expert in the order drawn.

    That order may differ from CTA to CTA, which matters where an expert has several groups only: see `select`.
    """

    def body(_ctx, drawn_s, from_s, order_s):
        @_each_slot(slots, threads)
        def _(numbers):
            drawn = [(s, simt.at(drawn_s, s.min(slots - 1))) for s in numbers]
            for s, value in drawn:
                e = value & 0xFFFF
                with mgpu.when(arith.andi(s < slots, e < experts)):
                    simt.put(order_s, simt.at(from_s, e) + (value >> 16), s)

    return body


def select(tokens: int, slots: int, threads: int):
    """Slots number pass_ * tokens .. of an expert, ascending, to their place in order_s: the same in all CTAs."""

    def body(_ctx, expert, pass_, place, drawn_s, order_s):
        e, q, place = (Int(a.registers.item()) for a in (expert, pass_, place))
        lane = simt.thread() % LANES
        below = (Int(1) << lane) - 1
        simt.meet(threads)  # `sort` is done everywhere

        def search(chunk, before):
            s = chunk * LANES + lane
            hit = (simt.at(drawn_s, s) & 0xFFFF).equals(e)
            hits = Int(utils.inline_ptx("vote.sync.ballot.b32 $0, $1, 0xffffffff;", hit, result_types=simt.i32(),
                                        has_side_effects=True, convergent=True))
            rank = before + simt.population(hits & below)
            with mgpu.when(arith.andi(hit, arith.andi(rank >= 0, rank < tokens))):
                simt.put(order_s, place + rank, s)
            return before + simt.population(hits)

        with mgpu.when(simt.thread() < LANES):
            simt.loop(-(-slots // LANES), Int(0) - q * tokens)(search)

    return body


# ------------------------------------------------------------------------------------------------- operands and results


def load_words(start, source: tuple[Int, int, Int], words: int) -> list:
    """`words` 32-bit words (a multiple of 4) from global memory: row, bytes of a row, byte offset."""
    row, row_bytes, offset = source
    address = simt.global_offset(start, row, row_bytes, offset)
    loaded = []
    for i in range(0, words, 4):
        loaded += utils.inline_ptx(f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{4 * i}];", address,
                                   result_types=[simt.i32()] * 4, has_side_effects=True)
    return loaded


def finish_operand(threads: int) -> None:
    """Makes what all threads wrote visible to wgmma."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
    simt.meet(threads)


def gather(tokens: int, cols: int, columns: int, divisor: int, wide: bool, threads: int):
    """`columns` columns, from `first`, of rows order_s[place + j] // divisor of `source` [rows, cols] to rows j < size
    of the N operand, bfloat16, K-major.

    The operand is [columns / 64, tokens, 64], tiled by (8, 64) with 128-byte swizzle. Rows beyond the last slot keep
    what they held; their columns of the product are not stored.

    Args:
      wide: the source is float32 and is rounded here; else bfloat16, copied without passing through registers.
    """
    words = 8 if wide else 4  # 32-bit words of 8 values
    per_row = columns // 8

    def body(_ctx, place, size, first, source, order_s, operand):
        start, to, t = simt.address(source), Int(simt.address(operand)), simt.thread()
        place, size, first = (Int(a.registers.item()) for a in (place, size, first))
        simt.meet(threads)  # everybody has multiplied with the rows before, and the slots are in order
        total = size * per_row

        def at(n: Int):
            """Value group n: its row, its bytes there, and where they go."""
            j, c = n // per_row, n % per_row
            row = simt.at(order_s, place + j) // divisor
            atom = (c // 8) * (tokens // 8) + j // 8
            return (row, cols // 8 * words * 4, (first // 8 + c) * (words * 4)), to + atom * 1024 + (j % 8) * 128 + (
                ((c % 8) ^ (j % 8)) << 4)

        def store(loaded, where):
            loaded = [utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", Int(loaded[i + 1]).float(),
                                       Int(loaded[i]).float(), result_types=simt.i32()) for i in range(0, 8, 2)]
            utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", where.v, *loaded)

        @simt.loop((total + (threads * UNROLL - 1)) // (threads * UNROLL))
        def _(i):
            numbers = [i * (threads * UNROLL) + u * threads + t for u in range(UNROLL)]
            groups = [(n < total, *at(n.min(total - 1))) for n in numbers]
            if wide:
                loaded = [load_words(start, group, words) for _, group, _ in groups]
                for (exists, _, where), values in zip(groups, loaded, strict=True):
                    with mgpu.when(exists):
                        store(values, where)
            else:
                for exists, group, where in groups:
                    utils.inline_ptx(_COPY, arith.extui(simt.i32(), exists), where.v, simt.global_offset(start, *group),
                                     has_side_effects=True)

        if not wide:
            utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)
        finish_operand(threads)

    return body


_COPY = "{ .reg .pred exists; setp.ne.b32 exists, $0, 0; @exists cp.async.cg.shared.global [$1], [$2], 16; }"


def own_row(t: Int, permuted: bool) -> Int:
    """The first of the two rows that a thread of a warpgroup owns of an accumulator [64, tokens]; the other is 8 below.

    permuted: not row l // 4 of a warp's first 8 for lane l, but one for which the 8 bytes per lane that four lanes in a
    row read of a tile swizzled by 128 bytes lie in different banks in each half of the warp.
    """
    warp, row = t // LANES, (t % LANES) // 4
    return warp * 16 + ((row % 4) * 2 + row // 4 if permuted else row)


def load_rows(present: tuple[bool, ...], rows: int, permuted: bool, stride: int):
    """Values of the two rows of a thread's part of an accumulator, from a flat table for each matrix that has one:
    float32 [2] per thread, 0 where there is none.

    Rows first .. first + rows of each matrix with a stride of 1; entry `first` for all of them with 0.
    """

    def body(_ctx, first, *refs):
        first = Int(first.registers.item())
        t, f32 = simt.thread() % WARPGROUP, ir.F32Type.get()
        zero, refs, found = arith.constant(f32, 0.0), list(refs), []
        tables = [refs.pop(0) if there else None for there in present]
        for half in range(2):
            row = own_row(t, permuted) + half * 8
            at = arith.index_cast(ir.IndexType.get(), (first + row % rows * stride).v)
            loaded = [zero if table is None else memref.load(table, [at]) for table in tables]
            loaded = [v if v.type == f32 else arith.extf(f32, v) for v in loaded]
            value = loaded[0] if len(loaded) == 1 else arith.select(row < rows, *loaded)
            found.append(vector.from_elements(ir.VectorType.get((1,), f32), [value]))
        registers = np.empty(2, object)
        registers[:] = found
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGStridedFragLayout((2 * WARPGROUP,), 1), _is_signed=None)

    return body


@dataclasses.dataclass(frozen=True)
class Finish:
    """What happens to sums [64, tokens] in registers.

    Attributes:
      rescale: (value, factors[j], scale of the row or None) -> value, for column j; None leaves it. With it, the rows
        are permuted.
      has_scale, has_bias: whether per-thread scales and biases of the rows follow the other arguments.
    """

    rescale: Callable | None
    has_scale: bool
    has_bias: bool

    def values(self, accumulator, factors, first, *per_row):
        """(row, column, value) of a thread's part. The bias is the first warpgroup's to add."""
        per_row = [[vector.extract(register, [], [0]) for register in array.registers] for array in per_row]
        scale = per_row.pop(0) if self.has_scale else (None, None)
        bias = per_row.pop(0) if self.has_bias else None
        t, zero = simt.thread() % WARPGROUP, arith.constant(ir.F32Type.get(), 0.0)
        for i, pair in enumerate(accumulator.registers.flat):  # of two columns; columns by 8, then rows 0 and 8
            half = i % 2
            row = own_row(t, self.rescale is not None) + half * 8
            for k in range(2):
                column, value = (t % 4) * 2 + (i // 2 * 8 + k), vector.extract(pair, [], [k])
                if self.rescale is not None:
                    value = self.rescale(value, simt.at(factors, column), scale[half])
                if bias is not None:
                    value = arith.addf(value, arith.select(first, bias[half], zero))
                yield row, column, value


def spread(rows: int, finish: Finish):
    """Accumulator [64, tokens] of warpgroup wg to shared memory as [64 / rows, tokens, rows] float32."""

    def body(_ctx, accumulator, wg, target, factors, *per_row):
        index, first = ir.IndexType.get(), Int(wg.registers.item()).equals(0)
        for row, column, value in finish.values(accumulator, factors, first, *per_row):
            memref.store(value, target, [arith.index_cast(index, i.v) for i in (row // rows, column, row % rows)])

    return body


def scatter_sums(n: int, finish: Finish):
    """Accumulator [64, tokens] of the only warpgroup: column j < size to out[order_s[place + j], row : row + 64]."""

    def body(_ctx, accumulator, place, size, row_from, order_s, out, factors, *per_row):
        place, size, row_from = (Int(a.registers.item()) for a in (place, size, row_from))
        start = simt.address(out)
        true = arith.constant(ir.IntegerType.get_signless(1), 1)
        for row, column, value in finish.values(accumulator, factors, true, *per_row):
            with mgpu.when(column < size):
                where = simt.global_offset(start, simt.at(order_s, place + column), n * 4, (row_from + row) * 4)
                utils.inline_ptx("st.global.f32 [$0], $1;", where, value)

    return body


def scatter(n: int, rows: int, vec: int):
    """Results [tokens, rows], `vec` adjacent values per thread and turn: row j < size to
    out[order_s[place + j], row : row + rows]."""

    def body(_ctx, results, place, size, row, order_s, out):
        place, size, row = (Int(a.registers.item()) for a in (place, size, row))
        t, start = simt.thread() % WARPGROUP, simt.address(out)
        itemsize = utils.bytewidth(results.mlir_dtype)
        words = vec * itemsize // 4
        for i, register in enumerate(results.registers.flat):
            flat = (t + i * WARPGROUP) * vec
            j, r = flat // rows, flat % rows
            with mgpu.when(j < size):
                where = simt.global_offset(start, simt.at(order_s, place + j), n * itemsize, (row + r) * itemsize)
                bits = vector.bitcast(ir.VectorType.get((words,), simt.i32()), register)
                values = [vector.extract(bits, [], [w]) for w in range(words)]
                names = ", ".join(f"${w + 1}" for w in range(words))
                kind = {1: ".b32 [$0], $1", 2: f".v2.b32 [$0], {{{names}}}", 4: f".v4.b32 [$0], {{{names}}}"}[words]
                utils.inline_ptx(f"st.global{kind};", where, *values)

    return body
