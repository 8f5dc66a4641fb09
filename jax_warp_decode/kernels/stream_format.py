"""How the kernels of `shared_decode` read each weight format: the table `STREAM_FORMATS`, one row per format.

Weights go through a ring in shared memory as they are stored. Those of bfloat16 meet rows in bfloat16 there; all others
become float16 in registers, exactly, and meet rows in float16, see `shared_half`. A row of the table says how they are
stored, how a word of them becomes pairs of float16, and where their scales come in:

    ring    scales of blocks, which are copied with the weights: they multiply float32 sums over a block, or, where
            less than 32 values share one ("nvfp4"), the float16 values, which is exact
    factor  scales of a row or of an expert, which multiply the finished sums
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils

from jax_warp_decode.formats import FORMATS
from jax_warp_decode.formats.elements import e2m1_from_codes, unpack_nibbles
from jax_warp_decode.formats.integer import INT4_OFFSET
from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.simt import Int


@dataclasses.dataclass(frozen=True)
class Ring:
    """The scales that are copied with the weights.

    Attributes:
      rows, cols: what one of them covers.
      dtype: of them; uint8 where they are one byte.
    """

    rows: int
    cols: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class StreamFormat:
    """How the kernels of `shared_decode` read one format.

    Attributes:
      bits: of a value, as stored.
      dtype: of the array that holds the values.
      pairs: words of 8 adjacent values -> four pairs of float16, the values in the order of `order`, up to `gain`.
        None for bfloat16, which stays what it is.
      plain: the stored array -> float32 values, for the interpreter.
      gain: exponent; what `pairs` yields has to be multiplied by 2^gain.
      ring: its scales in the ring, or None.
      factor: "row" or "expert", what has a scale that multiplies finished sums, or "".
    """

    bits: int
    dtype: jnp.dtype
    pairs: Callable[[list], list] | None
    plain: Callable[[jax.Array], jax.Array]
    gain: int = 0
    ring: Ring | None = None
    factor: str = ""

    @property
    def packing(self) -> int:
        """Values in one element of the array."""
        return self.dtype.itemsize * 8 // self.bits

    @property
    def half(self) -> bool:
        """Whether rows meet the weights in float16."""
        return self.pairs is not None

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        """Of 8 adjacent values, those in each pair."""
        return ((0, 1), (2, 3), (4, 5), (6, 7)) if self.packing == 1 else ((0, 2), (4, 6), (1, 3), (5, 7))

    @property
    def on_values(self) -> bool:
        """Whether the scales of the ring multiply values instead of sums over 32 of them and more."""
        return self.ring is not None and self.ring.cols < 32

    @property
    def on_sums(self) -> bool:
        return self.ring is not None and not self.on_values


# --------------------------------------------------------------------------------------------- words to float16 pairs


def as_they_are(words: list) -> list:
    return words


def fp8(kind: str, words: list) -> list:
    """Words of four E4M3 or E5M2 values: two convert in one instruction."""
    code = _FP8.format(kind=kind)
    return [pair for word in words for pair in utils.inline_ptx(code, word, result_types=[simt.i32()] * 2)]


def e2m1(words: list) -> list:
    """A word of eight, to two words of E4M3 with the same bits, 2^-6 of the value: low nibbles, then high ones."""
    word = Int(words[0])
    return fp8("e4m3x2", [((word << 2) & 0x1C1C1C1C | (word << 4) & -0x7F7F7F80).v,
                          ((word >> 2) & 0x1C1C1C1C | word & -0x7F7F7F80).v])


def int8(words: list) -> list:
    """Words of four in two's complement, whose highest bit is turned to make them unsigned."""
    return [pair for word in words for pair in _unsigned((Int(word) ^ -0x7F7F7F80).v, 128)]


def int4(words: list) -> list:
    """A word of eight nibbles of value + 8: low ones, then high ones."""
    word = Int(words[0])
    nibbles = (word & 0x0F0F0F0F).v, ((word >> 4) & 0x0F0F0F0F).v
    return [pair for four in nibbles for pair in _unsigned(four, INT4_OFFSET)]


