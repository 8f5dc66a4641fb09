"""What several families share when they read their config.json."""

from jax_warp_decode.activations import Activation, SwiGLU
from jax_warp_decode.checkpoints.family import BlockSpec
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.models.settings import MAX_LAYERS, Settings, hidden_activation
from jax_warp_decode.routers import Router

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def all_layers(settings: Settings) -> tuple[int, ...]:
    return tuple(range(settings.integer("num_hidden_layers", most=MAX_LAYERS)))


def sparse_layers(settings: Settings) -> tuple[int, ...]:
    """Layers with experts by `decoder_sparse_step` and `mlp_only_layers` (Qwen)."""
    step = settings.integer("decoder_sparse_step", default=1)
    dense = set(settings.items("mlp_only_layers", kind=int, default=()))
    return tuple(n for n in all_layers(settings) if n not in dense and (n + 1) % step == 0)


def expert_activation(settings: Settings) -> Activation:
    return hidden_activation(settings.get("hidden_act", default="silu"))


def clamped_swiglu(settings: Settings) -> Activation:
    """gate * sigmoid(alpha gate) * (up + 1), both clamped (gpt-oss, MiniMax-M3)."""
    return SwiGLU("clamped_swiglu", settings.number("swiglu_alpha", default=1.702),
                  settings.number("swiglu_limit", default=7.0), 1.0)


def read_softmax(settings: Settings, layers: tuple[int, ...], renormalize: bool) -> BlockSpec:
    """Sizes by the names that Qwen uses, softmax router, and a shared expert if its size is there."""
    E, k = experts(settings)
    return BlockSpec(
        settings.integer("hidden_size"), settings.integer("moe_intermediate_size"), E, layers,
        Router(k, "softmax", renormalize), expert_activation(settings),
        settings.integer("shared_expert_intermediate_size", default=None))


def experts(settings: Settings) -> tuple[int, int]:
    """E and K."""
    E = settings.integer("num_experts", "num_local_experts", "n_routed_experts")
    k = settings.integer("num_experts_per_tok", "experts_per_token")
    if k > E:
        raise ArgumentError(f"num_experts_per_tok: got {k}, expected at most the number of experts, {E}")
    return E, k
