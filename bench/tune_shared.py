"""Checks and times configurations of the two shared-decode kernels.

    python -m bench.tune_shared --batch 8 16 32 64 128 --sweep 8 32 128 --out bench/results

For every format and batch size the whole layer with the heuristic's configuration, its two kernels apart, and at the
batch sizes of --sweep every candidate of each kernel. All are compared with the float32 reference on the inputs that
are timed; a wrong one is reported and not timed. With --parts also both kernels with a part left out. Times are cold
chains of layers with weights and routing of their own, as in bench.small_batch.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench.report import Report, need_gpu
from jax_warp_decode.activations import get_activation
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import dequantize
from jax_warp_decode.kernels import shared_common, shared_half, shared_mma, shared_simt, shared_stream
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.kernels.shared_down import moe_down_shared
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
from jax_warp_decode.measure import inputs
from jax_warp_decode.measure.variants import Variant, compare, describe, measure
from jax_warp_decode.paths import shared_decode
from jax_warp_decode.presets import PRESETS, get_preset

KERNELS = {"gate_up": 2, "down": 1}  # matrices that meet in an item
TOLERANCE = {"gate_up": 1e-4, "down": 1e-4, "layer": 5e-3}  # relative L2 error; the layer rounds y, and h, too
ROUNDED = 5e-4  # of down with quantised weights, which rounds h to float16, by up to 2^-11
SHARE = {"gate_up": 2 / 3, "down": 1 / 3, "layer": 1}  # of the weights
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

    def fill(n, warpgroups, ctas, waves, wgmma):
        for chunk, stages in itertools.product(CHUNKS, range(MOST_STAGES, 2, -1)):
            config = SharedConfig(n, chunk, stages, warpgroups, ctas, waves=waves, wgmma=wgmma)
            try:
                shared_common.check_config(config, cols, format, slots, E, KERNELS[kernel])
            except ArgumentError:
                continue
            if config.ring_bytes(format) * ctas >= 64 * 1024:  # or the ring cannot keep the memory busy
                return [config]
        return []

    found = itertools.product(tokens, LAYOUTS[format == "bf16"], WAVES, (True, False) if format == "bf16" else (True,))
    return [config for n, layout, waves, wgmma in found for config in fill(n, *layout, waves, wgmma)]


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
        rounded = h.astype(shared_decode.intermediate_dtype(experts[0]))
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

    def variants(self) -> list[Variant]:
        """All jobs. The row of a kernel with a part left out has no error: its results are wrong on purpose."""
        found = []
        for kernel, config in self.jobs():
            data, _, part = kernel.partition(" without ")
            read = self.unique * SHARE[data]
            row = dict(model=self.preset.name, format=self.format, batch=self.batch, kernel=kernel,
                       config=short(config), floor_us=READ_US + read / READ_TBPS / 1e6, unique_bytes=read)
            tolerance = ROUNDED if data == "down" and self.format != "bf16" else TOLERANCE[data]
            check = (lambda outputs: {}) if part else compare([self.want[data]], tolerance)
            found.append(Variant(row, self.function(kernel, config), self.layers[data], check))
        return found

    def measure(self) -> list[dict]:
        """Compiles, checks and times all jobs, these in one trace; prints and returns the rows."""
        print(f"{self.format} B={self.batch}: reads {self.unique / 1e6:.0f} MB, at most {self.most} slots of an expert",
              flush=True)
        rows = measure(self.variants(), self.options.steps, self.options.threads)
        rows.sort(key=lambda row: (row["kernel"], row.get("us", float("inf"))))
        print("\n".join(map(describe_row, rows)), flush=True)
        return rows


def describe_row(row: dict) -> str:
    head = f"{row['format']} B={row['batch']} {row['kernel']} {row['config']}: "
    if "us" not in row:
        return head + row["error"]
    kernels = " ".join(f"{name.removeprefix('moe_').removesuffix('_mosaic_gpu_kernel')}={us:.1f}"
                       for name, us in row["kernels"].items())
    error = f"error {row['relative_l2']:.0e}  " if "relative_l2" in row else ""
    return head + f"{row['us']:.1f} us {row['floor_us'] / row['us']:.0%} of {row['floor_us']:.1f}  {error}{kernels}"


PARTS = ("nothing", "gather", "products", "results")


def _without(part, fn, *args):
    """fn(*args), traced with a part of the kernels left out: how long the others take. The results are wrong."""
    nothing = {
        "nothing": (), "gather": ((shared_simt, "gather"), (shared_half, "gather")),
        "products": ((plgpu, "wgmma"), (shared_mma, "multiply"), (shared_half, "multiply")),
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


def short(config: SharedConfig | None) -> str:
    return "heuristic" if config is None else str(tuple(getattr(config, f.name) for f in dataclasses.fields(config)))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"], choices=inputs.FORMATS)
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
    parser.add_argument("--fill", action="store_true", help="keep what an earlier run wrote, measure what it lacks")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    need_gpu("tune_shared")
    start, preset = time.monotonic(), get_preset(options.model)
    path = options.out / f"tune_shared-{options.model}-{'-'.join(options.format)}.json"
    report = Report(path, "tune_shared", fill=options.fill)
    for format in options.format:
        experts = None
        for batch in options.batch:
            if report.has(format=format, batch=batch):
                continue
            if time.monotonic() - start > options.seconds:
                report.cut(f"{format} B={batch}")
                continue
            try:
                if experts is None:
                    experts = [inputs.make_experts(jax.random.key(i), preset, format) for i in range(options.layers)]
                report.add(*Bench(preset, format, batch, experts, options).measure())
            except Exception as error:
                report.add(dict(model=preset.name, format=format, batch=batch, error=describe(error)))
                print(f"{format} B={batch}: {describe(error)}", flush=True)
            print(f"after {time.monotonic() - start:.0f} s", flush=True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
