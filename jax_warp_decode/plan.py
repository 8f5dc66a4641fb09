"""`jax-warp-decode plan`: how to spread a model's routed experts over GPUs, from what was measured on one and on two.

A layer on one device takes what was measured, interpolated between two numbers of tokens. Any other takes as long as
reading the weights of the experts it touches, over the share of that speed that layers of the same load (token-slots
per expert) reached when they were measured; or, with many tokens, as long as its products. The busiest device counts.
Every device holds a share of every layer; tokens are split over the devices that share a copy of the experts, gathered
before a layer and scattered after it. Attention, shared experts and the KV cache are not counted.
"""

import argparse
import bisect
import dataclasses
import functools
import importlib.resources
import json
import math

from jax_warp_decode.errors import ArgumentError, counted
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.measured_layers import interpolate
from jax_warp_decode.presets import Preset, get_preset, listing
from jax_warp_decode.routing import expected_experts

# Layers with routed experts, from the model cards.
MOE_LAYERS = {
    "tiny-docs": 4, "qwen3-30b-a3b": 48, "qwen3-235b-a22b": 94, "qwen3-next-80b-a3b": 48, "gpt-oss-20b": 24,
    "gpt-oss-120b": 36, "deepseek-v3": 58, "kimi-k2": 60, "glm-4.5": 89, "glm-4.5-air": 45, "mixtral-8x7b": 32,
    "llama4-maverick": 24, "minimax-m2": 62}
USABLE = 0.9  # of a device's memory
SHOWN = 6
NEURONS = 32  # of a device, or a multiple: what the decode kernels take

