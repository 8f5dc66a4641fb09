"""The grouped kernels of expert_centric: results, then time for T = 32 .. 8192, by tiles, next to a large product.

    python -m bench.grouped --out bench/results

Every group of cases runs in a process of its own with a time limit, since a kernel that faults or hangs ends its
process; the group then goes on in another one without that kernel. Results are compared with the float32 reference on
the inputs that are timed. Needs a Hopper GPU.
"""

import argparse
import functools
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report, device_name, metadata
from jax_warp_decode.activations import get_activation
from jax_warp_decode.kernels.grouped_config import GroupedConfig
from jax_warp_decode.measure import inputs, timing
from jax_warp_decode.measure.variants import Variant, attempt, compare, compile_reference, describe, measure
from jax_warp_decode.paths import grouped_layer, grouped_plan
from jax_warp_decode.presets import PRESETS, get_preset

TOLERANCE = 1e-2  # relative L2 error
LAYERS = 3
STEPS = 6
LIMIT_S = 50
MOST_PROCESSES = 4  # of a group
LOST = re.compile(r"CUDA_ERROR|illegal (memory|instruction)|misaligned|unspecified launch", re.IGNORECASE)
MATMUL = 8192
# Format, tokens and what to try besides the heuristic's configuration: widths and stages.
GROUPS = {
    "bf16": [("bf16", 4096, (((64, 144), 4), ((64, 128, 144), 4)))],
    "large": [("bf16", 8192, (((64, 128, 144), 4),))],
    "mxfp8": [("mxfp8", 4096, (((64, 144), 3), ((128, 144), 3), ((128, 144), 5)))],
    "small": [("bf16", 256, ()), ("mxfp8", 256, ()), ("bf16", 1024, (((80,), 4),)), ("bf16", 2048, (((128, 160), 3),))],
}


def variants(preset, format, T, trials, make_plan):
    """Name and layer (x, routing, experts) -> y of each way to run the case."""
    silu = get_activation("silu")
    heuristic = GroupedConfig.heuristic(
        T * preset.experts_per_token, preset.num_experts, grouped_layer.ITEMSIZE[format])
    yield f"heuristic {heuristic.widths} {heuristic.stages}", grouped_layer.op(silu, None, make_plan)
    for widths, stages in trials:
        name = f"{'x'.join(map(str, widths))} {stages}"
        config = attempt(functools.partial(GroupedConfig, widths, stages))
        yield name, config if isinstance(config, Exception) else grouped_layer.op(silu, (config, config), make_plan)


def in_dtype_of_x(layer):
    if isinstance(layer, Exception):
        return layer
    return lambda x, *args: layer(x, *args).astype(x.dtype)


def run_case(preset, experts, format, T, named):
    """A row per variant, (name, layer) each."""
    rng = np.random.default_rng(T)
    layers = [(inputs.make_x(jax.random.key(T + i), T, preset), inputs.make_routing(rng, T, preset, "uniform"), e)
              for i, e in enumerate(experts)]
    x, routing, e = layers[0]
    first = x.astype("float32"), routing, e
    check = compare([compile_reference(*first)(*first)], TOLERANCE)
    rows = measure([Variant(dict(format=format, tokens=T, variant=name), in_dtype_of_x(layer), layers, check)
                    for name, layer in named], STEPS, announce=lambda row: say(trying=row))
    flops = 6 * T * preset.experts_per_token * preset.hidden * preset.intermediate
    for row in rows:
        if "us" in row:
            row["tflops"] = flops / row["us"] / 1e6
    return rows


