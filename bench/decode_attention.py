"""Library kernels for the attention of one decode step, alone: microseconds and share of reading the keys and values.

    python -m bench.decode_attention --out bench/results

Qwen3 heads (32 queries, 4 keys, 128), bf16, every row full. A chain of layers with caches of their own is timed, so
nothing comes from L2. Results are compared with float32 first. Writes decode_attention.json.
"""

import argparse
import functools
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report, need_gpu
from jax_warp_decode.measure.variants import Variant, compare, measure
from jax_warp_decode.models import decode_attention
from jax_warp_decode.models.decode_attention import ATTENTION, Attention

HEADS, KEY_HEADS, DIM = 32, 4, 128
LAYER_BYTES = 0.3e9  # of the caches of all layers together
TOLERANCE = 2e-2  # bf16 probabilities; relative L2


def variants() -> dict[str, Attention]:
    """The entries of the table, and splits of the Pallas kernel besides its own choice."""
    found = dict(ATTENTION)
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


def describe_row(row: dict) -> str:
    outcome = row.get("error") or f"{row['us']:8.1f} us  {row['tb_per_s']:.2f} TB/s  {row['relative_l2']:.1e}"
    return f"B={row['batch']:<3} {row['context']:6} {row['attention']:16} {outcome}"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 4096, 32768])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    need_gpu("decode_attention")
    report = Report(options.out / "decode_attention.json", "decode_attention")
    for batch, context in itertools.product(options.batch, options.context):
        layers = {first: make_layers(batch, context, first) for first in (False, True)}
        check = {first: compare([reference(*layers[first][0][:3], first)], TOLERANCE) for first in (False, True)}
        rows = measure([Variant(dict(attention=name, batch=batch, context=context), attention.attend,
                                layers[attention.heads_first], check[attention.heads_first])
                        for name, attention in variants().items()], options.steps)
        nbytes = 2 * batch * context * KEY_HEADS * DIM * 2
        for row in rows:
            if "us" in row:
                row["tb_per_s"] = nbytes / row["us"] / 1e6
            print(describe_row(row), flush=True)
        report.add(*rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
