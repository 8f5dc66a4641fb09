"""How long the strategies take for one layer, where this very layer was measured on this kind of GPU.

Two sources hold such times, see `tuned_table`: the user's file, written by `jax-warp-decode autotune`, and the table
that ships with the package. The first that knows two or more of the strategies that can run here, near this number of
tokens T, answers alone. They speak for a weight format, H, I, E and K, and for whole layers with bfloat16 x.

What a strategy takes at T is what was measured there; between two measured T, a factor of four apart at most, a power
of T; elsewhere its estimate, times what it took over its estimate at the nearest measured T, which is a factor of two
away at most. A strategy that was not measured near T has its estimate, times the same quotient of the fastest measured.
An infinite estimate, which rules a strategy out, says nothing of one that was measured.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from jax_warp_decode import tuning
from jax_warp_decode.tuned_table import LayerTime, packaged_table, user_table

MOST_GAP = tuning.MOST_RATIO**2  # between two T that are interpolated


@dataclasses.dataclass(frozen=True)
class Found:
    """The times of one layer's strategies.

    Attributes:
      us: microseconds, by strategy.
      tokens: the measured T that each measured strategy's time comes from.
      source: the file, in words.
    """

    us: dict[str, float]
    tokens: dict[str, tuple[int, ...]]
    source: str

    def reason(self, chosen: str, others: Collection[str]) -> str:
        """What the chosen strategy takes, against the others.

        Example:
          >>> from jax_warp_decode.measured_layers import Found
          >>> found = Found({"a": 43.2, "b": 51.0, "c": 90.5}, {"a": (8, 16), "b": (8,)}, "h200.json")
          >>> found.reason("a", ["b", "c"])
          'measured 43.2 us against 51.0 us of b and an estimated 90.5 us of c (h200.json, T=8 and 16)'
        """
        own, other = ("measured", "an estimated ") if chosen in self.tokens else ("estimated", "a measured ")
        against = [f"{other * ((name in self.tokens) != (chosen in self.tokens))}{self.us[name]:.1f} us of {name}"
                   for name in sorted(others, key=self.us.__getitem__)]
        sizes = sorted({t for tokens in self.tokens.values() for t in tokens})
        return f"{own} {self.us[chosen]:.1f} us against {_listed(against)} ({self.source}, T={_listed(sizes)})"


def find(runnable: Collection[str], estimate: Callable[[int], Mapping[str, float]], *, format: str, T: int, K: int,
         H: int, I: int, E: int) -> Found | None:
    """The times of a layer's strategies; None if two of them were not measured near T, or without a GPU.

    Args:
      runnable: the strategies that can run here.
      estimate: T -> what each strategy takes, in a unit of its own, or infinity; has all that `runnable` names, and
        maybe others, which get a time too, but never their measured one.
      format: of the weights, see `experts.weight_format`.
      T, K, H, I, E: tokens, experts per token, hidden and intermediate size, experts.

    Raises:
      ArgumentError: a file that cannot be used, which is named, with the way out.
    """
    device = tuning.device_kind()
    if device is None or not T:
        return None
    for read, what in ((user_table, ""), (packaged_table, "packaged table")):
        if not (table := read(device)):
            continue
        near = {}
        for name in runnable:
            if at := _near(table.layers.get((name, format, H, I, E, K), {}), T, estimate, name):
                near[name] = at
        if len(near) > 1:
            costs = estimate(T)
            known = [name for name in near if math.isfinite(costs[name])]  # what `estimate` rules out has no unit
            fastest = min(known, key=lambda name: near[name][0], default=None)
            scale = near[fastest][0] / costs[fastest] if fastest else math.inf
            us = {name: near[name][0] if name in near else costs[name] * scale for name in costs}
            return Found(us, {name: tokens for name, (_, tokens) in near.items()}, what or str(table.path))
    return None


def _near(times: Mapping[int, LayerTime], T: int, estimate: Callable[[int], Mapping[str, float]],
          name: str) -> tuple[float, tuple[int, ...]] | None:
    """Microseconds of a strategy at T, from its measured `times`, and their T; None if none is near."""
    nearest = tuning.nearest_tokens(times, T) if times else None
    if nearest is None:
        return None
    below, above = [t for t in times if t <= T], [t for t in times if t >= T]
    around = sorted({max(below, default=nearest), min(above, default=nearest)})
    if around[0] <= T <= around[-1] <= MOST_GAP * around[0]:
        return interpolate([(t, times[t].us) for t in around], T), tuple(around)
    costs = [estimate(tokens)[name] for tokens in (T, nearest)]
    growth = costs[0] / costs[1] if all(map(math.isfinite, costs)) else 1.0
    return times[nearest].us * growth, (nearest,)


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """y at x = `at`, as a power of x between two points (x, y); the ends hold beyond.

    Example:
      >>> from jax_warp_decode.measured_layers import interpolate
      >>> [round(interpolate([(1, 10.0), (4, 40.0)], x), 6) for x in (0.5, 1, 2, 8)]
      [10.0, 10.0, 20.0, 40.0]
    """
    i = bisect.bisect([x for x, _ in points], at)
    if i in (0, len(points)):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1:i + 1]
    return y0 * (y1 / y0) ** (math.log(at / x0) / math.log(x1 / x0))


def _listed(items: Sequence) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
