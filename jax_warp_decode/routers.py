"""Routers of published models: how logits become a choice of experts and their weights, all in float32.

Choice and weight are two values. The choice looks at scores that may carry a correction bias and is limited to the best
groups of experts; a weight is the plain score of a chosen expert, renormalised and scaled, each once:

    logits + bias ─► score ─► + correction_bias ─► groups ─► K ids
                       └────────────── score of those ids ─► renormalize ─► * scale * expert_scale ─► weights

A new score is one function and one row of `SCORING`; a model family is one row of `ROUTERS`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_warp_decode.errors import ArgumentError

_INT32_MIN = np.int32(-(2**31))
_EPSILON = np.float32(1e-20)  # added to the sum before dividing, as DeepSeek-V3's modeling code does

# --------------------------------------------------------------------------------------------------------- scores


def _softmax(z: jax.Array) -> jax.Array:
    """Softmax over the last axis, float32. A row of -inf scores zero; NaN or +inf makes its row NaN."""
    largest = lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    exp = jnp.exp(z - jnp.where(jnp.isneginf(largest), np.float32(0), largest))
    total = jnp.sum(exp, axis=-1, keepdims=True)
    return exp / jnp.where(total == 0, np.float32(1), total)


def _sqrt_softplus(z: jax.Array) -> jax.Array:
    """sqrt(log(1 + exp(z))); far below zero exp(z / 2), which neither underflows early nor has infinite gradients."""
    low = np.float32(-20)
    high_part = jnp.sqrt(jax.nn.softplus(jnp.maximum(z, low)))
    return jnp.where(z < low, jnp.exp(jnp.minimum(z, low) * np.float32(0.5)), high_part)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How logits become scores.

    Attributes:
      score: float32 [T, n] -> [T, n], increasing in each logit of a row.
      on_chosen: the choice is made on the logits, and `score` sees the K chosen logits alone.
    """

    score: Callable[[jax.Array], jax.Array]
    on_chosen: bool = False


SCORING = {
    "softmax": Scoring(_softmax),
    "topk_softmax": Scoring(_softmax, on_chosen=True),
    "sigmoid": Scoring(jax.nn.sigmoid),
    "sqrt_softplus": Scoring(_sqrt_softplus),
}

# Score of a group of experts: the sum of its best so many choice values.
GROUP_SCORES = {"top2": 2, "max": 1}

# --------------------------------------------------------------------------------------------------------- config


