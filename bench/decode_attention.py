"""Library kernels for the attention of one decode step, alone: microseconds and share of reading the keys and values.

    python -m bench.decode_attention --out bench/results

Qwen3 heads (32 queries, 4 keys, 128), bf16, every row full. A chain of layers with caches of their own is timed, so
nothing comes from L2. Results are compared with float32 first. Writes decode_attention.json.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bench import small_batch
from jax_warp_decode.measure import timing
from jax_warp_decode.models import decode_attention
from jax_warp_decode.models.decode_attention import ATTENTION, Attention

HEADS, KEY_HEADS, DIM = 32, 4, 128
LAYER_BYTES = 0.3e9  # of the caches of all layers together
TOLERANCE = 2e-2  # bf16 probabilities; relative L2


def variants() -> dict[str, Attention]:
    """The entries of the table, and splits of the Pallas kernel besides its own choice."""
    found = dict(ATTENTION)
    if "split_k" in found:
        for splits, block in ((8, 64), (16, 64), (16, 128), (32, 64), (32, 128), (64, 64), (64, 128), (128, 128)):
            attend = functools.partial(decode_attention._split_k, splits=splits, block=block)
            name = f"split_k-{splits}x{block}"
            found[name] = Attention(name, True, attend)
    return found


def make_layers(batch: int, context: int, heads_first: bool) -> list[tuple]:
    """(q, k, v, lengths) of several layers."""
    nbytes = 2 * batch * context * KEY_HEADS * DIM * 2
    count = int(min(16, max(3, LAYER_BYTES // nbytes)))
    middle = (KEY_HEADS, context) if heads_first else (context, KEY_HEADS)
    lengths = jnp.full((batch,), context, jnp.int32)

    @jax.jit
    def make(key):
        q, k, v = jax.random.split(key, 3)
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        return normal(q, (batch, HEADS, DIM)), normal(k, (batch, *middle, DIM)), normal(v, (batch, *middle, DIM))

    return [(*make(jax.random.key(i)), lengths) for i in range(count)]


def reference(q, k, v, heads_first: bool) -> np.ndarray:
    if heads_first:
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.nn.dot_product_attention(q[:, None], k, v)[:, 0], np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 4096, 32768])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("bench.decode_attention measures an NVIDIA GPU; JAX sees none")
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for batch in options.batch:
        for context in options.context:
            layers = {first: make_layers(batch, context, first) for first in (False, True)}
            want = {first: reference(*layers[first][0][:3], first) for first in (False, True)}

            def compile_one(item, layers=layers):
                name, attention = item
                try:
                    lowered = timing.lower_step(attention.run, layers[attention.heads_first], "attention")
                    return timing.compile_step(lowered)
                except Exception as error:
                    return error

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                steps = dict(zip(variants(), pool.map(compile_one, variants().items()), strict=True))
            calls = []
            for name, step in steps.items():
                first = variants()[name].heads_first
                row = dict(attention=name, batch=batch, context=context)
                try:
                    if isinstance(step, Exception):
                        raise step
                    got = np.asarray(step(layers[first])[0], np.float64)
                    row["relative_l2"] = float(np.linalg.norm(got - want[first]) / np.linalg.norm(want[first]))
                    if not row["relative_l2"] < TOLERANCE:
                        raise ArithmeticError(small_batch.WRONG)
                    calls.append((row, step, layers[first]))
                except Exception as error:
                    results.append(dict(row, error=small_batch.describe(error)))
            nbytes = 2 * batch * context * KEY_HEADS * DIM * 2
            for (row, *_), timed in zip(calls, timing.time_steps([c[1:] for c in calls], options.steps), strict=True):
                results.append(dict(row, us=timed.us, kernels=timed.kernels, clock=timed.clock,
                                    tb_per_s=nbytes / timed.us / 1e6))
            for row in results[-len(steps):]:
                outcome = row.get("error") or (
                    f"{row['us']:8.1f} us  {row['tb_per_s']:.2f} TB/s  {row['relative_l2']:.1e}")
                print(f"B={batch:<3} {context:6} {row['attention']:16} {outcome}", flush=True)
            (options.out / "decode_attention.json").write_text(json.dumps(
                dict(meta=small_batch.metadata("decode_attention"), results=results), indent=1) + "\n")


if __name__ == "__main__":
    main()
