"""Weights with scales times float16 rows, for the shared-expert kernels: no weight is ever multiplied by its scale.

An E4M3, E5M2 or E2M1 value is a float16 exactly, and two convert in one instruction. The scale of a block of 32 goes to
the float32 sums of its products instead:

    total[n, t] += 2^(scale[n, block] - 127 - 22) * sum over the block of element[n, i] * f16[t, i]

"fp8_block128" does the same with its float32 scales and sums over 128.

float16 wants rows of known size: `gather` multiplies each by the power of two that brings its largest |value| to
[2^14, 2^15). Multiplying by powers of two is exact, so what is left of a row x is the rounding of `to_float16`:

    bfloat16  exact down to 2^-31 of the row's largest |x|; below, an error of at most 2^-39 of the largest |x|
    float32   rounded to 11 bits, an error of at most 2^-11 of the value, or 2^-39 of the largest |x|

An error of 2^-39 is far below what float32 sums lose on the largest term, 2^-24. Rows with inf or NaN keep them, and
give inf and NaN in their own results only. The 2^-22 keeps the sums finite while the |weights| of a row add up to
less than 2^134; `rescale` takes it back, and the factors of the rows. The scale 2^-127 counts as 0.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_warp_decode.formats.elements import e2m1_from_codes, unpack_nibbles
from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.shared_common import BLOCK128
from jax_warp_decode.kernels.shared_simt import finish_operand, load_words, own_row
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int
from jax_warp_decode.kernels.tile import MX_BLOCK, e8m0_to_f32

LARGEST = 14  # exponent of the largest value of a row, as float16
# How a row of values is stored: the array's dtype, and values in one of its elements.
STORED = {"mxfp8": (jnp.float8_e4m3fn, 1), "mxfp8_e5m2": (jnp.float8_e5m2, 1), "mxfp4": (jnp.uint8, 2),
          BLOCK128: (jnp.float8_e4m3fn, 1)}
# What is converted to float16.
PTX_TYPE = {"mxfp8": "e4m3x2", "mxfp8_e5m2": "e5m2x2", "mxfp4": "e4m3x2", BLOCK128: "e4m3x2"}
# Of 8 values of a thread, those in the pairs of its fragments, in order.
PAIRS = {1: ((0, 1), (2, 3), (4, 5), (6, 7)), 2: ((0, 2), (4, 6), (1, 3), (5, 7))}
E2M1_GAIN = 6  # E2M1 bits in the place of E4M3 bits are the value times 2^-6
SHIFT = 22  # of the sums: scales are multiplied by 2^-SHIFT
MOST_SCALE = 253  # exponent field: then the inverse is no subnormal
IN_REGISTERS = 32  # words of a row that a lane may hold


# --------------------------------------------------------------------------------------------------------------- rows


def gather(format: str, tokens: int, cols: int, columns: int, divisor: int, wide: bool, threads: int):
    """`columns` columns, from `first`, of rows order_s[place + j] // divisor of `source` [rows, cols] to rows j < size
    of the N operand, float16, and their factors.

    The operand is [columns / 64, tokens, 64], tiled by (8, 64) with 128-byte swizzle. Inside a block of 32 columns a
    thread's 8 contiguous weights become the 2 + 2 + 2 + 2 columns that it owns in two mma steps of 16, and the values
    go to those columns here. Rows beyond the last slot keep what they held.

    Args:
      wide: the source is float32, else bfloat16.
    """
    words, per_row, per_panel = (8 if wide else 4), cols // 8, columns // 8
    pieces = -(-per_row // LANES)  # of 8 values, per lane
    once = pieces * words <= IN_REGISTERS and per_panel == per_row
    unroll = pieces if once else max(1, IN_REGISTERS // words)
    warps = threads // LANES

    def body(_ctx, place, size, first, source, order_s, operand, factors):
        start, to = simt.address(source), Int(simt.address(operand))
        place, size, first = (Int(a.registers.item()) for a in (place, size, first))
        warp, lane = simt.thread() // LANES, simt.thread() % LANES
        simt.meet(threads)  # everybody has multiplied with the rows before, and the slots are in order

        @simt.loop((size + (warps - 1) - warp.min(size)) // warps)
        def _(i):
            j = i * warps + warp
            row = simt.at(order_s, place + j) // divisor

            def load(turn, first, count):
                at = [((turn * unroll + u) * LANES + lane).min(count - 1) for u in range(unroll)]
                return [(c, load_words(start, (row, per_row * words * 4, (first // 8 + c) * (words * 4)), words))
                        for c in at]

            def largest(loaded, most):
                for _, piece in loaded:
                    for value in _values(piece, wide):
                        most = most.max(value & 0x7FFFFFFF)
                return most

            loaded = load(Int(0), first, per_row) if once else None
            if once:
                most = largest(loaded, Int(0))
            else:
                most = simt.loop(_hidden(-(-pieces // unroll)), Int(0))(
                    lambda turn, most: largest(load(turn, Int(0), per_row), most))
            most = Int(utils.inline_ptx("redux.sync.max.u32 $0, $1, 0xffffffff;", most.v, result_types=simt.i32(),
                                        has_side_effects=True, convergent=True))
            field = (Int(2 * 127 + LARGEST) - (most >> 23)).min(MOST_SCALE)
            simt.put(factors, j, Int(254 + SHIFT) - field)
            scale = (field << 23).float()

            def store(loaded):
                for c, piece in loaded:
                    values = [arith.mulf(value.float(), scale) for value in _values(piece, wide)]
                    base = to + ((c // 8) * (tokens // 8) + j // 8) * 1024 + (j % 8) * 128 + (c % 4) * 4
                    for p, (low, high) in enumerate(PAIRS[STORED[format][1]]):
                        pair = utils.inline_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", values[high], values[low],
                                                result_types=simt.i32())
                        where = base + (((((c // 4) % 2) * 4 + p) ^ (j % 8)) << 4)
                        utils.inline_ptx("st.shared.b32 [$0], $1;", where.v, pair)

            if once:
                store(loaded)
            else:
                simt.loop(_hidden(-(-per_panel // (LANES * unroll))))(lambda turn: store(load(turn, first, per_panel)))

        finish_operand(threads)

    return body


def _hidden(n: int) -> Int:
    """n, which the compiler does not know: else it unrolls the loop, and a row takes more registers than there are."""
    return Int(utils.inline_ptx(f"mov.b32 $0, {n};", result_types=simt.i32(), has_side_effects=True))


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


def multiply(format: str, tokens: int, chunk: int, cols: int, rows: int, scale_bytes: int, swizzle: int):
    """Tile `step`, [64, chunk], of an item's weights times part `part` of the N operand, with the scales, plus `total`.

    A warp multiplies 16 rows, in the order of `own_row`, with mma.sync: its latency is short, and no warp waits for
    another.

    Args:
      rows: rows of one matrix in the tile; the scales of a matrix's rows lie together, matrices `scale_bytes` apart.
      swizzle: of the tile, in bytes.
    """
    per_row, blocks, groups = cols // MX_BLOCK, chunk // MX_BLOCK, tokens // 8
    packed, together = STORED[format][1] == 2, 4 if format == BLOCK128 else 1  # blocks that share a scale
    block_bytes, row_bytes = MX_BLOCK // STORED[format][1], chunk // STORED[format][1]
    # 4 scales in one load where all rows begin at a multiple of 4.
    load, per_load = ("u32", 4) if per_row % 4 == 0 and blocks % 4 == 0 else ("u16", 2)

    def body(_ctx, values, scales, begins, operand, step, part, total):
        t = simt.thread() % WARPGROUP
        begins, step, part = (Int(a.registers.item()) for a in (begins, step, part))
        row, quad, lane = own_row(t, True), t % 4, t % LANES
        scales_from = Int(simt.address(scales)) + (row // rows) * scale_bytes + (
            (begins + step * (blocks // 4)) * 4 if together == 4 else (row % rows) * per_row + step * blocks)
        totals = [[vector.extract(v, [], [i]) for i in range(2)] for v in total.registers.flat]
        # The swizzle XORs bits of the row, which is the same in all atoms of a thread.
        row_from = Int(simt.address(values)) + (row // 8) * (8 * row_bytes) + (row % 8) * swizzle
        mask = ((((row % 8) * swizzle) // 128) & (swizzle // 16 - 1)) << 4
        places = [row_from + ((quad * (block_bytes // 4) + first) ^ mask) for first in range(0, swizzle, block_bytes)]
        # B: 8 tokens, 4 x 8 columns; a lane says where one of 32 rows of 16 bytes is.
        token = lane % 8
        operand_from = Int(simt.address(operand)) + part * (chunk // 64 * tokens * 128) + token * 128
        columns = [operand_from + (((lane // 8 + 4 * odd) ^ token) << 4) for odd in range(2)]

        def words(block):
            """Of rows 0 and 8, 8 values each."""
            byte = block * block_bytes
            kind, results = ("b32 $0", 1) if packed else ("v2.b32 {$0, $1}", 2)
            return [utils.inline_ptx(
                f"ld.shared.{kind}, [${results}+{half * 8 * row_bytes + byte // swizzle * 8 * swizzle}];",
                places[byte % swizzle // block_bytes].v, result_types=[simt.i32()] * results, has_side_effects=True)
                for half in range(2)]

        def b_fragments(block, group):
            return simt.load_matrices(columns[block % 2], (block // 2 * groups + group) * 1024)

        def load_scale(kind, offset):
            return Int(utils.inline_ptx(f"ld.shared.{kind} $0, [$1+{offset}];", scales_from.v, result_types=simt.i32(),
                                        has_side_effects=True))

        if together == 4:
            scale_words = [load_scale("u32", 4 * i) for i in range(blocks // 4)]
        else:
            scale_words = {(half, first): load_scale(load, half * 8 * per_row + first)
                           for half in range(2) for first in range(0, blocks, per_load)}

        def scale_factors(block):
            """2^-SHIFT times the scales of rows 0 and 8."""
            if together == 4:
                return [arith.mulf(scale_words[block // 4].float(), arith.constant(ir.F32Type.get(), 2.0**-SHIFT))] * 2
            return [_scale(scale_words[half, block // per_load * per_load], block % per_load,
                           SHIFT - E2M1_GAIN * packed) for half in range(2)]

        zero = arith.constant(ir.F32Type.get(), 0.0)
        loaded = [(words(block), [b_fragments(block, g) for g in range(groups)]) for block in range(min(AHEAD, blocks))]
        for block in range(blocks):
            if block + AHEAD < blocks:
                loaded.append((words(block + AHEAD), [b_fragments(block + AHEAD, g) for g in range(groups)]))
            halves, b = loaded[block]
            pairs = [_to_f16(format, of_row) for of_row in halves]
            a = [[pairs[half][2 * k16 + k8] for k8 in range(2) for half in range(2)] for k16 in range(2)]
            if block % together == 0:
                sums, factors = [[zero] * 4 for _ in range(groups)], scale_factors(block)
            for g in range(groups):
                products = sums[g]
                for k16 in range(2):
                    products = simt.multiply_add("f16", a[k16], b[g][2 * k16:2 * k16 + 2], products)
                sums[g] = products
                if (block + 1) % together:
                    continue
                for half in range(2):  # registers: columns by 8, then rows 0 and 8
                    pair = totals[2 * g + half]
                    for n in range(2):
                        pair[n] = llvm.intr_fma(products[2 * half + n], factors[half], pair[n])
        pair_type = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(total.registers.shape, object)
        registers.flat[:] = [vector.from_elements(pair_type, pair) for pair in totals]
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return body


AHEAD = 2  # blocks of 32 columns that are loaded before the one that is multiplied


def _to_f16(format: str, words) -> list:
    """4 pairs of float16 from 8 values, as in PAIRS."""
    if STORED[format][1] == 2:  # to two words of E4M3: the low nibbles of the bytes, and the high ones
        word = Int(words[0])
        words = [((word << 2) & 0x1C1C1C1C | (word << 4) & -0x7F7F7F80).v,
                 ((word >> 2) & 0x1C1C1C1C | word & -0x7F7F7F80).v]
    code = _TO_F16.format(type=PTX_TYPE[format])
    return [pair for word in words for pair in utils.inline_ptx(code, word, result_types=[simt.i32()] * 2)]


_TO_F16 = """{{
    .reg .b16 lo, hi;
    mov.b32 {{lo, hi}}, $2;
    cvt.rn.f16x2.{type} $0, lo;
    cvt.rn.f16x2.{type} $1, hi;
}}"""


def _scale(word: Int, byte: int, down: int) -> ir.Value:
    """2^(s - 127 - down) of one byte s, 0 for s = 0, NaN for 255."""
    shift = 23 - 8 * byte
    bits = (word << shift if shift > 0 else word >> -shift) & 0x7F800000
    f32 = ir.F32Type.get()
    # f - f * (1 - 2^-down) is exact, and inf - inf where the byte is 255.
    return llvm.intr_fma(bits.float(), arith.constant(f32, 2.0**-down - 1), bits.float())


def multiply_plain(format, values, scales, begins, operand, step, part, total, *, chunk: int, cols: int, rows: int):
    """`multiply` for the interpreter: arrays instead of references."""
    matrices, blocks = 64 // rows, chunk // MX_BLOCK
    tokens, per_row = operand.shape[1], cols // MX_BLOCK
    if format == BLOCK128:
        flat = lax.dynamic_slice_in_dim(scales.reshape(matrices, -1), begins, cols // 128, 1)
        flat = jnp.repeat(jnp.repeat(flat, rows, axis=0), 4, axis=1)
    else:
        flat = e8m0_to_f32(scales.reshape(matrices, -1)[:, :rows * per_row].reshape(64, per_row))
    factors = lax.dynamic_slice_in_dim(flat, step * blocks, blocks, 1) * jnp.float32(2.0**-SHIFT)
    columns = operand.astype(jnp.float32).swapaxes(0, 1).reshape(tokens, -1, MX_BLOCK)
    columns = lax.dynamic_slice_in_dim(columns, part * blocks, blocks, 1)
    elements = e2m1_from_codes(unpack_nibbles(values)) if STORED[format][1] == 2 else values.astype(jnp.float32)
    products = jnp.einsum("nbi,tbi->ntb", elements.reshape(64, blocks, MX_BLOCK), columns)
    return total + jnp.sum(products * factors[:, None], axis=2)
