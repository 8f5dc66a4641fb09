"""What can run here: devices, versions, and every strategy with every weight format, each with the reason why not."""

import argparse
import dataclasses
import functools
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from rich.text import Text

import jax_warp_decode
from jax_warp_decode import STRATEGIES, available_strategies, choose, tuned_table, tuning
from jax_warp_decode.compat import JAX_WINDOW
from jax_warp_decode.device import driver_cuda, in_window
from jax_warp_decode.errors import ArgumentError, UnsupportedError, counted
from jax_warp_decode.experts import DENSE_FORMATS, ExpertWeights
from jax_warp_decode.formats import FORMATS, quantize

CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _example_experts(format: str) -> ExpertWeights:
    """Shapes only: experts whose dimensions every strategy takes, in one format."""
    E, I, H = 8, 256, 512
    make: dict[str, Callable[..., Any]] = {
        name: lambda shape, d=dtype: jax.ShapeDtypeStruct(shape, d) for dtype, name in DENSE_FORMATS.items()}
    for name in FORMATS:
        make[name] = lambda shape, name=name: jax.eval_shape(
            functools.partial(quantize, format=name), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    return ExpertWeights(make[format]((E, I, H)), make[format]((E, I, H)), make[format]((E, H, I)))


def _refusal(strategy: str, format: str) -> str:
    try:
        choose(1, _example_experts(format), experts_per_token=2, x_dtype=jnp.bfloat16, strategy=strategy)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    return ""


@dataclasses.dataclass(frozen=True)
class Info:
    """A snapshot of this process.

    Attributes:
      versions: name -> version, or None if not installed.
      jax_in_window: whether the installed jax lies inside the tested window.
      devices: one line per kind of device that JAX sees.
      strategies: name -> "" if it can run here, else why not.
      formats: (strategy, weight format) -> "" if the pair can run here, else why not.
    """

    versions: dict[str, str | None]
    jax_in_window: bool
    devices: tuple[str, ...]
    strategies: dict[str, str]
    formats: dict[tuple[str, str], str]


def collect() -> Info:
    """Asks JAX and the strategy table; starts the default backend, compiles nothing.

    Example:
      >>> from jax_warp_decode.info import collect
      >>> collect().strategies["reference"]
      ''
    """
    versions: dict[str, str | None] = {
        "jax-warp-decode": jax_warp_decode.__version__, "python": platform.python_version()}
    versions |= {name: _installed(name) for name in ("jax", "jaxlib", "flax", *CUDA_PLUGINS)}
    counts: dict[str, int] = {}
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        kind = device.device_kind + (f", compute capability {capability}" if capability else "")
        counts[kind] = counts.get(kind, 0) + 1
    strategies = available_strategies()
    formats = {
        (strategy, format): strategies[strategy] or _refusal(strategy, format)
        for strategy in STRATEGIES for format in (*DENSE_FORMATS.values(), *FORMATS)}
    return Info(versions, in_window(jax.__version__), tuple(f"{n} x {kind}" for kind, n in counts.items()),
                strategies, formats)


def tuned_file() -> str:
    """The user's file of measured configurations, and what there is to say about it."""
    if (kind := tuning.device_kind()) is None:
        return "none is read without a GPU"
    path = tuned_table.user_file(kind)
    try:
        table = tuned_table.user_table(kind)
    except ArgumentError as error:
        return f"NOT USABLE: {error}"
    return f"{path}, {counted(len(table.entries()), 'measurement')}" if table else f"{path}, which does not exist"


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Prints name and value, one fact a line: aligned and wrapped on a terminal, unwrapped elsewhere."""
    if not console.is_terminal:
        width = max(map(len, facts))
        for name, fact in facts.items():
            console.print(f"{name:<{width}}  {fact}", soft_wrap=True, markup=False)
        return
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(Text(name, style="bold cyan"), Text(fact))
    console.print(table)


def render(info: Info, console: Console) -> None:
    """Prints the snapshot: facts, a strategy-by-format table, then one line per distinct reason."""
    facts = {name: info.versions[name] or "not installed" for name in ("jax-warp-decode", "python", "flax", "jaxlib")}
    window = "inside" if info.jax_in_window else "OUTSIDE"
    facts["jax"] = f"{info.versions['jax']}, {window} the tested window {' to '.join(JAX_WINDOW)}"
    plugins = [f"{name} {info.versions[name]}" for name in CUDA_PLUGINS if info.versions[name]]
    facts["CUDA plugin"] = ", ".join(plugins) or "not installed"
    if driver := driver_cuda():
        facts["NVIDIA driver"] = f"knows CUDA up to {driver[0]}.{driver[1]}"
    facts["devices"] = ", ".join(info.devices)
    facts["tuned file"] = tuned_file()
    print_facts(console, facts)
    console.print()

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("weights \\ strategy")
    for strategy in info.strategies:
        table.add_column(strategy)
    for format in dict.fromkeys(format for _, format in info.formats):
        cells = ["[red]no[/]" if info.formats[strategy, format] else "[green]yes[/]" for strategy in info.strategies]
        table.add_row(format, *cells)
    console.print(table)

    reasons: dict[str, list[str]] = {}
    for (strategy, format), why in info.formats.items():
        if why:
            what = strategy if info.strategies[strategy] else f"{strategy} with {format}"
            if what not in reasons.setdefault(why, []):
                reasons[why].append(what)
    if reasons:
        console.print()
        print_facts(console, {", ".join(what): why for why, what in reasons.items()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command takes none."""


def main(options: argparse.Namespace) -> int:
    render(collect(), Console(highlight=False))
    return 0
