"""What `jax-warp-decode plan` reckons with, collected from measurements: layers, plain reads, collectives.

    python -m bench.plan_table

Reads bench/results and writes jax_warp_decode/data/plan/nvidia-h200.json. Of several times for one case, the fastest
strategy counts. Run it after new results.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

from jax_warp_decode import STRATEGIES
from jax_warp_decode.plan import expert_bytes
from jax_warp_decode.presets import get_preset
from jax_warp_decode.routing import expected_experts

LAYERS = ("decode-*.json", "small_batch-*-uniform.json", "suite.json", "grouped_gemm-expert_centric.json",
          "formats-*.json")
DEVICE = "NVIDIA H200"
MEMORY_BYTES = 143771 * 2**20  # nvidia-smi


def load(path):
    content = json.loads(path.read_text())
    return content["meta"], [r for r in content["results"] if "us" in r and r.get("clock", "device") == "device"]


def layers(results: pathlib.Path):
    """Rows {model, format, tokens, strategy, us, bytes, source} of single devices, and (bytes, us) of plain reads."""
    best, reads, used = {}, [], []
    for path in sorted(p for pattern in LAYERS for p in results.glob(pattern)):
        meta, rows = load(path)
        if not meta["device"].startswith(DEVICE):
            continue
        for r in rows:
            if path.stem.startswith("formats-"):  # one model and strategy, see bench/formats.py
                r = dict(model=path.stem.removeprefix("formats-"), strategy="warp_decode", pattern="uniform") | r
            if r.get("pattern") != "uniform":
                continue
            if r.get("strategy") == "read":
                reads.append((r["unique_bytes"], r["us"]))
            elif r.get("strategy") in STRATEGIES:
                keep(best, dict(model=r["model"], format=r["format"], tokens=r["batch"], strategy=r["strategy"],
                                us=r["us"], bytes=r["unique_bytes"], source=path.name))
        used.append(path.name)
    for path in sorted(results.glob("parallel-*.json")):
        _, rows = load(path)
        for r in rows:
            if r["layout"] == "one":
                preset = get_preset(r["model"])
                touched = expected_experts(preset.num_experts, preset.experts_per_token, r["batch"])
                keep(best, dict(model=r["model"], format=r["format"], tokens=r["batch"], strategy=r["strategy"],
                                us=r["us"], bytes=touched * expert_bytes(preset, r["format"]), source=path.name))
        used.append(path.name)
    return list(best.values()), reads, used


def keep(best, row):
    key = row["model"], row["format"], row["tokens"]
    if key not in best or row["us"] < best[key]["us"]:
        best[key] = row


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("jax_warp_decode/data/plan/nvidia-h200.json"))
    options = parser.parse_args(argv)
    rows, reads, used = layers(options.results)
    sizes, us = np.array(reads).T
    slope, start = np.polyfit(sizes, us, 1, w=1 / us)  # relative errors count
    table = dict(
        device=DEVICE, memory_bytes=MEMORY_BYTES, read=dict(start_us=round(start, 3), bytes_per_us=round(1 / slope)),
        layers=[r | dict(us=round(r["us"], 1), bytes=round(r["bytes"])) for r in sorted(
            rows, key=lambda r: (r["model"], r["format"], r["tokens"]))],
        collectives=[], sources=used)
    collectives = options.results / "collectives.json"
    if collectives.exists():
        table["collectives"] = [
            dict(operation=r["operation"], devices=r["devices"], bytes=r["bytes"], us=round(r["us"], 1))
            for r in load(collectives)[1] if r["collectives"] == "graph"]
        table["sources"].append(collectives.name)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {options.out}: {len(rows)} layers, {len(reads)} reads, {len(table['collectives'])} collectives")
    return 0


if __name__ == "__main__":
    sys.exit(main())
