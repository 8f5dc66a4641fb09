"""Storage formats of weights: one table, `FORMATS`, and the two ways through it, `quantize` and `dequantize`."""

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats.mx import BLOCK, dequantize_mxfp8, from_qwix, quantize_mxfp8, to_qwix
from jax_warp_decode.formats.quantized import Format, QuantizedArray

__all__ = ["FORMATS", "Format", "QuantizedArray", "dequantize", "dequantize_mxfp8", "from_qwix", "quantize",
           "quantize_mxfp8", "to_qwix"]

FORMATS = {f.name: f for f in (
    Format("mxfp8", BLOCK, jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8), quantize_mxfp8, dequantize_mxfp8),
)}


def quantize(x: jax.Array, format: str) -> QuantizedArray:
    """Quantises an array along its last axis.

    Args:
      x: [..., N] float32, bfloat16 or float16; N a multiple of the format's block (32 for "mxfp8").
      format: a key of `FORMATS`.

    Raises:
      ArgumentError: for an unknown format, or an array the format cannot take.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import dequantize, quantize
      >>> w = quantize(jnp.arange(32.0), "mxfp8")
      >>> [float(v) for v in dequantize(w)[15:19]]
      [15.0, 16.0, 16.0, 18.0]
    """
    if format not in FORMATS:
        raise ArgumentError(f"format: got {format!r}, expected one of {sorted(FORMATS)}")
    if isinstance(x, QuantizedArray):
        raise ArgumentError(f"x: got an array that is already {x.format}, expected a plain array; dequantise it first")
    return FORMATS[format].quantize(x)


def dequantize(w: jax.Array | QuantizedArray, dtype=jnp.float32) -> jax.Array:
    """A weight as a plain array of `dtype`: decodes a `QuantizedArray`, casts anything else."""
    return w.dequantize(dtype) if isinstance(w, QuantizedArray) else jnp.asarray(w).astype(dtype)
