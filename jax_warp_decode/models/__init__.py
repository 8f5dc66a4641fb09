"""Small decoders built on the `MoE` layer."""

from jax_warp_decode.models.cache import KVCache
from jax_warp_decode.models.decoder import Decoder
from jax_warp_decode.models.gpt_oss_config import GptOssConfig
from jax_warp_decode.models.mixtral_config import MixtralConfig
from jax_warp_decode.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig

__all__ = ["Decoder", "GptOssConfig", "KVCache", "MixtralConfig", "Qwen3Moe", "Qwen3MoeConfig"]
