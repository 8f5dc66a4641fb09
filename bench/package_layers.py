"""Puts the measured times of layers into the table that ships with the package, from committed runs.

    python -m bench.package_layers

Reads `SOURCES` under bench/results and writes the "layers" of jax_warp_decode/data/tuned/nvidia-h200.json, all of them
anew; its configurations stay. Of several times of a strategy for one layer and T, the newest counts. A time without
another strategy's near it (see `tuning.nearest_tokens`) decides nothing, and is left out. Run it after new results.
"""

import argparse
import json
import pathlib
import sys

from bench.small_batch import OURS
from jax_warp_decode import tuned_table, tuning
from jax_warp_decode.presets import get_preset
from jax_warp_decode.tuned_table import LayerTime

DEVICE = "NVIDIA H200"
RESULTS = pathlib.Path(__file__).parent / "results"
SOURCES = ("crossovers.json", "range-bf16.json", "range-mxfp8.json", "suite.json",
           "shared_formats-qwen3-30b-a3b-uniform.json", "wide-qwen3-30b-a3b-uniform.json")


def entry_of(row: dict, meta: dict) -> LayerTime:
    preset = get_preset(row["model"])
    return LayerTime(row["strategy"], row["format"], preset.hidden, preset.intermediate, preset.num_experts,
                     preset.experts_per_token, row["batch"], round(row["us"], 1), meta["jax"], meta["date"])


def collect(folder: pathlib.Path = RESULTS) -> list[LayerTime]:
    """The entries that the results in this folder make."""
    newest: dict[tuple, LayerTime] = {}
    reports = [json.loads((folder / name).read_text()) for name in SOURCES]
    for report in sorted(reports, key=lambda report: report["meta"]["date"]):
        if report["meta"]["device"] != DEVICE:
            raise SystemExit(f"a report is of {report['meta']['device']}, expected {DEVICE}")
        for row in report["results"]:
            if row["strategy"] in OURS and row["pattern"] == "uniform" and row.get("clock") == "device":
                entry = entry_of(row, report["meta"])
                newest[*entry.shape, entry.T] = entry
    return [newest[key] for key in sorted(newest) if _decides(newest[key], newest)]


def _decides(entry: LayerTime, among: dict[tuple, LayerTime]) -> bool:
    """Whether another strategy's time of this layer is near."""
    others = {e.T for e in among.values() if e.shape[1:] == entry.shape[1:] and e.strategy != entry.strategy}
    return bool(others) and tuning.nearest_tokens(others, entry.T) is not None


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=tuned_table.packaged_file(DEVICE), help="the table")
    options = parser.parse_args(argv)
    layers, table = collect(), tuned_table.read_table(options.out, DEVICE)
    configs = [entry for entry in table.entries() if not isinstance(entry, LayerTime)] if table else []
    tuned_table.write_table(options.out, DEVICE, [*configs, *layers])
    print(f"wrote {options.out}: {len(layers)} times of layers from {len(SOURCES)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
