"""Random layers against float64 for a night: the layers, the draws and the bound of tests/test_fuzz.py.

    python -m bench.fuzz --out bench/results [--examples 10000] [--minutes 35] [--seed 0] [--processes 2]
    python -m bench.fuzz --repeat "Layer('warp_decode', 2, 3, 64, 32, 2, 'bf16')" --seed 7

Goes round by round, each with a seed of its own, until so many examples have run or so much time has passed. A round
runs the fixed layers and draws others, of every strategy; more than an example in seven is one of kernels: interpreted,
or compiled for a GPU and their PTX executed (tests/ptx), where a data race or a load of a result that nobody wrote is a
failure, too. Needs no GPU. Writes fuzz.json: what ran of each path and of each format, how much of it had a bound, what
was refused, and every failure with the layer, the seed and the draw that repeat it. Exit code 1 if there was one.

The bound is derived in tests/fuzz_bound.py, term by term: n u / (1 - n u) * sum |products| for each of the three sums
of a layer, with u the unit roundoff of float32 (2^-24; 2^-23 where tensor cores may truncate) and n its length; 2^-8
for each value that a path stores in bfloat16; absolute terms for what may be flushed to zero.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import sys
import time

# Before JAX is imported; workers inherit both. Small programs spend their time in the compiler.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402

from bench.report import metadata, replace_text  # noqa: E402
from jax_warp_decode.errors import UnsupportedError  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import aot  # noqa: E402
import fuzz_layers  # noqa: E402
import test_fuzz  # noqa: E402
from ptx import launch  # noqa: E402

FIXED = (*fuzz_layers.LAYERS, *fuzz_layers.INTERPRETED, *fuzz_layers.EMULATED)
# In a round: layers that are drawn of a kind, which take seconds to compile. The dearest first, for even processes.
DRAWN = {("shared_decode", False): 2, ("shared_decode", True): 2, ("expert_centric", True): 2,
         ("warp_decode", True): 3, ("warp_decode", False): 3, ("expert_centric", False): 6, ("reference", False): 6}


def examples(layer) -> int:
    """In a round: by what an example takes."""
    if (layer.strategy, layer.emulated) in fuzz_layers.QUICK:
        return 18 if layer in FIXED else 16
    return 2 if layer in FIXED else 4


def of_round(number: int, emulated: bool) -> list:
    """The layers of a round."""
    drawn = [layer for kind, count in DRAWN.items() for layer in fuzz_layers.drawn(*kind, count, number)]
    return [layer for layer in (*drawn, *FIXED) if emulated or not layer.emulated]


_machines: list = []  # of this process, while it executes PTX
_stack = contextlib.ExitStack()


def start(emulated: bool) -> None:
    """What a process does once."""
    global _machines
    if emulated:
        _machines = _stack.enter_context(launch.emulated())


def attempt(layer, number: int) -> dict:
    """What became of one layer with one seed: the share with a bound of each example, or why there is none."""
    try:
        # The simplest draw of a fixed layer is the same in every round.
        shares = test_fuzz.run(layer, examples(layer), number, simplest=layer not in FIXED or number == 0)
        races = [race for m in _machines for race in m.races.found]
        unwritten = [place for m in _machines for place in m.memory.unwritten if place[1] != "shared memory"]
        assert not races and not unwritten, f"data races {races[:2]}, loads of what nobody wrote {unwritten[:2]}"
        return dict(shares=shares)
    except UnsupportedError as error:
        return dict(shares=[], refused=str(error))
    except Exception as error:
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return dict(shares=[], failure=words[-3000:])
    finally:
        _machines.clear()


def summary(results: list) -> dict:
    """(layer, what became of it) of a run -> the report's tables."""
    paths, formats = collections.defaultdict(list), collections.defaultdict(list)
    for layer, found in results:
        paths[layer.path].append((layer, found))
        formats[layer.weights].append((layer, found))

    def shares(of):
        return [share for _, found in of for share in found["shares"]]

    def row(of):
        return dict(examples=len(shares(of)), elements_with_a_bound=round(float(np.mean(shares(of) or [0])), 3))

    kernels = lambda of: [(layer, found) for layer, found in of if not layer.path.endswith("XLA")]
    return dict(
        examples=len(shares(results)), in_kernels=len(shares(kernels(results))),
        of_drawn_layers=len(shares([(layer, found) for layer, found in results if layer not in FIXED])),
        paths={path: row(of) | dict(layers=len({layer for layer, _ in of}), refused=sum("refused" in f for _, f in of))
               for path, of in sorted(paths.items())},
        formats={name: row(of) | dict(in_kernels=len(shares(kernels(of)))) for name, of in sorted(formats.items())},
        refused=[dict(layer=repr(layer), reason=found["refused"]) for layer, found in results if "refused" in found])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for fuzz.json")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", metavar="LAYER", help="only this layer, with the seed")
    options = parser.parse_args(arguments)
    if missing := aot.missing_tools():
        print(f"executes no PTX: {missing}", flush=True)
    if options.repeat:
        start(not missing)
        with _stack:
            print(found := attempt(eval(options.repeat, vars(fuzz_layers)), options.seed))
        return 1 if "failure" in found else 0
    begin, number, results, failures = time.monotonic(), options.seed, [], []
    done = lambda: sum(len(found["shares"]) for _, found in results)
    # Spawned: a fork of a process with XLA's threads may hang.
    with concurrent.futures.ProcessPoolExecutor(
            options.processes, multiprocessing.get_context("spawn"), start, (not missing,)) as pool:
        while done() < options.examples and time.monotonic() - begin < 60 * options.minutes:
            layers = of_round(number, not missing)
            for layer, found in zip(layers, pool.map(attempt, layers, [number] * len(layers)), strict=True):
                results.append((layer, found))
                if "failure" in found:
                    failures.append(dict(layer=repr(layer), seed=number, error=found["failure"]))
                    print(failures[-1], flush=True)
            number += 1
            print(f"{done()} examples, {len(failures)} failures, {time.monotonic() - begin:.0f} s", flush=True)
    report = dict(
        metadata("fuzz"), hypothesis=hypothesis.__version__, numpy=np.__version__, seeds=[options.seed, number - 1],
        processes=options.processes, seconds=round(time.monotonic() - begin), **summary(results), failures=failures)
    if options.out:
        replace_text(options.out / "fuzz.json", json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
