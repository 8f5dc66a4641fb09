"""Qwen3-MoE folders under their own name."""

from typing import Any

from jax_warp_decode.checkpoints.decoders import load_model
from jax_warp_decode.checkpoints.progress import Report
from jax_warp_decode.models.decoder import Decoder
from jax_warp_decode.models.qwen3_moe_config import Qwen3MoeConfig


def load_qwen3_moe(
        folder: Any, *, dtype: Any = None, strategy: str = "auto", progress: Report | None = None) -> Decoder:
    """`load_model` for a Hugging Face `Qwen3MoeForCausalLM` folder, plain or quantised; refuses any other.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from jax_warp_decode.checkpoints import load_qwen3_moe, save_qwen3_moe
      >>> from jax_warp_decode.models import Decoder, Qwen3MoeConfig
      >>> config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1,
      ...                         num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4,
      ...                         num_experts_per_tok=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_qwen3_moe(Decoder(config, rngs=nnx.Rngs(0)), folder, format="mxfp8")
      ...     model = load_qwen3_moe(folder)
      >>> model.layers[0].moe.experts.format
      'mxfp8'
    """
    return load_model(
        folder, dtype=dtype, strategy=strategy, progress=progress, architecture=Qwen3MoeConfig.ARCHITECTURE)
