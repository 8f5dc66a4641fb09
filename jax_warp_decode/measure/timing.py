"""Device time of chains of layers, from the profiler's timeline, with a host-clock cross-check.

One jitted step runs every layer once, each with weights of its own, so that nothing it reads is left in L2. XLA
captures the step as one CUDA graph; the time of a layer is the span of the step on the device over the number of
layers. A host clock around one call would measure the handling of its many buffers instead.

A trace costs about two seconds, however short it is, so that many steps share one. A kernel that does nothing, with a
name of its own, runs between two steps and marks where the events of the next one begin.
"""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# Capture everything that can be captured, in program order, and keep the graph while the profiler looks: XLA launches
# kernel by kernel under a profiler unless told otherwise.
GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    "xla_enable_command_buffers_during_profiling": True,
}
WARM_UP = 2  # first repetitions in a trace, which are dropped
MARKER = "timing_marker"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per layer.

    Attributes:
      us, min_us, p90_us: median, best and 90th percentile over the steps of one trace.
      wall_us: host clock over steps queued back to back; equals `us` where the device, not the host, is the limit.
      kernels: median time per layer spent in the kernels of each name, longest first; their sum leaves out the gaps
        between them.
      clock: "device", or "host" where the trace does not show every step (`us` is then `wall_us`).
      steps, layers: how much was measured.
    """

    us: float
    min_us: float
    p90_us: float
    wall_us: float
    kernels: dict[str, float]
    clock: str
    steps: int
    layers: int


def lower_step(layer, layers: list[tuple], name: str) -> jax.stages.Lowered:
    """One step that calls layer(*args) for every entry of layers and returns a list of results.

    The layers do not feed each other, but run one after the other: one stream, and a serial graph. Entries may hold
    arrays or `jax.ShapeDtypeStruct`s.
    """

    def step(layers):
        return [layer(*args) for args in layers]

    step.__name__ = name
    return jax.jit(step).lower(layers)


def compile_step(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The executable of `lower_step`; may run in several threads at once."""
    return lowered.compile(compiler_options=GRAPH_OPTIONS if jax.default_backend() == "gpu" else None)


def time_step(step: Callable, layers: list[tuple], steps: int = 20) -> Timing:
    """Times an executable of `compile_step`; needs a GPU."""
    return time_steps([(step, layers)], steps)[0]


def time_steps(calls: Sequence[tuple[Callable, list[tuple]]], steps: int = 20) -> list[Timing]:
    """Times many executables of `compile_step` in one trace; needs a GPU.

    Args:
      calls: (executable, its layers) each; run one after the other, every one `steps` times in a row.
      steps: timed repetitions; `WARM_UP` more run first and are dropped.

    Returns:
      One `Timing` per call, in order.
    """
    return record_steps(calls, steps).timings()


@dataclasses.dataclass(frozen=True)
class Recording:
    """What `record_steps` saw: a serialised trace, and per call the host clock and the number of layers."""

    xspace: bytes
    walls: list[float]
    layers: list[int]
    steps: int

    def timings(self) -> list[Timing]:
        """Reads the trace, which needs no GPU."""
        events = device_events(jax.profiler.ProfileData.from_serialized_xspace(self.xspace))
        found = split_calls(events, len(self.layers)) or [[]] * len(self.layers)
        return [summarise(split_runs(events, WARM_UP + self.steps)[WARM_UP:], wall, self.steps, layers)
                for events, wall, layers in zip(found, self.walls, self.layers, strict=True)]


def record_steps(calls: Sequence[tuple[Callable, list[tuple]]], steps: int) -> Recording:
    """The part of `time_steps` that needs the GPU, for those who share it."""
    walls = [_wall_us(step, layers, steps) for step, layers in calls]
    with device_trace() as (mark, read):
        for step, layers in calls:
            for _ in range(WARM_UP + steps):
                out = step(layers)
            jax.block_until_ready(out)
            mark()
    return Recording(read(), walls, [len(layers) for _, layers in calls], steps)


