"""MXFP8 of the OCP Microscaling (MX) specification v1.0: 32 E4M3 values share one E8M0 scale.

An element is value * 2^(scale byte - 127). Both directions are exact bit arithmetic, because float32 arithmetic on the
CPU flushes subnormals, among them the smallest scale, 2^-127.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.formats.quantized import QuantizedArray

if TYPE_CHECKING:
    import qwix

BLOCK = 32  # elements per scale
E4M3_MAX = 448.0
E4M3_MAX_EXPONENT = 8  # 448 = 1.75 * 2^8
E4M3_MIN_EXPONENT = -6  # below it, values are multiples of 2^-9
E4M3_MANTISSA = 3
NAN_SCALE = 255

_MANTISSA = np.int32(0x007FFFFF)  # fields of a float32
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_HIDDEN_BIT = np.int32(0x00800000)
_SMALLEST_SCALE = np.int32(0x00400000)  # 2^-127, a subnormal
_NAN = np.int32(0x7FC00000)
_INPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def quantize_mxfp8(x: jax.Array) -> QuantizedArray:
    """Quantises blocks of 32 along the last axis to MXFP8 (OCP MX v1.0, section 6.3).

    The scale of a block is 2^(floor(log2(max |x|)) - 8), at least 2^-127; a block of zeros gets 2^-127. Values are
    rounded to nearest even and saturate at +-448, so the largest element of a block may shrink by up to 12.5 %. Finite
    input, float32 subnormals included, never gives NaN. The specification leaves inf and NaN open: here such an element
    makes its whole block NaN (scale byte 255, NaN values), so that it stays visible.

    Args:
      x: [..., N], N a multiple of 32; float32, bfloat16 or float16.

    Returns:
      QuantizedArray of format "mxfp8": values float8_e4m3fn [..., N], scales uint8 [..., N // 32].

    Raises:
      ArgumentError: for another dtype, or N not a multiple of 32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import quantize_mxfp8
      >>> q = quantize_mxfp8(jnp.full(32, 3.0))    # floor(log2 3) - 8 = -7
      >>> int(q.scales[0]) - 127, float(q.values[0])
      (-7, 384.0)
    """
    dtype = getattr(x, "dtype", None)
    if dtype not in _INPUT_DTYPES:
        raise ArgumentError(
            f"x: got {dtype if dtype is not None else type(x).__name__}, expected a float32, bfloat16 or float16 "
            f"array; convert it with astype")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ArgumentError(f"x: got shape {x.shape}, expected a last axis that is a multiple of {BLOCK}; pad it")
    return QuantizedArray(*_encode(jnp.asarray(x)), "mxfp8")


@jax.jit
def _encode(x):
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    bits = bits.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    magnitude = bits & _MAGNITUDE
    # Magnitudes order like integers, so the block maximum and its exponent need no float arithmetic.
    largest = jnp.max(magnitude, axis=-1, keepdims=True)
    bad = largest >= _INFINITY
    scale = jnp.maximum((largest >> 23) - np.int32(E4M3_MAX_EXPONENT), 0)

    scaled = jnp.minimum(_times_power_of_two(magnitude, np.int32(127) - scale), np.float32(E4M3_MAX))
    # Round to the E4M3 grid here; the cast is then exact, whatever rounding the backend gives it.
    exponent = (lax.bitcast_convert_type(scaled, jnp.int32) >> 23) - np.int32(127)
    grid = jnp.maximum(exponent, np.int32(E4M3_MIN_EXPONENT)) - np.int32(E4M3_MANTISSA)
    rounded = jnp.minimum(jnp.round(scaled * _power_of_two(-grid)) * _power_of_two(grid), np.float32(E4M3_MAX))
    rounded = jnp.where(bad, np.float32(np.nan), rounded)
    values = jnp.where(bits < 0, -rounded, rounded).astype(jnp.float8_e4m3fn)
    scales = jnp.where(bad, np.int32(NAN_SCALE), scale).astype(jnp.uint8)
    return values.reshape(x.shape), scales[..., 0]


def dequantize_mxfp8(values: jax.Array, scales: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Decodes MXFP8: value * 2^(scale byte - 127), exactly, for all 256 values and all 256 scale bytes.

    Scale byte 255 and the value codes 0x7F and 0xFF give NaN. Products beyond float32's range (at least 2^128) give
    inf. Products below 2^-126 are exact float32 subnormals; arithmetic that follows on the CPU, the cast to a narrower
    `dtype` included, may treat those as zero.

    Args:
      values: float8_e4m3fn [..., N].
      scales: [..., N // 32], the E8M0 bytes as uint8 or the same as float8_e8m0fnu.
      dtype: floating dtype of the result; the product is rounded to it once. float16 overflows beyond 65504.

    Raises:
      ArgumentError: for other dtypes (float8_e4m3fnuz among them) or shapes that do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import dequantize_mxfp8
      >>> ones = jnp.ones(64, jnp.float8_e4m3fn)
      >>> [float(v) for v in dequantize_mxfp8(ones, jnp.array([126, 134], jnp.uint8))[::32]]
      [0.5, 128.0]
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ArgumentError(f"dtype: got {dtype}, expected a floating dtype such as float32 or bfloat16")
    scales = jnp.asarray(scales)
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    QuantizedArray(values, scales, "mxfp8").check("mxfp8")
    return _decode(jnp.asarray(values), scales, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=2)
def _decode(values, scales, dtype):
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32).reshape(*scales.shape, BLOCK)
    scale = scales.astype(jnp.int32)[..., None]
    magnitude = bits & _MAGNITUDE
    # Multiplying by a power of two adds to the exponent field. Every nonzero E4M3 value is a normal float32 with three
    # mantissa bits, so that the shift into a subnormal loses nothing.
    exponent = (magnitude >> 23) + scale - np.int32(127)
    normal = magnitude + ((scale - np.int32(127)) << 23)
    subnormal = ((magnitude & _MANTISSA) | _HIDDEN_BIT) >> jnp.clip(np.int32(1) - exponent, 0, 31)
    product = jnp.where(exponent > 0, normal, subnormal)
    product = jnp.where(exponent >= 255, _INFINITY, product)
    product = jnp.where(magnitude == 0, np.int32(0), product)
    bad = (scale == NAN_SCALE) | (magnitude > _INFINITY)
    product = jnp.where(bad, _NAN, product | (bits & ~_MAGNITUDE))
    return lax.bitcast_convert_type(product, jnp.float32).reshape(values.shape).astype(dtype)


def to_qwix(q: QuantizedArray) -> "qwix.QArray":
    """Converts to a `qwix.QArray` that shares the values; its scales are float32 powers of two.

    Exact. qwix multiplies in floating point, so on the CPU it sees the scale byte 0 (2^-127, subnormal) as zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import from_qwix, quantize_mxfp8, to_qwix
      >>> q = to_qwix(quantize_mxfp8(jnp.full((2, 64), 3.0)))
      >>> q.qtype, q.scale.shape, float(q.scale[0, 0])
      ('mxfp8', (2, 2), 0.0078125)
      >>> from_qwix(q).format
      'mxfp8'
    """
    q.check("q")
    scale = jnp.asarray(q.scales).astype(jnp.int32)
    bits = jnp.where(scale == 0, _SMALLEST_SCALE, jnp.where(scale == NAN_SCALE, _NAN, scale << 23))
    return _qwix().QArray(q.values, lax.bitcast_convert_type(bits, jnp.float32), None, "mxfp8")


def from_qwix(qarray: "qwix.QArray") -> QuantizedArray:
    """Converts a symmetric `qwix.QArray` with E4M3 values and power-of-two scales per 32 of the last axis.

    `qwix.quantize(x, "mxfp8", tiled_axes={-1: 32})` makes such an array. qwix rounds its scales up where OCP MX rounds
    down, so its bytes differ from those of `quantize_mxfp8`; both are valid MXFP8.

    Raises:
      ArgumentError: for a zero point, other values, other tiles, or scales that are not powers of two. Inside `jit`
        scales have no values yet: there a scale that is not a power of two makes its block NaN.
    """
    if qarray.zero_point is not None:
        raise ArgumentError("qarray.zero_point: got an array, expected None: MXFP8 is symmetric")
    values, scale = qarray.qvalue, jnp.asarray(qarray.scale)
    want = (*values.shape[:-1], values.shape[-1] // BLOCK)
    if values.shape[-1] % BLOCK or scale.shape != want:
        raise ArgumentError(
            f"qarray.scale: got shape {scale.shape} for values {values.shape}, expected {want}: tiles of {BLOCK} along "
            f"the last axis; quantise with tiled_axes={{-1: {BLOCK}}}, swap axes first if the reduction is not last")
    if scale.dtype == jnp.float8_e8m0fnu:
        scales = lax.bitcast_convert_type(scale, jnp.uint8)
    else:
        bits = lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32)
        exponent, mantissa = bits >> 23, bits & _MANTISSA
        nan = (bits & _MAGNITUDE) > _INFINITY
        valid = (exponent > 0) & (exponent < 255) & (mantissa == 0) | (bits == _SMALLEST_SCALE) | nan
        if not isinstance(valid, jax.core.Tracer) and not bool(jnp.all(valid)):
            raise ArgumentError(
                "qarray.scale: got values that are not powers of two, expected 2^-127 to 2^127 as OCP MX has them; "
                "dequantise and use quantize_mxfp8, or quantise with qtype='mxfp8' in qwix")
        scales = jnp.where(valid & ~nan, exponent, np.int32(NAN_SCALE)).astype(jnp.uint8)
    q = QuantizedArray(values, scales, "mxfp8")
    q.check("qarray")
    return q


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent as float32 for exponents -126..127, zero below."""
    return lax.bitcast_convert_type(jnp.maximum(exponent + np.int32(127), 0) << 23, jnp.float32)


def _times_power_of_two(magnitude: jax.Array, exponent: jax.Array) -> jax.Array:
    """Float32 bits without sign, times 2^exponent; subnormal inputs count in full, results below 2^-126 may be zero."""
    normal = lax.bitcast_convert_type(magnitude, jnp.float32) * _power_of_two(exponent)
    subnormal = magnitude.astype(jnp.float32) * _power_of_two(exponent - np.int32(149))
    return jnp.where(magnitude < _HIDDEN_BIT, subnormal, normal)


def _qwix():
    try:
        import qwix
    except ImportError as e:
        raise UnsupportedError("to_qwix: the package qwix is not installed; pip install qwix") from e
    return qwix
