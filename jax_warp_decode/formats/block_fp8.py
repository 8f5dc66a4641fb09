"""E4M3 with ordinary scales: "fp8_block128" (DeepSeek-V3, Qwen3-FP8), "fp8_channel" and "fp8_tensor".

A value is element * scale, the scale a positive float32 or bfloat16 number for a block of 128 x 128, for a row or for
the whole matrix. Checkpoints call the scales `weight_scale_inv` or `weight_scale`; both multiply.
"""

import functools

import jax
import jax.numpy as jnp

from jax_warp_decode.formats.elements import E4M3, round_to_element
from jax_warp_decode.formats.quantized import Format, QuantizedArray
from jax_warp_decode.formats.scaling import BlockShape, fit_scale, spread


@functools.partial(jax.jit, static_argnums=1)
def _encode(x, block_shape):
    x = x.astype(jnp.float32)
    scales = fit_scale(x, block_shape, E4M3.max)
    values = round_to_element(x / spread(scales, x.shape, block_shape), E4M3)
    return values.astype(jnp.float8_e4m3fn), scales


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decode(q, block_shape, dtype):
    values, scales = jnp.asarray(q.values).astype(jnp.float32), jnp.asarray(q.scales).astype(jnp.float32)
    return (values * spread(scales, q.shape, block_shape)).astype(dtype)


def _row(name: str, block_shape: BlockShape) -> Format:
    """The format of one block shape.

    Quantising takes max |x| / 448 of the block as scale (float32, at least 2^-126), rounds to nearest even and
    saturates; a block with inf or NaN becomes NaN. Decoding multiplies in float32, which is exact for bfloat16 scales.
    """

    def quantize(x):
        spec.check_input(x)
        return QuantizedArray(*_encode(jnp.asarray(x), block_shape), name)

    spec = Format(
        name, 8, block_shape, 1, jnp.dtype(jnp.float8_e4m3fn), (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)),
        quantize, lambda q, dtype: _decode(q, block_shape, dtype))
    return spec


FP8_BLOCK128 = _row("fp8_block128", (128, 128))
FP8_CHANNEL = _row("fp8_channel", (1, None))
FP8_TENSOR = _row("fp8_tensor", (None, None))
