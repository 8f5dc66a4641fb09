"""Device time of programs that run on several GPUs at once, and how XLA is told to run their collectives.

The GPUs of one program do not start together, and the one that starts first waits in the first collective for the
others. So the time of a step is that of the device that starts last: nothing it does waits for a launch elsewhere.
"""

import dataclasses
import pathlib
import re
import statistics
import tempfile
import time
import types

import jax

from jax_warp_decode.measure import timing

WARM_UP = 2
PAUSE_S, GAP_NS = 0.15, 75e6  # between two programs in one trace, and how it is found again
COLLECTIVE = re.compile(r"nccl|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|psum", re.IGNORECASE)

# XLA options by name. "nccl": NCCL's kernels, launched by the host between the CUDA graphs of the layers. "graph":
# NCCL's kernels inside one graph. "xla": as XLA is set up, which replaces small all-reduces by a kernel of its own.
_NO_OWN_KERNELS = {"xla_gpu_experimental_use_collective_kernels": ""}
COLLECTIVES = {
    "nccl": _NO_OWN_KERNELS,
    "graph": _NO_OWN_KERNELS | {
        "xla_gpu_enable_command_buffer": timing.GRAPH_OPTIONS["xla_gpu_enable_command_buffer"] + ",COLLECTIVES"},
    "xla": {},
}


@dataclasses.dataclass(frozen=True)
class Spans:
    """Microseconds of one program, medians over its steps.

    Attributes:
      us: from first to last event on the device that starts last in a step; the host clock where `clock` says so.
      clock: "device", or "host" where the trace does not show every step on every device.
      wall_us: host clock over steps queued back to back.
      collective_us: in collectives, on the device that waits in them the least.
      busy_us: in all other kernels, for each device.
      kernels: by name, on the first device.
    """

    us: float
    clock: str
    wall_us: float
    collective_us: float | None
    busy_us: list[float]
    kernels: dict[str, float]


def compile(lowered: jax.stages.Lowered, collectives: str) -> jax.stages.Compiled:
    """An executable that runs as a CUDA graph, its collectives as `COLLECTIVES` says. Threads may share the work."""
    on_gpu = jax.default_backend() == "gpu"
    return lowered.compile(compiler_options=timing.GRAPH_OPTIONS | COLLECTIVES[collectives] if on_gpu else None)


def time_programs(programs: list[tuple], steps: int) -> list[Spans]:
    """Times executables, (program, arguments) each, in one trace, because a trace costs two seconds. Needs a GPU."""
    walls = [_wall_us(program, args, steps) for program, args in programs]
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for program, args in programs:  # the profiler's own first steps take long, in the middle of ours
                jax.block_until_ready(program(*args))
            time.sleep(PAUSE_S)
            for program, args in programs:
                for _ in range(WARM_UP + steps):
                    jax.block_until_ready(program(*args))
                time.sleep(PAUSE_S)
        (trace,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(trace))
        devices = [timing.device_events(types.SimpleNamespace(planes=[plane]))
                   for plane in profile.planes if plane.name.startswith("/device:GPU")]
    return summarise([events for events in devices if events], walls, steps)


def summarise(devices: list[list[timing.Event]], walls: list[float], steps: int) -> list[Spans]:
    """What the events of each device, in order of their start, say about the programs with these host times."""
    programs = [split_at_pauses(events)[1:][-len(walls):] for events in devices]
    if not programs or any(len(found) != len(walls) for found in programs):
        programs = [[[]] * len(walls)]
    return [_spans([timing.split_runs(found[i], WARM_UP + steps)[WARM_UP:] for found in programs], wall)
            for i, wall in enumerate(walls)]


def split_at_pauses(events: list[timing.Event]) -> list[list[timing.Event]]:
    """Events between which less than `GAP_NS` pass, together."""
    groups, end = [], float("-inf")
    for event in events:
        if event.start_ns - end > GAP_NS:
            groups.append([])
        groups[-1].append(event)
        end = max(end, event.end_ns)
    return groups


def _spans(devices, wall) -> Spans:
    if not devices or not all(devices):
        return Spans(wall, "host", wall, None, [], {})
    lasts = []
    for runs in zip(*devices, strict=True):  # one step, on every device
        run = max(runs, key=lambda run: run[0].start_ns)
        lasts.append((max(e.end_ns for e in run) - run[0].start_ns) / 1e3)
    spent = [[_by_name(run) for run in runs] for runs in devices]
    inside, outside = ([statistics.median(sum(us for name, us in run.items() if bool(COLLECTIVE.search(name)) is which)
                                          for run in runs) for runs in spent] for which in (True, False))
    first = {name: statistics.median(run[name] for run in spent[0]) for name in spent[0][0]}
    return Spans(statistics.median(lasts), "device", wall, min(inside), outside,
                 dict(sorted(first.items(), key=lambda item: -item[1])))


def _by_name(run):
    times = {}
    for event in run:
        times[event.name] = times.get(event.name, 0.0) + (event.end_ns - event.start_ns) / 1e3
    return times


def _wall_us(program, args, steps):
    for _ in range(3):
        jax.block_until_ready(program(*args))
    start = time.perf_counter()
    for _ in range(steps):
        out = program(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / steps * 1e6
