"""Ways to run the same layers: compiled side by side, checked, timed in one trace. One that fails stops no other."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_warp_decode.measure import timing
from jax_warp_decode.moe import moe

WRONG = "wrong result"


def describe(error: BaseException) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def errors(got: list, want: list) -> dict:
    """Relative L2 error, cosine and largest error over all layers, in float64."""
    a, b = (np.concatenate([np.asarray(layer, np.float64).ravel() for layer in layers]) for layers in (got, want))
    return dict(
        relative_l2=float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        cosine=float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))),
        max_abs=float(np.abs(a - b).max()))


def compare(want: list, tolerance: float) -> Callable[[list], dict]:
    """A check of a `Variant`: `errors` of its first results, those that `want` has; raises beyond the tolerance."""

    def check(outputs: list) -> dict:
        found = errors(outputs[:len(want)], want)
        if not found["relative_l2"] < tolerance:
            raise ArithmeticError(f"{WRONG}, relative L2 {found['relative_l2']:.1e}")
        return found

    return check


@dataclasses.dataclass
class Variant:
    """One way to run a chain of layers.

    Attributes:
      row: what tells it from others; `measure` adds what it found.
      layer: called with the arguments of each layer, or the error that says why there is none.
      layers: the arguments, as `timing.lower_step` takes them.
      check: results of all layers -> what to add to the row; raises if they are wrong.
    """

    row: dict
    layer: Callable | Exception
    layers: Sequence[tuple]
    check: Callable[[list], dict] = lambda outputs: {}


def compile_reference(*args, **options) -> jax.stages.Compiled:
    """The float32 reference of `moe` for these arguments. Tuning its products would take longer than it saves."""
    untuned = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    reference = jax.jit(lambda *args: moe(*args, strategy="reference", **options))
    return reference.lower(*args).compile(compiler_options=untuned)


def attempt(function: Callable, *args):
    """The result, or the exception."""
    try:
        return function(*args)
    except Exception as error:
        return error


def build(jobs: Sequence[tuple[Callable | Exception, Sequence[tuple]]], threads: int = 8) -> list:
    """Executables of (layer, its arguments), the exception in place of one that failed.

    Lowers here, since the Python part of Mosaic has global state, and compiles in threads meanwhile.
    """

    def lower(layer, layers):
        if isinstance(layer, Exception):
            raise layer
        return timing.lower_step(layer, layers, "step")

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        pending = []
        for job in jobs:
            lowered = attempt(lower, *job)
            failed = isinstance(lowered, Exception)
            pending.append(lowered if failed else pool.submit(attempt, timing.compile_step, lowered))
        return [p if isinstance(p, Exception) else p.result() for p in pending]


def measure(variants: Sequence[Variant], steps: int, threads: int = 8,
            announce: Callable[[dict], None] = lambda row: None, gpu=None) -> list[dict]:
    """The rows with the fields of a `timing.Timing`, or with "error". Without a GPU they are only checked.

    `announce` gets the row of a variant before it runs for the first time, for those who outlive a process it ends;
    `gpu` is a lock, held from then on.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.measure.variants import Variant, compare, measure
      >>> x, check = jnp.arange(4.0), compare([2 * jnp.arange(4.0)], 1e-3)
      >>> found = measure([Variant(dict(by=n), lambda x, n=n: n * x, [(x,)], check) for n in (2, 3)], steps=1)
      >>> [(row["by"], row.get("error")) for row in found]
      [(2, None), (3, 'ArithmeticError: wrong result, relative L2 5.0e-01')]
    """
    calls: list[tuple[Variant, Any]] = []
    built = build([(v.layer, v.layers) for v in variants], threads)
    with gpu or contextlib.nullcontext():
        for variant, step in zip(variants, built, strict=True):
            try:
                if isinstance(step, Exception):
                    raise step
                announce(variant.row)
                variant.row |= variant.check(jax.block_until_ready(step(variant.layers)))
                calls.append((variant, step))
            except Exception as error:
                variant.row["error"] = describe(error)
        if calls and jax.default_backend() == "gpu":
            try:
                timed = timing.time_steps([(step, list(variant.layers)) for variant, step in calls], steps)
            except Exception as error:
                for variant, _ in calls:
                    variant.row["error"] = describe(error)
            else:
                for (variant, _), found in zip(calls, timed, strict=True):
                    variant.row |= dataclasses.asdict(found)
    return [variant.row for variant in variants]
