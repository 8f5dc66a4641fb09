"""Checks and times configurations of the two shared-decode kernels.

    python -m bench.tune_shared --batch 8 16 32 64 128 --out bench/results

For every format and batch size: first the whole layer with the heuristic's configuration, checked and timed, then every
candidate of each kernel. A candidate is compared with the float32 reference on the inputs that are timed, and a wrong
one is reported and not timed. Times are cold chains of layers with weights and routing of their own, as in
bench.small_batch. Batch sizes in --refine only time the candidates that were best at the sizes before.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import small_batch
from jax_warp_decode.activations import get_activation
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import dequantize
from jax_warp_decode.kernels import shared_common
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.kernels.shared_down import moe_down_shared
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
from jax_warp_decode.measure import inputs, timing
from jax_warp_decode.paths import shared_decode
from jax_warp_decode.presets import PRESETS, get_preset

ITEMSIZE = {"bf16": 2, "mxfp8": 1}
KERNELS = {"gate_up": 2, "down": 1}  # matrices that meet in an item
TOLERANCE = {"gate_up": 1e-4, "down": 1e-4, "layer": 5e-3}  # relative L2 error; the layer rounds h and y to bfloat16
READ_US, READ_TBPS = 1.48, 4.70  # a kernel that only reads: fixed microseconds and TB/s (bench/NOTES.md)
MOST_STAGES = 12
MXFP8_REGISTERS = {64: 128, 128: 128, 192: 170, 256: 170, 320: 255, 384: 255}  # by chunk at most, from tests.aot
LAYOUTS = ((1, 2), (1, 3), (2, 1), (1, 1), (2, 2), (3, 1), (1, 4), (4, 1))  # warpgroups, CTAs per SM


def candidates(batch: int, preset, kernel: str, itemsize: int) -> list[SharedConfig]:
    """Every way to fill shared memory, the ring as deep as fits."""
    cols = preset.hidden if kernel == "gate_up" else preset.intermediate
    slots, E = batch * preset.experts_per_token, preset.num_experts
    found = []
    for tokens, (warpgroups, ctas), chunk in itertools.product((8, 16, 32), LAYOUTS, shared_common.CHUNKS):
        if tokens > max(8, batch // 4) or tokens < 16 <= batch // 8 or cols % chunk:
            continue
        if chunk < 128 and any(cols % c == 0 for c in (128, 192, 256, 320, 384)):
            continue
        if itemsize == 1 and MXFP8_REGISTERS[chunk] * warpgroups * ctas > 512:
            continue  # an SM has 512 registers for each of 128 threads
        for stages in range(MOST_STAGES, 1, -1):
            config = SharedConfig(tokens, chunk, stages, warpgroups, ctas)
            try:
                shared_common.check_config(config, cols, itemsize, slots, E, KERNELS[kernel])
            except ArgumentError:
                continue
            if config.ring_bytes(itemsize) * ctas >= 80 * 1024:  # or the ring cannot keep the memory busy
                found.append(config)
            break
    return found


# ------------------------------------------------------------------------------------------------- float32 reference


def _matrix(w, e):
    return dequantize(jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, e, keepdims=False), w), jnp.float32)


def _dot(w, v):
    return jnp.dot(w, v, precision=lax.Precision.HIGHEST)


@jax.jit
def reference_h(x, ids, experts):
    """h float32 [T, K, I], one slot at a time."""
    def one(slot):
        e, row = slot
        return get_activation("silu").apply(_dot(_matrix(experts.w_gate, e), row), _dot(_matrix(experts.w_up, e), row))

    rows = jnp.repeat(x.astype(jnp.float32), ids.shape[1], axis=0)
    return lax.map(one, (ids.reshape(-1), rows)).reshape(*ids.shape, -1)


@jax.jit
def reference_y(h, ids, weights, experts):
    """y float32 [T, H] from h as given."""
    slots = ids.reshape(-1), h.reshape(-1, h.shape[2])
    products = lax.map(lambda slot: _dot(_matrix(experts.w_down, slot[0]), slot[1]), slots)
    return jnp.sum(products.reshape(*ids.shape, -1) * weights[..., None], axis=1)


def relative_error(got, want) -> float:
    """Relative L2 error; inf where something is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want)) if np.isfinite(got).all() else float("inf")


# ------------------------------------------------------------------------------------------------------------ sweep