def static_integer(name: str, value, expected: str) -> int:
    """An argument as a Python integer; `ArgumentError` for anything traced, a bool or no integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}: got {value!r}, expected a static integer {expected}") from None


@dataclasses.dataclass(frozen=True)
class Router:
    """Static settings of a router; hashable, so that `jax.jit` may take it as a static argument.

    Attributes:
      k: experts per token.
      scoring: key of `SCORING`. "softmax" over all experts, "topk_softmax" over the chosen ones, "sigmoid" or
        "sqrt_softplus" of each logit.
      renormalize: divide the chosen scores by their sum ("topk_softmax" sums to one anyway).
      n_group: the experts form so many equal groups, neighbours together.
      topk_group: only experts of so many best groups can be chosen; ties go to the lower group.
      group_score: "top2", a group counts as the sum of its two best choice values (DeepSeek-V3), or "max", its best
        one (DeepSeek-V2).
      scale: factor on every weight, renormalised or not (`routed_scaling_factor`).

    Raises:
      ArgumentError: unknown names, numbers out of range.

    Example:
      >>> from jax_warp_decode.routers import ROUTERS, Router
      >>> ROUTERS["deepseek-v3"]
      Router(k=8, scoring='sigmoid', renormalize=True, n_group=8, topk_group=4, group_score='top2', scale=2.5)
      >>> Router(2, "cosine")
      Traceback (most recent call last):
      ...
      jax_warp_decode.errors.ArgumentError: scoring: got 'cosine', expected one of ['softmax', 'topk_softmax', \
'sigmoid', 'sqrt_softplus']
    """

    k: int
    scoring: str = "softmax"
    renormalize: bool = True
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2"
    scale: float = 1.0

    def __post_init__(self):
        for name, table in (("scoring", SCORING), ("group_score", GROUP_SCORES)):
            if not isinstance(got := getattr(self, name), str) or got not in table:
                raise ArgumentError(f"{name}: got {got!r}, expected one of {list(table)}")
        for name in ("k", "n_group", "topk_group"):
            value = static_integer(name, getattr(self, name), "of at least 1")
            if value < 1:
                raise ArgumentError(f"{name}: got {value}, expected at least 1")
            object.__setattr__(self, name, value)
        if self.topk_group > self.n_group:
            raise ArgumentError(f"topk_group: got {self.topk_group}, expected at most n_group = {self.n_group}")
        try:  # NumPy scalars become Python numbers, so that equal routers hash alike and x64 mode changes nothing
            if isinstance(self.scale, str | bool):
                raise TypeError
            object.__setattr__(self, "scale", float(self.scale))
        except TypeError:
            raise ArgumentError(f"scale: got {type(self.scale).__name__}, expected a static number") from None
        if not abs(self.scale) <= float(np.finfo(np.float32).max):
            raise ArgumentError(f"scale: got {self.scale}, expected a finite number, which float32 can hold")
        if not isinstance(self.renormalize, bool | np.bool_):
            raise ArgumentError(f"renormalize: got {self.renormalize!r}, expected True or False")
        object.__setattr__(self, "renormalize", bool(self.renormalize))

    @property
    def limited(self) -> bool:
        """Whether some groups are out of reach."""
        return self.topk_group < self.n_group

    def check(self, num_experts: int) -> None:
        """Raises `ArgumentError` if these settings do not fit E = `num_experts`."""
        if num_experts % self.n_group:
            raise ArgumentError(
                f"n_group: got {self.n_group}, expected a divisor of E = {num_experts}, the number of experts")
        eligible = num_experts // self.n_group * self.topk_group
        if self.k > eligible:
            of = f"topk_group = {self.topk_group} of n_group = {self.n_group} groups of E = {num_experts} experts"
            where = of if self.limited else f"E = {num_experts}, the number of experts"
            raise ArgumentError(f"k: got {self.k}, expected 1 to {eligible}, that is {where}")


# From the model cards and published configurations, each of the family's largest model; a checkpoint's own
# configuration comes first. Arrays that belong to them: gpt-oss `bias`; those with sigmoid or sqrt_softplus, except
# Llama-4, `correction_bias`; Gemma-4 `expert_scale`. Llama-4 puts the weight on the expert's input: the layer's affair.
ROUTERS = {
    "qwen3-moe": Router(8),
    "qwen3-next": Router(10),
    "mixtral": Router(2, "topk_softmax"),
    "gpt-oss": Router(4, "topk_softmax"),
    "deepseek-v2": Router(6, "softmax", renormalize=False, n_group=8, topk_group=3, group_score="max", scale=16.0),
    "deepseek-v3": Router(8, "sigmoid", n_group=8, topk_group=4, scale=2.5),
    "deepseek-v4": Router(6, "sqrt_softplus", scale=1.5),
    "kimi-k2": Router(8, "sigmoid", scale=2.827),
    "glm-4.5": Router(8, "sigmoid", scale=2.5),
    "minimax-m2": Router(8, "sigmoid"),
    "minimax-m3": Router(4, "sigmoid", scale=2.0),
    "nemotron3-nano": Router(6, "sigmoid", scale=2.5),
    "gemma4": Router(8),
    "llama4": Router(1, "sigmoid", renormalize=False),
}

# ---------------------------------------------------------------------------------------------------- computation


@functools.partial(jax.jit, static_argnums=0)
def choose_experts(
    router: Router,
    logits: jax.Array,
    bias: jax.Array | None,
    correction_bias: jax.Array | None,
    expert_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """ids int32 [T, K] and weights float32 [T, K] from logits [T, E]: `routing.route` without its checks."""
    scoring = SCORING[router.scoring]
    z = logits.astype(jnp.float32)
    if bias is not None:
        z = z + bias.astype(jnp.float32)
    scores = z if scoring.on_chosen else scoring.score(z)
    # Where the score only grows with the logit, choosing on logits is the same and keeps the order of experts whose
    # scores underflow or round to the same float32.
    monotone = correction_bias is None and (not router.limited or router.group_score == "max")
    choice = z if monotone else scores
    if correction_bias is not None:
        choice = choice + correction_bias.astype(jnp.float32)
    ids = lax.top_k(_eligible(router, choice), router.k)[1].astype(jnp.int32)

    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if scoring.on_chosen:
        weights = scoring.score(weights)
    elif router.renormalize:
        total = jnp.sum(weights, axis=-1, keepdims=True) + _EPSILON
        # Both by one power of two, which changes no quotient: its gradient squares the total, and that would underflow.
        power = _reciprocal_power(lax.stop_gradient(total))
        weights = weights * power / (total * power)
    if router.scale != 1:
        weights = weights * np.float32(router.scale)
    if expert_scale is not None:
        weights = weights * jnp.take(expert_scale.astype(jnp.float32), ids, axis=0)
    return ids, weights


def _reciprocal_power(z: jax.Array) -> jax.Array:
    """A power of two that brings a positive float32 to about 1."""
    exponent = lax.bitcast_convert_type(z, jnp.int32) >> 23 & 255
    return lax.bitcast_convert_type(jnp.clip(254 - exponent, 1, 254) << 23, jnp.float32)


def _eligible(router: Router, choice: jax.Array) -> jax.Array:
    """Order keys of [T, E] choice values; experts outside the best groups get the lowest key of all."""
    key = order_key(choice)
    if not router.limited:
        return key
    tokens, experts = key.shape
    size = experts // router.n_group
    grouped = key.reshape(tokens, router.n_group, size)
    best = lax.top_k(grouped, min(GROUP_SCORES[router.group_score], size))[1]
    values = jnp.take_along_axis(choice.reshape(grouped.shape), best, axis=-1)
    groups = lax.top_k(order_key(jnp.sum(values, axis=-1)), router.topk_group)[1]
    kept = jnp.any(groups[:, :, None] == jnp.arange(router.n_group, dtype=jnp.int32), axis=1)
    return jnp.where(kept[:, :, None], grouped, _INT32_MIN).reshape(tokens, experts)


def order_key(z: jax.Array) -> jax.Array:
    """float32 -> int32 with the same order, except that -0 equals 0 and NaN is lowest, though above INT32_MIN.

    Choosing on integers gives distinct ids for any bits on every backend; INT32_MIN is left for what is out of reach.
    """
    bits = lax.bitcast_convert_type(z, jnp.int32)
    key = jnp.where(bits < 0, _INT32_MIN - bits, bits)
    return jnp.where(jnp.isnan(z), _INT32_MIN + np.int32(1), key)