def check_plan():
    """The plan kernel against its plain form; slots that are not routed, empty experts, hot experts."""
    rng = np.random.default_rng(0)
    for T, K, E, widest in ((4096, 8, 128, 160), (1, 8, 128, 32), (33, 8, 128, 32), (8192, 8, 128, 192),
                            (257, 10, 512, 32), (5, 1, 3, 16), (1000, 2, 2, 64)):
        ids = rng.integers(-1, E + 1, (T, K)).astype(np.int32)
        ids[: T // 3] = rng.integers(0, max(1, E // 50), (T // 3, K))
        for _ in range(3):
            got, want = (jax.tree.map(np.asarray, jax.jit(plan, static_argnums=(1, 2))(ids, E, widest))
                         for plan in (grouped_plan.plan_on_gpu, grouped_plan.plan))
            routed = (ids >= 0) & (ids < E)
            np.testing.assert_array_equal(got.position[routed], want.position[routed])
            np.testing.assert_array_equal(got.token[want.position[routed]], want.token[want.position[routed]])
            assert got.token.min() >= 0 and got.token.max() < T, "token out of range"
            np.testing.assert_array_equal(got.total, want.total)
            used = int(want.total[0]) * (want.tiles.size // grouped_plan.most_tiles(ids.size, E, widest))
            np.testing.assert_array_equal(got.tiles[:used], want.tiles[:used])
    return dict(variant="plan", result="equal")


def time_matmul():
    """TFLOP/s of a large bfloat16 product."""
    a, b = (jax.random.normal(jax.random.key(i), (MATMUL, MATMUL), jnp.bfloat16) for i in range(2))
    step = timing.compile_step(timing.lower_step(jnp.dot, [(a, b)] * 2, "step"))
    timed = timing.time_step(step, [(a, b)] * 2, STEPS)
    return dict(variant="matmul", us=timed.us, tflops=2 * MATMUL**3 / timed.us / 1e6)


ALONE = {"plan": check_plan, "matmul": time_matmul}


def say(**record) -> None:
    """A line for the parent."""
    print(json.dumps(record, default=float), flush=True)


def child(options) -> None:
    if options.child in ALONE:
        row = attempt(ALONE[options.child])
        say(row=dict(variant=options.child, error=describe(row)) if isinstance(row, Exception) else row)
        return
    make_plan = grouped_plan.plan if options.xla_plan else grouped_plan.plan_on_gpu
    preset, done = get_preset(options.model), json.loads(options.done)
    format_of, experts = None, None
    for format, T, trials in GROUPS[options.child]:
        named = [(name, layer) for name, layer in variants(preset, format, T, trials, make_plan)
                 if [format, T, name] not in done]
        if not named:
            continue
        try:
            if format != format_of:
                format_of, experts = format, None  # the old ones go first
                experts = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(LAYERS)]
            for row in run_case(preset, experts, format, T, named):
                say(row=row)
        except Exception as error:
            say(row=dict(format=format, tokens=T, variant="all", error=describe(error)))


def start_child(group: str, done: list, options) -> tuple[list[dict], str]:
    """What a process of the group says, and how it ended if not well."""
    command = [sys.executable, "-m", "bench.grouped", "--model", options.model, "--out", str(options.out),
               "--child", group, "--done", json.dumps(done), *["--xla-plan"] * options.xla_plan]
    said = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer = threading.Timer(options.limit, process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith("{"):
                said.append(json.loads(line))
                if "row" in said[-1]:  # at once: what runs this may be stopped
                    print(describe_row(said[-1]["row"]), flush=True)
        process.wait()
        timed_out = timer.finished.is_set()
        timer.cancel()
        errors.seek(0)
        last = [line for line in errors if line.strip()][-1:]
    if not process.returncode:
        return said, ""
    ended = f"stopped after {options.limit:.0f} s" if timed_out else f"ended with {process.returncode}"
    return said, f"{ended}: {' '.join(last).strip()}"[:200]


def run_group(group: str, options) -> list[dict]:
    """The rows of a group."""
    rows, done = [], []
    for _ in range(MOST_PROCESSES):
        said, ended = start_child(group, done, options)
        new = [record["row"] for record in said if "row" in record]
        lost = next((row for row in new if LOST.search(row.get("error", ""))), None)
        if lost:  # what ran after it failed with it
            new = [row for row in new if row is lost or not LOST.search(row.get("error", ""))]
        elif ended:
            tried = [record["trying"] for record in said if "trying" in record] or [dict(variant=group)]
            lost = dict(tried[-1], error=ended)
            new.append(lost)
            print(describe_row(lost), flush=True)
        rows += new
        done = [[row.get("format"), row.get("tokens"), row["variant"]] for row in rows]
        if not lost or lost["variant"] in ("all", group):
            break
    return rows


def describe_row(r) -> str:
    if "result" in r:
        return f"{r['variant']}: {r['result']}"
    row = f"{r.get('format', ''):6} T={r.get('tokens', ''):<5} {r.get('variant', ''):36}"
    if "us" in r:
        row += f"{r['us']:9.1f} us {r['tflops']:6.1f} TFLOP/s"
    if "relative_l2" in r:
        row += f"  error {r['relative_l2']:.1e}"
    if "kernels" in r:
        row += "  " + ", ".join(f"{name[:24]} {us:.1f}" for name, us in list(r["kernels"].items())[:9])
    return row + "  " + r.get("error", "")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--groups", nargs="+", default=[*ALONE, *GROUPS], choices=[*ALONE, *GROUPS])
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a process (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no group is begun")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--done", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--xla-plan", action="store_true", help="plan in XLA; so if the plan kernel fails its check")
    options = parser.parse_args(argv)
    if options.child:
        child(options)
        return 0
    meta = metadata("grouped", device_name())  # this process must not hold the GPU
    begin, report = time.monotonic(), Report(options.out / "grouped.json", meta, model=options.model)
    for group in options.groups:
        start = time.monotonic()
        if start - begin > options.budget:
            report.cut(group)
            continue
        found = run_group(group, options)
        report.add(*found)
        options.xla_plan |= group == "plan" and any("error" in row for row in found)
        print(f"-- {group}: {time.monotonic() - start:.0f} s", flush=True)
    return max(report.finish(), int(any("error" in row for row in report.rows)))


if __name__ == "__main__":
    sys.exit(main())
