"""Small decoders built on the `MoE` layer."""

from jax_warp_decode.models.cache import KVCache
from jax_warp_decode.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig

__all__ = ["KVCache", "Qwen3Moe", "Qwen3MoeConfig"]
