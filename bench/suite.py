"""Small batches on the layers of many models, each in the format it is served in, and under skewed routing.

    python -m bench.suite --out bench/results

Runs bench.small_batch for every line of SUITE with warp decode alone, next to the plain read of the same bytes, and
writes suite.json. The last column says how far a layer is from reading its weights once.
"""

import argparse
import json
import pathlib

import jax

from bench import small_batch

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", default=["1", "2", "4", "8"])
    parser.add_argument("--steps", default="10")
    parser.add_argument("--only", nargs="+", help="models; default: all")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("bench.suite measures an NVIDIA GPU; JAX sees none")
    options.out.mkdir(parents=True, exist_ok=True)
    path, results = options.out / "suite.json", []
    for model, format, pattern in SUITE:
        if options.only and model not in options.only:
            continue
        found = list(small_batch.run(small_batch.parse([
            "--model", model, "--format", format, "--pattern", pattern, "--strategies", "warp_decode",
            "--batch", *options.batch, "--steps", options.steps, "--out", str(options.out)])))
        results += found
        path.write_text(json.dumps(dict(meta=small_batch.metadata("suite"), results=results), indent=1) + "\n")
        for row in found:
            if row["strategy"] != "read":
                outcome = row.get("error") or f"{row['us']:8.1f} us  {row['us'] / row['read_us']:.3f} x the read"
                print(f"{model:18} {format:6} {pattern:8} B={row['batch']:<3} {outcome}", flush=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
