"""A step's worth of layers to time: how many, their inputs, and the bytes that they read."""

import dataclasses
import math
import statistics

import jax
import numpy as np

from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.measure import inputs, read_kernel
from jax_warp_decode.presets import Preset

STEP_BYTES = 0.6e9  # unique weight bytes of one step: many times the L2 cache
LAYERS = (2, 8)  # at least, at most


def layer_bytes(preset: Preset, format: str) -> int:
    """Bytes of the experts of one layer.

    Example:
      >>> from jax_warp_decode.measure.workload import layer_bytes
      >>> from jax_warp_decode.presets import get_preset
      >>> layer_bytes(get_preset("qwen3-30b-a3b"), "bf16") / 1e6
      1207.959552
    """
    shapes = jax.eval_shape(lambda key: inputs.make_experts(key, preset, format), jax.random.key(0))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def layers_needed(preset: Preset, nbytes: float, tokens: int) -> int:
    """Layers, of `nbytes` each, that make a step cold: it reads `STEP_BYTES`, in the bounds of `LAYERS`.

    Example:
      >>> from jax_warp_decode.measure.workload import layer_bytes, layers_needed
      >>> from jax_warp_decode.presets import get_preset
      >>> preset = get_preset("qwen3-30b-a3b")
      >>> [layers_needed(preset, layer_bytes(preset, "bf16"), tokens) for tokens in (1, 2, 64)]
      [8, 4, 2]
    """
    chosen = min(tokens * preset.experts_per_token / preset.num_experts, 1)
    return max(LAYERS[0], min(LAYERS[1], math.ceil(STEP_BYTES / (chosen * nbytes))))


def make_layers(preset: Preset, format: str, nbytes: float) -> list[ExpertWeights]:
    """Random experts of as many layers as `nbytes` hold, in the bounds of `LAYERS`."""
    count = max(LAYERS[0], min(LAYERS[1], int(nbytes / layer_bytes(preset, format))))
    return [inputs.make_experts(jax.random.key(i), preset, format) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The inputs of a step.

    Attributes:
      tokens: T of every layer.
      calls: (x [T, H], Routing) of each layer; layer i runs with the i-th experts.
      unique, logical: mean weight bytes of a layer, see `inputs.Traffic`.
    """

    tokens: int
    calls: list[tuple]
    unique: float
    logical: float

    @classmethod
    def of(cls, preset: Preset, experts: list[ExpertWeights], tokens: int, pattern: str, seed: int = 0) -> "Workload":
        """As many of the layers as `layers_needed` says, if there are so many."""
        rng = np.random.default_rng([seed, tokens])
        count = min(len(experts), layers_needed(preset, sum(w.nbytes for w in jax.tree.leaves(experts[0])), tokens))
        calls, read = [], []
        for key, weights in zip(jax.random.split(jax.random.key(tokens + seed), count), experts, strict=False):
            routing = inputs.make_routing(rng, tokens, preset, pattern)
            calls.append((inputs.make_x(key, tokens, preset), routing))
            read.append(inputs.traffic(np.asarray(routing.ids), weights))
        return cls(tokens, calls, statistics.mean(t.unique for t in read), statistics.mean(t.logical for t in read))

    def layers(self, experts: list) -> list[tuple]:
        """The arguments of each layer, (x, routing, experts)."""
        return [(*call, weights) for call, weights in zip(self.calls, experts, strict=False)]

    def windows(self) -> list[tuple]:
        """The arguments of `read_kernel.read` for the ceiling: as many windows as layers, of the mean unique bytes."""
        keys = jax.random.split(jax.random.key(7), len(self.calls))
        return [(read_kernel.window(key, self.unique),) for key in keys]
