"""What each kernel of bench.suite reads, and how fast: what is left over the plain read, and where.

    python -m bench.kernel_rates [--results bench/results/suite.json]

From figures that were measured before; needs no GPU. The plain reads of all layers give a line, a start in microseconds
plus bytes over a rate. Gate/up reads two thirds of a gated layer's bytes and down one third. For each kernel: its time,
its multiple of that line for its unique bytes, and the rate of its logical bytes (one expert per slot, duplicates
counted, as they come from L2) once a start is taken off.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

SHARES = {"gate_up": 2 / 3, "down": 1 / 3}


def line_of(reads: list[dict]) -> tuple[float, float]:
    """(start in us, TB/s) of the plain reads; relative errors are least."""
    us, size = (np.array([row[name] for row in reads]) for name in ("us", "unique_bytes"))
    start, per_byte = np.linalg.lstsq(np.stack([1 / us, size / us], 1), np.ones_like(us), rcond=None)[0]
    return float(start), float(1e-6 / per_byte)


def rates(rows: list[dict]) -> list[dict]:
    """One row per kernel of a measured layer that warp_decode ran.

    Example:
      >>> from bench.kernel_rates import rates
      >>> read = [dict(strategy="read", us=1.5 + n / 4.7e6, unique_bytes=n) for n in (30e6, 300e6)]
      >>> layer = dict(model="m", format="bf16", pattern="uniform", strategy="warp_decode", batch=1, us=9.0,
      ...              unique_bytes=30e6, logical_bytes=30e6, kernels={"moe_gate_up": 6.0, "moe_down": 4.0})
      >>> [(row["kernel"], round(row["of_line"], 2), round(row["tb_per_s"], 2)) for row in rates([*read, layer])]
      [('gate_up', 1.04, 4.44), ('down', 1.1, 4.0)]
    """
    start, rate = line_of([row for row in rows if row["strategy"] == "read" and "us" in row])
    found = []
    for row in rows:
        if row["strategy"] != "warp_decode" or "us" not in row:
            continue
        for kernel, share in SHARES.items():
            us = sum(us for name, us in row["kernels"].items() if kernel in name)
            found.append({name: row[name] for name in ("model", "format", "pattern", "batch")} | dict(
                kernel=kernel, us=us, of_line=us / (start + share * row["unique_bytes"] / rate / 1e6),
                tb_per_s=share * row["logical_bytes"] / (us - start) / 1e6))
    return found


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path,
                        default=pathlib.Path(__file__).parent / "results" / "suite.json")
    options = parser.parse_args(argv)
    content = json.loads(options.results.read_text())
    start, rate = line_of([row for row in content["results"] if row["strategy"] == "read" and "us" in row])
    print(f"{options.results.name}, commit {content['meta']['commit'][:7]}, {content['meta']['device']}")
    print(f"plain read: {start:.2f} us + bytes / {rate:.2f} TB/s")
    for row in rates(content["results"]):
        print("{model:16} {format:6} {pattern:8} B={batch:<3} {kernel:8} {us:7.2f} us  {of_line:5.2f} x the line  "
              "{tb_per_s:5.2f} TB/s logical".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
