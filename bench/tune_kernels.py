"""Times configurations of the two warp-decode kernels: what their heuristics were derived from.

    python -m bench.tune_kernels --model qwen3-30b-a3b --batch 1 8 --out bench/results

For every format and batch size, each candidate runs as a chain of layers with weights and routing of their own, the
way bench.small_batch times a whole layer: all that one step reads is several times the L2 cache.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import pathlib
import statistics

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


def layer_times(fns: list, layers: list[tuple], steps: int) -> list[float]:
    """Median microseconds per layer of each fn, chained over the layers as in bench.small_batch."""
    lowered = [timing.lower_step(fn, layers, "candidate") for fn in fns]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(timing.compile_step, lowered))
    return [timing.time_step(step, layers, steps).us for step in compiled]


def sweep(preset, format: str, batch: int, experts: list, options, h_dtype) -> list[dict]:
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
    for name in options.kernel:
        kernel, config, found, share, keywords, args = kernels[name]
        found = [c for c in found if c[0] in options.lanes]
        fns = [functools.partial(kernel, config=config(*c), **keywords) for c in found]
        ranked = sorted(zip(layer_times(fns, args, options.steps), found, strict=True))
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
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kernel", nargs="+", default=["moe_gate_up", "moe_down"], choices=["moe_gate_up", "moe_down"])
    parser.add_argument("--lanes", nargs="+", type=int, default=[32, 16, 8])
    parser.add_argument("--h-dtype", nargs="+", default=["float32", "bfloat16"], help="of the intermediate")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    preset, results = get_preset(options.model), []
    for format in options.format:
        experts = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(options.layers)]
        for batch, h_dtype in itertools.product(options.batch, options.h_dtype):
            results += sweep(preset, format, batch, experts, options, jnp.dtype(h_dtype))
    path = options.out / f"tune_kernels-{options.model}.json"
    path.write_text(json.dumps(dict(meta=small_batch.metadata("tune_kernels"), results=results), indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
