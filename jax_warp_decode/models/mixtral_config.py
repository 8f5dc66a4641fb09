"""The shape of a Mixtral decoder, read from a Hugging Face config.json."""

import dataclasses
from typing import ClassVar

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.models.decoder_config import DecoderConfig
from jax_warp_decode.models.settings import MAX_SIZE, is_integer, show
from jax_warp_decode.routers import Router


@dataclasses.dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    """Sizes and constants of a Mixtral decoder; defaults as in transformers' `MixtralConfig`.

    Attributes:
      sliding_window: how many positions every layer sees; None is all.

    The others as in `DecoderConfig`; config.json calls I `intermediate_size` and E `num_local_experts`.

    Example:
      >>> config = MixtralConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
      ...     num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2)
      >>> config.router.scoring, config.window(0)                              # every layer sees all positions
      ('topk_softmax', None)
    """

    ARCHITECTURE: ClassVar[str] = "MixtralForCausalLM"
    MODEL_TYPE: ClassVar[str] = "mixtral"
    SPELLINGS: ClassVar = {"moe_intermediate_size": ("intermediate_size",), "num_experts": ("num_local_experts",)}

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_position_embeddings: int = 131072
    sliding_window: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_window(self.sliding_window)

    @property
    def router(self) -> Router:
        return Router(self.num_experts_per_tok, "topk_softmax")

    def window(self, layer: int) -> int | None:
        return self.sliding_window


def check_window(window) -> None:
    """Raises `ArgumentError` unless a sliding window is a size or None."""
    if window is not None and not (is_integer(window) and 1 <= window <= MAX_SIZE):
        raise ArgumentError(f"sliding_window: got {show(window)}, expected an integer of 1 to {MAX_SIZE}, or null")
