"""The only place that knows how the supported JAX versions differ, or touches anything private to JAX."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# Supported window, both ends tested. jax 0.12.0.1 is a post-release of 0.12.0.
JAX_WINDOW = ("0.11.2", "0.12.0.1")
PLUGIN_LOGGER = "jax._src.xla_bridge"  # says which plugins do not load


def store_unaligned(ref, value: jax.Array) -> None:
    """Stores registers to global memory without the 32-byte sector rule that jax 0.12 enforces by default."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11 has no plgpu.store and does not check a plain store
        ref[...] = value


def interpret_params(interpret: bool | plgpu.InterpretGPUParams) -> plgpu.InterpretGPUParams | None:
    """What `plgpu.kernel(interpret=...)` wants: None on a GPU, parameters when a kernel is interpreted on the CPU."""
    if isinstance(interpret, bool):
        return plgpu.InterpretGPUParams() if interpret else None
    return interpret


def _interpreter():
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call


def races_found() -> bool:
    """Whether the interpreter saw a data race. jax 0.12 raises by itself; jax 0.11 only prints and goes on."""
    races = _interpreter().get_races()
    return races is not None and races.races_found


def reset_interpreter() -> None:
    """Forgets the interpreter's state, which an exception inside a kernel would leave behind for the next one."""
    _interpreter().reset_gpu_interpret_mode_state()
