"""Hugging Face checkpoint folders."""

from jax_warp_decode.checkpoints.qwen3_moe import load_qwen3_moe
from jax_warp_decode.checkpoints.writer import save_qwen3_moe

__all__ = ["load_qwen3_moe", "save_qwen3_moe"]
