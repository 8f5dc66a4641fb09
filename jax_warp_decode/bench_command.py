"""`jax-warp-decode bench`: how fast a model's experts run on this GPU, and how far that is from reading their weights.

No checkpoint is needed: weights are random, made on the device in the model's format. Every strategy that runs here is
timed beside a kernel that does nothing but read as many bytes, cold, as `measure.timing` describes.
"""

import argparse
import concurrent.futures
import functools
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jax_warp_decode.choose import available_strategies, choose, no_gpu_reason
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.measure import inputs, read_kernel, timing
from jax_warp_decode.moe import moe
from jax_warp_decode.presets import PRESETS, get_preset

LAYERS = (3, 8)
STEP_BYTES = 0.6e9  # unique weight bytes of one step: many times the L2 cache
MEMORY_SHARE = 0.5  # of the GPU's, for all layers together; quantising needs room beside them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="NAME",
                        help="a model whose sizes are known; 'list' shows them")
    parser.add_argument("--format", nargs="+", metavar="NAME",
                        help="of the weights (default: the format that the model is published in)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8], metavar="T",
                        help="tokens per step (default: 1 2 4 8)")
    parser.add_argument("--pattern", default="uniform", metavar="NAME",
                        help="which experts the tokens choose: uniform, one_hot or zipf (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    """Runs the command; bad input raises the package's errors."""
    run(options, Console(highlight=False))
    return 0


def run(options: argparse.Namespace, console: Console) -> None:
    """`main` on a console of the caller's."""
    if options.model == "list":
        for p in PRESETS.values():
            console.print(f"{p.name:20} H {p.hidden:5} I {p.intermediate:5} E {p.num_experts:4} "
                          f"K {p.experts_per_token:2}  {p.format}")
        return
    preset = get_preset(options.model)
    chosen = dict.fromkeys(options.format or [preset.format])
    for name, got, allowed in (("format", chosen, inputs.FORMATS), ("pattern", [options.pattern], inputs.PATTERNS)):
        if unknown := [g for g in got if g not in allowed]:
            raise ArgumentError(f"{name}: got {unknown[0]!r}, expected one of {', '.join(allowed)}")
    if min(*options.batch, options.steps) < 1:
        raise ArgumentError(f"batch, steps: got {options.batch}, {options.steps}, expected at least 1 each")
    if reason := no_gpu_reason():
        raise UnsupportedError(f"bench: measures on a GPU: {reason}")
    for format in chosen:
        _bench(preset, format, dict.fromkeys(options.batch), options, console)


def _bench(preset, format: str, batches, options, console) -> None:
    keys = jax.random.split(jax.random.key(0), _layers(preset, format))
    experts = [inputs.make_experts(key, preset, format) for key in keys]
    console.print(f"\n{preset.name}, {format}, {options.pattern} routing: us per layer, routed experts only; in "
                  "brackets times the read of the same bytes", soft_wrap=True)
    for batch in batches:
        taken = choose(batch, experts[0], experts_per_token=preset.experts_per_token, x_dtype=jnp.bfloat16)
        timings, unique, refused = _measure(preset, experts, batch, options)
        read = timings.pop("read").us
        parts = [f"{'*' if name == taken.strategy else ''}{name} {t.us:.1f} ({t.us / read:.2f} x)"
                 for name, t in timings.items()]
        console.print(f"T={batch:<5} read {read:.1f} us, {unique / 1e6:.0f} MB, {unique / read / 1e6:.2f} TB/s;  "
                      + ", ".join(parts), soft_wrap=True, markup=False)
        for line in refused:
            console.print(f"        {line}", soft_wrap=True, markup=False, style="dim")
    console.print("* what strategy='auto' takes", style="dim")


def _layers(preset, format: str) -> int:
    """Layers that fit the memory, as many as make a step cold."""
    shapes = jax.eval_shape(lambda key: inputs.make_experts(key, preset, format), jax.random.key(0))
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(shapes))
    memory = jax.devices()[0].memory_stats()["bytes_limit"] * MEMORY_SHARE
    if size * LAYERS[0] > memory:
        raise ArgumentError(
            f"model: {LAYERS[0]} layers of {preset.name} in {format} take {size * LAYERS[0] / 1e9:.0f} GB, expected at "
            f"most {memory / 1e9:.0f} GB, half of the GPU's memory; a chain of fewer would be timed from its cache")
    return max(LAYERS[0], min(LAYERS[1], int(memory / size)))


def _measure(preset, experts, batch: int, options):
    """Timings by name, mean unique bytes of a layer, and a line for each strategy that cannot run."""
    rng = np.random.default_rng(batch)
    expected = min(batch * preset.experts_per_token / preset.num_experts, 1) * sum(
        w.nbytes for w in jax.tree.leaves(experts[0]))
    count = min(len(experts), max(LAYERS[0], math.ceil(STEP_BYTES / expected)))
    layers, read = [], []
    for key, weights in zip(jax.random.split(jax.random.key(batch), count), experts, strict=False):
        routing = inputs.make_routing(rng, batch, preset, options.pattern)
        layers.append((inputs.make_x(key, batch, preset), routing, weights))
        read.append(inputs.traffic(np.asarray(routing.ids), weights).unique)
    unique = statistics.mean(read)
    windows = [(read_kernel.window(key, unique),) for key in jax.random.split(jax.random.key(7), count)]

    calls = {"read": (read_kernel.read, windows)}
    refused = []
    for name, reason in available_strategies().items():
        if name == "reference":
            continue
        if reason:
            refused.append(f"{name}: {reason}")
        else:
            calls[name] = (functools.partial(moe, strategy=name), layers)
    lowered = {}
    for name, (run, args) in calls.items():
        try:
            lowered[name] = timing.lower_step(run, args, name)
        except UnsupportedError as error:
            refused.append(f"{name}: {error}")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        steps = list(pool.map(timing.compile_step, lowered.values()))
    runs = [(step, calls[name][1]) for name, step in zip(lowered, steps, strict=True)]
    timed = timing.time_steps(runs, options.steps)
    return dict(zip(lowered, timed, strict=True)), unique, refused
