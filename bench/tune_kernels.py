"""Times configurations of the two warp-decode kernels, to derive the heuristics: python -m bench.tune_kernels --out DIR.

For every shape, format and batch size the candidates run over rotated weights (well past L2) with fresh uniform
routing, all under one profiler trace; a row is the median kernel time of one candidate.
"""

import argparse
import concurrent.futures
import glob
import itertools
import json
import os
import statistics
import tempfile

import jax
import jax.numpy as jnp

from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.kernels import DownConfig, GateUpConfig, moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.kernels.tile import RowTile, largest_divisor

SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "gemma4-26b": (2816, 704, 128, 8), "qwen3.5-35b-a3b": (2048, 512, 256, 8),
          "gpt-oss-20b": (2880, 2880, 32, 4), "qwen3-235b-a22b": (4096, 1536, 128, 8)}
ITEMSIZE = {"bf16": 2, "mxfp8": 1}


def make_layers(shape, fmt, layers):
    H, I, E, _ = shape

    @jax.jit
    def make(key):
        draw = lambda key, *s: jax.random.normal(key, s, jnp.bfloat16) * jnp.bfloat16(s[-1] ** -0.5)
        keys = jax.random.split(key, 3)
        experts = ExpertWeights(draw(keys[0], E, I, H), draw(keys[1], E, I, H), draw(keys[2], E, H, I))
        return experts.quantize(fmt) if fmt != "bf16" else experts

    return [make(jax.random.key(i)) for i in range(layers)]


def candidates(cols, n, itemsize, steps_per_row):
    """(lanes, rows, unroll) triples that fit a weight [n, cols]; steps_per_row is K for down, 1 for gate/up."""
    for lanes, rows, in_flight in itertools.product((32, 16, 8), (1, 2, 4), (4, 8, 16)):
        if lanes * (16 // itemsize) > cols:
            continue
        tile = RowTile(cols, itemsize, lanes, rows)
        if n % tile.out_rows or (-cols % tile.step) / cols > 0.34 or (lanes == 8 and cols % tile.step == cols % (2 * tile.step)):
            continue  # a lane group of 8 only where it walks a row more evenly than 16
        steps = steps_per_row * tile.steps
        unroll = largest_divisor(steps, max(1, in_flight // rows))
        if unroll * rows > 16:
            continue
        yield lanes, rows, unroll


def kernel_times(trace_dir):
    """[(start, name, us)] of every kernel in the newest trace, in order of start."""
    path = max(glob.glob(os.path.join(trace_dir, "**", "*.xplane.pb"), recursive=True), key=os.path.getmtime)
    events = []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    events += [(e.start_ns, e.name, e.duration_ns / 1e3) for e in line.events]
    return sorted(events)


def run_group(name, fns, args_per_layer, repeats):
    """Median microseconds of each fn over the layers, in one trace."""
    with tempfile.TemporaryDirectory() as trace_dir:
        compile_one = lambda fn: jax.jit(fn).lower(*args_per_layer[0]).compile()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            compiled = list(pool.map(compile_one, fns))
        for c in compiled:
            jax.block_until_ready(c(*args_per_layer[0]))
        with jax.profiler.trace(trace_dir):
            for c in compiled:
                for args in args_per_layer * repeats:
                    out = c(*args)
                jax.block_until_ready(out)
        events = [e for e in kernel_times(trace_dir) if name in e[1]]
    per_fn = len(args_per_layer) * repeats
    if len(events) != per_fn * len(fns):
        raise RuntimeError(f"expected {per_fn} x {len(fns)} launches of {name} in the trace, found {len(events)}")
    return [statistics.median(us for _, _, us in events[i * per_fn:(i + 1) * per_fn]) for i in range(len(fns))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["qwen3-30b-a3b"], choices=SHAPES)
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"], choices=ITEMSIZE)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--h-dtype", default="float32")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    results = []
    for model, fmt in itertools.product(options.model, options.format):
        H, I, E, K = SHAPES[model]
        size = ITEMSIZE[fmt]
        layers = make_layers(SHAPES[model], fmt, options.layers)
        for B in options.batch:
            keys = jax.random.split(jax.random.key(B), options.layers)
            ids = [jax.lax.top_k(jax.random.uniform(k, (B, E)), K)[1] for k in keys]
            x = jax.random.normal(keys[0], (B, H), jnp.bfloat16)
            h = jax.random.normal(keys[0], (B, K, I), jnp.dtype(options.h_dtype))
            weights = jax.random.uniform(keys[0], (B, K), jnp.float32)
            unique = statistics.median(len(set(i.reshape(-1).tolist())) for i in ids)
            for kernel in ("gate_up", "down"):
                if kernel == "gate_up":
                    found = list(dict.fromkeys(candidates(H, I, size, 1)))
                    fns = [lambda x, i, g, u, c=GateUpConfig(*c): moe_gate_up_3d_batched(
                        x, i, g, u, config=c, out_dtype=jnp.dtype(options.h_dtype)) for c in found]
                    args = [(x, i, w.w_gate, w.w_up) for i, w in zip(ids, layers)]
                else:
                    found = list(dict.fromkeys(candidates(I, H, size, K)))
                    fns = [lambda h, i, r, d, c=DownConfig(*c): moe_down_3d_batched(h, i, r, d, config=c) for c in found]
                    args = [(h, i, weights, w.w_down) for i, w in zip(ids, layers)]
                times = run_group(f"moe_{kernel}", fns, args, options.repeats)
                ranked = sorted(zip(times, found))
                per_row = 2 * I * H if kernel == "gate_up" else I * H
                gb = unique * per_row * (2 if size == 2 else 1 + 1 / 32) / 1e9
                best = "  ".join(f"{c}: {t:.1f}" for t, c in ranked[:6])
                print(f"{model} {fmt} B={B} {kernel}: {gb * 1e3:.0f} MB, line {1.48 + gb / 4.70e-3:.1f} us | {best} | worst "
                      f"{ranked[-1][1]}: {ranked[-1][0]:.1f}", flush=True)
                results.append(dict(model=model, format=fmt, batch=B, kernel=kernel, unique_experts=unique,
                                    h_dtype=options.h_dtype, unique_gb=gb,
                                    us={str(c): t for t, c in ranked}))
    with open(os.path.join(options.out, "tune_kernels.json"), "w") as f:
        json.dump(dict(device=jax.devices()[0].device_kind, jax=jax.__version__, results=results), f, indent=1)


if __name__ == "__main__":
    main()
