"""Flax layers: `MoE` for NNX, `linen_moe` for Linen."""

from jax_warp_decode.layers.linen import linen_moe
from jax_warp_decode.layers.moe import MoE, RouterState

__all__ = ["MoE", "RouterState", "linen_moe"]
