"""Experts on two GPUs: step time of expert parallel (EP2) and tensor parallel (TP2) against one GPU.

    python -m bench.parallel --model qwen3-30b-a3b deepseek-v3 --format bf16 --out bench/results

A step is a chain of MoE layers, x + moe(x), each with weights and routing of its own and fed by the one before, so that
no two collectives can be merged or hidden behind the next layer. Every layout is compared with one GPU first, and
one GPU with the float32 reference. Times are spans on each device's timeline, the slower device counts; the share of
the collective is that of the device which waits less. Prints a table and writes one JSON. Without two GPUs only results
are compared, on two virtual devices of the CPU (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import types

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.small_batch import describe, errors, metadata
from jax_warp_decode import choose, moe
from jax_warp_decode.measure import inputs, timing
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
from jax_warp_decode.presets import PRESETS, get_preset

LAYERS = (2, 6)
WEIGHT_BYTES = 30e9  # of all layers together, on the GPU that holds them whole
LAYOUTS = {"EP2": dict(expert_axis="gpu"), "TP2": dict(tensor_axis="gpu")}
TARGET = 0.62  # of one GPU's time
# One layer against the float32 reference; a chain against one GPU: the two differ by a rounding of y per layer.
TOLERANCE_REFERENCE, TOLERANCE_ONE_GPU = 1e-2, 2e-3
WARM_UP = 2


def chain(layer):
    def step(x, layers):
        for routing, experts in layers:
            x = x + layer(x, routing, experts)
        return x

    return step


def compile_step(layer, x, layers, graph_collectives):
    options = None
    if jax.default_backend() == "gpu":
        options = dict(timing.GRAPH_OPTIONS)
        if graph_collectives:
            options["xla_gpu_enable_command_buffer"] += ",COLLECTIVES"
    return jax.jit(chain(layer)).lower(x, layers).compile(compiler_options=options)


def time_step(step, args, steps: int, layers: int) -> dict:
    """Microseconds per layer: span of a step, the collective in it, and the host's clock."""
    for _ in range(3):
        jax.block_until_ready(step(*args))
    start = time.perf_counter()
    for _ in range(steps):
        out = step(*args)
    jax.block_until_ready(out)
    wall = (time.perf_counter() - start) / steps / layers * 1e6

    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(WARM_UP + steps):
                out = jax.block_until_ready(step(*args))
        (trace,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(trace))
        devices = [timing.device_events(types.SimpleNamespace(planes=[plane]))
                   for plane in profile.planes if plane.name.startswith("/device:GPU")]
    found = dict(wall_us=wall, clock="host", us=wall)
    runs = [timing.split_runs(events, WARM_UP + steps)[WARM_UP:] for events in devices if events]
    if runs and all(runs):
        spans = [[(max(e.end_ns for e in run) - run[0].start_ns) / 1e3 / layers for run in device] for device in runs]
        nccl = [[sum(e.end_ns - e.start_ns for e in run if "nccl" in e.name.lower()) / 1e3 / layers for run in device]
                for device in runs]
        found |= dict(clock="device", us=max(map(statistics.median, spans)),
                      collective_us=min(map(statistics.median, nccl)),
                      kernels=dict(sorted(kernel_times(runs[0], layers).items(), key=lambda item: -item[1])))
    return found


def kernel_times(runs, layers):
    names = {e.name for e in runs[0]}
    return {name: statistics.median(sum(e.end_ns - e.start_ns for e in run if e.name == name) / 1e3 / layers
                                    for run in runs) for name in names}


def inputs_for(batch, count, preset, seed):
    rng = np.random.default_rng([seed, batch])
    x = inputs.make_x(jax.random.key(seed + batch), batch, preset)
    return x, [inputs.make_routing(rng, batch, preset, "uniform") for _ in range(count)]


def measure(options, name, layer, experts, placed, want, batch):
    """One layout and batch size: errors against one GPU, then the time."""
    x, routings = placed
    layers = list(zip(routings, experts, strict=True))
    found = dict(layout=name, batch=batch)
    try:
        step = compile_step(layer, x, layers, options.graph_collectives)
        y = np.asarray(step(x, layers), np.float64)
        if want is not None:
            found |= errors([y], [want])
            if not found["relative_l2"] < TOLERANCE_ONE_GPU:
                raise ArithmeticError("wrong result")
        if jax.default_backend() == "gpu":
            found |= time_step(step, (x, layers), options.steps, len(layers))
        return found, y
    except Exception as error:  # one layout that fails must not end the run
        return found | dict(error=describe(error)), None


