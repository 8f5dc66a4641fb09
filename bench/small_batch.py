"""Decode-sized batches: time and traffic of one MoE layer, next to peers and to simply reading the weights.

    python -m bench.small_batch --model qwen3-30b-a3b --format bf16 mxfp8 --out bench/results

For every format, batch size and strategy: results are compared with the float32 reference, then a chain of layers with
weights and routing of their own is timed (see jax_warp_decode/measure/timing.py), and a plain read of as many unique
bytes in the same way. Prints a table, writes one JSON and one PNG. Without a GPU only results are compared.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys

import jax
import jaxlib
import numpy as np

from bench.peers import STRATEGIES
from jax_warp_decode import moe
from jax_warp_decode.measure import inputs, read_kernel, timing
from jax_warp_decode.presets import PRESETS, get_preset

STEP_BYTES = 0.6e9  # unique weight bytes of one step: many times the L2 cache
LAYERS = (3, 8)
WEIGHT_BYTES = 40e9  # of all layers together
TOLERANCE = {"expert_centric_mxfp8": 0.1}  # relative L2 error; quantised activations are far less accurate
DEFAULT_TOLERANCE = 1e-2
WRONG = "wrong result"


@dataclasses.dataclass(frozen=True)
class Workload:
    """Layers of one batch size: (x, routing) of each, the float32 result of each, and the bytes they read."""

    batch: int
    layers: list
    want: list
    unique: float  # mean bytes per layer
    logical: float


def make_workload(options, preset, experts, batch) -> Workload:
    rng = np.random.default_rng([options.seed, batch])
    per_layer = sum(w.nbytes for w in jax.tree.leaves(experts[0]))
    expected = min(batch * preset.experts_per_token / preset.num_experts, 1) * per_layer
    count = min(len(experts), max(LAYERS[0], math.ceil(STEP_BYTES / expected)))
    reference = jax.jit(lambda *args: moe(*args, strategy="reference"))
    layers, want, read = [], [], []
    for layer, key in enumerate(jax.random.split(jax.random.key(batch + options.seed), count)):
        x, routing = inputs.make_x(key, batch, preset), inputs.make_routing(rng, batch, preset, options.pattern)
        layers.append((x, routing))
        want.append(np.asarray(reference(x.astype("float32"), routing, experts[layer]), np.float64))
        read.append(inputs.traffic(np.asarray(routing.ids), experts[layer]))
    return Workload(batch, layers, want, statistics.mean(t.unique for t in read),
                    statistics.mean(t.logical for t in read))


def errors(got: list, want: list) -> dict:
    """Relative L2 error, cosine and largest error over all layers, in float64."""
    got, want = (np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays]) for arrays in (got, want))
    return dict(
        relative_l2=float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        cosine=float(got @ want / (np.linalg.norm(got) * np.linalg.norm(want))),
        max_abs=float(np.abs(got - want).max()))


def time_read(workload: Workload, steps: int) -> timing.Timing:
    """The ceiling: as many windows as layers, each of the mean unique bytes."""
    keys = jax.random.split(jax.random.key(7), len(workload.layers))
    windows = [(read_kernel.window(key, workload.unique),) for key in keys]
    return timing.time_step(timing.compile_step(timing.lower_step(read_kernel.read, windows, "read")), windows, steps)


def lower(strategy, weights, workload):
    """(executable-to-be, arguments) or the exception."""
    layers = [(x, routing, w) for (x, routing), w in zip(workload.layers, weights, strict=False)]
    try:
        return timing.lower_step(strategy.layer, layers, strategy.name), layers
    except Exception as error:  # one failing peer must not end the run
        return error, None


def compile_one(lowered):
    try:
        return lowered if isinstance(lowered, Exception) else timing.compile_step(lowered)
    except Exception as error:
        return error


def run_strategy(strategy, experts, workloads, options):
    """Yields one outcome per batch size: errors against the reference and a timing, or what went wrong."""
    try:
        weights = [strategy.prepare(e) for e in experts]
        jax.block_until_ready(weights)
    except Exception as error:
        yield from [{"error": describe(error)}] * len(workloads)
        return
    lowered = [lower(strategy, weights, w) for w in workloads]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        steps = pool.map(compile_one, [executable for executable, _ in lowered])
        for workload, step, (_, layers) in zip(workloads, steps, lowered, strict=True):
            outcome = {}
            try:
                if isinstance(step, Exception):
                    raise step
                outcome.update(errors(step(layers), workload.want))
                if not outcome["relative_l2"] < TOLERANCE.get(strategy.name, DEFAULT_TOLERANCE):
                    raise ArithmeticError(WRONG)
                if jax.default_backend() == "gpu":
                    outcome["timing"] = timing.time_step(step, layers, options.steps)
            except Exception as error:
                outcome["error"] = describe(error)
            yield outcome


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def output_of(*command) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def metadata(module: str) -> dict:
    """Where a result comes from. The output folder is the reader's own, so the command names none."""
    words = list(sys.argv[1:])
    if "--out" in words:
        words[words.index("--out") + 1] = "OUT"
    return dict(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", f"bench.{module}", *words]),
        commit=os.environ.get("GIT_COMMIT") or output_of("git", "rev-parse", "HEAD"),  # the first for a copied tree
        device=jax.devices()[0].device_kind,
        driver=output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        jax=jax.__version__, jaxlib=jaxlib.__version__, xla_options=timing.GRAPH_OPTIONS)


