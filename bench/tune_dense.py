"""Configurations of dense_rows, for the projections of a decode step: microseconds, and share of reading the weights.

    python -m bench.tune_dense --out bench/results

A chain of layers with weights of their own for every configuration, all in one trace; results are compared with float32
first. "read" is a kernel that reads as many bytes and does nothing with them. Writes tune_dense.json.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report, need_gpu
from jax_warp_decode.kernels.dense_rows import DenseConfig, dense_rows
from jax_warp_decode.kernels.rms_norm import rms_norm
from jax_warp_decode.measure import read_kernel
from jax_warp_decode.measure.variants import Variant, compare, measure

SHAPES = {"qkv": (5120, 2048), "output": (2048, 4096), "head": (151936, 2048)}  # Qwen3-30B-A3B: N, M
CONFIGS = ((1, 8), (2, 4), (4, 2), (1, 4), (2, 2), (4, 1))  # rows and unroll; the heuristic's choice comes first
STEP_BYTES = 0.3e9
TOLERANCE = 1e-2


def make_layers(name: str, tokens: int) -> list[tuple]:
    """(x, delta, w, gain, residual) of each layer."""
    N, M = SHAPES[name]
    count = max(2, math.ceil(STEP_BYTES / (2 * N * M)))
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)

    @jax.jit
    def make(key):
        keys = jax.random.split(key, 5)
        shapes = (tokens, M), (tokens, M), (N, M), (M,), (tokens, N)
        return tuple(normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    return [make(jax.random.key(i)) for i in range(count)]


def candidates(name: str, tokens: int) -> list[tuple[DenseConfig, bool]]:
    """Configurations, and whether the norm is a launch of its own."""
    configs = list(dict.fromkeys([DenseConfig.heuristic(tokens, *SHAPES[name]), *(DenseConfig(*c) for c in CONFIGS)]))
    alone = [(config, True) for config in configs] if name == "head" and tokens == 1 else []
    return [(config, False) for config in configs] + alone


def layer_function(name: str, tokens: int, config: DenseConfig, own_norm: bool = False):
    """As models.decode_step calls it: the norm comes along for a single token."""

    def layer(x, delta, w, gain, residual):
        if name == "output":
            return dense_rows((x,), w, residuals=(residual, residual), config=config)
        if own_norm:
            return dense_rows((rms_norm((x, delta), gain, eps=1e-6),), w, config=config)
        if tokens == 1:
            return dense_rows((x, delta), w, gain=gain, config=config)
        return dense_rows((x,), w, config=config)

    return layer


def reference(name, tokens, x, delta, w, gain, residual):
    x, delta, w, gain, residual = (a.astype(jnp.float32) for a in (x, delta, w, gain, residual))
    if name != "output" and tokens == 1:
        x = x + delta
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain
    y = jnp.einsum("tm,nm->tn", x, w, precision="highest")
    return np.asarray(y + 2 * residual if name == "output" else y)


def describe_row(row: dict) -> str:
    outcome = row.get("error") or f"{row['us']:7.2f} us  {row['of_read']:.0%} of the read"
    if not row["tokens"]:
        return f"{row['shape']:7} read  {outcome}"
    how = f"rows={row['rows']} unroll={row['unroll']} own_norm={row['own_norm']:d}"
    return f"{row['shape']:7} T={row['tokens']} {how}  {outcome}"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    need_gpu("tune_dense")
    report, ceiling = Report(options.out / "tune_dense.json", "tune_dense"), read_kernel.bytes_per_us()
    for name in options.shapes:
        nbytes = 2 * math.prod(SHAPES[name])
        windows = [(read_kernel.window(jax.random.key(i), nbytes),) for i in range(max(2, round(STEP_BYTES / nbytes)))]
        variants = [Variant(dict(shape=name, tokens=0), read_kernel.read, windows)]
        for tokens in options.tokens:
            layers = make_layers(name, tokens)
            check = compare([reference(name, tokens, *layers[0])], TOLERANCE)
            variants += [Variant(dict(shape=name, tokens=tokens, own_norm=own_norm) | dataclasses.asdict(config),
                                 layer_function(name, tokens, config, own_norm), layers, check)
                         for config, own_norm in candidates(name, tokens)]
        found = measure(variants, options.steps)
        for row in found:
            if "us" in row:
                row["of_read"] = nbytes / ceiling / row["us"]
        found.sort(key=lambda row: (row["tokens"], row.get("us", math.inf)))
        print("\n".join(map(describe_row, found)), flush=True)
        report.add(*found)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
