"""What `jax-warp-decode plan` reckons with, collected from measurements: layers, plain reads, products, collectives.

    python -m bench.plan_table

Reads bench/results and writes jax_warp_decode/data/plan/nvidia-h200.json. Files are told by their rows, not by name. Of
several times of a strategy for one case, the newest counts; of several strategies, the fastest. Run it after new
results.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable

import numpy as np

from bench.small_batch import OURS
from jax_warp_decode.plan import expert_bytes
from jax_warp_decode.presets import get_preset
from jax_warp_decode.routing import expected_experts

DEVICE = "NVIDIA H200"
MEMORY_BYTES = 143771 * 2**20  # nvidia-smi
MANY = 4096  # tokens from which products are what takes long


def load(paths: Iterable[pathlib.Path]) -> list[tuple[str, dict]]:
    """Names and contents of the results on DEVICE, oldest first."""
    contents = [(path.name, json.loads(path.read_text())) for path in sorted(paths)]
    contents = [(name, c) for name, c in contents if c.get("meta", {}).get("device") == DEVICE]
    return sorted(contents, key=lambda pair: pair[1]["meta"]["date"])


def as_small_batch(name: str, content: dict, r: dict) -> dict:
    """The row as bench.small_batch writes it, if it is one of our strategies on one GPU as `auto` runs it."""
    if r.get("swept") is False:  # bench.formats
        return dict(r, model=name.removesuffix(".json").partition("-")[2], strategy="warp_decode", pattern="uniform")
    if r.get("variant", "").startswith("heuristic"):  # bench.grouped
        return dict(r, model=content["model"], batch=r["tokens"], strategy="expert_centric", pattern="uniform")
    if r.get("layout") == "one":  # bench.parallel
        return dict(r, pattern="uniform")
    return r


def row_of(name: str, date: str, r: dict) -> dict:
    preset = get_preset(r["model"])
    touched = expected_experts(preset.num_experts, preset.experts_per_token, r["batch"])
    size = r.get("unique_bytes") or touched * expert_bytes(preset, r["format"])
    return dict(model=r["model"], format=r["format"], tokens=r["batch"], strategy=r["strategy"], us=round(r["us"], 1),
                bytes=round(size), source=name, date=date)


def collect(paths: Iterable[pathlib.Path]) -> dict:
    """The table that the results in these files make."""
    newest, collectives, reads, used = {}, {}, [], set()
    for name, content in load(paths):
        for r in content.get("results", []):
            if r.get("clock") != "device" or "us" not in r:
                continue
            r = as_small_batch(name, content, r)
            if r.get("collectives") == "graph" and "operation" in r:
                collectives[r["operation"], r["devices"], r["bytes"]] = round(r["us"], 1)
            elif r.get("pattern") == "uniform" and r.get("strategy") == "read":
                reads.append((r["unique_bytes"], r["us"]))
            elif r.get("pattern") == "uniform" and r.get("strategy") in OURS:
                row = row_of(name, content["meta"]["date"], r)
                newest[row["model"], row["format"], row["tokens"], row["strategy"]] = row
            else:
                continue
            used.add(name)
    layers = {}
    for key in sorted(newest, key=lambda key: (key[:3], -newest[key]["us"])):
        layers[key[:3]] = newest[key]  # the fastest comes last
    sizes, us = np.array(reads).T
    slope, start = np.polyfit(sizes, us, 1, w=1 / us)  # relative errors count
    return dict(
        device=DEVICE, memory_bytes=MEMORY_BYTES,
        read=dict(start_us=round(start, 3), bytes_per_us=round(1 / slope)),
        products={r["format"]: dict(strategy=r["strategy"], tokens=r["tokens"], tflops=round(tflops(r), 1))
                  for r in layers.values() if r["tokens"] >= MANY},
        layers=list(layers.values()),
        collectives=[dict(operation=operation, devices=devices, bytes=size, us=us)
                     for (operation, devices, size), us in collectives.items()],
        sources=sorted(used))


def tflops(row: dict) -> float:
    preset = get_preset(row["model"])
    slots = row["tokens"] * preset.experts_per_token
    return 6 * preset.hidden * preset.intermediate * slots / row["us"] / 1e6


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("jax_warp_decode/data/plan/nvidia-h200.json"))
    options = parser.parse_args(argv)
    table = collect(options.results.glob("*.json"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {options.out}: {len(table['layers'])} layers, {len(table['collectives'])} collectives, "
          f"from {len(table['sources'])} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
