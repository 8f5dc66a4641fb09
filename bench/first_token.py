"""Time to the first token of long prompts, whole model: Qwen3-30B-A3B's shape, one prompt, random weights.

    python -m bench.first_token --out bench/results

As bench.decode, but for the prefill. Host clock around one call, which takes tens of milliseconds; median. Writes
first_token.json.
"""

import argparse
import math
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import decode_model
from bench.decode_report import OURS
from bench.report import Report, need_gpu
from jax_warp_decode.measure.variants import describe
from jax_warp_decode.models.decode_step import prefill

CASES = (  # format, strategy
    ("bf16", OURS), ("bf16", "tokamax_mosaic"), ("bf16", "tokamax_mosaic_large"), ("mxfp8", OURS))


def measure(format: str, strategy: str, weights, tokens: int, repeats: int) -> dict:
    model = decode_model.decode_model(strategy, "auto", len(weights.layers))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, decode_model.MODEL.vocab_size, (1, tokens)), jnp.int32)
    lengths = jnp.array([tokens], jnp.int32)
    step = jax.jit(prefill, static_argnums=0, donate_argnums=2)
    seconds = []
    for _ in range(repeats + 1):  # the first compiles
        cache = jax.block_until_ready(model.new_cache(1, tokens))
        start = time.perf_counter()
        logits, cache = step(model, weights, cache, ids, lengths)
        best = int(jnp.argmax(logits))
        seconds.append(time.perf_counter() - start)
    return dict(format=format, strategy=strategy, tokens=tokens, ms=statistics.median(seconds[1:]) * 1e3, best=best)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=decode_model.MODEL.num_hidden_layers)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no new case starts")
    parser.add_argument("--fill", action="store_true", help="keep what an earlier run wrote, measure what it lacks")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    decode_model.take_memory()
    need_gpu("first_token")
    start, report = time.perf_counter(), Report(options.out / "first_token.json", "first_token", fill=options.fill)
    weights, made_for = None, None
    for format, strategy in CASES:
        case = decode_model.Case(format, strategy, 1, 0, "auto")
        rows = [dict(format=format, strategy=strategy, tokens=tokens) for tokens in options.tokens]
        rows = [row for row in rows if not report.has(**row)]
        if why := decode_model.missing(case):
            print(f"{format:6} {strategy:22} {why}", flush=True)
            report.add(*(dict(row, error=f"skipped: {why}") for row in rows))
            continue
        if rows and time.perf_counter() - start > options.budget:
            report.cut(*rows)
            continue
        try:
            if rows and (made_for is None or made_for[0] != format):
                weights = None  # the old ones go first
                weights, made_for = decode_model.make_weights(format, options.layers), (format, decode_model.AS_IT_IS)
            if rows and decode_model.layout(case) is not made_for[1]:
                weights = decode_model.prepared(weights, decode_model.layout(case))
                made_for = format, decode_model.layout(case)
        except Exception as error:
            report.add(*(dict(row, error=describe(error)) for row in rows))
            weights, made_for = None, None
            continue
        for row in rows:
            try:
                row |= measure(format, strategy, weights, row["tokens"], options.repeats)
            except Exception as error:
                row["error"] = describe(error)
            report.add(row)
            outcome = row.get("error") or f"{row['ms']:8.1f} ms"
            print(f"{format:6} {strategy:22} {row['tokens']:6} tokens  {outcome}", flush=True)
    print(f"after {time.perf_counter() - start:.0f} s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
