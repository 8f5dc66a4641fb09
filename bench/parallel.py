"""Experts on two GPUs: step time of expert parallel (EP2) and tensor parallel (TP2) against one GPU.

    python -m bench.parallel --model qwen3-30b-a3b --format bf16 --out bench/results

A step is a chain of MoE layers, x + moe(x), each with weights and routing of its own. A layer's routing waits for the
layer before, as a router's would, so that no collective is hidden behind the next layer. Every layout is compared with
one GPU first, and one GPU with the float32 reference; smaller batches are the first rows of the largest. How the
collectives run is in bench/two_devices.py. Prints a table and writes one JSON. Without two GPUs only results are
compared, on two virtual devices of the CPU (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import sys

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import two_devices
from bench.report import metadata
from jax_warp_decode import Routing, choose, moe
from jax_warp_decode.measure import inputs
from jax_warp_decode.measure.variants import describe, errors
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
from jax_warp_decode.presets import PRESETS, get_preset

LAYERS = (2, 6)
WEIGHT_BYTES = 30e9  # of all layers together, on the GPU that holds them whole
LAYOUTS = {"EP2": dict(expert_axis="gpu"), "TP2": dict(tensor_axis="gpu")}
TARGET = 0.62  # of one GPU's time
# One layer against the float32 reference; a chain against one GPU: the two differ by a rounding of y per layer.
TOLERANCE_REFERENCE, TOLERANCE_ONE_GPU = 1e-2, 2e-3


def chain(layer):
    def step(x, layers):
        for routing, experts in layers:
            x, routing = lax.optimization_barrier((x, routing))
            x = x + layer(x, routing, experts)
        return x

    return step


def rows(batch, x, routing):
    return x[:batch], Routing(routing.ids[:batch], routing.weights[:batch])


def run_layout(options, layer, experts, x, routings, want, ways):
    """Yields {batch, us, errors, ..} for one layout and every way to run collectives; `want` is {} or {batch: y}."""
    args = {b: (rows(b, x, routings[0])[0], [(rows(b, x, r)[1], e) for r, e in zip(routings, experts, strict=True)])
            for b in options.batch}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        lowering = {b: pool.submit(lambda b=b: jax.jit(chain(layer)).lower(*args[b])) for b in args}
        building = {way: {b: pool.submit(lambda b=b, way=way: two_devices.compile(lowering[b].result(), way))
                          for b in args} for way in ways}
    for way, futures in building.items():
        found, good = {}, []
        for b, future in futures.items():
            found[b] = dict(batch=b, collectives=way)
            try:
                y = np.asarray(future.result()(*args[b]), np.float64)
                if b in want:
                    found[b] |= errors([y], [want[b]])
                    if not found[b]["relative_l2"] < TOLERANCE_ONE_GPU:
                        raise ArithmeticError("wrong result")
                want.setdefault(b, y)
                good.append(b)
            except Exception as error:  # one batch that fails must not end the run
                found[b]["error"] = describe(error)
        if jax.default_backend() == "gpu" and good:
            try:
                spans = two_devices.time_programs([(futures[b].result(), args[b]) for b in good], options.steps)
                for b, span in zip(good, spans, strict=True):
                    found[b] |= per_layer(span, len(experts))
            except Exception as error:
                for b in good:
                    found[b]["error"] = describe(error)
        yield from found.values()


def per_layer(span, layers):
    def divide(value):
        if isinstance(value, dict):
            return {name: divide(us) for name, us in value.items()}
        return [divide(us) for us in value] if isinstance(value, list) else value and value / layers

    return {name: value if name == "clock" else divide(value) for name, value in dataclasses.asdict(span).items()}


def check_first_layer(x, routing, experts):
    """Relative L2 error of one GPU's first layer against the float32 reference."""
    got = jax.jit(moe)(x, routing, experts)
    want = jax.jit(lambda *args: moe(*args, strategy="reference"))(x.astype("float32"), routing, experts)
    error = errors([got], [want])["relative_l2"]
    if not error < TOLERANCE_REFERENCE:
        raise ArithmeticError(f"wrong result on one GPU: relative L2 error {error:.1e}")
    return error


