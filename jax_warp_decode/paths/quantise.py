"""Activations as conventional MXFP8 serving has them: rounded to a block format before each projection."""

import jax
import jax.numpy as jnp

from jax_warp_decode.formats import FORMATS, dequantize
from jax_warp_decode.gradients import without_gradient


@jax.named_scope("quantise")
def quantise(rows: jax.Array, format: str) -> jax.Array:
    """Rounds rows [M, N] to a block format along N; returns the float32 values the format can hold."""
    # Rounding has a derivative of zero: without the guard, every gradient behind it would silently vanish.
    rounded = without_gradient(
        lambda rows: dequantize(FORMATS[format].quantize(rows), jnp.float32),
        "activation_format: quantised activations have no gradient; differentiate with activation_format=None")
    return rounded(rows)
