"""Small batches on the layers of many models, each in the format it is served in, and under skewed routing.

    python -m bench.suite --out bench/results

Runs bench.small_batch for every line of SUITE with warp decode and what else 'auto' takes at one of the batch sizes,
next to the plain read of the same bytes, and writes suite.json with the choices. The last column says how far a layer
is from reading its weights once.
"""

import argparse
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

from bench import small_batch
from bench.report import Report, need_gpu
from jax_warp_decode import choose
from jax_warp_decode.measure import inputs
from jax_warp_decode.measure.variants import describe
from jax_warp_decode.presets import get_preset

SUITE = (  # model, format, routing
    ("qwen3-30b-a3b", "bf16", "uniform"),
    ("qwen3-30b-a3b", "mxfp8", "uniform"),
    ("qwen3-235b-a22b", "mxfp8", "uniform"),
    ("qwen3.5-35b-a3b", "mxfp8", "uniform"),
    ("gpt-oss-20b", "bf16", "uniform"),
    ("deepseek-v3", "mxfp8", "uniform"),
    ("mixtral-8x7b", "bf16", "uniform"),
    ("minimax-m3", "mxfp8", "uniform"),
    ("gemma4-26b-a4b", "bf16", "uniform"),
    ("qwen3-30b-a3b", "bf16", "one_hot"),
    ("qwen3-30b-a3b", "mxfp8", "one_hot"),
    ("qwen3-30b-a3b", "bf16", "zipf"),
    ("qwen3-30b-a3b", "mxfp8", "zipf"),
)


def auto(model: str, format: str, batch: int) -> str:
    """What 'auto' takes for a layer of a preset on the device of this process.

    Example:
      >>> import jax_warp_decode
      >>> from bench.suite import auto
      >>> auto("qwen3-30b-a3b", "bf16", 1) in jax_warp_decode.STRATEGIES
      True
    """
    preset = get_preset(model)
    experts = jax.eval_shape(lambda key: inputs.make_experts(key, preset, format), jax.random.key(0))
    return choose(batch, experts, experts_per_token=preset.experts_per_token, x_dtype=jnp.bfloat16).strategy


def describe_row(row: dict) -> str:
    outcome = row.get("error") or f"{row['us']:8.1f} us  {row['us'] / row['read_us']:.3f} x the read"
    layer = f"{row['model']:18} {row['format']:6} {row['pattern']:8} B={row['batch']:<3} {row['strategy']:14}"
    return f"== {layer} {outcome}"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--steps", default="10")
    parser.add_argument("--only", nargs="+", help="models; default: all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no layer is begun after this")
    parser.add_argument("--fill", action="store_true", help="keep what an earlier run wrote, measure what it lacks")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    need_gpu("suite")
    start = time.monotonic()
    report = Report(options.out / "suite.json", "suite", fill=options.fill, choices={})
    for model, format, pattern in SUITE:
        if options.only and model not in options.only:
            continue
        if time.monotonic() - start > options.seconds:
            report.cut(f"{model} {format} {pattern}")
            continue
        choices = {batch: auto(model, format, batch) for batch in options.batch}
        report.facts["choices"][f"{model} {format}"] = choices
        try:
            found = small_batch.run(small_batch.parse([
                "--model", model, "--format", format, "--pattern", pattern, "--out", str(options.out),
                "--strategies", *dict.fromkeys(["warp_decode", *choices.values()]),
                "--batch", *map(str, options.batch), "--steps", options.steps]), report)
        except Exception as error:  # of one model, such as too little memory
            found = [dict(model=model, format=format, pattern=pattern, strategy="warp_decode", batch=0,
                          error=describe(error))]
            report.add(*found)
        for row in found:
            if row["strategy"] != "read":
                print(describe_row(row), flush=True)
        print(f"-- {time.monotonic() - start:.0f} s", flush=True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
