"""Hugging Face checkpoint folders."""

from jax_warp_decode.checkpoints.blocks import MoEBlock, MoEFolder, load_moe_blocks
from jax_warp_decode.checkpoints.decoders import load_model
from jax_warp_decode.checkpoints.qwen3_moe import load_qwen3_moe
from jax_warp_decode.checkpoints.writer import save_qwen3_moe

__all__ = ["MoEBlock", "MoEFolder", "load_model", "load_moe_blocks", "load_qwen3_moe", "save_qwen3_moe"]