def record_runs(jobs: Sequence[tuple[Callable[[], Any], Callable[[Any], Any]]]) -> list[list["Event"]]:
    """The device events of runs that keep a state, such as decode steps with a donated cache, in one trace.

    Args:
      jobs: (prepare, run) each. `run(prepare())` is called; only what `run` does is returned.

    Returns:
      One list of events per job, in order; empty lists if the trace lost a marker.
    """
    with device_trace() as (mark, read):
        for prepare, run in jobs:
            state = jax.block_until_ready(prepare())
            mark()
            jax.block_until_ready(run(state))
            del state
            mark()
    events = device_events(jax.profiler.ProfileData.from_serialized_xspace(read()))
    return split_calls(events, 2 * len(jobs))[1::2] or [[]] * len(jobs)


@contextlib.contextmanager
def device_trace() -> Iterator[tuple[Callable[[], None], Callable[[], bytes]]]:
    """Traces the device: yields a function that runs the marker kernel, and one for the trace, to call afterwards."""
    kernel = functools.partial(_marker(), jnp.zeros((128,), jnp.float32))
    jax.block_until_ready(kernel())  # compiled before the trace begins
    with tempfile.TemporaryDirectory() as folder:
        found: list[bytes] = []
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            yield lambda: jax.block_until_ready(kernel()), lambda: found[0]
        (trace,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        found.append(trace.read_bytes())


def _wall_us(step, layers: list[tuple], steps: int) -> float:
    for _ in range(3):
        jax.block_until_ready(step(layers))
    start = time.perf_counter()
    for _ in range(steps):
        out = step(layers)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / steps * 1e6 / len(layers)


@functools.cache
def _marker():
    """A kernel whose event separates those of two steps: float32 [128] -> the same."""

    def body(x_ref, out_ref):
        out_ref[...] = plgpu.load(x_ref.at[...], layout=plgpu.Layout.WG_STRIDED((128,), 1))

    return jax.jit(plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=(1,), grid_names=("one",), kernel_name=MARKER))


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel or copy on the device."""

    name: str
    start_ns: float
    end_ns: float


def device_events(profile) -> list[Event]:
    """Everything that ran on a stream of a GPU, in order of its start. Summary lines of the trace are left out."""
    return sorted(
        (Event(e.name, e.start_ns, e.end_ns)
         for plane in profile.planes if plane.name.startswith("/device:GPU")
         for line in plane.lines if line.name.startswith("Stream")
         for e in line.events),
        key=lambda e: e.start_ns)


def split_calls(events: list[Event], calls: int) -> list[list[Event]]:
    """The events before each of `calls` markers; empty if the markers are not that many."""
    groups: list[list[Event]] = [[]]
    for event in events:
        if event.name.startswith(MARKER):
            groups.append([])
        else:
            groups[-1].append(event)
    return groups[:-1] if len(groups) == calls + 1 else []


def split_runs(events: list[Event], runs: int) -> list[list[Event]]:
    """`runs` equal runs of events.

    Empty if there are no events, if some are missing, or if the runs differ: then they cannot be told apart.
    """
    size, rest = divmod(len(events), runs)
    if rest or not size:
        return []
    found = [events[i:i + size] for i in range(0, len(events), size)]
    kinds = {tuple(sorted(e.name for e in run)) for run in found}
    return found if len(kinds) == 1 else []


def summarise(runs: list[list[Event]], wall_us: float, steps: int, layers: int) -> Timing:
    """The `Timing` of equal runs of events, each a step of `layers` layers."""
    times: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * len(runs))
    for i, run in enumerate(runs):
        for event in run:
            times[event.name][i] += (event.end_ns - event.start_ns) / 1e3 / layers
    kernels = {name: statistics.median(us) for name, us in times.items()}
    # Kernels may overlap: the last one to start need not be the last one to end.
    spans = [(max(e.end_ns for e in run) - run[0].start_ns) / 1e3 / layers for run in runs]
    clock, spans = ("device", spans) if spans else ("host", [wall_us])
    return Timing(
        us=statistics.median(spans), min_us=min(spans), p90_us=sorted(spans)[int(0.9 * (len(spans) - 1))],
        wall_us=wall_us, kernels=dict(sorted(kernels.items(), key=lambda item: -item[1])), clock=clock, steps=steps,
        layers=layers)


def aot_cases():
    """Cases for a deviceless compile, see tests/aot.py: (name, function, arguments, limits)."""
    limits = dict(min_wide_loads=0, min_shuffles=0, max_barriers=3)
    yield MARKER, _marker(), (jax.ShapeDtypeStruct((128,), jnp.float32),), limits
