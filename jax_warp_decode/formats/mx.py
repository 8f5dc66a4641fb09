"""Shared exponents of the OCP Microscaling (MX) specification v1.0, and its eight-bit formats: "mxfp8", "mxfp8_e5m2".

32 elements share one E8M0 scale; a value is element * 2^(scale byte - 127). Both directions are exact bit arithmetic,
because float32 arithmetic on the CPU flushes subnormals, among them the smallest scale, 2^-127.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_warp_decode.formats.elements import (
    E4M3,
    E5M2,
    HIDDEN_BIT,
    INFINITY,
    MAGNITUDE,
    NAN_SCALE,
    Element,
    power_of_two,
    round_to_element,
    times_e8m0,
)
from jax_warp_decode.formats.quantized import Format, QuantizedArray

BLOCK = 32  # elements per scale


def encode_mx(x: jax.Array, element: Element) -> tuple[jax.Array, jax.Array]:
    """Blocks of 32 along the last axis: element values in float32 [..., N] and scale bytes [..., N // 32].

    The rule is that of section 6.3: the scale is 2^(floor(log2(max |x|)) - the element type's largest exponent), at
    least 2^-127; elements are rounded to nearest even and saturate. A block with inf or NaN gets scale byte 255 and NaN
    elements.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    bits = bits.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    magnitude = bits & MAGNITUDE
    # Magnitudes order like integers, so the block maximum and its exponent need no float arithmetic.
    largest = jnp.max(magnitude, axis=-1, keepdims=True)
    bad = largest >= INFINITY
    scale = jnp.maximum((largest >> 23) - np.int32(element.max_exponent), 0)
    rounded = round_to_element(_times_power_of_two(magnitude, np.int32(127) - scale), element)
    rounded = jnp.where(bad, np.float32(np.nan), jnp.where(bits < 0, -rounded, rounded))
    scales = jnp.where(bad, np.int32(NAN_SCALE), scale).astype(jnp.uint8)
    return rounded.reshape(x.shape), scales[..., 0]


def decode_mx(elements: jax.Array, scales: jax.Array) -> jax.Array:
    """Element values in float32 [..., N] times their scales [..., N // 32], exactly."""
    blocks = elements.reshape(*scales.shape, BLOCK)
    return times_e8m0(blocks, scales[..., None]).reshape(elements.shape)


def quantize_mxfp8(x: jax.Array) -> QuantizedArray:
    """Quantises blocks of 32 along the last axis to MXFP8 with E4M3 elements (OCP MX v1.0, section 6.3).

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
    return _quantize(x, MXFP8, E4M3)


def quantize_mxfp8_e5m2(x: jax.Array) -> QuantizedArray:
    """The same with E5M2 elements: scales are 2^(floor(log2(max |x|)) - 15) and values saturate at +-57344."""
    return _quantize(x, MXFP8_E5M2, E5M2)


def _quantize(x, spec, element):
    spec.check_input(x)
    return QuantizedArray(*_encode(jnp.asarray(x), element, spec.values_dtype), spec.name)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode(x, element, dtype):
    rounded, scales = encode_mx(x, element)
    return rounded.astype(dtype), scales


def dequantize_mxfp8(values: jax.Array, scales: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
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
    scales = jnp.asarray(scales)
    if scales.dtype == jnp.float8_e8m0fnu:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    q = QuantizedArray(values, scales, MXFP8.name)
    q.check(MXFP8.name)
    return q.dequantize(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(q, dtype):
    return decode_mx(jnp.asarray(q.values).astype(jnp.float32), jnp.asarray(q.scales)).astype(dtype)


def _times_power_of_two(magnitude: jax.Array, exponent: jax.Array) -> jax.Array:
    """Float32 bits without sign, times 2^exponent; subnormal inputs count in full, results below 2^-126 may be zero."""
    normal = lax.bitcast_convert_type(magnitude, jnp.float32) * power_of_two(exponent)
    subnormal = magnitude.astype(jnp.float32) * power_of_two(exponent - np.int32(149))
    return jnp.where(magnitude < HIDDEN_BIT, subnormal, normal)


_E8M0 = (jnp.dtype(jnp.uint8),)
MXFP8 = Format("mxfp8", 8, (1, BLOCK), BLOCK, jnp.dtype(jnp.float8_e4m3fn), _E8M0, quantize_mxfp8, _dequantize)
MXFP8_E5M2 = Format(
    "mxfp8_e5m2", 8, (1, BLOCK), BLOCK, jnp.dtype(jnp.float8_e5m2), _E8M0, quantize_mxfp8_e5m2, _dequantize)