# Assumed: the network between hosts, for each GPU (400 Gbit/s), and two GPUs where no collectives were measured.
NETWORK_BYTES_PER_US, NETWORK_US = 50e3, 20.0
UNMEASURED_COLLECTIVES = ({"bytes": 8192, "devices": 2, "us": 14.0}, {"bytes": 2**24, "devices": 2, "us": 100.0})


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to spread the experts, with what it costs.

    Attributes:
      ep, tp: devices that share the experts of a layer, and the neurons of an expert.
      copies: how often all weights exist; each copy has its part of the tokens.
      memory: bytes of expert weights on a device.
      layer_us: of a layer's kernels on the busiest device; gate and up take two thirds of it, down one.
      collective_us: gathering the tokens before a layer and summing after it.
      step_us: all layers.
      measured: whether a layer of these very sizes was measured.
      nearest: the numbers of tokens whose measured times the layer's comes from: its own, two around it, or an end.
      multiplies: whether the products take longer than the reading.
    """

    ep: int
    tp: int
    copies: int
    memory: float
    layer_us: float
    collective_us: float
    step_us: float
    measured: bool
    nearest: tuple[int, ...]
    multiplies: bool


def expert_bytes(preset: Preset, format: str, tp: int = 1) -> float:
    """Bytes of the part of one expert that a device reads, scales included."""
    H, I = preset.hidden, preset.intermediate // tp
    if format in FORMATS:
        return 2 * FORMATS[format].nbytes((1, I, H)) + FORMATS[format].nbytes((1, H, I))
    return 3 * H * I * {"bf16": 2, "f16": 2, "f32": 4}[format]


def busiest_experts(preset: Preset, ep: int, tokens: int) -> float:
    """Experts touched on the busiest of `ep` devices: the mean, and as many deviations as `ep` draws reach."""
    mean = expected_experts(preset.num_experts, preset.experts_per_token, tokens) / ep
    share = mean * ep / preset.num_experts
    deviation = math.sqrt(preset.num_experts / ep * share * (1 - share))
    return min(preset.num_experts / ep, mean + deviation * math.sqrt(2 * math.log(ep)))


@functools.cache
def load_table(name: str = "nvidia-h200") -> dict:
    """The measurements that ship with the package, see bench/plan_table.py."""
    file = importlib.resources.files("jax_warp_decode") / "data" / "plan" / f"{name}.json"
    return json.loads(file.read_text())


def stand_in(format: str) -> str:
    """The format whose measurements speak for one without any."""
    return "mxfp8" if format in FORMATS else "bf16"


def speed(table: dict, format: str, load: float) -> tuple[float, str]:
    """Share of the plain read's speed that layers reached at so many pairs per expert; and the format it is from.

    Both without the time to start. Interpolated over the load; the ends hold beyond what was measured.
    """
    rows = [r for r in table["layers"] if r["format"] == format]
    source = format if rows else stand_in(format)
    best: dict[int, list[float]] = {}
    for r in rows or [r for r in table["layers"] if r["format"] == source]:
        preset = get_preset(r["model"])
        if preset.name != "tiny-docs":
            pairs = round(math.log2(r["tokens"] * preset.experts_per_token / preset.num_experts))
            share = r["bytes"] / table["read"]["bytes_per_us"] / (r["us"] - table["read"]["start_us"])
            best.setdefault(pairs, []).append(share)
    points: list[tuple[float, float]] = []
    for pairs, shares in sorted(best.items()):
        share = sum(shares) / len(shares)
        # Above a pair an expert the bytes hardly grow: if the share did, more tokens would take less time.
        points.append((2.0**pairs, min(share, points[-1][1]) if points and pairs > 0 else share))
    return interpolate(points, load), source


def read_us(table: dict, size: float) -> float:
    return table["read"]["start_us"] + size / table["read"]["bytes_per_us"]


def products_format(table: dict, format: str) -> str:
    """The format whose products with many tokens were measured and speak for this one."""
    return format if format in table["products"] else stand_in(format)


def estimate(table: dict, preset: Preset, format: str, tokens: int, ep: int = 1, tp: int = 1) -> tuple[float, bool]:
    """Microseconds of a layer on the busiest device, and whether its products take longer than the reading."""
    share, _ = speed(table, format, tokens * preset.experts_per_token / preset.num_experts)
    reading = read_us(table, busiest_experts(preset, ep, tokens) * expert_bytes(preset, format, tp) / share)
    products = 6 * preset.hidden * preset.intermediate / tp * tokens * preset.experts_per_token / ep
    multiplying = products / table["products"][products_format(table, format)]["tflops"] / 1e6
    return max(reading, multiplying), multiplying > reading


def measured_times(table: dict, preset: Preset, format: str) -> list[tuple[int, float]]:
    """Tokens and microseconds of this layer on one device, but for times that newer ones of other sizes contradict."""
    kept: list[tuple[int, float]] = []
    rows = [r for r in table["layers"] if (r["model"], r["format"]) == (preset.name, format)]
    for r in sorted(rows, key=lambda r: r["date"], reverse=True):
        if all((r["tokens"] - tokens) * (r["us"] - us) >= 0 for tokens, us in kept):
            kept.append((r["tokens"], r["us"]))
    return sorted(kept)


def one_device(table: dict, preset: Preset, format: str, tokens: int) -> tuple[float, tuple[int, ...], bool]:
    """Microseconds of a layer on one device, the measured numbers of tokens that they come from, and `multiplies`."""
    points = measured_times(table, preset, format)
    sizes = [size for size, _ in points]
    nearest = tuple(sizes[max(0, bisect.bisect(sizes, tokens) - 1):bisect.bisect_left(sizes, tokens) + 1])
    if len(nearest) == 2 or nearest == (tokens,):
        return interpolate(points, tokens), nearest, False
    us, multiplies = estimate(table, preset, format, tokens)
    if nearest:  # beyond the ends: the estimate, scaled so that it meets what was measured
        us *= interpolate(points, tokens) / estimate(table, preset, format, *nearest)[0]
    return us, nearest, multiplies


def collective_us(table: dict, preset: Preset, tokens: int, devices: int, per_host: int) -> float:
    """Gathering bfloat16 tokens on `devices` devices and scattering their float32 sums.

    The latency of two devices grows with the logarithm of their number. Bytes cross NVLink as fast as between two
    devices, and the network where the devices are not of one host.
    """
    if devices == 1:
        return 0.0
    rows = [r for r in table["collectives"] if r["operation"] == "scatter_and_gather"] or UNMEASURED_COLLECTIVES
    small, large = (pick(rows, key=lambda r: r["bytes"]) for pick in (min, max))
    # Of b bytes, the two collectives of n devices move 2 b (n - 1) / n over each link.
    rate = (large["bytes"] - small["bytes"]) * 2 * (1 - 1 / small["devices"]) / (large["us"] - small["us"])
    moved = tokens * (6 * preset.hidden + 8 * preset.experts_per_token) * (devices - 1) / devices
    us = small["us"] * math.log2(max(2, devices)) + moved / rate
    return us if devices <= per_host else us + 2 * NETWORK_US + moved / NETWORK_BYTES_PER_US


def splits(table: dict, preset: Preset, format: str, layers: int, devices: int, tokens: int,
           per_host: int) -> list[Split]:
    """Every split of the devices that divides experts, whole blocks of neurons, and tokens; fastest first."""
    found = []
    cut = FORMATS[format].block_shape if format in FORMATS else ()
    block = math.lcm(NEURONS, *(n or 1 for n in cut))
    for group in (n for n in range(1, devices + 1) if devices % n == 0 and tokens % (devices // n) == 0):
        for ep in (n for n in range(1, group + 1) if group % n == 0 and preset.num_experts % n == 0):
            tp, copies = group // ep, devices // group
            if preset.intermediate % tp or tp > 1 and preset.intermediate // tp % block:
                continue
            T = tokens // copies
            size = expert_bytes(preset, format, tp)
            nearest: tuple[int, ...] = ()
            if group == 1:
                us, nearest, multiplies = one_device(table, preset, format, T)
            else:
                us, multiplies = estimate(table, preset, format, T, ep, tp)
            collective = collective_us(table, preset, T, group, per_host)
            found.append(Split(ep, tp, copies, layers * preset.num_experts / ep * size, us, collective,
                               layers * (us + collective), nearest == (T,), nearest, multiplies))
    return sorted(found, key=lambda split: split.step_us)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", required=True, metavar="NAME",
                        help="a model whose sizes are known, such as deepseek-v3; 'list' shows them")
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs in all")
    parser.add_argument("--batch", type=int, metavar="T", help="tokens of a step, of all GPUs together")
    parser.add_argument("--format", metavar="NAME", help="of the expert weights (default: as the model was released)")
    parser.add_argument("--layers", type=int, metavar="N", help="layers with experts (default: the model's, if known)")
    parser.add_argument("--per-host", type=int, default=8, metavar="N", help="GPUs that NVLink connects (default: 8)")


def main(options: argparse.Namespace) -> int:
    """Prints the plan and returns 0.

    Raises:
      ArgumentError: an unknown model or format, sizes below 1, no split that divides, or one that fits no memory.
    """
    from rich.console import Console

    console = Console(highlight=False)
    for line in report(options):
        console.print(line, soft_wrap=isinstance(line, str))
    return 0


def report(options: argparse.Namespace):
    """Yields what `main` prints: a rich table, then notes."""
    from rich import box
    from rich.table import Table

    if options.model == "list":
        yield from listing()
        return
    preset, table = get_preset(options.model), load_table()
    for name, meaning in (("devices", "GPUs"), ("batch", "tokens of a step")):
        if getattr(options, name) is None:
            raise ArgumentError(f"--{name}: got nothing, expected the number of {meaning}")
    format = options.format or preset.format
    if format not in (known := ("bf16", "f16", "f32", *FORMATS)):
        raise ArgumentError(f"--format: got {format!r}, expected one of {list(known)}")
    layers = options.layers if options.layers is not None else MOE_LAYERS.get(preset.name)
    if layers is None:
        raise ArgumentError(f"--layers: got nothing, expected the number of layers with experts of {preset.name}, "
                            "which is not known here")
    for name, value in (("devices", options.devices), ("batch", options.batch), ("layers", layers),
                        ("per-host", options.per_host)):
        if not 1 <= value < 2**31:
            got = value if abs(value) < 2**63 else f"a number of {len(str(abs(value)))} digits"
            raise ArgumentError(f"--{name}: got {got}, expected 1 to {2**31 - 1}")
    if options.devices > options.per_host and options.devices % options.per_host:
        raise ArgumentError(f"--per-host: got {options.per_host}, expected a number that divides --devices = "
                            f"{options.devices}, or at least as many")
    every = splits(table, preset, format, layers, options.devices, options.batch, options.per_host)
    if not every:
        raise ArgumentError(
            f"--devices: got {options.devices}, expected a number that splits E = {preset.num_experts}, "
            f"I = {preset.intermediate} in whole blocks of {format}, or a --batch that it divides")
    room = USABLE * table["memory_bytes"]
    fitting = [split for split in every if split.memory <= room]
    if not fitting:
        least = min(split.memory for split in every)
        raise ArgumentError(f"--devices: got {options.devices}, expected more: at best {least / 1e9:.1f} GB of experts "
                            f"on each, and {table['device']} has room for {room / 1e9:.1f} GB")
    yield (f"{preset.name}: {counted(layers, 'layer')} of {preset.num_experts} experts, {format}, "
           f"{counted(options.batch, 'token')} a step on {options.devices} x {table['device']}; routed experts only")
    yield "GB of experts on a GPU; microseconds a layer for gate+up, down and collectives; ms a step"
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("EP", "TP", "copies", "GB", "gate+up", "down", "collectives", "step", "tokens/s"):
        out.add_column(heading, justify="right", no_wrap=True)
    for i, s in enumerate(fitting[:SHOWN]):
        out.add_row(str(s.ep), str(s.tp), str(s.copies), f"{s.memory / 1e9:.1f}", f"{s.layer_us * 2 / 3:.1f}",
                    f"{s.layer_us / 3:.1f}", f"{s.collective_us:.1f}", f"{s.step_us / 1e3:.2f}",
                    f"{options.batch / s.step_us * 1e6:,.0f}", style="" if i else "bold")
    yield out
    best = fitting[0]
    axes = [f"{name}_axis over {n}" for name, n in (("expert", best.ep), ("tensor", best.tp)) if n > 1]
    yield (f"Best: {' and '.join(axes) or 'no split'}, {best.copies} cop{'y' if best.copies == 1 else 'ies'}. "
           f"{len(every) - len(fitting)} of {len(every)} splits do not fit {USABLE:.0%} of the memory.")
    if fewer := fewest(table, preset, format, layers, options, room):
        n, alone = fewer
        if alone.step_us < best.step_us:
            yield (f"{'One GPU alone makes' if n == 1 else f'{n} GPUs alone make'} "
                   f"{options.batch / alone.step_us * 1e6:,.0f} tokens/s: more than this.")
    yield "Of the best:"
    yield from notes(table, preset, format, options, best)


def fewest(table, preset, format, layers, options, room) -> tuple[int, Split] | None:
    """The smallest number of GPUs below --devices that has room, and the fastest split of it."""
    for n in range(1, options.devices):
        if n > options.per_host and n % options.per_host:
            continue
        every = splits(table, preset, format, layers, n, options.batch, options.per_host)
        if fitting := [split for split in every if split.memory <= room]:
            return n, fitting[0]
    return None


def notes(table, preset, format, options, best):
    """What of the plan was measured, extrapolated and assumed."""
    load = options.batch / best.copies * preset.experts_per_token / preset.num_experts
    share, source = speed(table, format, load)
    scaled = f", scaled to {best.nearest[0]} tokens of this layer, measured on one GPU" if best.nearest else ""
    if best.measured:
        yield "Measured: this layer on one GPU."
    elif len(best.nearest) == 2:
        yield "Interpolated: between {} and {} tokens of this layer, measured on one GPU.".format(*best.nearest)
    elif best.multiplies:
        name = products_format(table, format)
        fastest = table["products"][name]
        yield (f"Extrapolated: products at {fastest['tflops']:.0f} TFLOP/s, as {fastest['strategy']} did "
               f"{fastest['tokens']} tokens in {name}{scaled}.")
    else:
        yield (f"Measured: plain reads at {table['read']['bytes_per_us'] / 1e6:.2f} TB/s; {source} layers at "
               f"{share:.0%} of that, at the loads measured nearest to {load:.2g} pairs an expert.")
        yield f"Extrapolated: the layer, from the bytes that the busiest GPU reads, with even routing{scaled}."
    yield "Assumed: gate and up take two thirds of a layer."
    if source != format and not best.multiplies:
        yield f"Assumed: {format} layers reach the share of {source} ones, which were measured."
    if (group := best.ep * best.tp) > 1:
        parts = [f"{'measured' if table['collectives'] else 'assumed'} between two GPUs"]
        if group > 2:
            parts.append(f"extrapolated to {group}, the latency by the logarithm and bytes at the same rate")
        if group > options.per_host:
            parts.append(f"between hosts assumed: {NETWORK_BYTES_PER_US / 1e3:.0f} GB/s a GPU and {NETWORK_US:.0f} us")
        yield f"Collectives: {'; '.join(parts)}."
