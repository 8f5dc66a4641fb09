"""Which strategy runs, decided from static facts at trace time, with the reason in words."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_warp_decode.device import capability
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.kernels import checks, shared_common
from jax_warp_decode.paths import expert_centric, grouped_gemm, shared_decode

STRATEGIES = ("warp_decode", "shared_decode", "expert_centric", "reference")

# Compute capabilities that Pallas Mosaic GPU compiles the warp-decode kernels for. 9.0 was measured (H200), 10.x only
# compiled.
CAPABILITIES = ("9.0", "10.0", "10.3")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Most (token, slot) pairs per expert for which a strategy is taken, from an H200 (bench/NOTES.md).

    Attributes:
      warp: up to here, warp_decode is the fastest.
      shared: up to here, shared_decode is.
      warp_alone: up to here, warp_decode is faster than expert_centric, for what shared_decode cannot take.
    """

    warp: float
    shared: float
    warp_alone: float


# bf16: `shared` is as far as it was measured. mxfp8: `warp` is from an earlier form of shared_decode, the rest a guess.
CROSSOVER = {"bf16": Limits(0.65, 8.0, 2.0), "f16": Limits(2.0, 0.0, 2.0), "mxfp8": Limits(1.5, 16.0, 12.0)}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The strategy of one call, and why."""

    strategy: str
    reason: str

    def __str__(self) -> str:
        return f"{self.strategy} ({self.reason})"


def no_gpu_reason() -> str:
    """Why warp decode cannot run on the default device, or an empty string."""
    if not capability():
        return (f"JAX sees no NVIDIA GPU (backend {jax.default_backend()!r}); install the CUDA build, "
                "pip install 'jax-warp-decode[cuda12]' or [cuda13]")
    if capability() not in CAPABILITIES:
        return (f"the GPU has compute capability {capability()}, the kernels need one of {', '.join(CAPABILITIES)} "
                "(Hopper or data-centre Blackwell)")
    return ""


def available_strategies() -> dict[str, str]:
    """Every strategy with an empty string if it can run on the default device, else the reason why not."""
    return {"warp_decode": no_gpu_reason(), "shared_decode": no_gpu_reason() or shared_common.device_refusal(),
            "expert_centric": grouped_gemm.device_refusal(), "reference": ""}


def _shape_reason(experts: ExpertWeights, x_dtype) -> str:
    """Why the kernels cannot take these operands, or an empty string."""
    if jnp.dtype(x_dtype) not in checks.HALF:
        return f"x is {jnp.dtype(x_dtype)}, the kernels take bfloat16 or float16"
    if experts.w_gate is None:
        return "the experts have no gate projection, the kernels need one"
    try:
        itemsize = checks.weight_itemsize("w_gate", experts.w_gate)
        checks.dimensions("w_gate", experts.hidden, experts.intermediate, itemsize)
        checks.dimensions("w_down", experts.intermediate, experts.hidden, itemsize)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    return ""


def _grouped_gemm_reason(experts: ExpertWeights, x_dtype) -> str:
    """Why the grouped GEMM of expert_centric cannot take these operands here, or an empty string."""
    if expert_centric.operand_dtype(x_dtype, experts.format) != jnp.bfloat16:
        return ""  # float32 runs on any device
    sizes = (experts.intermediate, experts.hidden)
    return grouped_gemm.refusal(*sizes) if jax.default_backend() == "gpu" else ""


def choose(tokens: int, experts: ExpertWeights, *, experts_per_token: int, x_dtype, strategy: str = "auto",
           interpret=False) -> Choice:
    """The strategy for a call with `tokens` tokens, from shapes, dtypes and the device only.

    Args:
      tokens: T, static.
      experts: the layer's weights (arrays or `jax.ShapeDtypeStruct`s).
      experts_per_token: K.
      x_dtype: dtype of the activations.
      strategy: "auto", or a name in `STRATEGIES`, which is returned as it is or refused: never replaced.
      interpret: the kernels will be interpreted, so no GPU is needed.

    Raises:
      ArgumentError: unknown strategy.
      UnsupportedError: the named strategy cannot run here; the message says what can.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, choose
      >>> w = jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16)
      >>> choose(1, ExpertWeights(w, w, w), experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True)
      Choice(strategy='warp_decode', reason='1 tokens x 2 slots on 8 experts: 0.25 pairs per expert')
    """
    if strategy not in ("auto", *STRATEGIES):
        raise ArgumentError(f"strategy: got {strategy!r}, expected 'auto' or one of {list(STRATEGIES)}")
    no_gpu = "" if interpret else no_gpu_reason()
    refused = {
        "warp_decode": no_gpu or _shape_reason(experts, x_dtype),
        "shared_decode": no_gpu or shared_decode.refusal(tokens, experts_per_token, experts, x_dtype),
        "expert_centric": _grouped_gemm_reason(experts, x_dtype),
        "reference": ""}
    if strategy != "auto":
        if refused[strategy]:
            raise UnsupportedError(f"strategy: {strategy!r} cannot run: {refused[strategy]}")
        return Choice(strategy, "asked for")
    load = tokens * experts_per_token / experts.num_experts
    order = _by_speed(load, CROSSOVER.get(experts.format, Limits(0, 0, 0)))
    chosen = next(name for name in order if not refused[name])
    skipped = {}  # reason -> the strategies it holds for
    for name in order[:order.index(chosen)]:
        skipped.setdefault(refused[name], []).append(name)
    reasons = [f"{' and '.join(names)} cannot run: {why}" for why, names in skipped.items()]
    pairs = f"{tokens} tokens x {experts_per_token} slots on {experts.num_experts} experts: {load:.3g} pairs per expert"
    return Choice(chosen, "; ".join([pairs, *reasons]))


def _by_speed(load: float, limits: Limits) -> list[str]:
    """The strategies, fastest first, at so many pairs per expert."""
    if load <= limits.warp:
        return ["warp_decode", "shared_decode", "expert_centric", "reference"]
    if load <= limits.shared:
        rest = ["warp_decode", "expert_centric"] if load <= limits.warp_alone else ["expert_centric", "warp_decode"]
        return ["shared_decode", *rest, "reference"]
    if load <= limits.warp_alone:
        return ["warp_decode", "expert_centric", "reference"]
    return ["expert_centric", "shared_decode", "warp_decode", "reference"]
