"""The shape of a Qwen3-MoE decoder, and its translation from and to a Hugging Face config.json."""

import dataclasses
from typing import Any, ClassVar

from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.models.decoder_config import DecoderConfig
from jax_warp_decode.models.settings import Settings, show
from jax_warp_decode.routers import Router


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(DecoderConfig):
    """Sizes and constants of a Qwen3-MoE decoder; fields, units and defaults as in transformers' `Qwen3MoeConfig`.

    Attributes:
      norm_topk_prob: whether the K routing weights are divided by their sum.

    The others, and what is raised, as in `DecoderConfig`. `from_hf` refuses scaled rotary embeddings, sliding-window
    attention and dense layers between the mixture-of-experts layers.

    Example:
      >>> config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
      ...     num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2)
      >>> config.router.scoring, config.router.renormalize
      ('softmax', False)
    """

    ARCHITECTURE: ClassVar[str] = "Qwen3MoeForCausalLM"
    MODEL_TYPE: ClassVar[str] = "qwen3_moe"
    SPELLINGS: ClassVar = {"num_experts": ("num_experts", "num_local_experts")}  # transformers 5 writes the second
    qk_norm: ClassVar[bool] = True

    norm_topk_prob: bool = False

    @property
    def router(self) -> Router:
        return Router(self.num_experts_per_tok, "softmax", self.norm_topk_prob)

    @classmethod
    def _read(cls, settings: Settings) -> dict[str, Any]:
        for name, allowed, why in (
                ("use_sliding_window", False, "only full attention is implemented"),
                ("mlp_only_layers", [], "every layer must have experts"),
                ("decoder_sparse_step", 1, "every layer must have experts")):
            if (got := settings.get(name, default=allowed)) != allowed:
                raise UnsupportedError(f"{name}: got {show(got)}, expected {allowed}; {why}")
        return super()._read(settings)

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers 4 and 5 read back as this model."""
        return {
            "architectures": [self.ARCHITECTURE], "model_type": self.MODEL_TYPE, **dataclasses.asdict(self),
            "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_scaling": None,
            "sliding_window": None, "use_sliding_window": False}
