"""Device time of a chain of layers, from the profiler's timeline, with a host-clock cross-check.

One jitted step runs every layer once, each with weights of its own, so that nothing it reads is left in L2. XLA
captures the step as one CUDA graph; the time of a layer is the span of the step on the device over the number of
layers. A host clock around one call would measure the handling of its many buffers instead.
"""

import collections
import dataclasses
import pathlib
import statistics
import tempfile
import time

import jax

# Capture everything that can be captured, in program order, and keep the graph while the profiler looks: XLA launches
# kernel by kernel under a profiler unless told otherwise.
GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    "xla_enable_command_buffers_during_profiling": True,
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per layer.

    Attributes:
      us, min_us, p90_us: median, best and 90th percentile over the steps of one trace.
      wall_us: host clock over steps queued back to back; equals `us` where the device, not the host, is the limit.
      kernels: mean time per layer spent in the kernels of each name; their sum leaves out the gaps between them.
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

    The layers do not feed each other, but run one after the other: one stream, and a serial graph.
    """

    def step(layers):
        return [layer(*args) for args in layers]

    step.__name__ = name
    return jax.jit(step).lower(layers)


def compile_step(lowered: jax.stages.Lowered):
    """The executable of `lower_step`; may run in several threads at once."""
    return lowered.compile(compiler_options=GRAPH_OPTIONS if jax.default_backend() == "gpu" else None)


def time_step(step, layers: list[tuple], steps: int = 20) -> Timing:
    """Times an executable of `compile_step`; needs a GPU."""
    for _ in range(3):
        jax.block_until_ready(step(layers))
    start = time.perf_counter()
    for _ in range(steps):
        out = step(layers)
    jax.block_until_ready(out)
    wall = [(time.perf_counter() - start) / steps * 1e6 / len(layers)]

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                out = step(layers)
            jax.block_until_ready(out)
        (trace,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        events = device_events(jax.profiler.ProfileData.from_file(str(trace)))
    kernels = collections.Counter()
    for event in events:
        kernels[event.name] += (event.end_ns - event.start_ns) / 1e3 / steps / len(layers)
    spans = [s / 1e3 / len(layers) for s in split_spans(events, steps)]
    clock, spans = ("device", spans) if spans else ("host", wall)
    return Timing(
        us=statistics.median(spans), min_us=min(spans), p90_us=sorted(spans)[int(0.9 * (len(spans) - 1))],
        wall_us=wall[0], kernels=dict(kernels.most_common()), clock=clock, steps=steps, layers=len(layers))


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


def split_spans(events: list[Event], steps: int) -> list[float]:
    """Nanoseconds from the first start to the last end of each of `steps` equal runs of events.

    Empty if there are no events, or some are missing: then the runs cannot be told apart.
    """
    size, rest = divmod(len(events), steps)
    if rest or not size:
        return []
    runs = [events[i:i + size] for i in range(0, len(events), size)]
    return [max(e.end_ns for e in run) - run[0].start_ns for run in runs]
