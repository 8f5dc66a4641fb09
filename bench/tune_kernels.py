"""Times configurations of the two warp-decode kernels: what their heuristics were derived from.

    python -m bench.tune_kernels --model qwen3-30b-a3b --batch 1 8 --out bench/results

For every format and batch size, each candidate runs over rotated weights (several layers, well past L2) with fresh
uniform routing, all under one profiler trace; its figure is the median kernel time.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import pathlib
import statistics
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from bench import inputs, small_batch, timing
from jax_warp_decode.kernels import DownConfig, GateUpConfig, moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.kernels.tile import RowTile
from jax_warp_decode.presets import PRESETS, get_preset

ITEMSIZE = {"bf16": 2, "mxfp8": 1}
IN_FLIGHT = (4, 8, 16)  # loads of 16 bytes per lane and weight matrix, before any arithmetic


def candidates(cols: int, n: int, itemsize: int, rows_per_pass: int) -> list[tuple[int, int, int]]:
    """(lanes, rows, unroll) that fit a weight [n, cols] read rows_per_pass times over (K for down, 1 for gate/up)."""
    found = []
    for lanes, rows, in_flight in itertools.product((32, 16, 8), (1, 2, 4), IN_FLIGHT):
        tile = RowTile(cols, itemsize, lanes, rows)
        if tile.step <= cols and n % tile.out_rows == 0:
            found.append((lanes, rows, min(rows_per_pass * tile.steps, max(1, in_flight // rows))))
    return list(dict.fromkeys(found))


def median_times(name: str, fns: list, args_per_layer: list[tuple], repeats: int) -> list[float]:
    """Median microseconds of the kernel `name` in each fn, over all layers."""

    def compile_one(fn):
        return jax.jit(fn).lower(*args_per_layer[0]).compile()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(compile_one, fns))
    for fn in compiled:
        jax.block_until_ready(fn(*args_per_layer[0]))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for fn in compiled:
                for args in args_per_layer * repeats:
                    out = fn(*args)
                jax.block_until_ready(out)
        (trace,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        events = timing.device_events(jax.profiler.ProfileData.from_file(str(trace)))
    us = [(e.end_ns - e.start_ns) / 1e3 for e in events if name in e.name]
    size = len(args_per_layer) * repeats
    if len(us) != size * len(fns):
        raise RuntimeError(f"expected {size} x {len(fns)} launches of {name} in the trace, found {len(us)}")
    return [statistics.median(us[i:i + size]) for i in range(0, len(us), size)]


def sweep(preset, format: str, batch: int, experts: list, repeats: int, h_dtype) -> list[dict]:
    """One result per kernel: microseconds of every candidate, best first."""
    H, I, K, size = preset.hidden, preset.intermediate, preset.experts_per_token, ITEMSIZE[format]
    rng = np.random.default_rng(batch)
    routing = [inputs.make_routing(rng, batch, preset, "uniform") for _ in experts]
    unique = statistics.mean(inputs.traffic(np.asarray(r.ids), e).unique for r, e in zip(routing, experts, strict=True))
    x = inputs.make_x(jax.random.key(batch), batch, preset)
    h = jax.random.normal(jax.random.key(batch), (batch, K, I), h_dtype)
    kernels = {
        "moe_gate_up": (moe_gate_up_3d_batched, GateUpConfig, candidates(H, I, size, 1), 2 / 3, dict(out_dtype=h_dtype),
                        [(x, r.ids, e.w_gate, e.w_up) for r, e in zip(routing, experts, strict=True)]),
        "moe_down": (moe_down_3d_batched, DownConfig, candidates(I, H, size, K), 1 / 3, {},
                     [(h, r.ids, r.weights, e.w_down) for r, e in zip(routing, experts, strict=True)])}
    results = []
    for name, (kernel, config, found, share, options, args) in kernels.items():
        fns = [functools.partial(kernel, config=config(*c), **options) for c in found]
        ranked = sorted(zip(median_times(name, fns, args, repeats), found, strict=True))
        print(f"{preset.name} {format} B={batch} {name}: {unique * share / 1e6:.0f} MB  "
              + "  ".join(f"{c}: {us:.1f}" for us, c in ranked[:6]), flush=True)
        results.append(dict(model=preset.name, format=format, batch=batch, kernel=name, h_dtype=str(jnp.dtype(h_dtype)),
                            unique_bytes=unique * share, us={str(c): us for us, c in ranked}))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--format", nargs="+", default=list(ITEMSIZE), choices=ITEMSIZE)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--h-dtype", nargs="+", default=["float32", "bfloat16"], help="of the intermediate")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    preset, results = get_preset(options.model), []
    for format in options.format:
        experts = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(options.layers)]
        for batch, h_dtype in itertools.product(options.batch, options.h_dtype):
            results += sweep(preset, format, batch, experts, options.repeats, jnp.dtype(h_dtype))
    path = options.out / f"tune_kernels-{options.model}.json"
    path.write_text(json.dumps(dict(meta=small_batch.metadata("tune_kernels"), results=results), indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
