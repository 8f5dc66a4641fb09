"""rms_norm of few tokens in one launch; XLA takes two, one for the sum of the squares and one to scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def _kernel(x_ref, gain_ref, y_ref, *, H, eps):
    exists = jnp.arange(x_ref.shape[0], dtype=jnp.int32) < H  # a block is a power of two
    x = plgpu.load(x_ref, mask=exists, other=0.0).astype(jnp.float32)
    gain = plgpu.load(gain_ref, mask=exists, other=0.0).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(x * x, axis=-1) * np.float32(1 / H) + np.float32(eps))
    plgpu.store(y_ref, (x * scale * gain).astype(y_ref.dtype), mask=exists)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(x: jax.Array, gain: jax.Array, *, eps: float, interpret: bool = False) -> jax.Array:
    """x / sqrt(mean(x ** 2) + eps) * gain over the last axis of x [T, H], in float32; gain [H]; no gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.rms_norm import rms_norm
      >>> rms_norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0]), eps=0.0, interpret=True).tolist()
      [[1.0, -2.0]]
    """
    T, H = x.shape
    block = pl.next_power_of_2(H)
    row = pl.BlockSpec((None, block), lambda token: (token, 0))
    return pl.pallas_call(
        functools.partial(_kernel, H=H, eps=eps),
        grid=(T,),
        in_specs=[row, pl.BlockSpec((block,), lambda token: (0,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=interpret,
        name="rms_norm",
    )(x, gain)
