"""The configurations that autotune measures: those that fit, thinned out by what sweeps on an H200 have taught."""

import itertools
from typing import Any

from jax_warp_decode import tuning
from jax_warp_decode.explain import KERNELS
from jax_warp_decode.kernels import checks
from jax_warp_decode.kernels.tile import RowTile

LANES = (32, 16, 8)
ROWS = (1, 2, 3, 4)
# Loads of 16 bytes that a lane has in flight, and how many candidates of each are taken per round.
IN_FLIGHT = {16: 3, 8: 3, 12: 2, 4: 1, 24: 1}
MOST_WASTE = 0.34  # of a row that a last step reads twice, see tile.pick_tile
MOST = 16
MOST_TENSOR = 3  # of them on the tensor cores, unless these are the likelier ones


def candidates(kernel: str, *, T: int, K: int, H: int, I: int, format: str, most: int = MOST) -> list:
    """At most `most` configurations of a kernel that fit a shape, the heuristic's first.

    Example:
      >>> from jax_warp_decode.kernels import DownConfig
      >>> from jax_warp_decode.measure.candidates import candidates
      >>> found = candidates("moe_down", T=1, K=8, H=2048, I=768, format="bf16", most=3)
      >>> len(found), found[0] == DownConfig.heuristic(T=1, K=8, H=2048, I=768, format="bf16")
      (3, True)
    """
    kinds: tuple[Any, ...] = KERNELS[kernel]
    kind, tensor = kinds
    heuristic = tuning.rule_of_thumb(kinds, T, K, H, I, format)
    shapes = (tensor(*sizes) for sizes in _tensor_sizes(kernel, K))
    products = [config for config in shapes if checks.fits(config, H, I, K, format)]
    if isinstance(heuristic, tensor):  # one row a lane is far behind there
        return list(dict.fromkeys([heuristic, *products]))[:most]
    by_loads: dict[int, list[tuple]] = {loads: [] for loads in IN_FLIGHT}
    for lanes, rows, loads in itertools.product(LANES, ROWS, IN_FLIGHT):
        cols, weights, passes = (H, 2, 1) if kernel == "moe_gate_up" else (I, 1, K)
        tile = RowTile(cols, format, lanes, rows)
        steps, (unroll, rest) = passes * tile.steps, divmod(loads, weights * rows)
        if rest or not unroll:
            continue
        waste = tile.steps * tile.step / cols - 1
        config = kind(lanes, rows, min(unroll, steps))
        if waste <= MOST_WASTE and checks.fits(config, H, I, K, format):
            # What a last, shorter group of steps leaves unused, and what a last step reads twice.
            by_loads[loads].append((waste + -steps % config.unroll / steps, -lanes, rows, config))
    ranked = []
    for loads, share in IN_FLIGHT.items():
        for place, (*cost, config) in enumerate(sorted(by_loads[loads], key=lambda c: c[:-1])):
            ranked.append((place // share, config))
    ranked.sort(key=lambda r: r[0])  # stable: within a round, in the order of IN_FLIGHT
    return list(dict.fromkeys([heuristic, *products[:MOST_TENSOR], *(config for _, config in ranked)]))[:most]


def _tensor_sizes(kernel: str, K: int):
    """Fields of the config classes, the likeliest first: few rows a warp, and as many parts as feed all warps."""
    shapes = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4))
    if kernel == "moe_gate_up":
        return shapes
    sizes = [(*shape, warps) for shape in shapes for warps in (8, 4)] + [(1, 1, 16), (2, 1, 16)]
    return [(tiles, unroll, warps, -(-warps // K)) for tiles, unroll, warps in sizes]
