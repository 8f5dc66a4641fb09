"""`jax-warp-decode bench`: how fast a model's experts run on this GPU, and how far that is from reading their weights.

No checkpoint is needed: weights are random, made on the device in the model's format. Every strategy that runs here is
timed beside a kernel that does nothing but read as many bytes, cold, as `measure.timing` describes.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from rich.console import Console

from jax_warp_decode.choose import available_strategies, choose, no_gpu_reason
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.measure import inputs, read_kernel
from jax_warp_decode.measure.variants import Variant, measure
from jax_warp_decode.measure.workload import LAYERS, Workload, layer_bytes, make_layers
from jax_warp_decode.moe import moe
from jax_warp_decode.presets import get_preset, listing

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
        for line in listing():
            console.print(line, soft_wrap=True)
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
    experts = make_layers(preset, format, _room(preset, format))
    console.print(f"\n{preset.name}, {format}, {options.pattern} routing: us per layer, routed experts only; in "
                  "brackets times the read of the same bytes", soft_wrap=True)
    for batch in batches:
        taken = choose(batch, experts[0], experts_per_token=preset.experts_per_token, x_dtype=jnp.bfloat16)
        workload = Workload.of(preset, experts, batch, options.pattern)
        read, *rows = _measure(workload, experts, preset.activation, options.steps)
        if "error" in read:
            raise UnsupportedError(f"bench: the read that everything is compared with failed: {read['error']}")
        parts = [f"{'*' if row['name'] == taken.strategy else ''}{row['name']} {row['us']:.1f} "
                 f"({row['us'] / read['us']:.2f} x)" for row in rows if "us" in row]
        console.print(
            f"T={batch:<5} read {read['us']:.1f} us, {workload.unique / 1e6:.0f} MB, "
            f"{workload.unique / read['us'] / 1e6:.2f} TB/s;  " + ", ".join(parts), soft_wrap=True, markup=False)
        for row in rows:
            if "error" in row:
                reason = row["error"].removeprefix("UnsupportedError: ")
                console.print(f"        {row['name']}: {reason}", soft_wrap=True, markup=False, style="dim")
    console.print("* what strategy='auto' takes", style="dim")


def _room(preset, format: str) -> float:
    """Bytes for the weights of all layers; raises if too few layers fit to make a step cold."""
    room = jax.devices()[0].memory_stats()["bytes_limit"] * MEMORY_SHARE
    needed = LAYERS[0] * layer_bytes(preset, format)
    if needed > room:
        raise ArgumentError(
            f"model: {LAYERS[0]} layers of {preset.name} in {format} take {needed / 1e9:.0f} GB, expected at most "
            f"{room / 1e9:.0f} GB, half of the GPU's memory; a chain of fewer would be timed from its cache")
    return room


def _measure(workload: Workload, experts: list, activation: str, steps: int) -> list[dict]:
    """The read, then every strategy: its name with a timing, or with the reason why there is none."""
    variants = [Variant(dict(name="read"), read_kernel.read, workload.windows())]
    for name, reason in available_strategies().items():
        if name != "reference":
            layer = UnsupportedError(reason) if reason else functools.partial(moe, strategy=name, activation=activation)
            variants.append(Variant(dict(name=name), layer, workload.layers(experts)))
    return measure(variants, steps)
