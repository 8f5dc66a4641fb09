"""The plan of the grouped kernels in one launch: a stable counting sort of the slots by expert.

Every CTA counts all slots by expert in shared memory, those before its own, those after, and its own by warp: so none
waits for another. Sums over the warps, then over the experts, give the first row of every expert, and of every warp
within it; the warps then number their slots in order. XLA's sort, scatter and sums are about ten kernels.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.grouped_config import FIELDS, ROW_ALIGNMENT
from jax_warp_decode.kernels.simt import LANES, Int

WARPGROUPS = 8
WARPS = WARPGROUPS * 4
THREADS = WARPS * LANES
UNROLL = 4  # loads of a lane in flight
MOST_CTAS = 64
MOST_EXPERTS = 1536  # whose counts fit shared memory


@functools.cache
def build(slots: int, per_token: int, experts: int, widest: int, rows: int, tiles: int):
    """The kernel: ids int32 [slots] -> token [rows], position [slots], tiles [FIELDS * tiles], total [1], all int32.

    See `paths.grouped_plan.Plan`.
    """
    padded = -(-experts // LANES) * LANES
    turns = -(-slots // (THREADS * MOST_CTAS))  # slots of a thread
    ctas = -(-slots // (THREADS * turns))
    outs = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (rows, slots, FIELDS * tiles, 1)]

    def body(*refs):
        code = _plan(slots, per_token, experts, widest, rows, turns, ctas)
        arg_types = plgpu.Layout.WG_SPLAT(()), *(plgpu.RefType(),) * len(refs)
        plgpu.inline_mgpu(arg_types=arg_types)(code)(lax.axis_index("cta"), *refs)

    return jax.jit(plgpu.kernel(
        body,
        out_type=outs,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((WARPS * padded,), jnp.int32), plgpu.SMEM((padded,), jnp.int32),
                       plgpu.SMEM((padded,), jnp.int32), plgpu.SMEM((32,), jnp.int32)],
        kernel_name="moe_grouped_plan",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    ))


def _plan(slots, per_token, experts, widest, rows, turns, ctas):
    padded = -(-experts // LANES) * LANES

    def body(_ctx, cta, ids, token, position, tiles, total, counts, sizes, starts, used):
        cta = Int(cta.registers.item())
        t = simt.thread()
        warp, lane = t // LANES, t % LANES
        below = (Int(1) << lane) - 1
        origin = (cta * WARPS + warp) * (turns * LANES)

        def expert_of(slot, mine=None):
            """Of a slot, -1 if it is not routed."""
            e = simt.at(ids, slot.min(slots - 1))
            routed = arith.andi(slot < slots, arith.andi(e >= 0, e < experts))
            return simt.select(routed if mine is None else arith.andi(routed, mine), e, Int(-1))

        def count(counters, e):
            with mgpu.when(e >= 0):
                utils.inline_ptx("red.shared.add.u32 [$0], 1;", (counters + e * 4).v, has_side_effects=True)

        def in_turns(number, then):
            """then(i) for i in range(number) or a few more, UNROLL at once."""
            @simt.loop(-(-number // UNROLL))
            def _(i):
                for do in [then(i * UNROLL + u) for u in range(UNROLL if number > 1 else 1)]:
                    do()

        @simt.loop(WARPS * padded // THREADS)
        def _(i):
            simt.put(counts, i * THREADS + t, Int(0))

        @simt.loop(-(-padded // THREADS))
        def _(i):
            e = i * THREADS + t
            with mgpu.when(e < padded):
                simt.put(starts, e, Int(0))
                simt.put(sizes, e, Int(0))

        simt.meet(THREADS)
        earlier, later = Int(simt.address(starts)), Int(simt.address(sizes))
        mine = Int(simt.address(counts)) + warp * (padded * 4)

        def of_others(i):
            e = expert_of(i * THREADS + t, arith.xori(_between(i, cta * turns, turns), _true()))
            return lambda: count(simt.select(i < cta * turns, earlier, later), e)

        def of_mine(i):
            e = expert_of(origin + i * LANES + lane, i < turns)
            return lambda: count(mine, e)

        if ctas > 1:
            in_turns(ctas * turns, of_others)
        in_turns(turns, of_mine)
        simt.meet(THREADS)

        # Counts of the warps before, in place, and the size of every expert.
        @simt.loop(-(-padded // THREADS))
        def _(i):
            e = i * THREADS + t
            with mgpu.when(e < padded):
                before = simt.at(starts, e)
                for w in range(WARPS):
                    at = e + w * padded
                    count = simt.at(counts, at)
                    simt.put(counts, at, before)
                    before = before + count
                simt.put(sizes, e, before + simt.at(sizes, e))

        simt.meet(THREADS)

        # The first warp: where every expert starts, and its tiles.
        with mgpu.when(warp < 1):
            row, tile = Int(0), Int(0)
            for chunk in range(0, padded, LANES):
                e = lane + chunk
                size = simt.at(sizes, e)
                space = ((size + (ROW_ALIGNMENT - 1)) // ROW_ALIGNMENT) * ROW_ALIGNMENT
                count = (size + (widest - 1)) // widest
                rows_to, tiles_to = simt.scan(space, lane), simt.scan(count, lane)
                start, first = row + rows_to - space, tile + tiles_to - count
                simt.put(starts, e, start)

                @simt.loop(simt.select(cta < 1, count, Int(0)))
                def _(q, e=e, first=first, count=count, start=start, size=size):
                    at = (first + q) * FIELDS
                    for f, value in enumerate((e, first, count, start, size)):
                        simt.put(tiles, at + f, value)

                row, tile = row + simt.last_lane(rows_to), tile + simt.last_lane(tiles_to)
            simt.put(used, Int(0), row)
            with mgpu.when(cta < 1):
                simt.put(total, Int(0), tile)

        simt.meet(THREADS)

        def place(i):
            s = origin + i * LANES + lane
            e = expert_of(s, i < turns)

            def do():
                # Lanes of the same expert, -1 among them.
                same = Int(utils.inline_ptx("match.any.sync.b32 $0, $1, 0xffffffff;", e.v, result_types=simt.i32(),
                                            has_side_effects=True, convergent=True))
                routed = e >= 0
                at = warp * padded + e.max(0)
                before = simt.at(counts, at)
                place = simt.at(starts, e.max(0)) + before + simt.population(same & below)
                utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True, convergent=True)
                with mgpu.when(arith.andi(routed, (same & below).equals(0))):
                    simt.put(counts, at, before + simt.population(same))
                utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True, convergent=True)
                with mgpu.when(routed):
                    simt.put(token, place, s // per_token)
                with mgpu.when(arith.andi(s < slots, i < turns)):
                    simt.put(position, s, simt.select(routed, place, Int(0)))

            return do

        in_turns(turns, place)

        # Rows that are nobody's still name a token.
        with mgpu.when(cta < 1):
            @simt.loop(-(-padded // THREADS))
            def _(i):
                e = i * THREADS + t
                with mgpu.when(e < padded):
                    size = simt.at(sizes, e)
                    end = simt.at(starts, e) + size

                    @simt.loop((Int(0) - size) & (ROW_ALIGNMENT - 1))
                    def _(q, end=end):
                        simt.put(token, end + q, Int(0))

        first = simt.at(used, Int(0)) + cta * THREADS + t

        @simt.loop((Int(rows + ctas * THREADS - 1) - first) // (ctas * THREADS))
        def _(i):
            simt.put(token, first + i * (ctas * THREADS), Int(0))

    return body


def _between(i: Int, start: Int, count: int):
    return arith.andi(i >= start, i < start + count)


def _true():
    return arith.constant(ir.IntegerType.get_signless(1), 1)
