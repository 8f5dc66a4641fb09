"""Qwen3-MoE: Qwen3-30B-A3B, Qwen3-235B-A22B. Sources: their model cards and config.json."""

from jax_warp_decode.checkpoints.families.common import PROJECTIONS, read_softmax, sparse_layers
from jax_warp_decode.checkpoints.family import BlockSpec, Family, Storage
from jax_warp_decode.models.settings import Settings


def read(settings: Settings) -> BlockSpec:
    return read_softmax(settings, sparse_layers(settings), renormalize=settings.flag("norm_topk_prob", default=False))


FAMILY = Family(
    "Qwen3-MoE", {"Qwen3MoeForCausalLM": "model.layers.{n}"}, {"qwen3_moe": "Qwen3MoeForCausalLM"}, "mlp", read,
    (Storage.separate("experts.{e}.{name}.weight", PROJECTIONS),))
