"""What Nsight Compute says about the decode kernels: DRAM throughput, occupancy, why warps wait.

    python -m bench.ncu_report --out bench/results

Runs one layer per format and batch size, in a process of its own each, through warp_decode at small ones and
shared_decode at larger, under `ncu` (caches flushed before every kernel, clocks left alone) and writes ncu-MODEL.json.
Needs a GPU whose counters may be read.
"""

import argparse
import csv
import functools
import itertools
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from bench.report import Report, device_name, metadata

SECTIONS = ("SpeedOfLight", "Occupancy", "WarpStateStats", "LaunchStats", "MemoryWorkloadAnalysis", "SchedulerStats")
METRICS = {
    "time": "gpu__time_duration.sum",
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
KERNELS = {"warp_decode": 2, "shared_decode": 3}  # of a layer
SHARED_FROM = 16  # tokens
# Memory that is not allocated need not be saved between the passes of a kernel; a graph would be one kernel.
SMALL = dict(
    XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_FLAGS="--xla_gpu_enable_command_buffer=", PYTHONFAULTHANDLER="1")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def run_layer(model: str, format: str, batch: int) -> None:
    """The child that ncu looks at."""
    import jax
    import numpy as np

    from jax_warp_decode import moe
    from jax_warp_decode.measure import inputs
    from jax_warp_decode.presets import get_preset

    preset = get_preset(model)
    experts = inputs.make_experts(jax.random.key(0), preset, format)
    x = inputs.make_x(jax.random.key(batch), batch, preset)
    routing = inputs.make_routing(np.random.default_rng(batch), batch, preset, "uniform")
    jax.block_until_ready(jax.jit(functools.partial(moe, strategy=strategy_of(batch)))(x, routing, experts))


def strategy_of(batch: int) -> str:
    return "shared_decode" if batch >= SHARED_FROM else "warp_decode"


def number(text: str) -> float:
    return float(text.replace(",", ""))


def run_ncu(options, format: str, batch: int, seconds: float) -> tuple[str, str]:
    """What a process of one case and ncu print; ncu writes its table when the process ends."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [ncu, "--clock-control", "none", "--kernel-name", "regex:moe_", "--csv", "--page", "raw",
               *(f"--section={s}" for s in SECTIONS), sys.executable, "-m", "bench.ncu_report", "--child",
               "--model", options.model, "--format", format, "--batch", str(batch)]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=os.environ | SMALL, start_new_session=True)
    except OSError as error:
        raise SystemExit(f"ncu: {error}; it comes with the CUDA toolkit") from None
    try:
        return process.communicate(timeout=None if math.isinf(seconds) else seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ncu and the program under it
        out, err = process.communicate()
        return out, f"{err} ended after {seconds:.0f} s"


def read_table(text: str, format: str, batch: int) -> list[dict]:
    """The rows of ncu's CSV, one per kernel of a case, as dicts. The second line holds the units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    units, *rows = csv.DictReader(lines)
    strategy = strategy_of(batch)
    if len(rows) != KERNELS[strategy]:
        raise ValueError(f"{KERNELS[strategy]} kernels are a layer of {strategy}, found {len(rows)}")
    results = []
    for row in rows:
        found = {name: dict(value=number(row[metric]), unit=units[metric])
                 for name, metric in METRICS.items() if row.get(metric)}
        stalls = {m[1]: number(row[k]) for k in row if k and (m := STALL.fullmatch(k)) and row[k]}
        worst = dict(sorted(stalls.items(), key=lambda item: -item[1])[:6])
        results.append(dict(
            strategy=strategy, format=format, batch=batch, kernel=row["Kernel Name"], **found,
            stalled_warps_per_issue=worst))
    return results


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, help="end ncu then; default: no limit")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        run_layer(options.model, options.format[0], options.batch[0])
        return 0
    results, missing, end = [], [], time.monotonic() + (options.seconds or float("inf"))
    for format, batch in itertools.product(options.format, options.batch):
        missing.append(f"{format} B={batch}")
        if (left := end - time.monotonic()) <= 0:
            continue
        out, err = run_ncu(options, format, batch, left)
        try:
            results += read_table(out, format, batch)
            missing.pop()
        except (ValueError, KeyError) as error:
            print(f"{format} B={batch}: ncu told nothing that can be read ({error}): {out[-1000:]}{err[-1000:]}")
    if not results:
        raise SystemExit("ncu told nothing that can be read")
    report = Report(options.out / f"ncu-{options.model}.json", metadata("ncu_report", device_name()))
    report.add(*results)
    report.cut(*missing)
    for r in results:
        print(f"{r['format']:6} B={r['batch']} {r['kernel'][:24]:24} " + "  ".join(
            f"{name} {r[name]['value']:.4g}" for name in METRICS if name in r)
            + f"  stalls {r['stalled_warps_per_issue']}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
