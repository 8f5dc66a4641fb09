"""Decode-sized batches: time and traffic of one MoE layer, next to peers and to simply reading the weights.

    python -m bench.small_batch --model qwen3-30b-a3b --format bf16 mxfp8 --out bench/results

For every format, batch size and strategy: results are compared with the float32 reference, then a chain of layers with
weights and routing of their own is timed (see jax_warp_decode/measure/timing.py), and a plain read of as many unique
bytes in the same way. Prints a table, writes one JSON and one PNG. Without a GPU only results are compared.
"""

import argparse
import itertools
import math
import pathlib
import sys

import jax
import numpy as np

from bench.peers import STRATEGIES
from bench.report import Report, draw
from jax_warp_decode.measure import inputs, read_kernel
from jax_warp_decode.measure.variants import Variant, attempt, compare, compile_reference, measure
from jax_warp_decode.measure.workload import Workload, make_layers
from jax_warp_decode.presets import PRESETS, get_preset
from jax_warp_decode.routing import Routing

WEIGHT_BYTES = 40e9  # of all layers together
TOLERANCE = {"expert_centric_mxfp8": 0.1}  # relative L2 error; quantised activations are far less accurate
DEFAULT_TOLERANCE = 1e-2
OURS = ("warp_decode", "shared_decode", "expert_centric")
MOST_TIMES = 8  # the fastest, in the plot


def references(workloads: list[Workload], experts: list) -> list[list[np.ndarray]]:
    """The float32 result of every layer of every workload, from one program for all numbers of tokens."""
    def layer(number):
        """The calls of one layer, one after the other; those with fewer layers give their last, which is not used."""
        x, routing = zip(*(w.calls[min(number, len(w.calls) - 1)] for w in workloads), strict=True)
        ids, weights = (np.concatenate([np.asarray(a) for a in arrays]) for arrays in zip(*(
            (r.ids, r.weights) for r in routing), strict=True))
        return np.concatenate([np.asarray(a, np.float32) for a in x]), Routing(ids, weights), experts[number]

    program = compile_reference(*layer(0))
    found = [np.asarray(program(*layer(number)), np.float64) for number in range(max(len(w.calls) for w in workloads))]
    ends = np.cumsum([w.tokens for w in workloads])
    return [[y[end - w.tokens:end] for y in found[:len(w.calls)]] for w, end in zip(workloads, ends, strict=True)]


def refusal(name: str, format: str) -> str:
    """Why a strategy cannot run here or with this format, or an empty string."""
    strategy = STRATEGIES[name]
    return strategy.missing() or ("" if format in strategy.formats else f"takes {strategy.formats} only")


def variants(name: str, experts, workloads, want) -> list[Variant]:
    """A strategy on every workload."""
    strategy = STRATEGIES[name]
    weights = attempt(lambda: jax.block_until_ready([strategy.prepare(e) for e in experts]))
    if isinstance(weights, Exception):
        return [Variant({}, weights, []) for _ in workloads]
    tolerance = TOLERANCE.get(name, DEFAULT_TOLERANCE)
    return [Variant({}, strategy.layer, w.layers(weights), compare(y, tolerance))
            for w, y in zip(workloads, want, strict=True)]


def run(options, report: Report) -> list[dict]:
    """Measures what the report lacks: a row per format, strategy and batch size, printed, added and returned."""
    preset, found = get_preset(options.model), []
    for format in options.format:
        same = dict(model=options.model, format=format, pattern=options.pattern)
        has = lambda name, same=same: all(report.has(**same, strategy=name, batch=b) for b in options.batch)
        refused = {name: why for name in options.strategies if (why := refusal(name, format))}
        rows = [dict(same, strategy=name, batch=b, error=f"skipped: {why}")
                for name, why in refused.items() for b in options.batch]
        report.add(*rows)
        print("\n".join(map(describe_row, rows)), flush=True)
        names = [name for name in options.strategies if name not in refused and not has(name)]
        if not names:
            continue
        experts = make_layers(preset, format, WEIGHT_BYTES)
        workloads = [Workload.of(preset, experts, batch, options.pattern, options.seed) for batch in options.batch]
        want, read_us = references(workloads, experts), {}
        # The ceiling shares the trace of the first strategy.
        waiting = [("read", w, Variant({}, read_kernel.read, w.windows())) for w in workloads]
        waiting = waiting if jax.default_backend() == "gpu" else []
        for name in names:
            waiting += [(name, *pair) for pair in zip(
                workloads, variants(name, experts, workloads, want), strict=True)]
            measure([variant for *_, variant in waiting], options.steps)
            read_us |= {w.tokens: v.row["us"] for n, w, v in waiting if n == "read" and "us" in v.row}
            rows = [row_of(dict(same, strategy=n, batch=w.tokens), w, v.row, read_us) for n, w, v in waiting
                    if n == name or not has(n)]
            report.add(*rows)
            print("\n".join(map(describe_row, rows)), flush=True)
            found, waiting = found + rows, []
    return found


