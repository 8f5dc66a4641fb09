"""Random layers against float64 for a night: the layers and the bound of tests/test_fuzz.py, with other seeds.

    python -m bench.fuzz --out bench/results [--examples 10000] [--minutes 35] [--seed 0]

Goes round by round, each with a seed of its own, until so many examples have run or so much time has passed, and writes
fuzz.json: what ran of each layer, how much of it had a bound, and every failure with the draw that repeats it. Exit
code 1 if there was one. Needs no GPU: the kernels are interpreted, or compiled for one and their PTX executed
(tests/ptx), where a data race or a load of a result that nobody wrote is a failure, too.

The bound is derived in tests/test_fuzz.py, term by term: n u / (1 - n u) * sum |products| for each of the three sums of
a layer, with u the unit roundoff of float32 (2^-24; 2^-23 where tensor cores may truncate) and n its length; 2^-8 for
each value that a path stores in bfloat16; absolute terms for what may be flushed to zero.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import time

import hypothesis
import numpy as np

from bench.report import metadata, replace_text

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import aot  # noqa: E402
import test_fuzz  # noqa: E402
from ptx import launch  # noqa: E402

EXAMPLES = 40  # of each layer in a round; of an interpreted or executed one, which takes seconds, one


def run(layer, number: int, simplest: bool, machines: list) -> list[float]:
    """A round of one layer: the share with a bound of each example."""
    done = test_fuzz.run(layer, EXAMPLES if layer in test_fuzz.LAYERS else 1, number, simplest)
    races = [race for m in machines for race in m.races.found]
    unwritten = [place for m in machines for place in m.memory.unwritten if place[1] != "shared memory"]
    machines.clear()
    assert not races and not unwritten, f"data races {races[:2]}, loads of what nobody wrote {unwritten[:2]}"
    return done


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for fuzz.json")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args(arguments)
    begin, number, failures = time.monotonic(), options.seed, []
    layers = [*test_fuzz.LAYERS, *test_fuzz.INTERPRETED]
    with contextlib.ExitStack() as stack:
        if missing := aot.missing_tools():
            machines = []
            print(f"executes no PTX: {missing}", flush=True)
        else:
            machines = stack.enter_context(launch.emulated())
            layers += test_fuzz.EMULATED
        shares = {layer: [] for layer in layers}
        while sum(map(len, shares.values())) < options.examples and time.monotonic() - begin < 60 * options.minutes:
            for layer, done in shares.items():
                try:
                    done += run(layer, number, number == options.seed, machines)
                except Exception as error:
                    words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
                    failures.append(dict(layer=layer.id, seed=number, error=words))
                    print(failures[-1], flush=True)
            number += 1
            print(f"{sum(map(len, shares.values()))} examples, {len(failures)} failures, "
                  f"{time.monotonic() - begin:.0f} s", flush=True)
    share = lambda done: round(float(np.mean(done)), 3) if done else None
    report = dict(
        metadata("fuzz"), hypothesis=hypothesis.__version__, numpy=np.__version__, seeds=[options.seed, number - 1],
        examples=sum(map(len, shares.values())), seconds=round(time.monotonic() - begin), failures=failures,
        layers={layer.id: dict(examples=len(done), elements_with_a_bound=share(done))
                for layer, done in shares.items()})
    if options.out:
        replace_text(options.out / "fuzz.json", json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
