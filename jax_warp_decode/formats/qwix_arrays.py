"""Conversion from and to `qwix.QArray`, for the formats that both packages have: mxfp8, mxfp4 and nvfp4."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.formats.elements import (
    E4M3,
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    NAN_SCALE,
    SMALLEST_E8M0,
    e2m1_from_codes,
    e2m1_to_codes,
    e8m0_to_float32,
    pack_nibbles,
    round_to_element,
    unpack_nibbles,
)
from jax_warp_decode.formats.mx import MXFP8
from jax_warp_decode.formats.packed_fp4 import MXFP4, NVFP4
from jax_warp_decode.formats.quantized import QuantizedArray

if TYPE_CHECKING:
    import qwix


def to_qwix(q: QuantizedArray) -> "qwix.QArray":
    """Converts to a `qwix.QArray` with float32 scales; four-bit elements are unpacked to float4_e2m1fn.

    Exact for "mxfp8" and "mxfp4"; for "nvfp4" the product of scale and global scale is rounded to float32. qwix
    multiplies in floating point, so on the CPU it sees the scale byte 0 (2^-127, subnormal) as zero.

    Raises:
      UnsupportedError: for a format that qwix does not have, or if qwix is not installed.

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
    if q.format not in (MXFP8.name, MXFP4.name, NVFP4.name):
        raise UnsupportedError(f"q.format: got {q.format!r}, qwix has mxfp8, mxfp4 and nvfp4; dequantise and quantise")
    scales = jnp.asarray(q.scales)
    values = q.values
    if q.format != MXFP8.name:
        values = e2m1_from_codes(unpack_nibbles(jnp.asarray(values))).astype(jnp.float4_e2m1fn)
    scale = e8m0_to_float32(scales) if q.global_scale is None else scales.astype(jnp.float32) * q.global_scale
    return _qwix().QArray(values, scale, None, q.format)


def from_qwix(qarray: "qwix.QArray") -> QuantizedArray:
    """Converts a symmetric `qwix.QArray` with tiles along the last axis: "mxfp8", "mxfp4" or "nvfp4".

    `qwix.quantize(w, "mxfp8", tiled_axes={2: 32}, channelwise_axes=[0, 1])` makes such an array of w [E, I, H]: axes
    that are not named share their scales, and qwix does not count from the end. It rounds MX scales up where OCP MX
    rounds down, so its bytes differ from those of `quantize`; both are valid. NVFP4 of qwix has no global scale; ours
    is 1.

    Raises:
      ArgumentError: for a zero point, other values, other tiles, or scales that are not powers of two (MX) or E4M3
        numbers (NVFP4). Inside `jit` scales have no values yet: there such a scale makes its block NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> import qwix
      >>> array = qwix.quantize(jnp.ones((4, 64)), "mxfp8", tiled_axes={1: 32}, channelwise_axes=[0])
      >>> w = from_qwix(array)
      >>> w.format, w.scales.shape, float(w.dequantize(jnp.float32).min())
      ('mxfp8', (4, 2), 1.0)
    """
    if qarray.zero_point is not None:
        raise ArgumentError("qarray.zero_point: got an array, expected None: the formats are symmetric")
    values, scale = qarray.qvalue, jnp.asarray(qarray.scale)
    four_bits = values.dtype == jnp.float4_e2m1fn
    spec = NVFP4 if four_bits and qarray.qtype == NVFP4.name else MXFP4 if four_bits else MXFP8
    want = (*values.shape[:-1], values.shape[-1] // spec.block)
    if values.shape[-1] % spec.block or scale.shape != want:
        last = values.ndim - 1
        raise ArgumentError(
            f"qarray.scale: got shape {scale.shape} for values {values.shape}, expected {want}: tiles of {spec.block} "
            f"along the last axis; quantise with tiled_axes={{{last}: {spec.block}}}, "
            f"channelwise_axes={list(range(last))}, swap axes first if the reduction is not last")
    if four_bits:
        values = pack_nibbles(e2m1_to_codes(values.astype(jnp.float32)))
    if spec is NVFP4:
        ones = jnp.ones(spec.global_scale_shape(qarray.qvalue.shape), jnp.float32)
        q = QuantizedArray(values, _e4m3_scales(scale), spec.name, ones)
    else:
        q = QuantizedArray(values, _e8m0_scales(scale), spec.name)
    q.check("qarray")
    return q


def _e8m0_scales(scale: jax.Array) -> jax.Array:
    if scale.dtype == jnp.float8_e8m0fnu:
        return lax.bitcast_convert_type(scale, jnp.uint8)
    bits = lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32)
    exponent, mantissa = bits >> 23, bits & MANTISSA
    nan = (bits & MAGNITUDE) > INFINITY
    valid = (exponent > 0) & (exponent < 255) & (mantissa == 0) | (bits == SMALLEST_E8M0) | nan
    _refuse_unless(valid, "values that are not powers of two, expected 2^-127 to 2^127 as OCP MX has them")
    return jnp.where(valid & ~nan, exponent, np.int32(NAN_SCALE)).astype(jnp.uint8)


def _e4m3_scales(scale: jax.Array) -> jax.Array:
    scale = scale.astype(jnp.float32)
    valid = (round_to_element(scale, E4M3) == scale) | jnp.isnan(scale)
    _refuse_unless(valid, "values that E4M3 does not have")
    return jnp.where(valid, scale, np.float32(np.nan)).astype(jnp.float8_e4m3fn)


def _refuse_unless(valid: jax.Array, what: str) -> None:
    if not isinstance(valid, jax.core.Tracer) and not bool(jnp.all(valid)):
        raise ArgumentError(
            f"qarray.scale: got {what}; dequantise and quantise again, or quantise with qtype='mxfp8', 'mxfp4' or "
            f"'nvfp4' in qwix")


def _qwix():
    try:
        import qwix
    except ImportError as e:
        raise UnsupportedError("to_qwix: the package qwix is not installed; pip install qwix") from e
    return qwix
