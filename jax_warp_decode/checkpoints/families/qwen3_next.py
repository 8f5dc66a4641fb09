"""Qwen3-Next and Qwen3.5-MoE: a shared expert behind a sigmoid gate. Sources: model cards and config.json.

Qwen3.5-MoE keeps its language model inside a multimodal one; bfloat16 folders have one tensor for the gate and up
projections of all experts, [E, 2 I, H] with the gate rows first, quantised ones a tensor for each expert.
"""

from jax_warp_decode.checkpoints.families.common import PROJECTIONS, all_layers, read_softmax, sparse_layers
from jax_warp_decode.checkpoints.family import DENSE, BlockSpec, Family, Storage, Tensor
from jax_warp_decode.models.settings import Settings

_SEPARATE = Storage.separate("experts.{e}.{name}.weight", PROJECTIONS)
_FUSED = Storage(Tensor("experts.gate_up_proj", "first"), Tensor("experts.gate_up_proj", "second"),
                 Tensor("experts.down_proj"), (DENSE,))
_SHARED = Storage.separate("shared_expert.{name}.weight", PROJECTIONS, single=True)


def read_next(settings: Settings) -> BlockSpec:
    return read_softmax(settings, sparse_layers(settings), renormalize=settings.flag("norm_topk_prob", default=True))


def read_35(settings: Settings) -> BlockSpec:
    return read_softmax(settings, all_layers(settings), renormalize=True)


NEXT = Family(
    "Qwen3-Next", {"Qwen3NextForCausalLM": "model.layers.{n}"}, {"qwen3_next": "Qwen3NextForCausalLM"}, "mlp",
    read_next, (_SEPARATE,), shared=_SHARED, shared_gate="shared_expert_gate.weight")

QWEN35 = Family(
    "Qwen3.5-MoE",
    {"Qwen3_5MoeForConditionalGeneration": "model.language_model.layers.{n}",
     "Qwen3_5MoeForCausalLM": "model.layers.{n}"},
    {"qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}, "mlp",
    read_35, (_FUSED, _SEPARATE), shared=_SHARED, shared_gate="shared_expert_gate.weight", text_section="text_config")
