"""Time to the first token of long prompts, whole model: Qwen3-30B-A3B's shape, one prompt, random weights.

    python -m bench.first_token --out bench/results

As bench.decode, but for the prefill. Host clock around one call, which takes tens of milliseconds; median. Writes
first_token.json.
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import decode, small_batch
from jax_warp_decode.models.decode_step import prefill

CASES = (  # format, strategy
    ("mxfp8", decode.OURS), ("bf16", decode.OURS), ("bf16", "tokamax_mosaic"), ("bf16", "tokamax_mosaic_large"))


def measure(format: str, strategy: str, weights, tokens: int, repeats: int) -> dict:
    model = decode.decode_model(strategy, "auto", len(weights.layers))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, decode.MODEL.vocab_size, (1, tokens)), jnp.int32)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=decode.MODEL.num_hidden_layers)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    decode.take_memory()
    if jax.default_backend() != "gpu":
        raise SystemExit("bench.first_token measures an NVIDIA GPU; JAX sees none")
    options.out.mkdir(parents=True, exist_ok=True)
    path, results, weights, before = options.out / "first_token.json", [], None, None
    for format, strategy in CASES:
        layout = decode.layout(decode.Case(format, strategy, 1, 0, "auto"))
        if before is None or before[0] != format:
            weights = None
            weights, before = decode.make_weights(format, options.layers), (format, decode.AS_IT_IS)
        if layout is not before[1]:
            weights, before = decode.prepared(weights, layout), (format, layout)
        for tokens in options.tokens:
            try:
                row = measure(format, strategy, weights, tokens, options.repeats)
                print(f"{format:6} {strategy:22} {tokens:6} tokens  {row['ms']:8.1f} ms", flush=True)
            except Exception as error:
                row = dict(format=format, strategy=strategy, tokens=tokens, error=small_batch.describe(error))
                print(row, flush=True)
            results.append(row)
            path.write_text(json.dumps(
                dict(meta=small_batch.metadata("first_token"), results=results), indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
