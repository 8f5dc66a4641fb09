"""Whether 'auto' takes the fastest strategy: both of its choices, on either side of every batch size where it changes.

    python -m bench.crossovers --out bench/results

For the models of bench.suite under uniform routing and B = 1, 2, 4, ... 1024: where the choices at B and at 2 B differ,
both strategies are timed at both (see bench.small_batch). Writes crossovers.json: what 'auto' takes, the rows, and for
each of these batch sizes how much slower that is than the faster of the two.
"""

import argparse
import itertools
import math
import pathlib
import sys
import time

from bench import small_batch
from bench.report import Report, need_gpu
from bench.suite import SUITE, auto
from jax_warp_decode.measure.variants import describe

BATCHES = tuple(2**n for n in range(11))
GOAL = 1.03  # times the best strategy


def switches(choices: dict[int, str]) -> list[tuple[int, int]]:
    """Neighbouring batch sizes with different choices.

    Example:
      >>> from bench.crossovers import switches
      >>> switches({1: "a", 2: "a", 4: "b", 8: "c"})
      [(2, 4), (4, 8)]
    """
    return [(b, c) for b, c in itertools.pairwise(choices) if choices[b] != choices[c]]


def slower(rows: list[dict], choices: dict[str, dict[int, str]]) -> list[dict]:
    """Per layer ("model format") and batch size with two strategies or more: what 'auto' takes over the best.

    Example:
      >>> from bench.crossovers import slower
      >>> same = dict(model="m", format="bf16", batch=8)
      >>> slower([same | dict(strategy="a", us=11.0), same | dict(strategy="b", us=10.0)], {"m bf16": {8: "a"}})
      [{'layer': 'm bf16', 'batch': 8, 'auto': 'a', 'best': 'b', 'ratio': 1.1}]
    """
    us: dict[tuple, dict] = {}
    for row in rows:
        if "us" in row and row["strategy"] != "read":
            us.setdefault((f"{row['model']} {row['format']}", row["batch"]), {})[row["strategy"]] = row["us"]
    found = []
    for (layer, batch), times in us.items():
        choice, best = choices[layer][batch], min(times, key=times.__getitem__)
        if choice in times and len(times) > 1:
            ratio = round(times[choice] / times[best], 3)
            found.append(dict(layer=layer, batch=batch, auto=choice, best=best, ratio=ratio))
    return found


def measure_model(model: str, format: str, options, report: Report) -> None:
    choices = {batch: auto(model, format, batch) for batch in BATCHES}
    report.facts["choices"][f"{model} {format}"] = choices
    for pair in switches(choices):
        small_batch.run(small_batch.parse([
            "--model", model, "--format", format, "--steps", options.steps, "--out", str(options.out),
            "--batch", *map(str, pair), "--strategies", *(choices[batch] for batch in pair)]), report)
    report.facts["slower"] = slower(report.rows, report.facts["choices"])
    report.write()


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="8", help="timed repetitions of the whole chain of layers")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no model is begun after this")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    need_gpu("crossovers")
    start, report = time.monotonic(), Report(options.out / "crossovers.json", "crossovers", choices={}, slower=[])
    for model, format in dict.fromkeys((model, format) for model, format, pattern in SUITE if pattern == "uniform"):
        if time.monotonic() - start > options.seconds:
            report.cut(f"{model} {format}")
            continue
        try:
            measure_model(model, format, options, report)
        except Exception as error:  # of one model, such as too little memory
            report.add(dict(model=model, format=format, batch=0, strategy="", error=describe(error)))
    for row in report.facts["slower"]:
        print(f"{row['layer']:25} B={row['batch']:<5} auto {row['auto']:15} best {row['best']:15} "
              f"{row['ratio']:.3f}{'  above ' + str(GOAL) if row['ratio'] > GOAL else ''}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
