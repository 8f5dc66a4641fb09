"""The shape of a gpt-oss decoder, read from a Hugging Face config.json."""

import dataclasses
from typing import Any, ClassVar

from jax_warp_decode.activations import Activation, SwiGLU
from jax_warp_decode.errors import ArgumentError, counted
from jax_warp_decode.models.decoder_config import DecoderConfig
from jax_warp_decode.models.mixtral_config import check_window
from jax_warp_decode.models.rope import Yarn, read_rope
from jax_warp_decode.models.settings import Settings, show
from jax_warp_decode.routers import Router

KINDS = ("sliding_attention", "full_attention")


@dataclasses.dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    """Sizes and constants of a gpt-oss decoder; defaults as in transformers' `GptOssConfig`.

    Attributes:
      sliding_window: how many positions a layer with sliding attention sees.
      layer_types: a name of `KINDS` for each layer; empty is alternating, sliding first.
      swiglu_limit: where the experts clamp gate and up.
      rope_scaling: YaRN, or None.

    The others as in `DecoderConfig`; config.json calls I `intermediate_size` and E `num_local_experts`.

    Example:
      >>> config = GptOssConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
      ...     num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2)
      >>> [config.window(layer) for layer in range(2)]
      [128, None]
    """

    ARCHITECTURE: ClassVar[str] = "GptOssForCausalLM"
    MODEL_TYPE: ClassVar[str] = "gpt_oss"
    SPELLINGS: ClassVar = {"moe_intermediate_size": ("intermediate_size",),
                           "num_experts": ("num_local_experts", "num_experts"),
                           "num_experts_per_tok": ("num_experts_per_tok", "experts_per_token")}
    attention_sinks: ClassVar[bool] = True
    router_bias: ClassVar[bool] = True
    expert_bias: ClassVar[bool] = True

    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    max_position_embeddings: int = 131072
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] = ()
    swiglu_limit: float = 7.0
    rope_scaling: Yarn | None = None

    def __post_init__(self):
        super().__post_init__()
        check_window(self.sliding_window)
        if not self.layer_types:
            object.__setattr__(self, "layer_types", tuple(KINDS[n % 2] for n in range(self.num_hidden_layers)))
        if len(self.layer_types) != self.num_hidden_layers or not set(self.layer_types) <= set(KINDS):
            raise ArgumentError(f"layer_types: got {show(self.layer_types)}, expected one of {KINDS} for each of "
                                f"{counted(self.num_hidden_layers, 'layer')}")

    @property
    def router(self) -> Router:
        return Router(self.num_experts_per_tok, "topk_softmax")

    @property
    def activation(self) -> Activation:
        return SwiGLU("clamped_swiglu", 1.702, self.swiglu_limit, 1.0)

    @property
    def yarn(self) -> Yarn | None:
        return self.rope_scaling

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == KINDS[0] else None

    @classmethod
    def _read(cls, settings: Settings) -> dict[str, Any]:
        theta, yarn = read_rope(settings, cls.rope_theta, scaled=True)
        return {"rope_theta": theta, "rope_scaling": yarn,
                "layer_types": settings.items("layer_types", kind=str, default=())}
