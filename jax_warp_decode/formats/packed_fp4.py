"""E2M1 elements, two to a byte with the low nibble first: "mxfp4" (gpt-oss, DeepSeek-V4) and "nvfp4".

"mxfp4" is OCP MX v1.0: 32 elements share one E8M0 scale. "nvfp4" is NVIDIA's: 16 elements share one E4M3 scale, and
each matrix has a float32 scale on top; a value is element * (scale * global scale).

The GGUF order, elements j and j + 16 of a block in one byte, is another layout: unpack it and use `pack_nibbles`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.formats import mx
from jax_warp_decode.formats.elements import (
    E2M1,
    E4M3,
    e2m1_from_codes,
    e2m1_to_codes,
    pack_nibbles,
    round_to_element,
    unpack_nibbles,
)
from jax_warp_decode.formats.quantized import Format, QuantizedArray
from jax_warp_decode.formats.scaling import fit_scale, spread

NVFP4_BLOCK = (1, 16)
_SMALLEST_SCALE = np.float32(2.0**-9)  # of E4M3


def quantize_mxfp4(x: jax.Array) -> QuantizedArray:
    """Quantises blocks of 32 along the last axis to MXFP4 (OCP MX v1.0, section 6.3).

    The scale of a block is 2^(floor(log2(max |x|)) - 2), at least 2^-127; elements are rounded to nearest even and
    saturate at +-6, so the largest of a block may shrink by up to 25 %. Finite input never gives NaN; an element that
    is inf or NaN makes its block NaN (scale byte 255).

    Args:
      x: [..., N], N a multiple of 32; float32, bfloat16 or float16.

    Returns:
      QuantizedArray of format "mxfp4": values uint8 [..., N // 2], scales uint8 [..., N // 32].

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import dequantize, quantize
      >>> w = quantize(jnp.arange(32.0), "mxfp4")              # floor(log2 31) - 2 = 2: multiples of 4 up to 24
      >>> hex(w.values[4]), [float(v) for v in dequantize(w)[8:10]]
      ('0x44', [8.0, 8.0])
    """
    MXFP4.check_input(x)
    values, scales = _encode_mxfp4(jnp.asarray(x))
    return QuantizedArray(values, scales, MXFP4.name)


def quantize_nvfp4(x: jax.Array) -> QuantizedArray:
    """Quantises blocks of 16 along the last axis to NVFP4.

    The global scale of a matrix is max |x| / (6 * 448), the scale of a block max |x| / 6 over the global scale in E4M3,
    at least 2^-9. Elements are rounded to nearest even and saturate at +-6. Finite input never gives NaN; an element
    that is inf or NaN makes its matrix NaN.

    Args:
      x: [..., R, N], N a multiple of 16; float32, bfloat16 or float16.

    Returns:
      QuantizedArray of format "nvfp4": values uint8 [..., R, N // 2], scales float8_e4m3fn [..., R, N // 16] and
      global_scale float32 [..., 1, 1].
    """
    NVFP4.check_input(x)
    values, scales, global_scale = _encode_nvfp4(jnp.asarray(x))
    return QuantizedArray(values, scales, NVFP4.name, global_scale)


@jax.jit
def _encode_mxfp4(x):
    elements, scales = mx.encode_mx(x, E2M1)
    return pack_nibbles(e2m1_to_codes(elements)), scales


@functools.partial(jax.jit, static_argnums=1)
def _decode_mxfp4(q, dtype):
    elements = e2m1_from_codes(unpack_nibbles(jnp.asarray(q.values)))
    return mx.decode_mx(elements, jnp.asarray(q.scales)).astype(dtype)


@jax.jit
def _encode_nvfp4(x):
    x = x.astype(jnp.float32)
    global_scale = fit_scale(x, (None, None), E2M1.max * E4M3.max)
    x = x / global_scale  # at most 6 * 448
    scales = round_to_element(jnp.maximum(fit_scale(x, NVFP4_BLOCK, E2M1.max), _SMALLEST_SCALE), E4M3)
    elements = round_to_element(x / spread(scales, x.shape, NVFP4_BLOCK), E2M1)
    return pack_nibbles(e2m1_to_codes(elements)), scales.astype(jnp.float8_e4m3fn), global_scale


@functools.partial(jax.jit, static_argnums=1)
def _decode_nvfp4(q, dtype):
    elements = e2m1_from_codes(unpack_nibbles(jnp.asarray(q.values)))
    # Element times scale has five bits of mantissa and is exact, so that the global scale brings the only rounding.
    exact = elements * spread(jnp.asarray(q.scales).astype(jnp.float32), q.shape, NVFP4_BLOCK)
    return (exact * jnp.asarray(q.global_scale)).astype(dtype)


_BYTES = jnp.dtype(jnp.uint8)
MXFP4 = Format("mxfp4", 4, (1, mx.BLOCK), mx.BLOCK, _BYTES, (_BYTES,), quantize_mxfp4, _decode_mxfp4)
NVFP4 = Format("nvfp4", 4, NVFP4_BLOCK, NVFP4_BLOCK[1], _BYTES, (jnp.dtype(jnp.float8_e4m3fn),), quantize_nvfp4,
               _decode_nvfp4, global_scale=True)
