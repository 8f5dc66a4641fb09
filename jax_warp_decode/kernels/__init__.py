"""Warp-decode kernels. They take arrays and a frozen config, return arrays, and know no strategy."""

from jax_warp_decode.kernels.down import DownConfig, moe_down_3d_batched
from jax_warp_decode.kernels.gate_up import GateUpConfig, moe_gate_up_3d_batched

__all__ = ["DownConfig", "GateUpConfig", "moe_down_3d_batched", "moe_gate_up_3d_batched"]
