"""Rotary position embeddings: frequencies, and YaRN, which stretches them to longer contexts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.models.settings import Settings, show

_LEAST_TURNS, _MOST_TURNS = 1e-3, 1e6


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN by parts (Peng et al. 2023, arXiv:2309.00071): fast dimensions stay, slow ones are stretched by `factor`.

    Attributes:
      factor: how many times longer the context became, at least 1.
      original_max_position_embeddings: the context before.
      beta_fast, beta_slow: turns over the original context; dimensions that turn more often stay, those that turn less
        often are stretched, and in between the two are mixed.
      truncate: whether the bounds of that mix are rounded to whole dimensions (gpt-oss does not).
      attention_factor: on cosine and sine; None is 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self):
        if self.factor < 1:
            raise ArgumentError(f"rope factor: got {self.factor}, expected at least 1")
        if not _LEAST_TURNS <= self.beta_slow <= self.beta_fast <= _MOST_TURNS:
            raise ArgumentError(f"beta_slow, beta_fast: got {self.beta_slow}, {self.beta_fast}, expected "
                                f"{_LEAST_TURNS} <= beta_slow <= beta_fast <= {_MOST_TURNS}")


def frequencies(theta: float, dim: int, yarn: Yarn | None = None) -> tuple[np.ndarray, float]:
    """Angles per position, float64 [dim / 2], and the factor on their cosine and sine.

    Example:
      >>> from jax_warp_decode.models.rope import Yarn, frequencies
      >>> frequencies(10000.0, 4)
      (array([1.  , 0.01]), 1.0)
      >>> angles, scale = frequencies(10000.0, 4, Yarn(4.0, 32))
      >>> angles.round(4).tolist(), round(scale, 4)
      ([1.0, 0.0025], 1.1386)
    """
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    if yarn is None:
        return plain, 1.0

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes so many turns over the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)  # 0 stays, 1 is stretched
    factor = yarn.attention_factor or 0.1 * math.log(yarn.factor) + 1.0
    return plain * (1 - ramp) + plain / yarn.factor * ramp, factor


def rotation(positions: jax.Array, theta: float, dim: int, yarn: Yarn | None) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [S, dim / 2] float32 of int32 positions [S]."""
    angle, scale = frequencies(theta, dim, yarn)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(angle, jnp.float32)
    return jnp.cos(angles) * np.float32(scale), jnp.sin(angles) * np.float32(scale)


def rotate(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [.., S, N, D] in float32 by `rotation`; i is paired with i + D/2 (RoPE, arXiv:2104.09864)."""
    cos, sin = (a[:, None, :] for a in turn)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def read_rope(settings: Settings, theta: float, scaled: bool) -> tuple[float, Yarn | None]:
    """Base and YaRN of a config.json: `rope_theta` beside `rope_scaling` (transformers 4), or both inside
    `rope_parameters` (transformers 5).

    Args:
      settings: of the config.json.
      theta: the base where there is none.
      scaled: whether the architecture may use YaRN.

    Raises:
      ArgumentError: a field of the wrong type, or two that contradict each other.
      UnsupportedError: another way to scale.
    """
    kinds = ("default", "yarn") if scaled else ("default",)
    bases, scalings = {}, []
    if settings.get("rope_theta", default=None) is not None:
        bases["rope_theta"] = settings.get("rope_theta")
    for name in ("rope_parameters", "rope_scaling"):
        options = settings.section(name, None)
        if options is None:
            continue
        kind = options.get("rope_type", "type", default="default")
        if kind not in kinds:
            raise UnsupportedError(f"{name}: got rope_type {show(kind)}, expected {' or '.join(map(repr, kinds))}")
        fields = {field.name for field in dataclasses.fields(Yarn)} if kind == "yarn" else set()
        if options.values.get("partial_rotary_factor") == 1:  # all of a head
            fields |= {"partial_rotary_factor"}
        if unknown := sorted(set(options.values) - {"rope_type", "type", "rope_theta"} - fields):
            raise UnsupportedError(f"{name}: got {show(unknown)}, expected only rope_type, rope_theta and "
                                   f"{sorted(fields) or 'nothing else'}")
        if "rope_theta" in options.values:
            bases[f"{name}.rope_theta"] = options.values["rope_theta"]
        scalings.append(_yarn(options, settings) if kind == "yarn" else None)
    if any(scaling != scalings[0] for scaling in scalings):
        raise ArgumentError("rope_parameters, rope_scaling: got two different ones, expected one; remove the wrong one")
    theta, yarn = Settings(bases).number(*(bases or ("rope_theta",)), default=theta), scalings[0] if scalings else None
    if yarn is not None and theta <= 1:
        raise ArgumentError(f"rope_theta: got {theta}, expected more than 1 with YaRN")
    return theta, yarn


def _yarn(options: Settings, settings: Settings) -> Yarn:
    whole = settings.integer("max_position_embeddings", default=None)
    return Yarn(
        options.number("factor"),
        options.integer("original_max_position_embeddings", **{} if whole is None else {"default": whole}),
        options.number("beta_fast", default=Yarn.beta_fast), options.number("beta_slow", default=Yarn.beta_slow),
        options.flag("truncate", default=Yarn.truncate), options.number("attention_factor", default=None))
