"""Activations of `row_products`, in shared memory: float16 in the order of the fragments, with a factor for each block.

A thread takes 8 values, four neighbours a block of 32. Columns beyond the row are zeros, and so are `ZERO_BYTES` after
the last row, which lanes read that have no activations of a chunk.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.row_products import ZERO_BYTES, Walk
from jax_warp_decode.kernels.simt import Int

PIECE = 8  # values
LARGEST = 14  # exponent of the largest activation of a block
MOST_FIELD = 253  # of a factor's exponent: then its inverse is no subnormal
REST = 11  # what a float16 leaves over is multiplied by 2^REST
UNROLL = 4  # pieces of a thread whose loads are issued together


def fill(walk: Walk, source, dtype, first: Int, rows: int, threads: int, shared) -> None:
    """Rows first .. first + rows of `source` [.., cols] to shared memory; all threads of the CTA take part.

    Args:
      dtype: of the source; float32 is split into two float16 numbers, see `row_products`.
      shared: references of the values and the factors, of the sizes that `Walk.shared` gives.
    """
    start, to, factors_to = simt.address(source), *(Int(simt.address(ref)) for ref in shared)
    itemsize = jnp.dtype(dtype).itemsize
    per_row, per_padded, t = walk.cols // PIECE, walk.padded // PIECE, simt.thread()
    pieces = rows * per_padded

    def load(turn):
        p = turn * threads + t
        row, piece = p.min(pieces - 1) // per_padded, p.min(pieces - 1) % per_padded
        at = simt.global_offset(start, first + row, walk.cols * itemsize, piece.min(per_row - 1) * (PIECE * itemsize))
        values = _values(at, dtype)
        if per_row != per_padded:
            values = [simt.select(piece < per_row, value, Int(0)) for value in values]
        return p, values

    def store(p, values):
        most = values[0] & 0x7FFFFFFF
        for value in values[1:]:
            most = most.max(value & 0x7FFFFFFF)
        for lanes in (1, 2):
            most = most.max(simt.shuffle(most, lanes, 31, nvvm.ShflKind.bfly))
        field = (Int(2 * 127 + LARGEST) - (most >> 23)).min(MOST_FIELD)
        scaled = [arith.mulf(value.float(), (field << 23).float()) for value in values]
        first_of_block = arith.andi(p < pieces, (p % 4).equals(0))
        for half in range(walk.halves):
            pairs = [utils.inline_ptx(_PAIR, *(scaled[walk.spec.order[i + k]] for k in (1, 0)), result_types=simt.i32())
                     for i in range(0, PIECE, 2)]
            _store(p < pieces, to + (p + half * pieces) * 16, pairs)
            factor = (Int(2 * 127 + walk.spec.gain - half * REST) - field).max(0) << 23
            _store(first_of_block, factors_to + (p + half * pieces), [factor.v])
            if half + 1 < walk.halves:
                scaled = [_rest(value) for value in scaled]

    turns = -(-pieces // threads)
    if turns <= UNROLL:
        for p, values in [load(Int(turn)) for turn in range(turns)]:
            store(p, values)
    else:
        simt.loop(turns)(lambda turn: store(*load(turn)))
    _store(t < ZERO_BYTES // 16, to + (t + walk.halves * pieces) * 16, [Int(0).v] * 4)


def _values(address, dtype) -> list[Int]:
    """Eight values from memory, as the bits of float32."""
    words = [Int(word) for offset in range(0, PIECE * jnp.dtype(dtype).itemsize, 16) for word in utils.inline_ptx(
        f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];", address, result_types=[simt.i32()] * 4,
        has_side_effects=True)]
    if dtype == jnp.float32:
        return words
    if dtype == jnp.bfloat16:  # its bits are the upper half of a float32
        return [half for word in words for half in (word << 16, word & -65536)]
    return [Int(half) for word in words for half in utils.inline_ptx(_HALVES, word.v, result_types=[simt.i32()] * 2)]


def _rest(value):
    """What rounding to float16 leaves over, times 2^REST; nothing of infinity and NaN."""
    f32 = ir.F32Type.get()
    over = arith.subf(value, utils.inline_ptx(_ROUND, value, result_types=f32))
    finite = (Int(arith.bitcast(simt.i32(), value)) & 0x7FFFFFFF) < 0x7F800000
    return arith.select(finite, arith.mulf(over, arith.constant(f32, 2.0**REST)), arith.constant(f32, 0.0))


def _store(condition, address: Int, words: list) -> None:
    """To shared memory, one word or four, where the condition holds."""
    form = "st.shared.b32 [$1], $2" if len(words) == 1 else "st.shared.v4.b32 [$1], {$2, $3, $4, $5}"
    code = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p " + form + "; }"
    utils.inline_ptx(code, arith.extui(simt.i32(), condition), address.v, *words, has_side_effects=True)


_PAIR = "cvt.rn.f16x2.f32 $0, $1, $2;"
_ROUND = "{ .reg .b16 half; cvt.rn.f16.f32 half, $1; cvt.f32.f16 $0, half; }"
_HALVES = """{
    .reg .b16 low, high;
    .reg .f32 a, b;
    mov.b32 {low, high}, $2;
    cvt.f32.f16 a, low;
    cvt.f32.f16 b, high;
    mov.b32 $0, a;
    mov.b32 $1, b;
}"""
