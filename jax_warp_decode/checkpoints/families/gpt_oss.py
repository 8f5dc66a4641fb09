"""gpt-oss: rows of gate and up alternate, for weights, biases and scales alike; biases everywhere, clamped SwiGLU.

MXFP4 folders have [E, 2 I, H / 32, 16] blocks, the reduction dimension last; bfloat16 folders have the transposed
[E, H, 2 I]. Sources: model card of gpt-oss-20b and its reference implementation.
"""

from jax_warp_decode.checkpoints.families.common import PROJECTIONS, all_layers, clamped_swiglu, experts
from jax_warp_decode.checkpoints.family import DENSE, BlockSpec, Family, Storage, Tensor
from jax_warp_decode.models.settings import Settings
from jax_warp_decode.routers import Router

_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_BIASES = Tensor(f"{_GATE_UP}_bias", "even"), Tensor(f"{_GATE_UP}_bias", "odd"), Tensor(f"{_DOWN}_bias")
_BLOCKS = Storage(Tensor(_GATE_UP, "even"), Tensor(_GATE_UP, "odd"), Tensor(_DOWN), ("mxfp4",), _BIASES)
_TRANSPOSED = Storage(Tensor(_GATE_UP, "even", True), Tensor(_GATE_UP, "odd", True), Tensor(_DOWN, "", True), (DENSE,),
                      _BIASES)
# Published nowhere: what `jax-warp-decode convert` writes.
_SEPARATE = Storage.separate("experts.{e}.{name}.weight", PROJECTIONS)


def read(settings: Settings) -> BlockSpec:
    E, k = experts(settings)
    return BlockSpec(settings.integer("hidden_size"), settings.integer("intermediate_size"), E, all_layers(settings),
                     Router(k, "topk_softmax"), clamped_swiglu(settings))


FAMILY = Family(
    "gpt-oss", {"GptOssForCausalLM": "model.layers.{n}"}, {"gpt_oss": "GptOssForCausalLM"}, "mlp", read,
    (_BLOCKS, _TRANSPOSED, Storage(_SEPARATE.gate, _SEPARATE.up, _SEPARATE.down, ("mxfp8",), _BIASES)),
    router="router.weight", router_bias="router.bias")
