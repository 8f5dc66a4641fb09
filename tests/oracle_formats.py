"""Number formats in float64: tables of every code, encoding and decoding. NumPy only, independent of the package."""

import dataclasses
from typing import NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 32


def _float_table(exponent_bits, mantissa_bits, bias, specials=()):
    """Value of each code of a small float; `specials` replace the positive codes from the top, in order."""
    code = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
    significand = np.where(exponent == 0, mantissa, mantissa + 2**mantissa_bits)
    positive = significand * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)
    positive[len(code) - len(specials):] = specials
    return np.concatenate([positive, -positive])


E4M3 = _float_table(4, 3, 7, [np.nan])  # value of each byte; 0x7F and 0xFF are NaN, there is no inf
E5M2 = _float_table(5, 2, 15, [np.inf, np.nan, np.nan, np.nan])
E2M1 = _float_table(2, 1, 1)  # 16 codes, neither NaN nor inf
INT8 = np.concatenate([np.arange(128.0), np.arange(-128.0, 0.0)])
INT4 = np.arange(16) - 8.0  # stored with 8 added
E8M0 = np.array([2.0 ** (byte - 127) for byte in range(255)] + [np.nan])


def bytes_of(a):
    """One-byte dtypes (float8_e4m3fn, float8_e8m0fnu, uint8) as uint8."""
    return np.ascontiguousarray(a).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class OracleFormat:
    """A format as its sources describe it: the table of its codes and what a scale covers.

    block is (rows, columns), None the whole axis. emax is set where the scale is a shared exponent (OCP MX).
    """

    table: np.ndarray
    dtype: type
    block: tuple
    scales_dtype: type
    emax: int | None = None
    largest: float = 0.0  # code value that the largest of a block is scaled to, where the scale is a number
    global_scale: bool = False

    @property
    def packed(self):
        return len(self.table) == 16


FORMATS = {
    "mxfp8": OracleFormat(E4M3, ml_dtypes.float8_e4m3fn, (1, 32), np.uint8, emax=8),
    "mxfp8_e5m2": OracleFormat(E5M2, ml_dtypes.float8_e5m2, (1, 32), np.uint8, emax=15),
    "mxfp4": OracleFormat(E2M1, np.uint8, (1, 32), np.uint8, emax=2),
    "nvfp4": OracleFormat(E2M1, np.uint8, (1, 16), ml_dtypes.float8_e4m3fn, largest=6, global_scale=True),
    "fp8_block128": OracleFormat(E4M3, ml_dtypes.float8_e4m3fn, (128, 128), np.float32, largest=448),
    "fp8_channel": OracleFormat(E4M3, ml_dtypes.float8_e4m3fn, (1, None), np.float32, largest=448),
    "fp8_tensor": OracleFormat(E4M3, ml_dtypes.float8_e4m3fn, (None, None), np.float32, largest=448),
    "int8_channel": OracleFormat(INT8, np.int8, (1, None), np.float32, largest=127),
    "int4_group32": OracleFormat(INT4, np.uint8, (1, 32), ml_dtypes.bfloat16, largest=7),
}


class Quantized(NamedTuple):
    """A weight [..., N] in a format, in NumPy: codes, scales of the rank of the weight, a global scale or None."""

    values: np.ndarray
    scales: np.ndarray
    format: str = "mxfp8"
    global_scale: np.ndarray | None = None

    def decode(self, *index):
        """float64 values of `self[index]`, an index of leading axes."""
        rule = FORMATS[self.format]
        codes = bytes_of(self.values[index])
        if rule.packed:  # element 2j is the low nibble of byte j
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        scales = self.scales[index]
        scales = E8M0[scales] if rule.emax is not None else scales.astype(np.float64)
        elements = rule.table[codes] * spread(scales, codes.shape, rule.block)
        return elements if self.global_scale is None else elements * self.global_scale[index].astype(np.float64)

    def to_jax(self):
        import jax.numpy as jnp

        from jax_warp_decode.formats import QuantizedArray

        parts = (None if a is None else jnp.asarray(a) for a in (self.values, self.scales, self.global_scale))
        values, scales, global_scale = parts
        return QuantizedArray(values, scales, self.format, global_scale)


def spread(scales, shape, block):
    """Scales repeated for each element of their blocks, the partial ones at the edges cut off."""
    for axis in (-2, -1)[-len(shape):]:
        scales = np.repeat(scales, block[axis] or shape[axis], axis).take(range(shape[axis]), axis)
    return scales


def block_max(x, block):
    """Largest magnitude of each block of the last two axes."""
    x = np.abs(x)
    for axis in (-2, -1)[-x.ndim:]:
        starts = range(0, x.shape[axis], block[axis] or x.shape[axis])
        x = np.maximum.reduceat(x, starts, axis)
    return x


def nearest_codes(x, table):
    """Codes of the finite table values nearest to x: a tie takes the even code, what is beyond the last saturates."""
    x = np.asarray(x, np.float64)
    half = len(table) // 2
    if table is INT4:
        return (np.clip(np.rint(x), -8, 7) + 8).astype(np.uint8)
    if table is INT8:
        return np.clip(np.rint(x), -128, 127).astype(np.int8).view(np.uint8)
    positive = table[:half][np.isfinite(table[:half])]
    middles = (positive[1:] + positive[:-1]) / 2
    code = np.searchsorted(middles, np.abs(x))
    tie = (code < len(middles)) & (np.abs(x) == middles[np.minimum(code, len(middles) - 1)])
    return (code + (tie & (code % 2 == 1)) + half * np.signbit(x)).astype(np.uint8)


def fit_scales(x, format):
    """(scales, global scale or None) for finite x [..., N]; scales in float64 before they are rounded to their dtype.

    They follow OCP MX v1.0, or put the largest of a block at the largest code; a scale is at least the smallest that
    its dtype has, 2^-126 of float32.
    """
    x, rule = np.asarray(x, np.float64), FORMATS[format]
    largest = block_max(x, rule.block)
    if rule.emax is not None:
        exponent = np.where(largest > 0, np.frexp(largest)[1] - 1.0, -np.inf)
        return np.clip(exponent - rule.emax, -127, 127) + 127, None
    if not rule.global_scale:
        return np.maximum(largest / rule.largest, 2.0**-126), None
    global_scale = np.maximum(block_max(x, (None, None)) / (448 * rule.largest), 2.0**-126).astype(np.float32)
    return np.maximum(largest / rule.largest / global_scale, 2.0**-9), global_scale


def encode(x, format, scales=None, global_scale=None):
    """Finite x [..., N] in a format, with given scales or those of `fit_scales`."""
    x, rule = np.asarray(x, np.float64), FORMATS[format]
    if scales is None:
        scales, global_scale = fit_scales(x, format)
        scales = scales.astype(rule.scales_dtype)
    factor = np.exp2(scales.astype(np.float64) - 127) if rule.emax is not None else scales.astype(np.float64)
    factor = factor if global_scale is None else factor * global_scale
    codes = nearest_codes(x / spread(factor, x.shape, rule.block), rule.table)
    if rule.packed:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return Quantized(codes.view(rule.dtype), scales, format, global_scale)


def decode_mx(values, scales):
    """E4M3 values [..., N] with E8M0 scales [..., N // 32] -> float64 [..., N]."""
    return Quantized(values, scales).decode()


def encode_mx(x):
    """Finite x [..., N] -> (values float8_e4m3fn [..., N], scales uint8 [..., N // 32]) by the rule of OCP MX v1.0."""
    return encode(x, "mxfp8")[:2]
