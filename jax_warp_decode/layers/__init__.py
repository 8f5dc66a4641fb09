"""Flax layers."""

from jax_warp_decode.layers.moe import MoE

__all__ = ["MoE"]
