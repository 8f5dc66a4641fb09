"""Random layers against float64 for a night: the layers and the bound of tests/test_fuzz.py, with other seeds.

    python -m bench.fuzz --out bench/results [--examples 10000] [--minutes 35] [--seed 0]

Goes round by round, each with a seed of its own, until so many examples have run or so much time has passed, and writes
fuzz.json: what ran of each layer, how much of it had a bound, and every failure with the draw that repeats it. Exit
code 1 if there was one. Needs no GPU: the kernels are interpreted.
"""

import argparse
import json
import pathlib
import sys
import time

import hypothesis
import numpy as np

from bench.report import metadata, replace_text

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import test_fuzz  # noqa: E402

EXAMPLES = 40  # of each layer in a round; of an interpreted one, which takes seconds, one


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for fuzz.json")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after this time")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args(arguments)
    begin, number = time.monotonic(), options.seed
    shares = {layer: [] for layer in (*test_fuzz.LAYERS, *test_fuzz.INTERPRETED)}
    failures = []
    while sum(map(len, shares.values())) < options.examples and time.monotonic() - begin < 60 * options.minutes:
        for layer, done in shares.items():
            try:
                done += test_fuzz.run(layer, 1 if layer in test_fuzz.INTERPRETED else EXAMPLES, number)
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
