"""Per-thread pieces of the grouped kernels that Pallas cannot say, as inline Mosaic GPU code."""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.kernel_format import MX_BLOCK
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int


def need_hopper(name: str) -> None:
    """Refuses to compile for anything else."""
    if utils.get_arch().major != 9:
        raise UnsupportedError(f"{name}: got compute capability {utils.get_arch()}, the kernel needs 9.0 (Hopper's "
                               "wgmma); use strategy='auto' or 'warp_decode'")


def transpose(start: int, count: int):
    """Columns start .. of a wgmma accumulator [64, N] to shared memory as bfloat16 [count, 64], tiled by (8, 64),
    128-byte swizzle.

    stmatrix with .trans stores four blocks of 8 x 8 at once: rows 0 and 8 of a warp's 16, of two blocks of 8 columns.
    Lane l gives the address of column l % 8 of block l / 8, and the swizzle spreads those of a block over all banks.
    """

    def body(_ctx, value, buffer):
        need_hopper("expert_centric")
        t = simt.thread() % WARPGROUP
        warp, lane = t // LANES, t % LANES
        token, block = lane % 8, lane // 8
        piece = warp * 2 + block % 2  # of 8 weight rows, 16 bytes
        to = Int(simt.address(buffer)) + (block // 2) * 1024 + token * 128 + ((piece ^ token) << 4)
        registers = value.registers.reshape(-1)[start // 4:(start + count) // 4]
        pairs = [_pack(v) for v in registers]  # columns by 8, then rows 0 and 8
        mgpu.warpgroup_barrier()  # the thread that waited for the buffer has seen it free
        for c in range(0, count // 8, 2):
            utils.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{c * 1024}], {{$1, $2, $3, $4}};",
                to.v, *pairs[2 * c:2 * c + 4], has_side_effects=True, convergent=True)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        mgpu.warpgroup_barrier()

    return body


def _pack(pair) -> ir.Value:
    """Two float32 to two bfloat16 in one word, the first in its low half."""
    low, high = (vector.extract(pair, [], [i]) for i in range(2))
    return utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=simt.i32())


# ------------------------------------------------------------------------------------------------------------- gather


def tokens(width: int, rows: int):
    """Tokens of the rows that a thread copies: every 16th of `width` rows from `row` on; a table of `rows` entries."""

    def body(_ctx, row, token):
        mine = Int(row.registers.item()) + simt.thread() % WARPGROUP // 8
        return words_array([simt.at(token, (mine + r).min(rows - 1)).v for r in range(0, width, 16)])

    return body


def gather(cols: int):
    """Starts to copy columns 64 * step .. of the rows of `tokens` to [rows, 64], tiled by (8, 64), 128-byte swizzle.

    Eight threads copy a row, 16 bytes each. The copies are one group of `cp.async`.
    """

    def body(_ctx, source, words, step, target):
        t = simt.thread() % WARPGROUP
        row, piece = t // 8, t % 8
        start, to = simt.address(source), Int(simt.address(target)) + row * 128 + ((piece ^ (row % 8)) << 4)
        offset = Int(step.registers.item()) * 128 + piece * 16
        for i, word in enumerate(words.registers.flat):
            at = simt.global_offset(start, Int(vector.extract(word, [], [0])), cols * 2, offset)
            utils.inline_ptx(f"cp.async.cg.shared.global [$0+{i * 2048}], [$1], 16;", to.v, at, has_side_effects=True)
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    return body


def gathered(pending: int):
    """Waits for all but the last `pending` groups of `gather`, and makes them visible to wgmma."""

    def body(_ctx):
        utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    return body


# -------------------------------------------------------------------------------------------------------------- MXFP8


def load_scales(n: int, cols: int, matrices: int):
    """The scales of a thread for one step of 64 columns: a word per part and half, of two bytes.

    Weight rows `row` + lane / 4 of a warp's 16, and 8 below, of the two parts: of both matrices, or 128 rows apart.
    Rows beyond n have the last one's scales; what becomes of them is not stored.
    """
    row_bytes, apart = cols // MX_BLOCK, 128

    def body(_ctx, expert, row, step, *refs):
        expert, row, step = (Int(a.registers.item()) for a in (expert, row, step))
        t = simt.thread() % WARPGROUP
        mine = row + (t // LANES) * 16 + (t % LANES) // 4
        words = []
        for part in range(2):
            start = simt.address(refs[part % matrices])
            for half in range(2):
                at = (mine + (half * 8 + (0 if matrices == 2 else part * apart))).min(n - 1)
                address = simt.global_offset(start, expert * n + at, row_bytes, step * 2)
                words.append(utils.inline_ptx("ld.global.nc.u16 $0, [$1];", address, result_types=_i16()))
        return words_array([arith.extui(simt.i32(), w) for w in words])

    return body


def words_array(words: list) -> mgpu.FragmentedArray:
    """Words of each thread as an array int32 [128 * len(words)]."""
    registers = np.empty(len(words), object)
    registers[:] = [vector.from_elements(ir.VectorType.get((1,), simt.i32()), [w]) for w in words]
    return mgpu.FragmentedArray(
        _registers=registers, _layout=mgpu.WGStridedFragLayout((WARPGROUP * len(words),), 1), _is_signed=True)


def widen(part: int):
    """A tile [64, 64] of E4M3 in shared memory, tiled by (8, 64) with 64-byte swizzle, and the words of `load_scales`
    -> bfloat16 [64, 64] in registers, as wgmma takes its A operand. Exact.
    """

    def body(_ctx, values, scales):
        t = simt.thread() % WARPGROUP
        warp, row, quad = t // LANES, (t % LANES) // 4, t % 4
        start = Int(simt.address(values)) + warp * 1024 + row * 64 + quad * 2
        factors = [[_e8m0((Int(vector.extract(scales.registers.flat[part * 2 + half], [], [0])) >> (8 * block)) & 255)
                    for block in range(2)] for half in range(2)]
        pairs = []
        for k16 in range(4):
            at = start + (((row // 2) ^ k16) << 4)  # the swizzle
            for k8 in range(2):
                for half in range(2):
                    two = utils.inline_ptx(f"ld.shared.u16 $0, [$1+{half * 512 + k8 * 8}];", at.v,
                                           result_types=_i16(), has_side_effects=True)
                    pairs.append(utils.inline_ptx(_SCALED, two, factors[half][k16 // 2], result_types=simt.i32()))
        registers = np.empty(len(pairs), object)
        registers[:] = [llvm.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), p) for p in pairs]
        shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 64))
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return body


_SCALED = """{
    .reg .b32 two, pair;
    .reg .b16 lo, hi;
    .reg .f32 a, b;
    cvt.rn.f16x2.e4m3x2 two, $1;
    mov.b32 {lo, hi}, two;
    cvt.f32.f16 a, lo;
    cvt.f32.f16 b, hi;
    mul.f32 a, a, $2;
    mul.f32 b, b, $2;
    cvt.rn.bf16x2.f32 $0, b, a;
}"""


def _i16() -> ir.Type:
    return ir.IntegerType.get_signless(16)


def _e8m0(byte: Int) -> ir.Value:
    """2^(byte - 127) as float32, a subnormal for 0, NaN for 255."""
    bits = (byte << 23).max(1 << 22)
    return (bits | (((byte + 1) >> 8) << 22)).float()
