"""Checks and times configurations of the two shared-decode kernels.

    python -m bench.tune_shared --batch 8 16 32 64 128 --sweep 8 32 128 --out bench/results

For every format and batch size the whole layer with the heuristic's configuration, its two kernels apart, and at the
batch sizes of --sweep every candidate of each kernel. All are compared with the float32 reference on the inputs that
are timed; a wrong one is reported and not timed. With --parts also both kernels with a part left out. Times are cold
chains of layers with weights and routing of their own, as in bench.small_batch.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench import small_batch
from jax_warp_decode.activations import get_activation
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import dequantize
from jax_warp_decode.kernels import shared_common, shared_mx, shared_simt, shared_stream
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.kernels.shared_down import moe_down_shared
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
from jax_warp_decode.measure import inputs, timing
from jax_warp_decode.paths import shared_decode
from jax_warp_decode.presets import PRESETS, get_preset

KERNELS = {"gate_up": 2, "down": 1}  # matrices that meet in an item
TOLERANCE = {"gate_up": 1e-4, "down": 1e-4, "layer": 5e-3}  # relative L2 error; the layer rounds h and y to bfloat16
READ_US, READ_TBPS = 1.48, 4.70  # a kernel that only reads: fixed microseconds and TB/s (bench/NOTES.md)
MOST_STAGES = 12
# Warpgroups and CTAs per SM, with bfloat16 and others.
LAYOUTS = {True: ((1, 1), (1, 2)), False: ((1, 2), (1, 3), (2, 1))}
WAVES = (1, 2, 4, 8)
CHUNKS = (256, 384, 128)  # the first that fits well


def candidates(batch: int, preset, kernel: str, format: str, tokens: list[int]) -> list[SharedConfig]:
    """Ways to fill shared memory, the ring as deep as fits."""
    cols = preset.hidden if kernel == "gate_up" else preset.intermediate
    slots, E = batch * preset.experts_per_token, preset.num_experts

    def fill(n, warpgroups, ctas, waves):
        for chunk, stages in itertools.product(CHUNKS, range(MOST_STAGES, 2, -1)):
            config = SharedConfig(n, chunk, stages, warpgroups, ctas, waves=waves)
            try:
                shared_common.check_config(config, cols, format, slots, E, KERNELS[kernel])
            except ArgumentError:
                continue
            if config.ring_bytes(format) * ctas >= 64 * 1024:  # or the ring cannot keep the memory busy
                return [config]
        return []

    found = itertools.product(tokens, LAYOUTS[format == "bf16"], WAVES)
    return [config for n, layout, waves in found for config in fill(n, *layout, waves)]


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
        counts = [np.bincount(np.asarray(r.ids).reshape(-1)) for r in routing]
        self.most = max(int(c.max()) for c in counts)
        h = reference_h(x, routing[0].ids, experts[0])
        rounded = h.astype(jnp.bfloat16)
        self.layers = {
            "gate_up": [(x, r.ids, e.w_gate, e.w_up) for r, e in zip(routing, experts, strict=True)],
            "down": [(rounded, r.ids, r.weights, e.w_down) for r, e in zip(routing, experts, strict=True)],
            "layer": [(x, r, e) for r, e in zip(routing, experts, strict=True)]}
        rounded = rounded.astype(jnp.float32)
        self.want = {
            "gate_up": h, "down": reference_y(rounded, routing[0].ids, routing[0].weights, experts[0]),
            "layer": reference_y(h, routing[0].ids, routing[0].weights, experts[0])}

    def function(self, kernel, config):
        kernel, _, part = kernel.partition(" without ")
        if part:
            return functools.partial(_without, part, self.function(kernel, config))
        if kernel == "layer":
            return functools.partial(shared_decode.run, activation=get_activation("silu"))
        if kernel == "gate_up":
            return functools.partial(moe_gate_up_shared, config=config)
        return functools.partial(moe_down_shared, out_dtype=jnp.float32, config=config)

    def jobs(self) -> list[tuple[str, SharedConfig | None]]:
        """What to measure: kernel and config, None for the heuristic's."""
        found = [("layer", None), *((f"{kernel} without {part}", None) for kernel in self.options.kernel
                                    for part in (PARTS if self.options.parts else ()))]
        if self.batch in self.options.sweep:
            for kernel in self.options.kernel:
                found += [(kernel, c) for c in candidates(
                    self.batch, self.preset, kernel, self.format, self.tokens())][:self.options.most]
        return found

    def tokens(self) -> list[int]:
        mean = self.batch * self.preset.experts_per_token / self.preset.num_experts
        return [8] if mean <= 2 else [16] if mean <= 8 else [24, 32]

    def measure(self, pool) -> list[dict]:
        """Compiles, checks and times all jobs, these in one trace; prints and returns the results."""
        print(f"{self.format} B={self.batch}: reads {self.unique / 1e6:.0f} MB, at most {self.most} slots of an expert",
              flush=True)
        jobs, ready, results = self.jobs(), [], []

        def start(kernel, config):
            """Lowers here, as Mosaic's Python part has global state; compiles in a thread."""
            try:
                return pool.submit(timing.compile_step, timing.lower_step(
                    self.function(kernel, config), self.layers[kernel.partition(" without ")[0]], "candidate"))
            except Exception as e:
                failed = concurrent.futures.Future()
                failed.set_exception(e)
                return failed

        for (kernel, config), future in [(job, start(*job)) for job in jobs]:
            label = f"{self.format} B={self.batch} {kernel} {_short(config)}"
            data, _, part = kernel.partition(" without ")
            try:
                step = future.result()
                error = 0.0 if part else relative_error(step(self.layers[data])[0], self.want[data])
            except Exception as e:  # one candidate must not stop the sweep
                print(f"{label}: FAILED {type(e).__name__}: {str(e).splitlines()[-1][:300]}", flush=True)
                continue
            if error > TOLERANCE[data]:
                print(f"{label}: WRONG, relative error {error:.2e}", flush=True)
                continue
            ready.append((label, kernel, data, config, step, error))
        times = timing.time_steps([(step, self.layers[data]) for _, _, data, _, step, _ in ready], self.options.steps)
        for (label, kernel, data, config, _, error), t in sorted(zip(ready, times, strict=True), key=lambda r: (
                r[0][1], r[1].us)):
            share = {"gate_up": 2 / 3, "down": 1 / 3, "layer": 1}[data]
            floor = READ_US + self.unique * share / READ_TBPS / 1e6
            kernels = {name.removeprefix("moe_").removesuffix("_mosaic_gpu_kernel"): us
                       for name, us in t.kernels.items()}
            print(f"{label}: {t.us:.1f} us {floor / t.us:.0%} of {floor:.1f}  error {error:.0e}  "
                  + " ".join(f"{name}={us:.1f}" for name, us in kernels.items()), flush=True)
            results.append(dict(
                model=self.preset.name, format=self.format, batch=self.batch, kernel=kernel, config=str(config),
                error=error, us=t.us, min_us=t.min_us, kernels=kernels, clock=t.clock, wall_us=t.wall_us,
                unique_bytes=self.unique * share, floor_us=floor))
        return results


