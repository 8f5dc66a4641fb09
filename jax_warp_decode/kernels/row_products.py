"""Sixteen weight rows of a warp times one activation on the tensor cores, for weights of a byte or less.

Converting narrow weights costs more than loading them, and a multiply-add for each value as much again. Here two values
convert to float16 in one instruction, and mma.m16n8k16 multiplies and adds eight values a lane in another one.

Its A operand, 16 by 16, are weights. A lane holds rows g and g + 8, with g its number / 4, and wants the same columns
of both. Which columns these are is free, as long as the B operand has the activations of the same columns: so a lane
reads 16 contiguous bytes of both rows, a *chunk*, as the one-row kernels do, and four lanes read 64 bytes of a row.

The columns of these four lanes lie under different scales, and the product sums over all of them. Its B operand has
eight columns, and one activation fills only one. So each block of 32 weights that shares a scale gets a column of its
own: column n of B has the activations of block n, and zeros for all others. After 256 weights of a row, eight blocks,
the accumulator holds eight sums a row, one for each block, and only they are multiplied by scales:

    total[row] += sum over n: (C[row, n] * factor[n]) * scale[row, n]

Activations are float16 with a power of two for each block of 32, the `factor`, which brings the largest |value| of the
block to [2^14, 2^15): bfloat16 stays exact down to 2^-31 of the largest of its block, and is rounded by at most
2^-39 of it below, where float32 sums have lost it long ago (2^-24 of the largest term). Of float32 activations, that
would leave 11 bits; they are *split* into a float16 number and what it leaves over, times 2^11, with four columns each.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.simt import LANES, Int

QUAD = 4  # lanes of a row
CHUNK_BYTES = 16  # of a lane and load
COLUMNS = 8  # of an accumulator
BLOCK = 32  # values under one factor, and one scale of MX formats
ROWS = 16  # of a product
SHARED_BYTES = 200 * 1024  # for activations
ZERO_BYTES = 64  # of zeros in shared memory, for lanes without activations of a chunk


@dataclasses.dataclass(frozen=True)
class NarrowFormat:
    """How weights of a format become float16.

    Attributes:
      values: of a lane's chunk of 16 bytes.
      order: of 8 activations, as their weights come in the fragments.
      gain: exponent of what the float16 values have to be multiplied with.
      scale_cols, scale_bytes: columns under one scale, and its size; `stored` knows that of an array.
    """

    values: int
    order: tuple[int, ...]
    gain: int
    scale_cols: int
    scale_bytes: int

    def bytes(self, cols: int) -> int:
        return cols * CHUNK_BYTES // self.values


IN_ORDER, APART = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)
FORMATS = {
    "mxfp8": NarrowFormat(16, IN_ORDER, 0, 32, 1),
    "mxfp4": NarrowFormat(32, APART, 6, 32, 1),  # E2M1 bits in the place of E4M3 bits are the value times 2^-6
    "fp8_block128": NarrowFormat(16, IN_ORDER, 0, 128, 4),
}


def stored(*weights: Any) -> NarrowFormat:
    """The format of weights with the size of their scales, the widest: those of FP8 blocks may be bfloat16, too."""
    return dataclasses.replace(FORMATS[weights[0].format], scale_bytes=max(w.scales.dtype.itemsize for w in weights))


def operands(w: Any, spec: NarrowFormat) -> tuple[jax.Array, jax.Array]:
    """Of a kernel: values and scales, as they are stored unless these are narrower than those of another weight."""
    return w.values, w.scales if w.scales.dtype.itemsize == spec.scale_bytes else w.scales.astype(jnp.float32)


def check(config, format: str, cols: int, n: int, rows: int, sizes) -> None:
    """Raises `ArgumentError` unless products of tiles of `rows` rows can take a weight [n, cols].

    Args:
      sizes: () -> of the activations in shared memory, see `Walk.shared`.
    """
    if problem := _problem(format, cols, n, rows, sizes):
        raise ArgumentError(f"config: got {config} for {problem}; take None or another")


def _problem(format: str, cols: int, n: int, rows: int, sizes) -> str:
    if format not in FORMATS:
        return f"{format} weights, expected {' or '.join(FORMATS)}"
    multiple = n if FORMATS[format].scale_cols == BLOCK else math.gcd(n, 128)  # a tile lies under one row of scales
    if cols % 64 or not rows or multiple % rows:
        return f"[.., {n}, {cols}], expected columns in multiples of 64, and a tile's {rows} rows to divide {multiple}"
    values, factors = sizes()
    needed = values * 2 + factors * 4
    return f"{needed} bytes of activations, expected at most {SHARED_BYTES}" if needed > SHARED_BYTES else ""


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a warp walks along 16 * `tiles` rows of a weight with `cols` columns: `unroll` groups at a time.

    A group is what one accumulator takes, 256 columns, or 128 if activations are split. The groups whose loads are
    issued together are a batch.

    Attributes:
      spec: of the weights.
      cols: length of a row, a multiple of 64.
      tiles: products of 16 rows, which share the activations.
      apart: rows between two of them.
      unroll: groups of a batch.
      parts: that a row is cut into, walked by different warps.
      split: activations are float32.
    """

    spec: NarrowFormat
    cols: int
    tiles: int
    apart: int
    unroll: int
    parts: int = 1
    split: bool = False

    # ----------------------------------------------------------------------------------------------- geometry

    @property
    def halves(self) -> int:
        """Of an activation: what float16 holds, and the rest if it is split."""
        return 2 if self.split else 1

    @property
    def group(self) -> int:
        """Columns of a group."""
        return COLUMNS * BLOCK // self.halves

    @property
    def chunks(self) -> int:
        """Of a lane, in a group."""
        return self.group // (QUAD * self.spec.values)

    @property
    def batches(self) -> int:
        """Of a part."""
        return -(-self.cols // (self.group * self.unroll * self.parts))

    @property
    def padded(self) -> int:
        """Columns of an activation in shared memory."""
        return self.batches * self.parts * self.unroll * self.group

    @property
    def _row_bytes(self) -> int:
        return self.spec.bytes(self.cols)

    @property
    def _row_scales(self) -> int:
        return -(-self.cols // self.spec.scale_cols)

    def shared(self, rows: int) -> tuple[int, int]:
        """Sizes of the arrays in shared memory for `rows` activations: float16 values, and float32 factors."""
        values = self.halves * rows * self.padded
        return values + ZERO_BYTES // 2, values // BLOCK

    # ------------------------------------------------------------------------------------- weights, to registers

    def value_address(self, values, row: Int):
        """Of the lane's first bytes of a row of weights."""
        return simt.global_offset(simt.address(values), row, self._row_bytes, simt.thread() % QUAD * CHUNK_BYTES)

    def scale_address(self, scales, row: Int):
        """Of the lane's first scale in a row of scales."""
        blocks, size = self.spec.scale_cols // BLOCK, self.spec.scale_bytes
        own = self._first_block() // blocks * size
        return simt.global_offset(simt.address(scales), row, self._row_scales * size, own)

    def _first_block(self) -> Int:
        """Of the two neighbouring blocks of a group that the lane has the sums of."""
        return simt.thread() % (QUAD // self.halves) * 2

    def load(self, values, scales, group: Int) -> tuple[list, list]:
        """A batch of groups from `group` on, as it is stored: words of weights, and of scales.

        Args:
          values: addresses for rows g and g + 8 of the first product.
          scales: the same; of rows of scales.
        """
        words, scale_words = [], []
        for u in range(self.unroll):
            at = group + u
            left = Int(self.cols) - at * self.group - simt.thread() % QUAD * self.spec.values
            offset = _wide(at * self.spec.bytes(self.group))
            for tile, base, c in itertools.product(range(self.tiles), values, range(self.chunks)):
                byte = tile * self.apart * self._row_bytes + c * QUAD * CHUNK_BYTES
                address = arith.addi(base, offset)
                if self.cols == self.padded:
                    words += utils.inline_ptx(_LOAD.format(address=4, byte=byte), address,
                                              result_types=[simt.i32()] * 4, has_side_effects=True)
                else:
                    inside = arith.extui(simt.i32(), Int(c * QUAD * self.spec.values) < left)
                    words += utils.inline_ptx(_MASKED_LOAD.format(byte=byte), inside, address,
                                              result_types=[simt.i32()] * 4, has_side_effects=True)
            scale_words += self._load_scales(scales, at)
        return words, scale_words

    def _load_scales(self, scales, group: Int) -> list:
        spec, own, per_group = self.spec, self._first_block(), self.group // self.spec.scale_cols
        if spec.scale_cols > BLOCK:  # and so many rows: all of a tile lie under one
            own, tiles = own // (spec.scale_cols // BLOCK), 1
        else:
            tiles = self.tiles
        kind = "u32" if spec.scale_bytes == 4 else "u16"  # float32; bfloat16, or two exponents
        inside = arith.extui(simt.i32(), group * per_group + own < self._row_scales)
        offset = _wide(group * (per_group * spec.scale_bytes))
        return [utils.inline_ptx(_SCALE.format(kind=kind, byte=tile * self.apart * self._row_scales), inside,
                                 arith.addi(base, offset), result_types=simt.i32(), has_side_effects=True)
                for tile in range(tiles) for base in scales]

    # ------------------------------------------------------------------------------------------------- products

    def multiply(self, words: list, scale_words: list, totals: list, shared, rows: int, row: Int, group: Int,
                 share=None) -> list:
        """Adds the products of a batch to the totals: float32 for rows g and g + 8 of each product.

        Args:
          words, scale_words: of `load`.
          shared: references of the activations and the factors.
          rows: of activations that are there.
          row, group: the activation, and the first group of the batch.
          share: multiplies what is added, None for 1.
        """
        x, factors, zero = self._activations(shared, rows, row, group)
        owns = self._owns()
        f32, totals = ir.F32Type.get(), list(totals)
        each, each_scale = iter(words), iter(scale_words)
        for u in range(self.unroll):
            stored = [[[[next(each) for _ in range(4)] for _ in range(self.chunks)] for _ in range(2)]
                      for _ in range(self.tiles)]
            sums = [[arith.constant(f32, 0.0)] * 4 for _ in range(self.tiles)]
            for c in range(self.chunks):
                at = simt.select(owns[c], x + (u * self.group + c * QUAD * self.spec.values) * 2, zero)
                b = [word for byte in range(0, self.spec.values * 2, 16) for word in utils.inline_ptx(
                    f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{byte}];", at.v, result_types=[simt.i32()] * 4,
                    has_side_effects=True)]
                for tile in range(self.tiles):
                    pairs = [[p for word in stored[tile][half][c] for p in self._to_f16(word)] for half in range(2)]
                    for i in range(0, len(pairs[0]), 2):
                        a = [pairs[half][i + k] for k in range(2) for half in range(2)]
                        sums[tile] = simt.multiply_add("f16", a, b[i:i + 2], sums[tile])
            factor = utils.inline_ptx(f"ld.shared.v2.f32 {{$0, $1}}, [$2+{u * self.group // BLOCK * 4}];", factors.v,
                                      result_types=[f32] * 2, has_side_effects=True)
            if share is not None:
                factor = [arith.mulf(f, share) for f in factor]
            scales = None
            for tile in range(self.tiles):
                if self.spec.scale_cols == BLOCK or scales is None:
                    scales = [self._scales(next(each_scale)) for _ in range(2)]
                for half, n in itertools.product(range(2), range(2)):
                    part = arith.mulf(sums[tile][2 * half + n], factor[n])
                    totals[2 * tile + half] = llvm.intr_fma(part, scales[half][n], totals[2 * tile + half])
        return totals

    def _owns(self) -> list:
        """For each chunk, whether the lane has activations in the B operand: block g of the group, g its column."""
        lane = simt.thread() % LANES
        column, quarter = lane // QUAD, lane % QUAD
        lanes = BLOCK // self.spec.values  # that a block lies over
        blocks = QUAD // lanes  # of a chunk of four lanes
        mine = (column % blocks).equals(quarter // lanes)
        chunk = column % (self.group // BLOCK) // blocks
        return [arith.andi(mine, chunk.equals(c)) for c in range(self.chunks)]

    def _activations(self, shared, rows: int, row: Int, group: Int) -> tuple[Int, Int, Int]:
        """Where the lane's activations begin, the factors of its sums, and zeros."""
        lane = simt.thread() % LANES
        x, factors = (Int(simt.address(ref)) for ref in shared)
        zero, at, half = x + self.halves * rows * self.padded * 2, row * self.padded + group * self.group, Int(0)
        if self.split:  # the second half of the columns is the rest's
            half = Int(rows * self.padded)
        x = x + (at + half * (lane // QUAD // (self.group // BLOCK)) + lane % QUAD * self.spec.values) * 2
        first = at + half * (lane % QUAD // (QUAD // self.halves))
        return x, factors + (first // BLOCK + self._first_block()) * 4, zero

    def _to_f16(self, word) -> list:
        """Pairs of float16 from a word of stored values."""
        parts = [word]
        if self.spec.values == 32:
            w = Int(word)
            parts = [((w << 2) & 0x1C1C1C1C | (w << 4) & -0x7F7F7F80).v, ((w >> 2) & 0x1C1C1C1C | w & -0x7F7F7F80).v]
        return [half for part in parts for half in utils.inline_ptx(_TO_F16, part, result_types=[simt.i32()] * 2)]

    def _scales(self, word) -> list:
        """Of the lane's two columns of a sum, in float32."""
        if self.spec.scale_cols > BLOCK:
            return [(Int(word) << (32 - 8 * self.spec.scale_bytes)).float()] * 2
        return [_e8m0((Int(word) << shift) & 0x7F800000) for shift in (23, 15)]


def _e8m0(bits: Int):
    """2^(s - 127) from s in the exponent's place; 2^-127 for 0, NaN for 255."""
    power = bits.max(1 << 22).float()
    return llvm.intr_fma(power, arith.constant(ir.F32Type.get(), 0.0), power)  # infinity becomes NaN, others stay


def over_quads(value):
    """Sum over the four lanes of a row."""
    for lanes in (1, 2):
        bits = Int(arith.bitcast(simt.i32(), value))
        value = arith.addf(value, simt.shuffle(bits, lanes, 31, nvvm.ShflKind.bfly).float())
    return value


def pipelined(batches: Int, load, multiply, totals: list, between) -> list:
    """`totals = multiply(i, *load(i), totals)` for i < batches; a load is issued before the products of the one before.

    The first is issued before `between`, even if there are no batches.
    """
    loaded = load(Int(0))
    between()

    def body(i, carried):
        words, scales, *now = carried
        return [*load(Int(i) + 1), *multiply(Int(i), words, scales, now)]

    last = (batches - 1).max(0)
    words, scales, *totals = mgpu.fori(last.v, [*loaded, *totals])(body).results
    some, zero = Int(0) < batches, arith.constant(ir.F32Type.get(), 0.0)
    return [arith.select(some, total, zero) for total in multiply(last, words, scales, totals)]


def _wide(value: Int):
    return arith.extui(ir.IntegerType.get_signless(64), value.v)


_LOAD = "ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [${address}+{byte}];"
_MASKED_LOAD = """{{{{
    .reg .pred p;
    setp.ne.b32 p, $4, 0;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    @p {}
}}}}""".format(_LOAD.replace("{address}", "5"))
_SCALE = """{{
    .reg .pred p;
    setp.ne.b32 p, $1, 0;
    mov.b32 $0, 0;
    @p ld.global.nc.{kind} $0, [$2+{byte}];
}}"""
_TO_F16 = """{
    .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
}"""
