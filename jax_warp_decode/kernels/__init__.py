"""Warp-decode kernels. They take arrays and a frozen config, return arrays, and know no strategy."""

from jax_warp_decode.kernels.down import DownConfig, moe_down_3d_batched
from jax_warp_decode.kernels.down_tensor import DownTensorConfig
from jax_warp_decode.kernels.gate_up import GateUpConfig, moe_gate_up_3d_batched
from jax_warp_decode.kernels.gate_up_tensor import GateUpTensorConfig

__all__ = ["DownConfig", "DownTensorConfig", "GateUpConfig", "GateUpTensorConfig", "moe_down_3d_batched",
           "moe_gate_up_3d_batched"]
