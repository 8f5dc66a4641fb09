"""rms_norm of few tokens, or of a sum of two, in one launch; XLA takes one for the squares and one to scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def _kernel(*refs, H, eps):
    *x_refs, gain_ref, y_ref = refs
    exists = jnp.arange(y_ref.shape[0], dtype=jnp.int32) < H  # a block is a power of two
    x = sum(plgpu.load(ref, mask=exists, other=0.0).astype(jnp.float32) for ref in x_refs)
    gain = plgpu.load(gain_ref, mask=exists, other=0.0).astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(x * x, axis=-1) * np.float32(1 / H) + np.float32(eps))
    plgpu.store(y_ref, (x * scale * gain).astype(y_ref.dtype), mask=exists)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(xs: tuple[jax.Array, ...], gain: jax.Array, *, eps: float, interpret: bool = False) -> jax.Array:
    """x / sqrt(mean(x ** 2) + eps) * gain over the last axis, x [T, H] the sum of xs, all in float32; no gradient.

    Args:
      xs: [T, H] each, of one dtype, which the result has too.
      gain: [H].
      eps: added to the mean square.
      interpret: run on the CPU, for tests.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.rms_norm import rms_norm
      >>> rms_norm((jnp.array([[3.0, -3.0]]),), jnp.array([1.0, 2.0]), eps=0.0, interpret=True).tolist()
      [[1.0, -2.0]]
    """
    T, H = xs[0].shape
    block = pl.next_power_of_2(H)
    row = pl.BlockSpec((None, block), lambda token: (token, 0))
    return pl.pallas_call(
        functools.partial(_kernel, H=H, eps=eps),
        grid=(T,),
        in_specs=[row] * len(xs) + [pl.BlockSpec((block,), lambda token: (0,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct((T, H), xs[0].dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=interpret,
        name="rms_norm",
    )(*xs, gain)
