"""The grouped kernels of expert_centric: results, then time for T = 32 .. 8192, by tiles, next to a large product.

    python -m bench.grouped --out bench/results

Every group of cases runs in a process of its own with a time limit, since a kernel that faults or hangs ends its
process. Results are compared with the float32 reference on the inputs that are timed. Needs a Hopper GPU.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench.small_batch import describe, errors, metadata
from jax_warp_decode import moe
from jax_warp_decode.activations import get_activation
from jax_warp_decode.kernels.grouped_config import GroupedConfig
from jax_warp_decode.measure import inputs, timing
from jax_warp_decode.paths import expert_centric, grouped_layer, grouped_plan
from jax_warp_decode.presets import PRESETS, get_preset

TOLERANCE = 1e-2  # relative L2 error
LAYERS = 3
STEPS = 6
LIMIT_S = 50
MATMUL = 8192
# What to try besides the heuristic's configuration, and format, tokens and trials of each case. A trial: widths,
# stages, CTAs in a cluster, whether gate_up gathers, whether a kernel of its own makes the plan.
SMALL = (((32,), 6, 1, False, True), ((32,), 6, 1, True, True), ((16, 32), 6, 1, False, True))
ONE_CTA = (((64, 144), 3, 1, False, True), ((64, 144), 3, 1, True, True),
           ((48, 96, 144), 3, 1, True, True))
TWO_CTAS = (((144,), 3, 2, False, True), ((128, 144), 3, 2, False, True), ((128, 144), 3, 2, True, True),
            ((64, 128), 4, 2, True, True), ((96, 128, 160), 3, 2, True, True))
GROUPS = {
    "one_cta": [("bf16", 4096, ONE_CTA)],
    "two_ctas": [("bf16", 4096, TWO_CTAS)],
    "small": [(format, T, SMALL) for T in (32, 256) for format in ("bf16", "mxfp8")],
    "mxfp8": [("mxfp8", 4096, (ONE_CTA[0], TWO_CTAS[1], TWO_CTAS[2]))],
    "large": [("bf16", 8192, (ONE_CTA[0], *TWO_CTAS[1:3])), ("bf16", 1024, (((80,), 4, 1, True, True),))],
}


def variants(preset, format, T, trials):
    """Name and layer (x, routing, experts) -> y of each way to run the case."""
    silu = get_activation("silu")
    if format == "bf16" and T in (32, 256, 1024):
        yield "stages", functools.partial(expert_centric.stages, activation=silu)
    heuristic = GroupedConfig.heuristic(
        T * preset.experts_per_token, preset.num_experts, grouped_layer.ITEMSIZE[format])
    yield f"heuristic {heuristic.widths} {heuristic.stages}", grouped_layer.op(silu)
    for widths, stages, cluster, gathered, kernel in trials:
        config = GroupedConfig(widths, stages, cluster=cluster)
        name = f"{'x'.join(map(str, widths))} {stages}" + " cluster" * (cluster > 1) + " gather" * gathered + (
            " plan" * kernel)
        make_plan = grouped_plan.plan_on_gpu if kernel else grouped_plan.plan
        yield name, grouped_layer.op(silu, (config, config), gathered, make_plan)


def run_case(preset, experts, format, T, trials):
    """A result per variant."""
    rng = np.random.default_rng(T)
    layers = [(inputs.make_x(jax.random.key(T + i), T, preset), inputs.make_routing(rng, T, preset, "uniform"), e)
              for i, e in enumerate(experts)]
    reference = jax.jit(lambda *args: moe(*args, strategy="reference"))
    x, routing, e = layers[0]
    want = [np.asarray(reference(x.astype("float32"), routing, e), np.float64)]
    flops = 6 * T * preset.experts_per_token * preset.hidden * preset.intermediate

    def lower(layer):
        try:
            return timing.lower_step(lambda x, *args: layer(x, *args).astype(x.dtype), layers, "step")
        except Exception as error:
            return error

    def compile_one(lowered):
        try:
            return lowered if isinstance(lowered, Exception) else timing.compile_step(lowered)
        except Exception as error:
            return error

    named = list(variants(preset, format, T, trials))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(compile_one, [lower(layer) for _, layer in named]))
    calls, found = [], []
    for (name, _), step in zip(named, compiled, strict=True):
        result = dict(format=format, tokens=T, variant=name)
        try:
            if isinstance(step, Exception):
                raise step
            result |= errors([step(layers)[0]], want)
            if not result["relative_l2"] < TOLERANCE:
                raise ArithmeticError(f"wrong result, {result['relative_l2']:.1e}")
            calls.append(((step, layers), result))
        except Exception as error:
            result["error"] = describe(error)
        found.append(result)
    for (_, result), timed in zip(calls, timing.time_steps([c for c, _ in calls], STEPS), strict=True):
        result |= dataclasses.asdict(timed) | dict(tflops=flops / timed.us / 1e6)
    return found


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


def child(options) -> int:
    preset = get_preset(options.model)
    print(json.dumps(dict(metadata=metadata("grouped"))), flush=True)  # the parent must not hold the GPU
    if options.child in ALONE:
        try:
            print(json.dumps(ALONE[options.child]()), flush=True)
        except Exception as error:
            print(json.dumps(dict(variant=options.child, error=describe(error))), flush=True)
        return 0
    if options.xla_plan:
        grouped_plan.plan_on_gpu = grouped_plan.plan
    format_of, experts = None, None
    for format, T, trials in GROUPS[options.child]:
        if format != format_of:
            format_of, experts = format, None  # the old ones go first
            experts = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(LAYERS)]
        try:
            for result in run_case(preset, experts, format, T, trials):
                print(json.dumps(result), flush=True)
        except Exception as error:
            print(json.dumps(dict(format=format, tokens=T, error=describe(error))), flush=True)
    return 0


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
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--xla-plan", action="store_true", help="plan in XLA; so if the plan kernel fails its check")
    options = parser.parse_args(argv)
    if options.child:
        return child(options)
    options.out.mkdir(parents=True, exist_ok=True)
    results, record = [], {}
    for group in options.groups:
        command = [sys.executable, "-m", "bench.grouped", "--model", options.model, "--out", str(options.out),
                   "--child", group, *["--xla-plan"] * options.xla_plan]
        start, limit = time.monotonic(), ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
            out, err = done.stdout, done.stderr
        except subprocess.TimeoutExpired as stopped:
            out, err = ((s or b"").decode() for s in (stopped.stdout, stopped.stderr))
            limit = f"stopped after {LIMIT_S} s"
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if limit or len(found) < 2:
            last = [line for line in err.splitlines() if line.strip()][-1:]
            found.append(dict(variant=group, error=f"{limit} {' '.join(last)}"[:300]))
        record |= next((r["metadata"] for r in found if "metadata" in r), {})
        found = [r for r in found if "metadata" not in r]
        results += found
        options.xla_plan |= group == "plan" and any("error" in r for r in found)
        print("\n".join(map(describe_row, found)))
        print(f"{group}: {time.monotonic() - start:.0f} s", flush=True)
        record |= dict(model=options.model, results=results)
        (options.out / "grouped.json").write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any("error" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
