"""Mixtral: w1 is the gate, w3 the up projection, w2 the down projection. Source: model card and config.json."""

from jax_warp_decode.checkpoints.families.common import all_layers, expert_activation, experts
from jax_warp_decode.checkpoints.family import BlockSpec, Family, Storage
from jax_warp_decode.models.settings import Settings
from jax_warp_decode.routers import Router


def read(settings: Settings) -> BlockSpec:
    E, k = experts(settings)
    return BlockSpec(settings.integer("hidden_size"), settings.integer("intermediate_size"), E, all_layers(settings),
                     Router(k, "topk_softmax"), expert_activation(settings))


FAMILY = Family(
    "Mixtral", {"MixtralForCausalLM": "model.layers.{n}"}, {"mixtral": "MixtralForCausalLM"}, "block_sparse_moe", read,
    (Storage.separate("experts.{e}.{name}.weight", ("w1", "w3", "w2")),))