PARTS = ("nothing", "gather", "products", "results")


def _without(part, fn, *args):
    """fn(*args), traced with a part of the kernels left out: how long the others take. The results are wrong."""
    nothing = {
        "nothing": (), "gather": ((shared_simt, "gather"), (shared_mx, "gather")),
        "products": ((plgpu, "wgmma"), (shared_mx, "multiply")),
        "results": ((shared_simt, "scatter"), (shared_simt, "scatter_sums"))}[part]
    stand_ins = {"wgmma": lambda *_: None, "multiply": lambda *_: lambda _ctx, *args: args[-1]}
    with contextlib.ExitStack() as stack:
        for module, name in nothing:
            stand_in = stand_ins.get(name, lambda *_: lambda _ctx, *args: None)
            stack.enter_context(unittest.mock.patch.object(module, name, stand_in))
        shared_stream.build.cache_clear()
        try:
            return fn(*args)
        finally:
            shared_stream.build.cache_clear()


def _short(config: SharedConfig | None) -> str:
    return "heuristic" if config is None else str(tuple(getattr(config, f.name) for f in dataclasses.fields(config)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"], choices=shared_common.BITS)
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--sweep", nargs="*", type=int, default=[8, 32, 128], help="batch sizes with candidates")
    parser.add_argument("--parts", action="store_true", help="also the time without each part of the kernels")
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--pattern", default="uniform", choices=inputs.PATTERNS)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=12, help="that compile")
    parser.add_argument("--most", type=int, default=99, help="candidates per kernel and batch size")
    parser.add_argument("--seconds", type=float, default=180, help="start no further batch size after this time")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    start, preset, results = time.monotonic(), get_preset(options.model), []
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"tune_shared-{options.model}-{'-'.join(options.format)}.json"
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for format in options.format:
            experts = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(options.layers)]
            for batch in options.batch:
                if time.monotonic() - start > options.seconds:
                    print(f"out of time before {format} B={batch}")
                    break
                try:
                    results += Bench(preset, format, batch, experts, options).measure(pool)
                except Exception as e:
                    print(f"{format} B={batch}: FAILED {type(e).__name__}: {str(e).splitlines()[-1][:300]}", flush=True)
                path.write_text(json.dumps(
                    dict(meta=small_batch.metadata("tune_shared"), results=results), indent=1) + "\n")
                print(f"after {time.monotonic() - start:.0f} s", flush=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
