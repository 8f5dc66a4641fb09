"""MiniMax-M3: sigmoid scores with a correction bias, clamped SwiGLU, one shared expert, the first layers dense.

The names are those of the published folder, whose language model lies inside a multimodal one: w1 is the gate, w3 the
up projection, w2 the down projection. Source: model card and config.json; defaults are those of transformers 5.17.
"""

from jax_warp_decode.checkpoints.families.common import PROJECTIONS, all_layers, clamped_swiglu, experts
from jax_warp_decode.checkpoints.family import BlockSpec, Family, Storage
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.models.settings import Settings, show
from jax_warp_decode.routers import Router


def read(settings: Settings) -> BlockSpec:
    E, k = experts(settings)
    if (got := settings.text("scoring_func", default="sigmoid")) != "sigmoid":
        raise UnsupportedError(f"scoring_func: got {show(got)}, expected 'sigmoid'")
    layers = all_layers(settings)
    kinds = settings.items("mlp_layer_types", kind=str, default=None)
    sparse = settings.items("moe_layer_freq", kind=int, default=(1,) * len(layers))
    sparse = sparse if kinds is None else tuple(kind == "sparse" for kind in kinds)
    if len(sparse) != len(layers):
        raise ArgumentError(f"moe_layer_freq, mlp_layer_types: got {len(sparse)} entries, expected one for each of "
                            f"{len(layers)} layers")
    return BlockSpec(
        settings.integer("hidden_size"), settings.integer("intermediate_size"), E,
        tuple(n for n in layers if sparse[n]),
        Router(k, "sigmoid", scale=settings.number("routed_scaling_factor", default=2.0)), clamped_swiglu(settings),
        settings.integer("shared_intermediate_size", default=None))


FAMILY = Family(
    "MiniMax-M3",
    {"MiniMaxM3SparseForConditionalGeneration": "language_model.model.layers.{n}",
     "MiniMaxM3SparseForCausalLM": "model.layers.{n}"},
    {"minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration", "minimax_m3": "MiniMaxM3SparseForCausalLM"},
    "block_sparse_moe", read, (Storage.separate("experts.{e}.{name}.weight", ("w1", "w3", "w2")),),
    correction_bias="e_score_correction_bias",
    shared=Storage.separate("shared_experts.{name}.weight", PROJECTIONS, single=True), text_section="text_config")