def _unsigned(word, offset: int) -> list:
    """Four bytes less `offset`, exactly: beside 0x64 a byte n is the float16 1024 + n."""
    both = f"0x{(0x6400 + offset) * 0x10001:08X}"
    return utils.inline_ptx(_UNSIGNED.format(both=both), word, result_types=[simt.i32()] * 2)


_FP8 = """{{
    .reg .b16 lo, hi;
    mov.b32 {{lo, hi}}, $2;
    cvt.rn.f16x2.{kind} $0, lo;
    cvt.rn.f16x2.{kind} $1, hi;
}}"""
_UNSIGNED = """{{
    .reg .b32 lo, hi, less;
    mov.b32 less, {both};
    prmt.b32 lo, $2, 0x64646464, 0x4140;
    prmt.b32 hi, $2, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, lo, less;
    sub.rn.f16x2 $1, hi, less;
}}"""


# ----------------------------------------------------------------------------------------------------- the interpreter


def widen(values: jax.Array) -> jax.Array:
    return values.astype(jnp.float32)


def plain_e2m1(values: jax.Array) -> jax.Array:
    return e2m1_from_codes(unpack_nibbles(values))


def plain_int4(values: jax.Array) -> jax.Array:
    return unpack_nibbles(values).astype(jnp.float32) - jnp.float32(INT4_OFFSET)


# --------------------------------------------------------------------------------------------------------------- table


def _row(name: str, pairs, plain=widen, gain: int = 0, scale_dtype=None) -> StreamFormat:
    spec, (rows, cols) = FORMATS[name], FORMATS[name].block_shape
    ring, factor = None, "row" if rows else "expert"
    if rows and cols:
        dtype = jnp.dtype(scale_dtype or spec.scales_dtypes[0])
        ring = Ring(rows, cols, dtype if dtype.itemsize > 1 else np.dtype(np.uint8))
        factor = "expert" if spec.global_scale else ""
    return StreamFormat(spec.bits, spec.values_dtype, pairs, plain, gain, ring, factor)


_E4M3, _E5M2 = (functools.partial(fp8, kind) for kind in ("e4m3x2", "e5m2x2"))
# Where scales of blocks have another dtype than the format's first, its name follows.
STREAM_FORMATS = {
    "bf16": StreamFormat(16, jnp.dtype(jnp.bfloat16), None, widen),
    "f16": StreamFormat(16, jnp.dtype(jnp.float16), as_they_are, widen),
    "mxfp8": _row("mxfp8", _E4M3),
    "mxfp8_e5m2": _row("mxfp8_e5m2", _E5M2),
    "mxfp4": _row("mxfp4", e2m1, plain_e2m1, gain=6),
    "nvfp4": _row("nvfp4", e2m1, plain_e2m1, gain=6),
    "fp8_block128": _row("fp8_block128", _E4M3),
    "fp8_block128 bfloat16": _row("fp8_block128", _E4M3, scale_dtype=jnp.bfloat16),
    "fp8_channel": _row("fp8_channel", _E4M3),
    "fp8_tensor": _row("fp8_tensor", _E4M3),
    "int8_channel": _row("int8_channel", int8),
    "int4_group32": _row("int4_group32", int4, plain_int4),
    "int4_group32 float32": _row("int4_group32", int4, plain_int4, scale_dtype=jnp.float32),
}


def key(format: str, scale_dtype=None) -> str:
    """The row of the table for a weight format and the dtype of its scales.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels import stream_format
      >>> stream_format.key("mxfp8"), stream_format.key("fp8_block128", jnp.bfloat16)
      ('mxfp8', 'fp8_block128 bfloat16')
    """
    named = f"{format} {jnp.dtype(scale_dtype)}" if scale_dtype is not None else format
    return named if named in STREAM_FORMATS else format