def run_model(options, model, format):
    """Yields one result per layout, way to run collectives, and batch size."""
    preset = get_preset(model)
    one = jax.devices()[0]
    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    most, rng = max(options.batch), np.random.default_rng(options.seed)
    with jax.default_device(one):
        first = inputs.make_experts(jax.random.key(0), preset, format)
        size = sum(a.nbytes for a in jax.tree.leaves(first))
        count = max(LAYERS[0], min(LAYERS[1], int(WEIGHT_BYTES / size)))
        whole = [first] + [inputs.make_experts(jax.random.key(i), preset, format) for i in range(1, count)]
        x = inputs.make_x(jax.random.key(options.seed), most, preset)
        routings = [inputs.make_routing(rng, most, preset, "uniform") for _ in range(count)]
    error, want = check_first_layer(x, routings[0], first), {}
    for found in run_layout(options, moe, whole, x, routings, want, ["nccl"]):
        yield found | dict(layout="one", collectives="none", relative_l2_to_reference=error,
                           **chosen(found["batch"], first, preset, 1))
    x, routings = jax.device_put((x, routings), NamedSharding(mesh, P()))
    for name, axes in LAYOUTS.items():
        sharding = ExpertSharding(mesh, **axes)
        shares = [sharding.shard(experts) for experts in whole]
        layer = lambda x, routing, experts, sharding=sharding: moe_sharded(x, routing, experts, sharding)
        local = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), shares[0])
        for found in run_layout(options, layer, shares, x, routings, want, options.collectives):
            yield found | dict(layout=name, **chosen(found["batch"], local, preset, 2 if name == "EP2" else 1))
        del shares, layer  # before the next layout takes as much


def chosen(batch, experts, preset, shares):
    choice = choose(batch, experts, experts_per_token=max(1, preset.experts_per_token // shares), x_dtype="bfloat16")
    return dict(strategy=choice.strategy)


def table(results) -> str:
    one = {(r["model"], r["format"], r["batch"]): r["us"] for r in results if r["layout"] == "one" and "us" in r}
    lines = [f"{'model':16}{'format':8}{'layout':7}{'by':6}{'B':>4}{'us/layer':>10}{'of one':>8}{'collective':>12}"
             f"{'share':>7}{'wall':>9}  strategy"]
    for r in results:
        line = f"{r['model']:16}{r['format']:8}{r['layout']:7}{r['collectives']:6}{r['batch']:4}"
        if "us" in r:
            ratio = r["us"] / one.get((r["model"], r["format"], r["batch"]), float("nan"))
            collective = r["collective_us"] or float("nan")
            line += f"{r['us']:10.1f}{ratio:8.2f}{collective:12.1f}{collective / r['us']:7.0%}{r['wall_us']:9.1f}"
        lines.append(f"{line}  {r['strategy']} {r.get('clock', '')} {r.get('error', '')}")
    return "\n".join(lines)


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3-30b-a3b"], choices=sorted(PRESETS))
    parser.add_argument("--format", nargs="+", default=["bf16"], choices=inputs.FORMATS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--collectives", nargs="+", default=["nccl", "graph"], choices=list(two_devices.COLLECTIVES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON, one a model")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast: not every host can
    if jax.device_count() < 2:
        print("Two devices are needed: GPUs, or XLA_FLAGS=--xla_force_host_platform_device_count=2", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    everything = []
    for model in options.model:
        path = options.out / f"parallel-{model}.json"
        meta, results = metadata("parallel"), []
        for format in options.format:
            for found in run_model(options, model, format):
                results.append(dict(model=model, format=format, **found))
                print(json.dumps({k: v for k, v in results[-1].items() if k != "kernels"}), flush=True)
                path.write_text(json.dumps(dict(meta=meta, target=TARGET, results=results), indent=1) + "\n")
        everything += results
        print(f"wrote {path}\n{table(results)}", flush=True)
    return int(any("error" in r for r in everything))


if __name__ == "__main__":
    sys.exit(main())