def row_of(same: dict, workload: Workload, measured: dict, read_us: dict) -> dict:
    row = dict(same, unique_bytes=workload.unique, logical_bytes=workload.logical, **measured)
    if "us" in row:
        ceiling = read_us.get(workload.tokens, float("nan"))
        row.update(read_us=ceiling, fraction_of_read=ceiling / row["us"], tb_per_s=workload.unique / row["us"] / 1e6)
    return row


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


def crossovers(rows: list[dict]) -> list[tuple[float, str]]:
    """Where another strategy of ours becomes the fastest, half-way between two batch sizes, and which.

    Example:
      >>> from bench.small_batch import crossovers
      >>> us = {"warp_decode": (1.0, 2.0, 4.0), "shared_decode": (2.0, 2.5, 3.0)}
      >>> crossovers([dict(strategy=s, batch=b, us=t) for s, times in us.items() for b, t in zip((1, 4, 16), times)])
      [(8.0, 'shared_decode')]
    """
    best: dict[int, dict] = {}
    for row in rows:
        if row["strategy"] in OURS and row["us"] < best.get(row["batch"], dict(us=math.inf))["us"]:
            best[row["batch"]] = row
    return [(math.sqrt(b * c), best[c]["strategy"]) for b, c in itertools.pairwise(sorted(best))
            if best[b]["strategy"] != best[c]["strategy"]]


def plot(path, options, results):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(len(options.format), 2, figsize=(11, 4 * len(options.format)), squeeze=False)
    for (left, right), format in zip(axes, options.format, strict=True):
        rows = [r for r in results if r["format"] == format and "us" in r]
        layers = [r for r in rows if r["strategy"] != "read"]
        fastest = {b: min((r["us"] for r in layers if r["batch"] == b), default=math.inf)
                   for b in {r["batch"] for r in rows}}
        for name in dict.fromkeys(r["strategy"] for r in rows):
            # What takes many times longer than the fastest would leave nothing to see of the others.
            mine = [r for r in rows if r["strategy"] == name and r["us"] <= MOST_TIMES * fastest[r["batch"]]]
            batch = [r["batch"] for r in mine]
            style = dict(marker="o", color="black", linestyle="--") if name == "read" else dict(marker="o")
            left.plot(batch, [r["us"] for r in mine], label=name, **style)
            right.plot(batch, [r["fraction_of_read"] for r in mine], **style)
        left.set(xscale="log", yscale="log", xlabel="tokens B", ylabel="us per layer",
                 title=f"{options.model}, {format}, {options.pattern} routing")
        right.set(xscale="log", xlabel="tokens B", ylabel="share of the size-matched read", ylim=(0, 1.1),
                  title="the same; dotted: the fastest of ours changes")
        for axis in (left, right):
            axis.set_xticks(options.batch, [str(b) for b in options.batch], fontsize=8)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        for batch, name in crossovers(rows):
            left.axvline(batch, color="grey", linestyle=":")
            left.annotate(f" {name} from here", (batch, 0.02), xycoords=("data", "axes fraction"), fontsize=7,
                          color="grey")
        left.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=120)


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
    parser.add_argument("--fill", action="store_true", help="keep what an earlier run wrote, measure what it lacks")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON and the PNG")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options = parse(argv)
    if jax.default_backend() != "gpu":
        print("No NVIDIA GPU: results are compared with the reference, nothing is timed.")
    path = options.out / f"{options.name}-{options.model}-{options.pattern}.json"
    report = Report(path, "small_batch", fill=options.fill)
    run(options, report)
    wrong = report.finish()
    if any("us" in r for r in report.rows):
        print(summary(options, report.rows))
        draw(plot, path.with_suffix(".png"), options, report.rows)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
