"""Storage formats of weights: one table, `FORMATS`, and the two ways through it, `quantize` and `dequantize`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats.block_fp8 import FP8_BLOCK128, FP8_CHANNEL, FP8_TENSOR
from jax_warp_decode.formats.elements import pack_nibbles, unpack_nibbles
from jax_warp_decode.formats.integer import INT4_GROUP32, INT8_CHANNEL
from jax_warp_decode.formats.mx import MXFP8, MXFP8_E5M2, dequantize_mxfp8, quantize_mxfp8
from jax_warp_decode.formats.packed_fp4 import MXFP4, NVFP4
from jax_warp_decode.formats.quantized import Format, QuantizedArray, find_format
from jax_warp_decode.formats.qwix_arrays import from_qwix, to_qwix

__all__ = ["FORMATS", "Format", "QuantizedArray", "dequantize", "dequantize_mxfp8", "from_qwix", "pack_nibbles",
           "quantize", "quantize_mxfp8", "to_qwix", "unpack_nibbles"]

FORMATS = {f.name: f for f in (
    MXFP8, MXFP8_E5M2, MXFP4, NVFP4, FP8_BLOCK128, FP8_CHANNEL, FP8_TENSOR, INT8_CHANNEL, INT4_GROUP32)}


def quantize(x: jax.Array | np.ndarray, format: str) -> QuantizedArray:
    """Quantises an array along its last axis, its last two where blocks have rows.

    Args:
      x: [..., N] float32, bfloat16 or float16; N a multiple of the format's `block` (32 for "mxfp8").
      format: a key of `FORMATS`.

    Raises:
      ArgumentError: for an unknown format, or an array the format cannot take.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import FORMATS, dequantize, quantize
      >>> w = quantize(jnp.arange(32.0), "mxfp8")
      >>> [float(v) for v in dequantize(w)[15:19]]
      [15.0, 16.0, 16.0, 18.0]
      >>> " ".join(FORMATS)
      'mxfp8 mxfp8_e5m2 mxfp4 nvfp4 fp8_block128 fp8_channel fp8_tensor int8_channel int4_group32'
    """
    spec = find_format(format)
    if isinstance(x, QuantizedArray):
        raise ArgumentError(f"x: got an array that is already {x.format}, expected a plain array; dequantise it first")
    return spec.quantize(x)


def dequantize(w: jax.Array | QuantizedArray, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """A weight as a plain array: decodes a `QuantizedArray`, casts anything else.

    Args:
      w: [..., N] in any format.
      dtype: of the result, floating; the value that a `QuantizedArray` stands for is rounded to it once.

    Raises:
      ArgumentError: parts of a `QuantizedArray` that do not fit together, or a dtype for one that is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import dequantize, quantize
      >>> w = dequantize(quantize(jnp.full((1, 32), 3.3), "mxfp8"), jnp.bfloat16)
      >>> w.shape, str(w.dtype), float(w[0, 0])
      ((1, 32), 'bfloat16', 3.25)
    """
    return w.dequantize(dtype) if isinstance(w, QuantizedArray) else jnp.asarray(w).astype(dtype)
