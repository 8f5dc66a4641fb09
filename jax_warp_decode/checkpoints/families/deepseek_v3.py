"""DeepSeek-V3 and R1: sigmoid scores with a correction bias, groups of experts, shared experts, the first layers dense.

Source: DeepSeek-V3 report (arXiv:2412.19437) and the model card's config.json. The extra layer for multi-token
prediction, numbered after the last one, is not part of the decoder.
"""

from jax_warp_decode.checkpoints.families.common import PROJECTIONS, all_layers, expert_activation, experts
from jax_warp_decode.checkpoints.family import BlockSpec, Family, Storage
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.models.settings import MAX_LAYERS, Settings, show
from jax_warp_decode.routers import Router


def read(settings: Settings) -> BlockSpec:
    E, k = experts(settings)
    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (got := settings.text(name, default=known)) != known:
            raise UnsupportedError(f"{name}: got {show(got)}, expected {known!r}")
    router = Router(
        k, "sigmoid", settings.flag("norm_topk_prob"), settings.integer("n_group"), settings.integer("topk_group"),
        "top2", settings.number("routed_scaling_factor"))
    router.check(E)
    dense = settings.integer("first_k_dense_replace", default=0, least=0)
    every = settings.integer("moe_layer_freq", default=1)
    intermediate = settings.integer("moe_intermediate_size")
    shared = settings.integer("n_shared_experts", default=0, least=0)
    layers = all_layers(settings)
    extra = settings.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0, most=MAX_LAYERS)
    return BlockSpec(
        settings.integer("hidden_size"), intermediate, E, tuple(n for n in layers if n >= dense and n % every == 0),
        router, expert_activation(settings), shared * intermediate or None,
        tuple(range(len(layers), len(layers) + extra)))


FAMILY = Family(
    "DeepSeek-V3", {"DeepseekV3ForCausalLM": "model.layers.{n}"}, {"deepseek_v3": "DeepseekV3ForCausalLM"}, "mlp", read,
    (Storage.separate("experts.{e}.{name}.weight", PROJECTIONS),), correction_bias="gate.e_score_correction_bias",
    shared=Storage.separate("shared_experts.{name}.weight", PROJECTIONS, single=True))
