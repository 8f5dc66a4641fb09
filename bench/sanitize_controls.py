"""Kernels that say how far the tools of bench.sanitize see: faults that they must find, and one without any."""

import functools
import math

PLANTED = ("memcheck", "initcheck", "racecheck")  # tools with such a fault; none is known that synccheck finds


def _kernel(body, name, *scratch, size=512):
    """[size] float32 -> the same, in one warpgroup, without the barriers that Pallas would add."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((size,), jnp.float32), scratch_types=scratch,
                        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True), kernel_name=name)


def _load(ref, vector=1):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(ref.at[:], layout=plgpu.Layout.WG_STRIDED(ref.shape, vector), optimized=False)


def written_by_tma():
    """A control of initcheck: whether it knows what TMA stores from a tile. It has no fault, and is right.

    A tile that 128 threads read in two loads each: of one launch initcheck records 256 findings, and drops the others.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = 64, 8

    def load(ref):
        return plgpu.load(ref, (), layout=plgpu.Layout.WGMMA, optimized=False)

    def copy(x_ref, y_ref, shared):
        shared[...] = load(x_ref)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, y_ref)
        plgpu.wait_smem_to_gmem(0)

    def add_one(x_ref, y_ref):
        y_ref[...] = load(x_ref) + 1.0

    kernel = functools.partial(plgpu.kernel, out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
                               compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True))
    writer = kernel(copy, scratch_types=[plgpu.SMEM(shape, jnp.float32)], kernel_name="tma_writer")
    reader = kernel(add_one, kernel_name="control_reader")
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    np.testing.assert_array_equal(jax.jit(lambda x: reader(writer(x)))(x), x + 1)


def planted(tool):
    """Kernels with the fault that the tool, one of PLANTED, must find; named so that they are told from the others."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x, run = jnp.arange(512, dtype=jnp.float32), lambda fn, *args: jax.block_until_ready(jax.jit(fn)(*args))
    if tool == "memcheck":
        def read_at(x_ref, at_ref, y_ref):
            value = x_ref[at_ref[0]]
            y_ref[...] = _load(x_ref) + value

        just_behind = jnp.array([x.size + 8], jnp.int32)
        run(_kernel(read_at, "planted_memcheck"), x, just_behind)
    elif tool == "initcheck":
        def write_one(x_ref, y_ref):
            y_ref[0] = x_ref[1]

        def add_one(x_ref, y_ref):
            y_ref[...] = _load(x_ref) + 1.0

        reader = _kernel(add_one, "planted_initcheck", size=128)  # 256 findings of a launch are recorded
        run(lambda x: reader(_kernel(write_one, "planted_writer", size=128)(x)), x[:128])
    elif tool == "racecheck":
        def no_barrier(x_ref, y_ref, shared):
            shared[...] = _load(x_ref)
            plgpu.commit_smem()  # with its barrier; the race is after it
            again = _load(shared, 4)
            shared[...] = again + 1.0
            y_ref[...] = _load(shared)

        run(_kernel(no_barrier, "planted_racecheck", plgpu.SMEM((512,), jnp.float32)), x)
