"""The Qwen3-MoE decoder under its own name."""

from jax_warp_decode.models.decoder import Decoder
from jax_warp_decode.models.qwen3_moe_config import Qwen3MoeConfig

Qwen3Moe = Decoder

__all__ = ["Qwen3Moe", "Qwen3MoeConfig"]
