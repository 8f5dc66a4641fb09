"""Per-thread pieces of the shared-expert kernels that Pallas cannot say, as inline Mosaic GPU code.

The first three are done by all threads of a CTA together and end with a barrier among them, the last by a warpgroup:

    plan        which experts have slots: a histogram in shared memory and a scan over the experts
    select      the slots of one expert, in ascending order
    gather      the rows of these slots as the N operand of wgmma, in the swizzled layout that it wants
    spread      a wgmma accumulator to shared memory, transposed

What MXFP8 weights need instead of `gather` and wgmma is in `shared_mxfp8`. The interpreter cannot run any of them;
`shared_stream` has a plain form of each for it.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm

from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.simt import LANES, Int

FULL_WARP = -1  # lane mask
UNROLL = 4  # loads of a thread in flight


def barrier(_ctx) -> None:
    """Among the threads of a warpgroup."""
    mgpu.warpgroup_barrier()


def meet(threads: int):
    """Among all threads of a CTA."""
    return lambda _ctx: simt.meet(threads)


# ----------------------------------------------------------------------------------------------- who needs which expert


def plan(tokens: int, experts: int, slots: int, threads: int):
    """Fills the tables of the groups (up to `tokens` slots of one expert), see `shared_common.plan_tables`."""

    def body(_ctx, ids, ids_s, count_s, expert_s, first_s, passes_s, total_s):
        if utils.get_arch().major != 9:
            raise UnsupportedError(
                f"strategy: 'shared_decode' got compute capability {utils.get_arch()}, its kernels need 9.0 (Hopper's "
                "wgmma); use strategy='auto' or 'warp_decode'")
        t, lane = simt.thread(), simt.thread() % LANES
        padded_experts, padded_slots = -(-experts // LANES) * LANES, -(-slots // LANES) * LANES

        @simt.loop(-(-padded_experts // threads))
        def _(i):
            e = i * threads + t
            with mgpu.when(e < padded_experts):
                simt.put(count_s, e, Int(0))

        simt.meet(threads)

        @simt.loop(-(-padded_slots // threads))
        def _(i):
            s = i * threads + t
            with mgpu.when(s < padded_slots):
                e = simt.select(s < slots, simt.at(ids, s.min(slots - 1)), Int(-1))
                simt.put(ids_s, s, e)
                routed = arith.andi(e >= 0, e < experts)
                with mgpu.when(routed):
                    utils.inline_ptx("red.shared.add.u32 [$0], 1;", (Int(simt.address(count_s)) + e * 4).v)

        simt.meet(threads)

        # Every warp does the same scans and writes the same values; those of UNROLL chunks of experts overlap.
        total = Int(0)
        for start in range(0, padded_experts, LANES * UNROLL):
            found = []
            for e in (lane + first for first in range(start, min(start + LANES * UNROLL, padded_experts), LANES)):
                passes = (simt.at(count_s, e) + (tokens - 1)) // tokens
                found.append((e, passes, _scan(passes, lane)))
            for e, passes, inclusive in found:
                first = total + inclusive - passes

                @simt.loop(passes)
                def _(q, e=e, passes=passes, first=first):
                    simt.put(expert_s, first + q, e)
                    simt.put(first_s, first + q, first)
                    simt.put(passes_s, first + q, passes)

                total = total + _shuffle(inclusive, LANES - 1, 31, nvvm.ShflKind.idx)

        simt.put(total_s, Int(0), total)
        simt.meet(threads)

    return body


def _shuffle(x: Int, lane: int, clamp: int, kind) -> Int:
    return Int(nvvm.shfl_sync(Int(FULL_WARP).v, x.v, Int(lane).v, Int(clamp).v, kind))


def _scan(x: Int, lane: Int) -> Int:
    """Sum over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        x = simt.select(lane < distance, x, x + _shuffle(x, distance, 0, nvvm.ShflKind.up))
    return x


def select(tokens: int, slots: int, threads: int):
    """Slots number q * tokens .. of expert e, in ascending order, to slots_s; how many, to slots_s[tokens]."""

    def body(_ctx, expert, pass_, ids_s, slots_s):
        e, q = Int(expert.registers.item()), Int(pass_.registers.item())
        lane = simt.thread() % LANES
        simt.meet(threads)  # everybody has read the slots of the group before, and multiplied with its rows
        below = (Int(1) << lane) - 1

        # Every warp does the same and writes the same values.
        @simt.loop(-(-slots // LANES), Int(0) - q * tokens)
        def found(chunk, before):
            s = chunk * LANES + lane
            hit = simt.at(ids_s, s).equals(e)
            hits = Int(utils.inline_ptx("vote.sync.ballot.b32 $0, $1, 0xffffffff;", hit, result_types=simt.i32(),
                                        has_side_effects=True, convergent=True))
            rank = before + _population(hits & below)
            with mgpu.when(arith.andi(hit, arith.andi(rank >= 0, rank < tokens))):
                simt.put(slots_s, rank, s)
            return before + _population(hits)

        simt.put(slots_s, Int(tokens), found.min(tokens))
        simt.meet(threads)

    return body


def _population(x: Int) -> Int:
    return Int(utils.inline_ptx("popc.b32 $0, $1;", x.v, result_types=simt.i32()))


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


def gather(tokens: int, cols: int, divisor: int, wide: bool, threads: int):
    """Rows slots_s[j] // divisor of `source` [rows, cols] to rows j of the N operand, bfloat16, K-major.

    The operand is [cols / 64, tokens, 64], tiled by (8, 64) with 128-byte swizzle. Rows beyond the last slot keep what
    they held; their columns of the product are not stored.

    Args:
      wide: the source is float32 and is rounded here; else bfloat16.
    """
    words = 8 if wide else 4  # 32-bit words of 8 values
    per_row = cols // 8

    def body(_ctx, source, slots_s, operand):
        start, to, t = simt.address(source), Int(simt.address(operand)), simt.thread()
        total = simt.at(slots_s, Int(tokens)) * per_row

        def place(n: Int):
            """Value group n: its words, loaded, and where they go."""
            j, c = n // per_row, n % per_row
            loaded = load_words(start, (simt.at(slots_s, j) // divisor, per_row * words * 4, c * (words * 4)), words)
            atom = (c // 8) * (tokens // 8) + j // 8
            return loaded, to + atom * 1024 + (j % 8) * 128 + (((c % 8) ^ (j % 8)) << 4)

        def store(loaded, where):
            if wide:
                loaded = [utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", Int(loaded[i + 1]).float(),
                                           Int(loaded[i]).float(), result_types=simt.i32()) for i in range(0, 8, 2)]
            utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", where.v, *loaded)

        @simt.loop((total + (threads * UNROLL - 1)) // (threads * UNROLL))
        def _(i):
            # The last groups may be done twice, with the same result.
            groups = [(i * (threads * UNROLL) + u * threads + t).min(total - 1) for u in range(UNROLL)]
            for loaded in [place(n) for n in groups]:
                store(*loaded)

        finish_operand(threads)

    return body


def spread(rows: int, rescale=None):
    """Accumulator [64, tokens] to shared memory as [64 / rows, tokens, rows] float32.

    rescale: (value, factors[j]) -> what to store, for column j; None stores the value.
    """

    def body(_ctx, accumulator, target, *factors):
        size = arith.constant(ir.IndexType.get(), rows)

        def put(value, at):
            row, token = at
            if rescale is not None:
                value = rescale(value, Int(memref.load(factors[0], [token])))
            memref.store(value, target, [arith.divui(row, size), token, arith.remui(row, size)])

        accumulator.foreach(put)

    return body
