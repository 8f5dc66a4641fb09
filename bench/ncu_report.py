"""What Nsight Compute says about the two warp-decode kernels: DRAM throughput, occupancy, why warps wait.

    python -m bench.ncu_report --out bench/results

Runs one layer per format and batch size under `ncu` (caches flushed before every kernel, clocks left alone) and writes
ncu-MODEL.json. Needs a GPU whose counters may be read.
"""

import argparse
import csv
import functools
import pathlib
import re
import shutil
import subprocess
import sys

from bench.report import Report, device_name, metadata

SECTIONS = ("SpeedOfLight", "Occupancy", "WarpStateStats", "LaunchStats", "MemoryWorkloadAnalysis", "SchedulerStats")
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes_per_second": "dram__bytes.sum.per_second",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "theoretical_occupancy_percent": "sm__maximum_warps_per_active_cycle_pct",
    "registers": "launch__registers_per_thread",
    "grid": "launch__grid_size",
    "waves": "launch__waves_per_multiprocessor",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def run_kernels(options) -> None:
    """The child that ncu looks at: every (format, batch) once to compile, once more to be measured."""
    import jax
    import numpy as np

    from jax_warp_decode import moe
    from jax_warp_decode.measure import inputs
    from jax_warp_decode.presets import get_preset

    preset = get_preset(options.model)
    for format in options.format:
        experts = inputs.make_experts(jax.random.key(0), preset, format)
        for batch in options.batch:
            x = inputs.make_x(jax.random.key(batch), batch, preset)
            routing = inputs.make_routing(np.random.default_rng(batch), batch, preset, "uniform")
            run = functools.partial(moe, strategy="warp_decode")
            try:
                jax.block_until_ready(jax.jit(run)(x, routing, experts))
            except Exception as error:
                print(f"{format} B={batch}: {error}", file=sys.stderr, flush=True)
            else:
                print(f"ran {format} {batch}", flush=True)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def read_table(text: str, cases: list[tuple[str, int]]) -> list[dict]:
    """Two rows of ncu's CSV (gate/up, down) per case, as dicts. The second line holds the units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    units, *rows = csv.DictReader(lines)
    if len(rows) != 2 * len(cases):
        print(f"expected {2 * len(cases)} kernels under ncu, found {len(rows)}: cases are not named")
        cases = [("", 0)] * len(rows)
    results = []
    for i, row in enumerate(rows):
        found = {name: dict(value=number(row[metric]), unit=units[metric])
                 for name, metric in METRICS.items() if row.get(metric)}
        stalls = {m[1]: number(row[k]) for k in row if k and (m := STALL.fullmatch(k)) and row[k]}
        format, batch = cases[i // 2]
        worst = dict(sorted(stalls.items(), key=lambda item: -item[1])[:6])
        results.append(dict(
            format=format, batch=batch, kernel=row["Kernel Name"], **found, stalled_warps_per_issue=worst))
    return results


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, help="end ncu then; default: no limit")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        run_kernels(options)
        return 0
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [ncu, "--clock-control", "none", "--kernel-name", "regex:moe_", "--csv", "--page", "raw",
               *(f"--section={s}" for s in SECTIONS), sys.executable, "-m", "bench.ncu_report", "--child",
               "--model", options.model, "--format", *options.format, "--batch", *map(str, options.batch)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
        out, err = done.stdout, done.stderr
    except OSError as error:
        raise SystemExit(f"ncu: {error}; it comes with the CUDA toolkit") from None
    except subprocess.TimeoutExpired as stopped:
        out, err = ((s or b"").decode() for s in (stopped.stdout, stopped.stderr))
    cases = [(format, int(batch)) for format, batch in re.findall(r"^ran (\S+) (\d+)$", out, re.MULTILINE)]
    try:
        results = read_table(out, cases)
    except Exception as error:
        raise SystemExit(f"ncu told nothing that can be read ({error}): {out[-2000:]}{err[-2000:]}") from None
    report = Report(options.out / f"ncu-{options.model}.json", metadata("ncu_report", device_name()))
    report.add(*results)
    for format in options.format:
        report.cut(*(f"{format} B={batch}" for batch in options.batch if (format, batch) not in cases))
    for r in results:
        print(f"{r['format']:6} B={r['batch']} {r['kernel'][:24]:24} " + "  ".join(
            f"{name} {r[name]['value']:.4g}" for name in METRICS if name in r)
            + f"  stalls {r['stalled_warps_per_issue']}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
