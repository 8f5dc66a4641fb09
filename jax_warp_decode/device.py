"""What the default device and the software under it are, as far as kernels care; and what a runtime failure means."""

import contextlib
import ctypes
import functools
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence

import jax

from jax_warp_decode.compat import JAX_WINDOW, PLUGIN_LOGGER

HOPPER = "9.0"
BLACKWELL = ("10.0", "10.3")  # data-centre: with tcgen05
H200_SMS = 132
# The first CUDA version whose driver knows an architecture (release notes of CUDA 12.0, 12.8 and 12.9).
FIRST_CUDA = {"9.0": (12, 0), "10.0": (12, 8), "10.3": (12, 9)}


def capability() -> str:
    """Compute capability of the default device, for example "9.0"; an empty string if it is no GPU."""
    if jax.default_backend() != "gpu":
        return ""
    return getattr(jax.devices()[0], "compute_capability", "unknown")


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the installed NVIDIA driver knows, for example (12, 8); None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def in_window(version: str) -> bool:
    """Whether a jax version lies inside the tested window.

    Example:
      >>> from jax_warp_decode.device import in_window
      >>> in_window("0.11.2"), in_window("0.11.1")
      (True, False)
    """
    def numbers(version):
        return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0].split(".dev")[0]))

    return numbers(JAX_WINDOW[0]) <= numbers(version) <= numbers(JAX_WINDOW[1])


def software_refusal() -> str:
    """Why the kernels cannot be compiled or loaded by the software of this machine, or an empty string.

    Asked before anything is compiled: the compiler's own words would name neither the driver nor the jax version.
    """
    first, driver = FIRST_CUDA.get(capability()), driver_cuda()
    if first and driver and driver < first:
        return (f"the NVIDIA driver knows CUDA up to {driver[0]}.{driver[1]}, kernels for compute capability "
                f"{capability()} need {first[0]}.{first[1]}; update the driver")
    if not in_window(jax.__version__):
        return (f"jax {jax.__version__} lies outside the tested window {' to '.join(JAX_WINDOW)}, and the kernels are "
                f"written in a part of jax that changes; install a version inside it")
    return ""


@contextlib.contextmanager
def plugin_errors() -> Iterator[list[str]]:
    """Inside, what keeps a plugin of JAX from loading goes to the list that it yields, not, with pages, to the log."""
    errors: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error:
            errors.append(str(error))
        return error is None

    logger = logging.getLogger(PLUGIN_LOGGER)
    logger.addFilter(keep)
    try:
        yield errors
    finally:
        logger.removeFilter(keep)


def start_refusal(plugin_errors: Sequence[str] = ()) -> str:
    """Why JAX cannot start on the platforms that it was told to use, with the way out; an empty string if it can.

    Example:
      >>> from jax_warp_decode.device import start_refusal
      >>> start_refusal()
      ''
    """
    try:
        jax.devices()
        return ""
    except (AssertionError, RuntimeError) as error:  # an assertion without words, if no platform has a device
        said = re.sub(r" \(set JAX_PLATFORMS=.*", "", str(error)) or "it finds no such device"
    why = ", and a plugin does not load: ".join(map(_first_line, [said, *plugin_errors]))
    platforms = jax.config.jax_platforms
    got, way_out = (f"got {platforms!r}", "unset it") if platforms else ("not set", "set it to cpu")
    return (f"JAX_PLATFORMS: {got}, and JAX cannot start: {why}; {way_out}, or install JAX's CUDA build, "
            "pip install 'jax[cuda12]' or 'jax[cuda13]'")


def _first_line(text: str) -> str:
    return textwrap.shorten((text.strip().splitlines() or [""])[0].rstrip("."), 200, placeholder=" ..")


# What the runtime says, and what it means.
_FAILURES = (
    (r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OUT_OF_MEMORY",
     "the device is out of memory{memory}; use quantised weights, a shorter cache, fewer tokens or more devices"),
    (r"UNSUPPORTED_PTX_VERSION|INSUFFICIENT_DRIVER|driver version is insufficient",
     "the NVIDIA driver{driver} is too old for the CUDA version of this jax; update it, or install jax[cuda12]"),
    (r"NO_BINARY_FOR_GPU|no kernel image is available",
     "no kernel was built for this GPU{capability}; use strategy='reference'"),
    (r"ILLEGAL_ADDRESS|illegal memory access",
     "a kernel read or wrote outside its memory, a bug: please report it with the shapes, dtypes and versions"),
)


def explain_failure(error: BaseException) -> str:
    """One line for a failure of the device at run time, with the way out; an empty string for any other error.

    jax raises `JaxRuntimeError` for all of them, after compiling or while something runs, with pages of its own detail.

    Example:
      >>> from jax_warp_decode.device import explain_failure
      >>> explain_failure(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"))
      'the device is out of memory (9 bytes asked for); use quantised weights, ...'
      >>> explain_failure(RuntimeError("something else"))
      ''
    """
    text = str(error)
    for pattern, meaning in _FAILURES:
        if isinstance(error, RuntimeError) and re.search(pattern, text):
            asked, driver = re.search(r"allocate ([\d.]+ ?\w*)", text), driver_cuda()
            return meaning.format(
                memory=f" ({asked.group(1).strip()} asked for)" if asked else "",
                driver=f", which knows CUDA up to {driver[0]}.{driver[1]}," if driver else "",
                capability=f" of compute capability {capability()}" if capability() else "")
    return ""