class Bench:
    """One format and batch size: inputs, references, and what was measured."""

    def __init__(self, preset, format, batch, experts, options):
        self.preset, self.format, self.batch, self.options = preset, format, batch, options
        rng = np.random.default_rng(batch)
        routing = [inputs.make_routing(rng, batch, preset, options.pattern) for _ in experts]
        x = inputs.make_x(jax.random.key(batch), batch, preset)
        self.unique = statistics.mean(
            inputs.traffic(np.asarray(r.ids), e).unique for r, e in zip(routing, experts, strict=True))
        h = reference_h(x, routing[0].ids, experts[0])
        rounded = h.astype(jnp.bfloat16).astype(jnp.float32)
        self.layers = {
            "gate_up": [(x, r.ids, e.w_gate, e.w_up) for r, e in zip(routing, experts, strict=True)],
            "down": [(rounded, r.ids, r.weights, e.w_down) for r, e in zip(routing, experts, strict=True)],
            "layer": [(x, r, e) for r, e in zip(routing, experts, strict=True)]}
        self.want = {
            "gate_up": h, "down": reference_y(rounded, routing[0].ids, routing[0].weights, experts[0]),
            "layer": reference_y(h, routing[0].ids, routing[0].weights, experts[0])}

    def functions(self, kernel, configs):
        if kernel == "layer":
            return [functools.partial(shared_decode.run, activation=get_activation("silu"))]
        if kernel == "gate_up":
            return [functools.partial(moe_gate_up_shared, config=c) for c in configs]
        return [functools.partial(moe_down_shared, out_dtype=jnp.float32, config=c) for c in configs]

    def measure(self, kernel, configs) -> list[dict]:
        """One result per config, in order; prints them as they come."""
        share = {"gate_up": 2 / 3, "down": 1 / 3, "layer": 1}[kernel]
        floor = READ_US + self.unique * share / READ_TBPS / 1e6
        layers, results = self.layers[kernel], []

        def start(pool, fn):
            """Lowers here, as Mosaic's Python part has global state; compiles in a thread."""
            try:
                return pool.submit(timing.compile_step, timing.lower_step(fn, layers, "candidate"))
            except Exception as e:
                failed = concurrent.futures.Future()
                failed.set_exception(e)
                return failed

        with concurrent.futures.ThreadPoolExecutor(self.options.threads) as pool:
            compiled = [start(pool, fn) for fn in self.functions(kernel, configs)]
            for config, future in zip(configs, compiled, strict=True):
                label = f"{self.format} B={self.batch} {kernel} {config}"
                try:
                    step = future.result()
                    error = relative_error(step(layers)[0], self.want[kernel])
                    if error > TOLERANCE[kernel]:
                        print(f"{label}: WRONG, relative error {error:.2e}", flush=True)
                        results.append(dict(config=str(config), error=error, us=None))
                        continue
                    t = timing.time_step(step, layers, self.options.steps)
                except Exception as e:  # one candidate must not stop the sweep
                    print(f"{label}: FAILED {type(e).__name__}: {str(e)[:300]}", flush=True)
                    results.append(dict(config=str(config), error=None, us=None, failed=str(e)[:1000]))
                    continue
                print(f"{label}: {t.us:.1f} us  {floor / t.us:.0%} of reading {self.unique * share / 1e6:.0f} MB "
                      f"({floor:.1f} us)  error {error:.1e}  kernels "
                      + " ".join(f"{name}={us:.1f}" for name, us in t.kernels.items()), flush=True)
                results.append(dict(config=str(config), error=error, us=t.us, min_us=t.min_us, kernels=t.kernels,
                                    clock=t.clock, wall_us=t.wall_us))
        return [dict(r, model=self.preset.name, format=self.format, batch=self.batch, kernel=kernel,
                     unique_bytes=self.unique * share, floor_us=floor) for r in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--format", nargs="+", default=list(ITEMSIZE), choices=ITEMSIZE)
    parser.add_argument("--sweep", nargs="*", default=list(ITEMSIZE), choices=ITEMSIZE, help="formats with candidates")
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--refine", nargs="*", type=int, default=[32, 64, 16])
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--pattern", default="uniform", choices=inputs.PATTERNS)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=12, help="that compile")
    parser.add_argument("--most", type=int, default=99, help="candidates per kernel and batch size")
    parser.add_argument("--seconds", type=float, default=180, help="start no further sweep after this time")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    start, preset, results, best = time.monotonic(), get_preset(options.model), [], {}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"tune_shared-{options.model}.json"

    def save():
        path.write_text(json.dumps(dict(meta=small_batch.metadata("tune_shared"), results=results), indent=1) + "\n")

    weights = {}
    for format in options.format:
        weights[format] = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(options.layers)]
    benches = {(f, b): Bench(preset, f, b, weights[f], options) for f in options.format for b in options.batch}
    print(f"inputs and references: {time.monotonic() - start:.0f} s", flush=True)
    for bench in benches.values():
        results += bench.measure("layer", ["heuristic"])
    save()
    print(f"whole layers: {time.monotonic() - start:.0f} s", flush=True)
    order = sorted(options.batch, key=lambda b: b in options.refine)
    for batch, format, kernel in itertools.product(order, options.sweep, options.kernel):
        if time.monotonic() - start > options.seconds:
            print(f"out of time before B={batch} {format} {kernel}")
            break
        configs = candidates(batch, preset, kernel, ITEMSIZE[format])[:options.most]
        if batch in options.refine and best.get((format, kernel)):
            configs = [c for c in configs if str(c) in best[format, kernel]]
        measured = benches[format, batch].measure(kernel, configs)
        ranked = sorted((r["us"], r["config"]) for r in measured if r["us"])
        best.setdefault((format, kernel), set()).update(c for _, c in ranked[:2])
        if ranked:
            top = "  ".join(f"{c}: {us:.1f}" for us, c in ranked[:3])
            print(f"best {format} B={batch} {kernel}: {top}", flush=True)
        results += measured
        save()
    print(f"wrote {path}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
