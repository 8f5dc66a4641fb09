"""The shape of a Qwen3-MoE decoder, and its translation from and to a Hugging Face config.json."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from jax_warp_decode.activations import get_activation
from jax_warp_decode.errors import ArgumentError, UnsupportedError

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig:
    """Sizes and constants of a Qwen3-MoE decoder; fields, units and defaults as in transformers' `Qwen3MoeConfig`.

    Attributes:
      vocab_size: V.
      hidden_size: H.
      moe_intermediate_size: I of every expert.
      num_hidden_layers: L, all of them mixture-of-experts layers.
      num_attention_heads: query heads.
      num_key_value_heads: KVH, divides num_attention_heads.
      head_dim: D, even.
      num_experts: E.
      num_experts_per_tok: K, at most E.
      norm_topk_prob: whether the K routing weights are divided by their sum.
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope_theta: base of the rotary frequencies.
      max_position_embeddings: positions the model was trained for; information only.
      tie_word_embeddings: whether the head is the embedding matrix.
      attention_bias: whether the four attention projections have a bias.
      hidden_act: activation of the experts, a key of `ACTIVATIONS`.

    Raises:
      ArgumentError: for a size that is not a positive integer or does not fit the others, or an unknown hidden_act.

    Source: Qwen3 Technical Report, arXiv:2505.09388, and the model cards of Qwen3-30B-A3B and Qwen3-235B-A22B.

    Example:
      >>> from jax_warp_decode.models import Qwen3MoeConfig
      >>> config = Qwen3MoeConfig(vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48,
      ...                         num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
      ...                         num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1e6)
      >>> Qwen3MoeConfig.from_hf(config.to_hf()) == config
      True
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"

    def __post_init__(self):
        kinds = {
            int: "an integer of at least 1", float: "a finite number above 0", bool: "true or false", str: "a string"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _fits(value, field.type):
                raise ArgumentError(f"{field.name}: got {value!r}, expected {kinds[field.type]}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ArgumentError(
                f"num_key_value_heads: got {self.num_key_value_heads}, expected a divisor of num_attention_heads "
                f"{self.num_attention_heads}")
        if self.head_dim % 2:
            raise ArgumentError(f"head_dim: got {self.head_dim}, expected an even number; the rotation works on pairs")
        if self.num_experts_per_tok > self.num_experts:
            raise ArgumentError(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, expected at most num_experts {self.num_experts}")
        try:
            get_activation(self.hidden_act)
        except ArgumentError as error:
            raise ArgumentError(f"hidden_act, as {error}") from None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen3MoeConfig":
        """Reads the content of a config.json, written by transformers 4 or 5.

        Args:
          config: the parsed JSON object. Keys that do not change inference are ignored.

        Raises:
          ArgumentError: a field is missing, of the wrong type or contradicts another one.
          UnsupportedError: another architecture, or an option that this decoder does not have: scaled rotary
            embeddings, sliding-window attention, dense layers between the MoE layers.
        """
        _check_architecture(config)
        _check_options(config)
        fields = {"rope_theta": _rope_theta(config)}
        for field in dataclasses.fields(cls):
            if field.name == "rope_theta":
                continue
            # transformers 5 writes num_local_experts
            names = ("num_experts", "num_local_experts") if field.name == "num_experts" else (field.name,)
            value = _either(config, *names)
            if value is not _MISSING:
                fields[field.name] = float(value) if field.type is float and _fits(value, float) else value
            elif field.default is dataclasses.MISSING and field.name != "head_dim":
                raise ArgumentError(f"{field.name}: missing, expected in the configuration of a {ARCHITECTURE}")
        if "head_dim" not in fields:
            hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
            if not (_fits(hidden, int) and _fits(heads, int)) or hidden % heads:
                raise ArgumentError(
                    f"head_dim: missing, and hidden_size {hidden!r} is no multiple of num_attention_heads {heads!r}")
            fields["head_dim"] = hidden // heads
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that transformers 4 and 5 read back as this model."""
        return {
            "architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, **dataclasses.asdict(self),
            "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_scaling": None,
            "sliding_window": None, "use_sliding_window": False}


def _fits(value: Any, kind: type) -> bool:
    if kind is bool or kind is str:
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if kind is int:
        return isinstance(value, int) and value >= 1
    return 0 < value <= sys.float_info.max  # an integer in JSON may be larger than any float


def _either(config: Mapping[str, Any], *names: str) -> Any:
    """The value of whichever spelling is there; both may be, if they agree."""
    found = {name: config[name] for name in names if config.get(name) is not None}
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        raise ArgumentError(f"{', '.join(found)}: got {values}, expected one value; remove the wrong one")
    return values[0] if values else _MISSING


def _check_architecture(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURE]:
        raise UnsupportedError(f"architectures: got {architectures!r}, expected ['{ARCHITECTURE}']")
    if config.get("model_type", MODEL_TYPE) != MODEL_TYPE or (architectures is None and "model_type" not in config):
        raise UnsupportedError(f"model_type: got {config.get('model_type')!r}, expected '{MODEL_TYPE}'")


def _check_options(config: Mapping[str, Any]) -> None:
    if config.get("use_sliding_window"):
        raise UnsupportedError("use_sliding_window: got true, expected false; only full attention is implemented")
    if config.get("mlp_only_layers"):
        raise UnsupportedError(
            f"mlp_only_layers: got {config['mlp_only_layers']!r}, expected []; every layer must have experts")
    if config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedError(
            f"decoder_sparse_step: got {config['decoder_sparse_step']!r}, expected 1; every layer must have experts")


def _rope_theta(config: Mapping[str, Any]) -> Any:
    """`rope_theta` beside `rope_scaling` (transformers 4), or both inside `rope_parameters` (transformers 5)."""
    bases = {}
    if config.get("rope_theta") is not None:
        bases["rope_theta"] = config["rope_theta"]
    for name in ("rope_parameters", "rope_scaling"):
        options = config.get(name)
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise ArgumentError(f"{name}: got {options!r}, expected an object or null")
        kind = _either(options, "rope_type", "type")
        if kind not in (_MISSING, "default"):
            raise UnsupportedError(f"{name}: got rope_type {kind!r}, expected 'default'; rotary scaling is not there")
        if unknown := sorted(set(options) - {"rope_type", "type", "rope_theta"}):
            raise UnsupportedError(f"{name}: got {unknown}, expected only rope_type 'default' and rope_theta")
        if "rope_theta" in options:
            bases[f"{name}.rope_theta"] = options["rope_theta"]
    theta = _either(bases, *bases)
    theta = Qwen3MoeConfig.rope_theta if theta is _MISSING else theta
    return float(theta) if _fits(theta, float) else theta
