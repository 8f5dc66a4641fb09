"""The plan of the grouped kernels in one launch of one CTA: a stable counting sort of the slots by expert.

Every warp owns a contiguous range of slots and counts them by expert in shared memory. Sums over the warps, then over
the experts, give the first row of every expert, and of every warp within it; the warps then walk their slots again, in
order, and number them. XLA's sort, scatter and sums are about ten kernels.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.grouped_config import FIELDS, ROW_ALIGNMENT
from jax_warp_decode.kernels.simt import LANES, Int

WARPGROUPS = 8
WARPS = WARPGROUPS * 4
THREADS = WARPS * LANES
UNROLL = 4  # loads of a lane in flight
MOST_EXPERTS = 1536  # whose counts fit shared memory


@functools.cache
def build(slots: int, per_token: int, experts: int, widest: int, rows: int, tiles: int):
    """The kernel: ids int32 [slots] -> token [rows], position [slots], tiles [FIELDS * tiles], total [1], all int32.

    See `paths.grouped_plan.Plan`.
    """
    padded = -(-experts // LANES) * LANES
    outs = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (rows, slots, FIELDS * tiles, 1)]

    def body(*refs):
        code = _plan(slots, per_token, experts, widest, rows)
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(code)(*refs)

    return jax.jit(plgpu.kernel(
        body,
        out_type=outs,
        grid=(1,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((WARPS * padded,), jnp.int32), plgpu.SMEM((padded,), jnp.int32),
                       plgpu.SMEM((padded,), jnp.int32), plgpu.SMEM((32,), jnp.int32)],
        kernel_name="moe_grouped_plan",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    ))


def _plan(slots, per_token, experts, widest, rows):
    padded = -(-experts // LANES) * LANES
    turns = -(-slots // (WARPS * LANES * UNROLL))  # of a warp, UNROLL times 32 slots each

    def body(_ctx, ids, token, position, tiles, total, counts, sizes, starts, used):
        t = simt.thread()
        warp, lane = t // LANES, t % LANES
        mine = Int(simt.address(counts)) + warp * (padded * 4)
        below = (Int(1) << lane) - 1
        origin = warp * (turns * UNROLL * LANES)

        def load(turn):
            """(slot, its expert or -1) of UNROLL slots."""
            found = []
            for u in range(UNROLL):
                s = origin + (turn * UNROLL + u) * LANES + lane
                e = simt.at(ids, s.min(slots - 1))
                routed = arith.andi(s < slots, arith.andi(e >= 0, e < experts))
                found.append((s, simt.select(routed, e, Int(-1))))
            return found

        @simt.loop(WARPS * padded // THREADS)
        def _(i):
            simt.put(counts, i * THREADS + t, Int(0))

        simt.meet(THREADS)

        @simt.loop(turns)
        def _(turn):
            for _, e in load(turn):
                with mgpu.when(e >= 0):
                    utils.inline_ptx("red.shared.add.u32 [$0], 1;", (mine + e * 4).v, has_side_effects=True)

        simt.meet(THREADS)

        # Counts of the warps before, in place, and the size of every expert.
        @simt.loop(-(-padded // THREADS))
        def _(i):
            e = i * THREADS + t
            with mgpu.when(e < padded):
                before = Int(0)
                for w in range(WARPS):
                    at = e + w * padded
                    count = simt.at(counts, at)
                    simt.put(counts, at, before)
                    before = before + count
                simt.put(sizes, e, before)

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

                @simt.loop(count)
                def _(q, e=e, first=first, count=count, start=start, size=size):
                    at = (first + q) * FIELDS
                    for f, value in enumerate((e, first, count, start, size)):
                        simt.put(tiles, at + f, value)

                row, tile = row + simt.last_lane(rows_to), tile + simt.last_lane(tiles_to)
            simt.put(used, Int(0), row)
            simt.put(total, Int(0), tile)

        simt.meet(THREADS)

        @simt.loop(turns)
        def _(turn):
            for s, e in load(turn):
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
                with mgpu.when(s < slots):
                    simt.put(position, s, simt.select(routed, place, Int(0)))

        # Rows that are nobody's still name a token.
        @simt.loop(-(-padded // THREADS))
        def _(i):
            e = i * THREADS + t
            with mgpu.when(e < padded):
                size = simt.at(sizes, e)
                end = simt.at(starts, e) + size

                @simt.loop((Int(0) - size) & (ROW_ALIGNMENT - 1))
                def _(q, end=end):
                    simt.put(token, end + q, Int(0))

        first = simt.at(used, Int(0)) + t

        @simt.loop((Int(rows + THREADS - 1) - first) // THREADS)
        def _(i):
            simt.put(token, first + i * THREADS, Int(0))

    return body
