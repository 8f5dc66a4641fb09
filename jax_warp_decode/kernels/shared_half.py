"""Weights times float16 rows, for the shared-expert kernels: all formats but bfloat16. See `stream_format`.

Every value becomes a float16 exactly, and two convert in a few instructions. The scale of a block of 32 goes to the
float32 sums of its products:

    total[n, t] += 2^(scale[n, block] - 127 - 22) * sum over the block of element[n, i] * f16[t, i]

"fp8_block128" does the same with its float32 scales and sums over 128. Formats with one scale for a row or an expert
sum up everything, and `rescale` multiplies. An NVFP4 scale of 16 values multiplies them: E2M1 times E4M3 is a float16.

float16 wants rows of known size: `gather` multiplies each by the power of two that brings its largest |value| to
[2^14, 2^15). Multiplying by powers of two is exact, so what is left of a row x is the rounding of `to_float16`:

    bfloat16  exact down to 2^-31 of the row's largest |x|; below, an error of at most 2^-39 of the largest |x|
    float32   rounded to 11 bits, an error of at most 2^-11 of the value, or 2^-39 of the largest |x|
    float16   (given as float32) exact down to 2^-28 of the row's largest |x|; below, as the others

An error of 2^-39 is far below what float32 sums lose on the largest term, 2^-24. Rows with inf or NaN keep them, and
give inf and NaN in their own results only. The 2^-22 keeps the sums finite while the |weights| of a row add up to
less than 2^134; `rescale` takes it back, and the factors of the rows. The scale 2^-127 counts as 0,
and float32 or bfloat16 scales of blocks lose bits below 2^-104.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.kernel_format import MX_BLOCK, e8m0_to_f32
from jax_warp_decode.kernels.shared_simt import finish_operand, load_words, own_row
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int
from jax_warp_decode.kernels.stream_format import STREAM_FORMATS, Ring

LARGEST = 14  # exponent of the largest value of a row, as float16
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
                    for p, (low, high) in enumerate(STREAM_FORMATS[format].order):
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


def rescale(format: str):
    """(a finished sum, the factor f of its column, the scale of its row or None) -> what it stands for.

    That is sum * scale * 2^(f - 127), where the exponent may be more than float32 has.
    """
    row = STREAM_FORMATS[format]

    def apply(value, factor: Int, scale):
        if not row.on_sums:
            value = arith.mulf(value, _power(row.gain - SHIFT))
        if scale is not None:
            value = arith.mulf(value, scale)
        first = factor.min(254)
        return arith.mulf(arith.mulf(value, (first << 23).float()), ((factor - first + 127) << 23).float())

    return apply


def rescale_plain(format: str, values, factors, scale):
    """`rescale` for the interpreter: all columns at once."""
    if not STREAM_FORMATS[format].on_sums:
        values = values * jnp.float32(2.0**-SHIFT)
    if scale is not None:
        values = values * scale
    first = jnp.minimum(factors, jnp.int32(254))
    for field in (first, factors - first + jnp.int32(127)):
        values = values * lax.bitcast_convert_type(field << 23, jnp.float32)
    return values


def _power(exponent: int) -> ir.Value:
    return arith.constant(ir.F32Type.get(), 2.0**exponent)


# ------------------------------------------------------------------------------------------------------------ products


def multiply(format: str, tokens: int, chunk: int, cols: int, rows: int, scale_bytes: int, swizzle: int):
    """Tile `step`, [64, chunk], of an item's weights times part `part` of the N operand, with the scales of its ring,
    plus `total`.

    A warp multiplies 16 rows, in the order of `own_row`, with mma.sync: its latency is short, and no warp waits for
    another.

    Args:
      rows: rows of one matrix in the tile; the scales of a matrix's rows lie together, matrices `scale_bytes` apart.
      swizzle: of the tile, in bytes.
    """
    row_format = STREAM_FORMATS[format]
    blocks, groups, bits = chunk // MX_BLOCK, tokens // 8, row_format.bits
    block_bytes, row_bytes = MX_BLOCK * bits // 8, chunk * bits // 8
    # Blocks of 32 columns whose products are summed before a scale; all, where the sums have none.
    ring = row_format.ring
    together = ring.cols // MX_BLOCK if ring and row_format.on_sums else 0

    def body(_ctx, values, operand, part, total, *scales_of):
        t = simt.thread() % WARPGROUP
        part = Int(part.registers.item())
        row, quad, lane = own_row(t, True), t % 4, t % LANES
        totals = [[vector.extract(v, [], [i]) for i in range(2)] for v in total.registers.flat]
        # The swizzle XORs bits of the row, which is the same in all atoms of a thread.
        row_from = Int(simt.address(values)) + (row // 8) * (8 * row_bytes) + (row % 8) * swizzle
        mask = ((((row % 8) * swizzle) // 128) & (swizzle // 16 - 1)) << 4
        places = [row_from + ((quad * (block_bytes // 4) + first) ^ mask) for first in range(0, swizzle, block_bytes)]
        # B: 8 tokens, 4 x 8 columns; a lane says where one of 32 rows of 16 bytes is.
        token = lane % 8
        operand_from = Int(simt.address(operand)) + part * (chunk // 64 * tokens * 128) + token * 128
        columns = [operand_from + (((lane // 8 + 4 * odd) ^ token) << 4) for odd in range(2)]
        scales = None
        if ring:
            start, begins, step = scales_of
            begins, step = (Int(a.registers.item()) for a in (begins, step))
            start = Int(simt.address(start)) + (row // rows) * scale_bytes
            scales = _Scales(ring, row_format.gain, start, row % rows, quad, begins, step, cols, chunk)

        def words(block):
            """Of rows 0 and 8, 8 values each."""
            byte, kind = block * block_bytes, _WORDS[bits]
            return [utils.inline_ptx(
                f"ld.shared.{kind}, [${bits // 4}+{half * 8 * row_bytes + byte // swizzle * 8 * swizzle}];",
                places[byte % swizzle // block_bytes].v, result_types=[simt.i32()] * (bits // 4), has_side_effects=True)
                for half in range(2)]

        def b_fragments(block, group):
            return simt.load_matrices(columns[block % 2], (block // 2 * groups + group) * 1024)

        zero = arith.constant(ir.F32Type.get(), 0.0)
        loaded = [(words(block), [b_fragments(block, g) for g in range(groups)]) for block in range(min(AHEAD, blocks))]
        for block in range(blocks):
            if block + AHEAD < blocks:
                loaded.append((words(block + AHEAD), [b_fragments(block + AHEAD, g) for g in range(groups)]))
            halves, b = loaded[block]
            pairs = [row_format.pairs(of_row) for of_row in halves]
            if row_format.on_values:
                pairs = [scales.times(half, block * MX_BLOCK, of_row) for half, of_row in enumerate(pairs)]
            a = [[pairs[half][2 * k16 + k8] for k8 in range(2) for half in range(2)] for k16 in range(2)]
            if together and block % together == 0:
                sums = [[zero] * 4 for _ in range(groups)]
                factors = [scales.factor(half, block * MX_BLOCK) for half in range(2)]
            for g in range(groups):  # registers: columns by 8, then rows 0 and 8
                products = sums[g] if together else totals[2 * g] + totals[2 * g + 1]
                for k16 in range(2):
                    products = simt.multiply_add("f16", a[k16], b[g][2 * k16:2 * k16 + 2], products)
                if not together:
                    totals[2 * g:2 * g + 2] = products[:2], products[2:]
                    continue
                sums[g] = products
                if (block + 1) % together:
                    continue
                for half in range(2):
                    pair = totals[2 * g + half]
                    for n in range(2):
                        pair[n] = llvm.intr_fma(products[2 * half + n], factors[half], pair[n])
        pair_type = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(total.registers.shape, object)
        registers.flat[:] = [vector.from_elements(pair_type, list(pair)) for pair in totals]
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return body


AHEAD = 2  # blocks of 32 columns that are loaded before the one that is multiplied
# Loads of 8 values, by bits of one.
_WORDS = {4: "b32 $0", 8: "v2.b32 {$0, $1}", 16: "v4.b32 {$0, $1, $2, $3}"}


class _Scales:
    """The scales of a stage that a thread needs, loaded: of rows `row` and `row` + 8 of a matrix, which has its scales
    at `start`. Blocks of several rows: both rows have the same, from scale `begins` on."""

    def __init__(self, ring: Ring, gain: int, start: Int, row: Int, quad: Int, begins: Int, step: Int, cols: int,
                 chunk: int):
        shared, self.columns, self.size = ring.rows, ring.cols, ring.dtype.itemsize
        self.gain, self.quad = gain, quad
        per_row, nbytes = cols // self.columns * self.size, chunk // self.columns * self.size
        self.next = 8 * per_row if shared == 1 else 0
        start = start + step * nbytes + (row * per_row if shared == 1 else begins * self.size)
        # Four bytes in one load where all rows begin at a multiple of 4.
        self.per_load = self.size if shared > 1 else 4 if per_row % 4 == 0 and nbytes % 4 == 0 else 2
        self.words = {at: Int(utils.inline_ptx(f"ld.shared.u{8 * self.per_load} $0, [$1+{at}];", start.v,
                                               result_types=simt.i32(), has_side_effects=True))
                      for half in {0, self.next} for at in range(half, half + nbytes, self.per_load)}

    def _word(self, half: int, column: int) -> tuple[Int, int]:
        """The word with the scale of a column, and which byte of it that is."""
        byte = column // self.columns * self.size
        return self.words[half * self.next + byte // self.per_load * self.per_load], byte % self.per_load

    def factor(self, half: int, column: int) -> ir.Value:
        """2^(gain - SHIFT) times the scale of the block from a column on; only formats with E8M0 have a gain."""
        word, byte = self._word(half, column)
        if self.size == 1:
            return _scale(word, byte, SHIFT - self.gain)
        bits = word if self.size == 4 else word & -65536 if byte else word << 16
        return arith.mulf(bits.float(), _power(-SHIFT))

    def times(self, half: int, column: int, pairs: list) -> list:
        """A thread's 8 values of the 32 from a column on, times the E4M3 scale of the 16 that they are among."""
        word, byte = self._word(half, column)
        selector = (self.quad // 2 + byte) * 0x11  # two times the byte
        scale = utils.inline_ptx(_E4M3_PAIR, word.v, selector.v, result_types=simt.i32())
        return [utils.inline_ptx("mul.rn.f16x2 $0, $1, $2;", pair, scale, result_types=simt.i32()) for pair in pairs]


_E4M3_PAIR = """{
    .reg .b32 both;
    .reg .b16 lo, hi;
    prmt.b32 both, $1, 0, $2;
    mov.b32 {lo, hi}, both;
    cvt.rn.f16x2.e4m3x2 $0, lo;
}"""


def _scale(word: Int, byte: int, down: int) -> ir.Value:
    """2^(s - 127 - down) of one byte s, 0 for s = 0, NaN for 255."""
    shift = 23 - 8 * byte
    bits = (word << shift if shift > 0 else word >> -shift) & 0x7F800000
    f32 = ir.F32Type.get()
    # f - f * (1 - 2^-down) is exact, and inf - inf where the byte is 255.
    return llvm.intr_fma(bits.float(), arith.constant(f32, 2.0**-down - 1), bits.float())


def multiply_plain(format, values, operand, part, total, scales, begins, step, *, chunk: int, cols: int, rows: int):
    """`multiply` for the interpreter: arrays instead of references."""
    row, tokens = STREAM_FORMATS[format], operand.shape[1]
    elements, columns = row.plain(values), operand.astype(jnp.float32).swapaxes(0, 1).reshape(tokens, -1)
    columns = lax.dynamic_slice_in_dim(columns, part * jnp.int32(chunk), chunk, 1)
    if not row.ring:
        return total + jnp.dot(elements, columns.T, preferred_element_type=jnp.float32)
    shared, block, flat = row.ring.rows, row.ring.cols, scales.reshape(64 // rows, -1)
    per_row, per_stage = cols // block, chunk // block
    if shared > 1:
        flat = jnp.repeat(lax.dynamic_slice_in_dim(flat, begins, per_row, 1), rows, axis=0)
    else:
        flat = flat[:, :rows * per_row].reshape(64, per_row)
    flat = lax.dynamic_slice_in_dim(flat, step * jnp.int32(per_stage), per_stage, 1)
    if row.on_values:
        factors = lax.bitcast_convert_type(flat, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        factors = e8m0_to_f32(flat) if flat.dtype == jnp.uint8 else flat.astype(jnp.float32)
        factors = factors * jnp.float32(2.0**-SHIFT)
    products = jnp.einsum("nbi,tbi->ntb", elements.reshape(64, -1, block), columns.reshape(tokens, -1, block))
    return total + jnp.sum(products * factors[:, None], axis=2)
