"""MXFP8 weights times float16 rows, for the shared-expert kernels: no weight is ever multiplied by its scale.

An E4M3 value is a float16 exactly, and two of them convert in one instruction. The scale of a block of 32 goes to the
float32 sums of its products instead:

    total[n, t] += 2^(scale[n, block] - 127 - 22) * sum over the block of e4m3[n, i] * f16[t, i]

float16 wants rows of known size: `gather` multiplies each by the power of two that brings its largest |value| to
[2^14, 2^15). Multiplying by powers of two is exact, so what is left of a row x is the rounding of `to_float16`:

    bfloat16  exact down to 2^-31 of the row's largest |x|; below, an error of at most 2^-39 of the largest |x|
    float32   rounded to 11 bits, an error of at most 2^-11 of the value, or 2^-39 of the largest |x|

An error of 2^-39 is far below what float32 sums lose on the largest term, 2^-24. Rows with inf or NaN keep them, and
give inf and NaN in their own results only. The 2^-22 keeps the sums finite wherever the weights fit float32; `rescale`
takes it back, and the factors of the rows. The scale 2^-127 counts as 0.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.shared_simt import finish_operand, load_words
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int
from jax_warp_decode.kernels.tile import MX_BLOCK, e8m0_to_f32

LARGEST = 14  # exponent of the largest value of a row, as float16
SHIFT = 22  # of the sums: scales are multiplied by 2^-SHIFT
MOST_SCALE = 253  # exponent field: then the inverse is no subnormal
IN_REGISTERS = 32  # words of a row that a lane may hold
MOST_SUMS = 32  # registers for the sums of the blocks under way


# --------------------------------------------------------------------------------------------------------------- rows


def gather(tokens: int, cols: int, divisor: int, wide: bool, threads: int):
    """Rows slots_s[j] // divisor of `source` [rows, cols] to rows j of the N operand, float16, and their factors.

    The operand is [cols / 64, tokens, 64], tiled by (8, 64) with 128-byte swizzle. Inside a block of 32 columns a
    thread's 8 contiguous bytes of weights become the 2 + 2 + 2 + 2 columns that it owns in two wgmma steps of 16, and
    the values go to those columns here. Rows beyond the last slot keep what they held.

    Args:
      wide: the source is float32, else bfloat16.
    """
    words, per_row = (8 if wide else 4), cols // 8
    pieces = -(-per_row // LANES)  # of 8 values, per lane
    once = pieces * words <= IN_REGISTERS
    unroll = pieces if once else max(1, IN_REGISTERS // words)
    warps = threads // LANES

    def body(_ctx, source, slots_s, operand, factors):
        start, to = simt.address(source), Int(simt.address(operand))
        warp, lane = simt.thread() // LANES, simt.thread() % LANES
        count = simt.at(slots_s, Int(tokens))

        @simt.loop((count + (warps - 1) - warp.min(count)) // warps)
        def _(i):
            j = i * warps + warp
            row = simt.at(slots_s, j) // divisor

            def load(turn):
                at = [((turn * unroll + u) * LANES + lane).min(per_row - 1) for u in range(unroll)]
                return [(c, load_words(start, (row, per_row * words * 4, c * (words * 4)), words)) for c in at]

            def largest(loaded, most):
                for _, piece in loaded:
                    for value in _values(piece, wide):
                        most = most.max(value & 0x7FFFFFFF)
                return most

            turns = -(-pieces // unroll)
            loaded = load(Int(0)) if once else None
            if once:
                most = largest(loaded, Int(0))
            else:
                most = simt.loop(turns, Int(0))(lambda turn, most: largest(load(turn), most))
            most = Int(utils.inline_ptx("redux.sync.max.u32 $0, $1, 0xffffffff;", most.v, result_types=simt.i32(),
                                        has_side_effects=True, convergent=True))
            field = (Int(2 * 127 + LARGEST) - (most >> 23)).min(MOST_SCALE)
            simt.put(factors, j, Int(254 + SHIFT) - field)
            scale = (field << 23).float()

            def store(loaded):
                for c, piece in loaded:
                    values = [arith.mulf(value.float(), scale) for value in _values(piece, wide)]
                    base = to + ((c // 8) * (tokens // 8) + j // 8) * 1024 + (j % 8) * 128 + (c % 4) * 4
                    for p in range(4):
                        pair = utils.inline_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", values[2 * p + 1], values[2 * p],
                                                result_types=simt.i32())
                        where = base + (((((c // 4) % 2) * 4 + p) ^ (j % 8)) << 4)
                        utils.inline_ptx("st.shared.b32 [$0], $1;", where.v, pair)

            if once:
                store(loaded)
            else:
                simt.loop(turns)(lambda turn: store(load(turn)))

        finish_operand(threads)

    return body


def _values(words: list, wide: bool) -> list[Int]:
    """Bits of float32."""
    if wide:
        return [Int(w) for w in words]
    return [half for w in words for half in (Int(w) << 16, Int(w) & -65536)]


def to_float16(rows):
    """`gather` in plain form: rows float [.., cols] -> float16 [.., cols] and the factors, int32 [..].

    Example:
      >>> import jax.numpy as jnp
      >>> values, factors = to_float16(jnp.array([[3.0, -0.5]], jnp.bfloat16))
      >>> values.tolist(), (factors - 127 - SHIFT).tolist()
      ([[24576.0, -4096.0]], [-13])
    """
    rows = rows.astype(jnp.float32)
    most = jnp.max(lax.bitcast_convert_type(rows, jnp.int32) & jnp.int32(0x7FFFFFFF), axis=-1)
    field = jnp.minimum(jnp.int32(2 * 127 + LARGEST) - (most >> 23), jnp.int32(MOST_SCALE))
    scale = lax.bitcast_convert_type(field << 23, jnp.float32)
    return (rows * scale[..., None]).astype(jnp.float16), jnp.int32(254 + SHIFT) - field


def rescale(value, factor: Int):
    """value * 2^(factor - 127), where the exponent may be more than float32 has."""
    first = factor.min(254)
    return arith.mulf(arith.mulf(value, (first << 23).float()), ((factor - first + 127) << 23).float())


def rescale_plain(values, factors):
    first = jnp.minimum(factors, jnp.int32(254))
    for field in (first, factors - first + jnp.int32(127)):
        values = values * lax.bitcast_convert_type(field << 23, jnp.float32)
    return values


# ------------------------------------------------------------------------------------------------------------ products


def load(chunk: int, swizzle: int):
    """A tile [64, chunk] of weights to registers, so that its stage of the ring is free again.

    Args:
      swizzle: of the tile, in bytes.
    """

    def body(_ctx, values):
        t = simt.thread() % WARPGROUP
        row, quad = (t // LANES) * 16 + (t % LANES) // 4, t % 4
        # The swizzle XORs bits of the row, which is the same in all atoms of a thread.
        row_from = Int(simt.address(values)) + (row // 8) * (8 * chunk) + (row % 8) * swizzle
        mask = ((((row % 8) * swizzle) // 128) & (swizzle // 16 - 1)) << 4
        places = [row_from + ((quad * 8 + first) ^ mask) for first in range(0, swizzle, MX_BLOCK)]
        one = ir.VectorType.get((1,), simt.i32())
        words = []
        for byte in range(0, chunk, MX_BLOCK):
            for half in range(2):  # rows 0 and 8
                words += utils.inline_ptx(
                    f"ld.shared.v2.b32 {{$0, $1}}, [$2+{half * 8 * chunk + byte // swizzle * 8 * swizzle}];",
                    places[byte % swizzle // MX_BLOCK].v, result_types=[simt.i32()] * 2, has_side_effects=True)
        registers = np.empty(len(words), object)
        registers[:] = [vector.from_elements(one, [w]) for w in words]
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGStridedFragLayout((WARPGROUP * len(words),), 1), _is_signed=True)

    return body


def words_of(chunk: int) -> int:
    """32-bit words that `load` returns, of all threads."""
    return 64 * chunk // 4


def multiply(tokens: int, chunk: int, cols: int, rows: int, scale_bytes: int):
    """A tile [64, chunk] of weights, from `load`, times the N operand, with the scales, added to `total`.

    Args:
      rows: rows of one matrix in the tile; the scales of a matrix's rows lie together, matrices `scale_bytes` apart.
    """
    per_row, sums = cols // MX_BLOCK, tokens // 2
    blocks = chunk // MX_BLOCK
    batch = max(1, min(4, MOST_SUMS // sums))  # blocks whose products are under way together
    # 4 scales in one load where all rows begin at a multiple of 4.
    load, per_load = ("u32", 4) if per_row % 4 == 0 and blocks % 4 == 0 else ("u16", 2)

    def body(_ctx, weights, scales, operand, step, total):
        t, step = simt.thread() % WARPGROUP, Int(step.registers.item())
        row = (t // LANES) * 16 + (t % LANES) // 4
        matrix = (row // rows) * scale_bytes + (row % rows) * per_row
        scales_from = Int(simt.address(scales)) + matrix + step * blocks
        # K-major, 128-byte swizzle, atoms of 8 rows 1024 bytes apart; 16 columns are 32 bytes.
        descriptor = ((Int(simt.address(operand)) + step * (chunk // 64 * tokens * 128)) >> 4) | (1 << 16)
        words = [vector.extract(v, [], [0]) for v in weights.registers]
        totals = [[vector.extract(v, [], [i]) for i in range(2)] for v in total.registers.flat]

        scale_words = {}
        for half in range(2):
            for first in range(0, blocks, per_load):
                scale_words[half, first] = Int(utils.inline_ptx(
                    f"ld.shared.{load} $0, [$1+{half * 8 * per_row + first}];", scales_from.v, result_types=simt.i32(),
                    has_side_effects=True))
        for first in range(0, blocks, batch):
            now = range(first, min(first + batch, blocks))
            fragments = []
            for block in now:
                for k16 in range(2):
                    pairs = [utils.inline_ptx(_TO_F16, words[block * 4 + half * 2 + k16],
                                              result_types=[simt.i32()] * 2) for half in range(2)]
                    fragments += [pairs[half][k8] for k8 in range(2) for half in range(2)]
            products = utils.inline_ptx(
                _products(tokens, now), *fragments, descriptor.v, result_types=[ir.F32Type.get()] * (sums * len(now)),
                has_side_effects=True, convergent=True)
            for i, block in enumerate(now):
                factors = [_scale(scale_words[half, block // per_load * per_load], block % per_load)
                           for half in range(2)]
                for r, pair in enumerate(totals):  # registers: columns by 8, then rows 0 and 8
                    for n in range(2):
                        pair[n] = llvm.intr_fma(products[i * sums + r * 2 + n], factors[r % 2], pair[n])
        pair_type = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(total.registers.shape, object)
        registers.flat[:] = [vector.from_elements(pair_type, pair) for pair in totals]
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return body


_TO_F16 = """{
    .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
}"""


def _products(tokens: int, blocks: range) -> str:
    """PTX: one sum [64, tokens] for each of the blocks, of two steps of 16 columns; waits for the results."""
    sums = tokens // 2
    results, fragments = sums * len(blocks), 8 * len(blocks)
    low = f"${results + fragments}"
    lines = ["{", ".reg .b32 at;", ".reg .b64 where;", ".reg .pred no, yes;", "setp.ne.b32 no, 0, 0;",
             "setp.eq.b32 yes, 0, 0;", "wgmma.fence.sync.aligned;"]
    for i, block in enumerate(blocks):
        d = ", ".join(f"${i * sums + r}" for r in range(sums))
        for k16 in range(2):
            a = ", ".join(f"${results + i * 8 + k16 * 4 + r}" for r in range(4))
            offset = block // 2 * tokens * 8 + (block % 2 * 2 + k16) * 2  # in units of 16 bytes
            lines += [f"add.u32 at, {low}, {offset};", f"mov.b64 where, {{at, {1024 // 16 | 1 << 30}}};",
                      f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.f16.f16 {{{d}}}, {{{a}}}, where, "
                      f"{'yes' if k16 else 'no'}, 1, 1, 0;"]
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"])


def _scale(word: Int, byte: int) -> ir.Value:
    """2^(s - 127 - SHIFT) of one byte s, 0 for s = 0, NaN for 255."""
    shift = 23 - 8 * byte
    bits = (word << shift if shift > 0 else word >> -shift) & 0x7F800000
    f32 = ir.F32Type.get()
    # f - f * (1 - 2^-SHIFT) is exact, and inf - inf where the byte is 255.
    return llvm.intr_fma(bits.float(), arith.constant(f32, 2.0**-SHIFT - 1), bits.float())


def multiply_plain(values, scales, operand, step, total, *, chunk: int, rows: int):
    """`multiply` for the interpreter: arrays instead of references."""
    matrices, blocks = 64 // rows, chunk // MX_BLOCK
    tokens, per_row = operand.shape[1], operand.shape[0] * 64 // MX_BLOCK
    flat = scales.reshape(matrices, -1)[:, :rows * per_row].reshape(64, per_row)
    mine = lax.dynamic_slice_in_dim(flat, step * blocks, blocks, 1)
    factors = e8m0_to_f32(mine) * jnp.float32(2.0**-SHIFT)
    columns = operand.astype(jnp.float32).swapaxes(0, 1).reshape(tokens, per_row, MX_BLOCK)
    columns = lax.dynamic_slice_in_dim(columns, step * blocks, blocks, 1)
    products = jnp.einsum("nbi,tbi->ntb", values.astype(jnp.float32).reshape(64, blocks, MX_BLOCK), columns)
    return total + jnp.sum(products * factors[:, None], axis=2)
