"""Which strategy runs, decided from static facts at trace time, with the reason in words."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.kernels import checks
from jax_warp_decode.paths import expert_centric, grouped_gemm

STRATEGIES = ("warp_decode", "expert_centric", "reference")

# Compute capabilities that Pallas Mosaic GPU compiles these kernels for. 9.0 was measured (H200), 10.x only compiled.
CAPABILITIES = ("9.0", "10.0", "10.3")

# Most (token, slot) pairs per expert for which warp decode is taken, by weight format. On an H200 it is still faster
# at 2 pairs with two-byte weights. With MXFP8, which expert_centric must widen on every call, it is 7 times as fast at
# 2 pairs; 12 is extrapolated from there (bench/NOTES.md).
CROSSOVER = {"bf16": 2.0, "f16": 2.0, "mxfp8": 12.0}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The strategy of one call, and why."""

    strategy: str
    reason: str

    def __str__(self) -> str:
        return f"{self.strategy} ({self.reason})"


def no_gpu_reason() -> str:
    """Why warp decode cannot run on the default device, or an empty string."""
    if jax.default_backend() != "gpu":
        return (f"JAX sees no NVIDIA GPU (backend {jax.default_backend()!r}); install the CUDA build, "
                "pip install 'jax-warp-decode[cuda12]' or [cuda13]")
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability not in CAPABILITIES:
        return (f"the GPU has compute capability {capability}, the kernels need one of {', '.join(CAPABILITIES)} "
                "(Hopper or data-centre Blackwell)")
    return ""


def available_strategies() -> dict[str, str]:
    """Every strategy with an empty string if it can run on the default device, else the reason why not."""
    return {"warp_decode": no_gpu_reason(), "expert_centric": grouped_gemm.device_refusal(), "reference": ""}


def _shape_reason(experts: ExpertWeights, x_dtype) -> str:
    """Why the kernels cannot take these operands, or an empty string."""
    if jnp.dtype(x_dtype) not in checks.HALF:
        return f"x is {jnp.dtype(x_dtype)}, the kernels take bfloat16 or float16"
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
      Choice(strategy='warp_decode', reason='1 tokens x 2 slots on 8 experts: 0.25 pairs per expert, at most 2.0')
    """
    if strategy not in ("auto", *STRATEGIES):
        raise ArgumentError(f"strategy: got {strategy!r}, expected 'auto' or one of {list(STRATEGIES)}")
    if strategy == "reference":
        return Choice(strategy, "asked for")
    conventional = _grouped_gemm_reason(experts, x_dtype)
    if strategy == "expert_centric":
        if conventional:
            raise UnsupportedError(conventional)
        return Choice(strategy, "asked for")
    refused = ("" if interpret else no_gpu_reason()) or _shape_reason(experts, x_dtype)
    if strategy == "warp_decode":
        if refused:
            raise UnsupportedError(f"strategy: 'warp_decode' cannot run: {refused}")
        return Choice(strategy, "asked for")
    if refused and conventional:
        return Choice("reference", f"warp_decode cannot run: {refused}; expert_centric cannot run: {conventional}")
    if refused:
        return Choice("expert_centric", f"warp_decode cannot run: {refused}")
    load = tokens * experts_per_token / experts.num_experts
    pairs = f"{tokens} tokens x {experts_per_token} slots on {experts.num_experts} experts: {load:.3g} pairs per expert"
    most = CROSSOVER[experts.format]
    if load > most and conventional:
        return Choice("warp_decode", f"{pairs}, more than {most}, but expert_centric cannot run: {conventional}")
    if load > most:
        return Choice("expert_centric", f"{pairs}, more than {most}")
    return Choice("warp_decode", f"{pairs}, at most {most}")
