"""Symmetric integers: "int8_channel" and "int4_group32" (Kimi-K2 Thinking and K2.6, "mxint4").

A value is integer * scale. Eight-bit integers have one scale per row. Four-bit integers have one per 32 and are stored
as nibbles of value + 8, two to a byte with the low nibble first: the bytes of the 32-bit words that compressed-tensors
checkpoints pack, in their order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.formats.elements import pack_nibbles, unpack_nibbles
from jax_warp_decode.formats.quantized import Format, QuantizedArray
from jax_warp_decode.formats.scaling import fit_scale, spread

INT8_BLOCK = (1, None)
INT4_BLOCK = (1, 32)
INT4_OFFSET = 8  # added to an integer to make its nibble


def quantize_int8_channel(x: jax.Array) -> QuantizedArray:
    """Quantises each row to int8: scale max |x| / 127 in float32, rounded to nearest even, -127 to 127.

    The scale is at least 2^-126; a row with inf or NaN becomes NaN.

    Args:
      x: [..., N]; float32, bfloat16 or float16.

    Returns:
      QuantizedArray of format "int8_channel": values int8 [..., N], scales float32 [..., 1].

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import quantize
      >>> w = quantize(jnp.array([[1.0, -254.0, 3.0]]), "int8_channel")
      >>> w.values.tolist(), w.scales.tolist()
      ([[0, -127, 2]], [[2.0]])
    """
    INT8_CHANNEL.check_input(x)
    integers, scales = _encode(jnp.asarray(x), INT8_BLOCK, 127, jnp.float32)
    return QuantizedArray(integers.astype(jnp.int8), scales, INT8_CHANNEL.name)


def quantize_int4_group32(x: jax.Array) -> QuantizedArray:
    """Quantises blocks of 32 along the last axis to int4: scale max |x| / 7 in bfloat16, -7 to 7; -8 is read, not made.

    Args:
      x: [..., N], N a multiple of 32; float32, bfloat16 or float16.

    Returns:
      QuantizedArray of format "int4_group32": values uint8 [..., N // 2], scales bfloat16 [..., N // 32].
    """
    INT4_GROUP32.check_input(x)
    integers, scales = _encode(jnp.asarray(x), INT4_BLOCK, 7, jnp.bfloat16)
    return QuantizedArray(pack_nibbles(integers + np.int32(INT4_OFFSET)), scales, INT4_GROUP32.name)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _encode(x, block_shape, largest, scales_dtype):
    x = x.astype(jnp.float32)
    scales = fit_scale(x, block_shape, largest, scales_dtype)
    scaled = jnp.round(x / spread(scales, x.shape, block_shape).astype(jnp.float32))
    clipped = jnp.clip(scaled, np.float32(-largest), np.float32(largest))
    return jnp.where(jnp.isnan(clipped), np.float32(0), clipped).astype(jnp.int32), scales


@functools.partial(jax.jit, static_argnums=1)
def _decode_int8(q, dtype):
    return _times_scales(jnp.asarray(q.values), q, INT8_BLOCK, dtype)


@functools.partial(jax.jit, static_argnums=1)
def _decode_int4(q, dtype):
    integers = unpack_nibbles(jnp.asarray(q.values)).astype(jnp.int32) - np.int32(INT4_OFFSET)
    return _times_scales(integers, q, INT4_BLOCK, dtype)


def _times_scales(integers, q, block_shape, dtype):
    scales = jnp.asarray(q.scales).astype(jnp.float32)
    return (integers.astype(jnp.float32) * spread(scales, q.shape, block_shape)).astype(dtype)


_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
INT8_CHANNEL = Format("int8_channel", 8, INT8_BLOCK, 1, jnp.dtype(jnp.int8), _FLOATS, quantize_int8_channel,
                      _decode_int8)
INT4_GROUP32 = Format("int4_group32", 4, INT4_BLOCK, INT4_BLOCK[1], jnp.dtype(jnp.uint8), _FLOATS[::-1],
                      quantize_int4_group32, _decode_int4)
