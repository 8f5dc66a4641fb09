"""Activations between the two projections of an expert: one table, used by every path and inside the kernels.

An activation is a frozen dataclass, so that a model with other parameters makes its own instance:

    SwiGLU("my_swiglu", limit=12.0)

`apply` works in float32 with operations that JAX lowers on every backend and Mosaic GPU lowers inside a kernel.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Activation:
    """What happens between the projections.

    Attributes:
      name: how it is shown; a key of `ACTIVATIONS` for those in the table.
      gated: whether there is a gate projection; without one, `apply` is called with gate None.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import ACTIVATIONS
      >>> ACTIVATIONS["silu"].gated, ACTIVATIONS["relu2"].gated
      (True, False)
      >>> ACTIVATIONS["relu2"].apply(None, jnp.array([-3.0, 3.0])).tolist()
      [0.0, 9.0]
    """

    name: str
    gated: ClassVar[bool] = True

    def apply(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        """Both arguments and the result float32 of one shape; elementwise."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SwiGLU(Activation):
    """gate * sigmoid(alpha * gate) * (up + up_offset), both clamped before where there is a limit.

    The gate is clamped from above only, up on both sides.

    Attributes:
      alpha: slope of the sigmoid; 1 is SiLU.
      limit: where gate and up are clamped; None is nowhere.
      up_offset: added to up, after clamping.

    Sources: Shazeer 2020, arXiv:2002.05202; gpt-oss model card and reference code for the clamped form.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import SwiGLU
      >>> gpt_oss = SwiGLU("mine", alpha=1.702, limit=7.0, up_offset=1.0)    # what `moe(activation=..)` also takes
      >>> float(gpt_oss.apply(jnp.float32(9), jnp.float32(-9))) == float(gpt_oss.apply(jnp.float32(7), jnp.float32(-7)))
      True
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self):
        if self.limit is not None and not self.limit > 0:
            raise ArgumentError(f"limit: got {self.limit}, expected a positive number or None")

    def apply(self, gate: Any, up: jax.Array) -> jax.Array:
        if self.limit is not None:
            limit = np.float32(self.limit)
            gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
        if self.up_offset:
            up = up + np.float32(self.up_offset)
        slope = gate if self.alpha == 1 else gate * np.float32(self.alpha)
        return gate * jax.lax.logistic(slope) * up


@dataclasses.dataclass(frozen=True)
class GeluTanh(Activation):
    """GELU in its tanh approximation, times up (Gemma).

    (1 + tanh(a)) / 2 is computed as the equal sigmoid(2 a), which does not cancel for negative gates.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """

    def apply(self, gate: Any, up: jax.Array) -> jax.Array:
        twice = gate * (np.float32(1) + np.float32(0.044715) * gate * gate) * np.float32(2 * np.sqrt(2 / np.pi))
        return gate * jax.lax.logistic(twice) * up


@dataclasses.dataclass(frozen=True)
class GeluErf(Activation):
    """Exact GELU, gate * P(normal variable < gate), times up.

    Mosaic GPU has no erf. The tail P(normal < -a) is exp(-a^2 / 2) * t * p(t) with t = 1 / (1 + 0.265 a) and a
    polynomial p, fitted for the least maximum of the relative error, 1.3e-8, over 0 <= a <= 13. In float32 the relative
    error of the tail stays below (a^2 / 2 + 8) * 2^-24: one rounding of a^2 in the exponent, and all the others.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """

    _SLOPE: ClassVar[float] = 0.265
    _COEFFICIENTS: ClassVar[tuple[float, ...]] = (  # of p, highest power first
        0.0309128911, -0.144663504, 0.218689313, -0.117337583, 0.138611219, 0.0600382873, 0.102770191, 0.105237068,
        0.105742124)

    def apply(self, gate: Any, up: jax.Array) -> jax.Array:
        a = jnp.abs(gate)
        t = np.float32(1) / (np.float32(1) + np.float32(self._SLOPE) * a)
        p: Any = np.float32(self._COEFFICIENTS[0])
        for coefficient in self._COEFFICIENTS[1:]:
            p = p * t + np.float32(coefficient)
        tail = jnp.exp(gate * gate * np.float32(-0.5)) * (t * p)
        return gate * jnp.where(gate < np.float32(0), tail, np.float32(1) - tail) * up


@dataclasses.dataclass(frozen=True)
class Relu2(Activation):
    """max(up, 0)^2, without a gate projection (Nemotron).

    Source: So et al. 2021, arXiv:2109.08668.
    """

    gated: ClassVar[bool] = False

    def apply(self, gate: Any, up: jax.Array) -> jax.Array:
        positive = jnp.maximum(up, np.float32(0))
        return positive * positive


@dataclasses.dataclass(frozen=True)
class SiTU(Activation):
    """beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta) (Kimi-K3).

    Attributes:
      beta: where the gate saturates.
      linear_beta: where up saturates; None leaves it as it is.
    """

    beta: float = 4.0
    linear_beta: float | None = 25.0

    def __post_init__(self):
        for name in ("beta", "linear_beta"):
            value = getattr(self, name)
            if not (value is None and name == "linear_beta") and not value > 0:
                raise ArgumentError(f"{name}: got {value}, expected a positive number")

    def apply(self, gate: Any, up: jax.Array) -> jax.Array:
        if self.linear_beta is not None:
            up = _soft_clip(up, self.linear_beta)
        return _soft_clip(gate, self.beta) * jax.lax.logistic(gate) * up


def _soft_clip(x, beta):
    return np.float32(beta) * jnp.tanh(x * np.float32(1 / beta))


ACTIVATIONS = {a.name: a for a in (
    SwiGLU("silu"),
    GeluTanh("gelu_tanh"),
    GeluErf("gelu_erf"),
    Relu2("relu2"),
    SwiGLU("clamped_swiglu", alpha=1.702, limit=7.0, up_offset=1.0),  # gpt-oss
    SwiGLU("clamped_silu", limit=10.0),  # DeepSeek-V4
    SiTU("situ"),
)}


def get_activation(activation: str | Activation) -> Activation:
    """Looks up an activation by name; an `Activation` is returned as it is.

    Args:
      activation: a key of `ACTIVATIONS`, for example "silu" (SwiGLU, Shazeer 2020, arXiv:2002.05202), or an instance
        with parameters of its own.

    Raises:
      ArgumentError: for an unknown name.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.activations import SwiGLU, get_activation
      >>> float(get_activation("silu").apply(jnp.float32(64), jnp.float32(0.5)))
      32.0
      >>> float(get_activation(SwiGLU("tight", limit=1.0)).apply(jnp.float32(64), jnp.float32(-8))).__round__(4)
      -0.7311
    """
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ArgumentError(f"activation: got {activation!r}, expected one of {sorted(ACTIVATIONS)} or an Activation")
    return ACTIVATIONS[activation]