def describe_row(result) -> str:
    row = f"{result['format']:6} B={result['batch']:<4} {result['strategy']:26} "
    if "us" in result:
        row += (f"{result['us']:8.1f} us by the {result['clock']} (min {result['min_us']:.1f}, in kernels "
                f"{sum(result['kernels'].values()):.1f}, wall {result['wall_us']:.1f})  "
                f"{result['unique_bytes'] / 1e9:.3f} GB  {result['tb_per_s']:.2f} TB/s  "
                f"{result['fraction_of_read']:6.1%} of the read  ")
    if "relative_l2" in result:
        row += f"relative L2 {result['relative_l2']:.1e}  "
    return row + result.get("error", "")


def summary(options, results) -> str:
    """Per format: one line a strategy, one column a batch size, microseconds and share of the size-matched read."""
    lines = []
    for format in options.format:
        cells = {(r["strategy"], r["batch"]): f"{r['us']:.1f} {r['fraction_of_read']:4.0%}"
                 for r in results if r["format"] == format and "us" in r}
        lines.append(f"\n{options.model} {format}, {options.pattern}: us per layer, share of the read")
        lines.append(f"{'B':26}" + "".join(f"{b:>14}" for b in options.batch))
        for name in dict.fromkeys(name for name, _ in cells):
            lines.append(f"{name:26}" + "".join(f"{cells.get((name, b), '-'):>14}" for b in options.batch))
    return "\n".join(lines)


def plot(path, options, results):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(len(options.format), 2, figsize=(11, 4 * len(options.format)), squeeze=False)
    for (left, right), format in zip(axes, options.format, strict=True):
        rows = [r for r in results if r["format"] == format and "us" in r]
        for name in dict.fromkeys(r["strategy"] for r in rows):
            mine = [r for r in rows if r["strategy"] == name]
            batch = [r["batch"] for r in mine]
            style = dict(marker="o", color="black", linestyle="--") if name == "read" else dict(marker="o")
            left.plot(batch, [r["us"] for r in mine], label=name, **style)
            right.plot(batch, [r["fraction_of_read"] for r in mine], **style)
        left.set(xscale="log", yscale="log", xlabel="tokens B", ylabel="us per layer",
                 title=f"{options.model}, {format}, {options.pattern} routing")
        right.set(xscale="log", xlabel="tokens B", ylabel="share of the size-matched read", ylim=(0, 1.1))
        for axis in (left, right):
            axis.set_xticks(options.batch, [str(b) for b in options.batch])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        left.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def run(options):
    """Yields one result dict per format, strategy and batch size."""
    preset = get_preset(options.model)
    on_gpu = jax.default_backend() == "gpu"
    for format in options.format:
        shapes = jax.eval_shape(lambda k, f=format: inputs.make_experts(k, preset, f), jax.random.key(0))
        size = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(shapes))
        count = max(LAYERS[0], min(LAYERS[1], int(WEIGHT_BYTES / size)))
        experts = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(count)]
        workloads = [make_workload(options, preset, experts, batch) for batch in options.batch]
        reads = [time_read(w, options.steps) if on_gpu else None for w in workloads]
        found = {"read": [{"timing": read} for read in reads]} if on_gpu else {}
        for name in options.strategies:
            strategy = STRATEGIES[name]
            reason = strategy.missing() or ("" if format in strategy.formats else f"takes {strategy.formats} only")
            found[name] = ([{"error": f"skipped: {reason}"}] * len(workloads) if reason
                           else run_strategy(strategy, experts, workloads, options))
        for name, outcomes in found.items():
            for workload, read, outcome in zip(workloads, reads, outcomes, strict=True):
                timed = outcome.pop("timing", None)
                result = dict(
                    model=options.model, format=format, pattern=options.pattern, strategy=name, batch=workload.batch,
                    unique_bytes=workload.unique, logical_bytes=workload.logical, **outcome)
                if timed:
                    result.update(dataclasses.asdict(timed), read_us=read.us, fraction_of_read=read.us / timed.us,
                                  tb_per_s=workload.unique / timed.us / 1e6)
                yield result


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"], choices=inputs.FORMATS)
    parser.add_argument("--pattern", default="uniform", choices=inputs.PATTERNS, help="which experts the tokens choose")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES),
                        default=[n for n in STRATEGIES if n != "expert_centric_mxfp8"])
    parser.add_argument("--steps", type=int, default=20, help="timed repetitions of the whole chain of layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="small_batch", help="first part of the name of the JSON and the PNG")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON and the PNG")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    if jax.default_backend() != "gpu":
        print("No NVIDIA GPU: results are compared with the reference, nothing is timed.")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.name}-{options.model}-{options.pattern}.json"
    meta, results = metadata("small_batch"), []
    for result in run(options):
        print(describe_row(result), flush=True)
        results.append(result)
        path.write_text(json.dumps(dict(meta=meta, results=results), indent=1) + "\n")  # survives a run cut short
    print(f"wrote {path}")
    if any("us" in r for r in results):
        plot(path.with_suffix(".png"), options, results)
        print(f"wrote {path.with_suffix('.png')}\n{summary(options, results)}")
    return int(any(WRONG in r.get("error", "") for r in results))


if __name__ == "__main__":
    sys.exit(main())
