"""Scales that are ordinary numbers: the largest magnitude of each block, and scales spread over their blocks."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.formats.elements import MAGNITUDE

BlockShape = tuple[int | None, int | None]
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SMALLEST = np.float32(2.0**-126)  # of a scale: float32 arithmetic on the CPU flushes what is below


def fit_scale(x: jax.Array, block_shape: BlockShape, largest: float, dtype=jnp.float32) -> jax.Array:
    """The scale of each block of float32 x that puts its largest magnitude at `largest`; NaN for inf or NaN in a block.

    At least 2^-126, so that a block of zeros divides by a normal number, and so small that `largest` times the scale
    stays finite in float32.
    """
    # As integers, because a maximum of floats may skip NaN; magnitudes order like integers, NaN last.
    magnitude = jax.lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE
    maximum = jax.lax.bitcast_convert_type(block_max(magnitude, block_shape), jnp.float32)
    limit = _round_down(_FLOAT32_MAX / largest, dtype)
    scale = jnp.minimum(jnp.maximum(maximum / np.float32(largest), _SMALLEST), limit)
    return jnp.where(maximum < np.float32(np.inf), scale, np.float32(np.nan)).astype(dtype)


def block_max(x: jax.Array, block_shape: BlockShape) -> jax.Array:
    """Maximum of non-negative integers over blocks of the last two axes; those at the edge may be partial."""
    tail = len(x.shape[-2:])
    for axis, block in zip(range(-tail, 0), block_shape[-tail:], strict=True):
        x = jnp.moveaxis(_row_block_max(jnp.moveaxis(x, axis, -1), block), -1, axis)
    return x


def spread(scales: jax.Array, shape: tuple[int, ...], block_shape: BlockShape) -> jax.Array:
    """Scales repeated for every element of their block, in a shape that broadcasts against `shape`."""
    tail = len(shape[-2:])
    for axis, block in zip(range(-tail, 0), block_shape[-tail:], strict=True):
        if block is not None and block > 1:
            scales = jnp.repeat(scales, block, axis=axis, total_repeat_length=block * scales.shape[axis])
            scales = jax.lax.slice_in_dim(scales, 0, shape[axis], axis=axis % scales.ndim)
    return scales


def _round_down(x: float, dtype) -> np.float32:
    """x as float32, at most x also after rounding to `dtype`."""
    rounded = np.array(x, dtype)
    return np.float32(rounded if float(rounded) <= x else np.nextafter(rounded, np.array(0, dtype)))


def _row_block_max(x: jax.Array, block: int | None) -> jax.Array:
    n = x.shape[-1]
    block = block or max(1, n)
    count = math.ceil(n / block)
    if n % block:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % block)])
    return jnp.max(x.reshape(*x.shape[:-1], count, block), axis=-1, initial=0)
