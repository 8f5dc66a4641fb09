"""The ceiling: a kernel that reads memory with plain 16-byte loads and does nothing else."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.compat import store_unaligned
from jax_warp_decode.measure import timing

WARPS, LANES, VEC = 4, 32, 4  # one warpgroup; four float32 make one 16-byte load
LOADS = 8  # per lane, all issued before the first use
CHUNK_BYTES = WARPS * LANES * VEC * 4 * LOADS  # per CTA
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, LANES * VEC), (VEC,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def window(key: jax.Array, nbytes: float) -> jax.Array:
    """A buffer of random float32 for `read`, nbytes rounded to whole chunks of 16 KiB (at least one)."""
    chunks = max(1, round(nbytes / CHUNK_BYTES))
    return jax.random.normal(key, (chunks, WARPS, LOADS * LANES * VEC), jnp.float32)


@functools.cache
def reader(chunks: int):
    """A function that reads a `window` once: [chunks, 4, 1024] -> one sum per warp, [chunks, 4].

    One CTA a chunk, one warp a row of it; nothing passes through shared memory.
    """

    def body(x_ref, sums_ref):
        chunk = jax.lax.axis_index("chunk")
        x = plgpu.load(x_ref.at[chunk], layout=LAYOUT, optimized=False)
        store_unaligned(sums_ref.at[chunk], jnp.sum(x, axis=1))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((chunks, WARPS), jnp.float32),
        grid=(chunks,),
        grid_names=("chunk",),
        kernel_name="read_only",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


def read(x: jax.Array) -> jax.Array:
    """Reads a `window`; the sums keep the compiler from leaving the loads out."""
    return reader(x.shape[0])(x)


def aot_cases():
    """Cases for a deviceless compile, see tests/aot.py: (name, function, arguments, limits)."""
    x = jax.ShapeDtypeStruct((600 * 2**20 // CHUNK_BYTES, WARPS, LOADS * LANES * VEC), jnp.float32)
    yield "read_only", read, (x,), dict(max_registers=64, max_narrow_loads=0, min_wide_loads=LOADS)


def bytes_per_us(nbytes: float = 4e9, steps: int = 10) -> float:
    """Speed of one long read on this GPU."""
    windows = [(window(jax.random.key(3), nbytes),)]
    timed = timing.time_step(timing.compile_step(timing.lower_step(read, windows, "read")), windows, steps)
    return windows[0][0].nbytes / timed.us