def check_first_layer(x, routing, experts):
    """Relative L2 error of one GPU's first layer against the float32 reference."""
    got = jax.jit(moe)(x, routing, experts)
    want = jax.jit(lambda *args: moe(*args, strategy="reference"))(x.astype("float32"), routing, experts)
    error = errors([got], [want])["relative_l2"]
    if not error < TOLERANCE_REFERENCE:
        raise ArithmeticError(f"wrong result on one GPU: relative L2 error {error:.1e}")
    return error


def run_model(options, model, format):
    """Yields one result per layout and batch size."""
    preset = get_preset(model)
    one = jax.devices()[0]
    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    everywhere = NamedSharding(mesh, P())
    with jax.default_device(one):
        first = inputs.make_experts(jax.random.key(0), preset, format)
        size = sum(a.nbytes for a in jax.tree.leaves(first))
        count = max(LAYERS[0], min(LAYERS[1], int(WEIGHT_BYTES / size)))
        whole = [first] + [inputs.make_experts(jax.random.key(i), preset, format) for i in range(1, count)]
        batches = {b: inputs_for(b, count, preset, options.seed) for b in options.batch}
    want = {}
    for batch, (x, routings) in batches.items():
        error = check_first_layer(x, routings[0], whole[0])
        found, want[batch] = measure(options, "one", moe, whole, (x, routings), None, batch)
        yield found | dict(relative_l2_to_reference=error, **chosen(batch, whole[0], preset, 1))
    for name, axes in LAYOUTS.items():
        sharding = ExpertSharding(mesh, **axes)
        shares = [sharding.shard(experts) for experts in whole]
        layer = lambda x, routing, experts, sharding=sharding: moe_sharded(x, routing, experts, sharding)
        local = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), shares[0])
        for batch, placed in batches.items():
            placed = jax.device_put(placed, everywhere)
            found, _ = measure(options, name, layer, shares, placed, want[batch], batch)
            yield found | chosen(batch, local, preset, 2 if name.startswith("EP") else 1)


def chosen(batch, experts, preset, shares):
    choice = choose(batch, experts, experts_per_token=max(1, preset.experts_per_token // shares), x_dtype="bfloat16")
    return dict(strategy=choice.strategy)


def table(results) -> str:
    one = {(r["model"], r["format"], r["batch"]): r["us"] for r in results if r["layout"] == "one" and "us" in r}
    lines = [f"{'model':16}{'format':8}{'layout':8}{'B':>5}{'us/layer':>10}{'of one GPU':>12}{'collective':>12}"
             f"{'share':>8}  strategy"]
    for r in results:
        line = f"{r['model']:16}{r['format']:8}{r['layout']:8}{r['batch']:5}"
        if "us" in r:
            ratio = r["us"] / one.get((r["model"], r["format"], r["batch"]), float("nan"))
            collective = r.get("collective_us", float("nan"))
            line += f"{r['us']:10.1f}{ratio:12.2f}{collective:12.1f}{collective / r['us']:8.0%}"
        lines.append(f"{line}  {r['strategy']} {r.get('error', '')}")
    return "\n".join(lines)


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3-30b-a3b", "deepseek-v3"], choices=sorted(PRESETS))
    parser.add_argument("--format", nargs="+", default=["bf16"], choices=inputs.FORMATS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graph-collectives", action="store_true", help="put the collectives into the CUDA graphs too")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast: not every host can
    if jax.device_count() < 2:
        print("Two devices are needed: GPUs, or XLA_FLAGS=--xla_force_host_platform_device_count=2", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "parallel.json"
    meta, results = metadata("parallel"), []
    for model in options.model:
        for format in options.format:
            for found in run_model(options, model, format):
                results.append(dict(model=model, format=format, **found))
                print(json.dumps({k: v for k, v in results[-1].items() if k != "kernels"}), flush=True)
                path.write_text(json.dumps(dict(meta=meta, target=TARGET, results=results), indent=1) + "\n")
    print(f"wrote {path}\n{table(results)}")
    return int(any("error" in r for r in results))


if __name__ == "__main__":
    sys.exit(main())
