"""Inputs to measure with: routing patterns, expert weights made on the device, and what must be read of them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode import ExpertWeights, Routing, formats, quantize
from jax_warp_decode.presets import Preset

PATTERNS = ("uniform", "one_hot", "zipf")
HALF = {"bf16": jnp.bfloat16, "f16": jnp.float16}
FORMATS = (*HALF, *formats.FORMATS)
ZIPF_EXPONENT = 1.0


def routing_ids(rng: np.random.Generator, tokens: int, preset: Preset, pattern: str) -> np.ndarray:
    """ids int32 [T, K], K distinct experts per token.

    "uniform": every expert equally likely. "one_hot": all tokens on the same K experts. "zipf": drawn without
    replacement with probabilities 1 / rank, the ranks permuted anew on every call.
    """
    E, K = preset.num_experts, preset.experts_per_token
    if pattern == "one_hot":
        return np.broadcast_to(rng.permutation(E)[:K], (tokens, K)).astype(np.int32)
    rank = rng.permutation(E) + 1.0
    log_p = {"uniform": np.zeros(E), "zipf": -ZIPF_EXPONENT * np.log(rank)}[pattern]
    # The K largest of log p plus Gumbel noise are K draws without replacement.
    return np.argsort(-(log_p + rng.gumbel(size=(tokens, E))), axis=1)[:, :K].astype(np.int32)


def make_routing(rng: np.random.Generator, tokens: int, preset: Preset, pattern: str) -> Routing:
    """A `Routing` with positive weights that sum to one."""
    ids = routing_ids(rng, tokens, preset, pattern)
    weights = rng.random(ids.shape, np.float32) + np.float32(0.1)
    return Routing(jnp.asarray(ids), jnp.asarray(weights / weights.sum(1, keepdims=True)))


def make_x(key: jax.Array, tokens: int, preset: Preset) -> jax.Array:
    """x bfloat16 [T, H], standard normal."""
    return jax.random.normal(key, (tokens, preset.hidden), jnp.bfloat16)


def make_experts(key: jax.Array, preset: Preset, format: str) -> ExpertWeights:
    """Random expert weights in one of `FORMATS`, scaled so that every projection keeps the size of its input."""
    E, I, H = preset.num_experts, preset.intermediate, preset.hidden
    keys = jax.random.split(key, 3)
    w = [_weight(k, E, n, m, format) for k, n, m in zip(keys, (I, I, H), (H, H, I), strict=True)]
    return ExpertWeights(w[0] if preset.act.gated else None, *w[1:])


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _weight(key, E, n, m, format):
    def one(key):
        w = jax.random.normal(key, (n, m), jnp.bfloat16) * jnp.bfloat16(1 / math.sqrt(m))
        return w.astype(HALF[format]) if format in HALF else quantize(w, format)

    return jax.lax.map(one, jax.random.split(key, E))  # one expert at a time: quantising needs float32 temporaries


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Weight bytes of one layer for given ids.

    Attributes:
      unique: of the experts that any token uses; what must cross the memory bus once.
      logical: of every slot; what a kernel asks for that never shares an expert between tokens.
    """

    unique: int
    logical: int


def traffic(ids: np.ndarray, experts: ExpertWeights) -> Traffic:
    """Counts from the actual ids and the actual arrays, scales included."""
    per_expert = sum(w.nbytes for w in experts.weights.values()) // experts.num_experts
    return Traffic(len(np.unique(ids)) * per_expert, ids.size * per_expert)
