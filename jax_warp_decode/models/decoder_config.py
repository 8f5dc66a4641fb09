"""What a decoder needs to know about a model. The architectures are subclasses, one module each."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jax_warp_decode.activations import Activation
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.models.rope import Yarn, read_rope
from jax_warp_decode.models.settings import (
    MAX_LAYERS,
    MAX_SIZE,
    Settings,
    hidden_activation,
    is_integer,
    is_positive,
    show,
)
from jax_warp_decode.routers import Router

_EXPECTED = {
    int: "an integer of at least 1", float: "a number above 0 which float32 can hold", bool: "true or false",
    str: "a string"}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants that all decoders share; a subclass says what its architecture adds.

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
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope_theta: base of the rotary frequencies.
      max_position_embeddings: positions the model was trained for; information only.
      tie_word_embeddings: whether the head is the embedding matrix.
      attention_bias: whether the four attention projections have a bias.
      hidden_act: activation of the experts, see `hidden_activation`.

    Class attributes:
      ARCHITECTURE, MODEL_TYPE: in config.json.
      SPELLINGS: other names of a field in config.json.
      qk_norm: whether queries and keys of a head are normalised.
      attention_sinks: whether every head has a learned logit that takes part in its softmax and has no value.
      router_bias, expert_bias: whether the router, and the projections of the experts, have a bias.

    Raises:
      ArgumentError: for a size that is not a positive integer or does not fit the others, or an unknown hidden_act.
    """

    ARCHITECTURE: ClassVar[str] = ""
    MODEL_TYPE: ClassVar[str] = ""
    SPELLINGS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    qk_norm: ClassVar[bool] = False
    attention_sinks: ClassVar[bool] = False
    router_bias: ClassVar[bool] = False
    expert_bias: ClassVar[bool] = False

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in _EXPECTED and not _fits(value, field.type):
                raise ArgumentError(f"{field.name}: got {show(value)}, expected {_EXPECTED[field.type]}")
            most = MAX_LAYERS if field.name == "num_hidden_layers" else MAX_SIZE
            if field.type is int and value > most:
                raise ArgumentError(f"{field.name}: got {show(value)}, expected at most {most}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ArgumentError(
                f"num_key_value_heads: got {self.num_key_value_heads}, expected a divisor of num_attention_heads "
                f"{self.num_attention_heads}")
        if self.head_dim % 2:
            raise ArgumentError(f"head_dim: got {self.head_dim}, expected an even number; the rotation works on pairs")
        if self.num_experts_per_tok > self.num_experts:
            raise ArgumentError(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, expected at most num_experts {self.num_experts}")
        hidden_activation(self.hidden_act)

    @property
    def router(self) -> Router:
        """How logits become a choice of experts."""
        raise NotImplementedError

    @property
    def activation(self) -> Activation:
        """What happens between the projections of an expert."""
        return hidden_activation(self.hidden_act)

    @property
    def yarn(self) -> Yarn | None:
        return None

    def window(self, layer: int) -> int | None:
        """How many of the last positions a token of this layer sees, itself included; None is all of them."""
        return None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads the content of a config.json, written by transformers 4 or 5.

        Args:
          config: the parsed JSON object. Keys that do not change inference are ignored.

        Raises:
          ArgumentError: a field is missing, of the wrong type or contradicts another one.
          UnsupportedError: another architecture, or an option that this decoder does not have.
        """
        settings = Settings(config, cls.ARCHITECTURE)
        cls._check_architecture(settings)
        fields = cls._read(settings)
        for field in dataclasses.fields(cls):
            if field.name in fields:
                continue
            missing = object()
            value = settings.get(*cls.SPELLINGS.get(field.name, (field.name,)), default=missing)
            if value is not missing:
                fields[field.name] = float(value) if field.type is float and is_positive(value) else value
            elif field.default is dataclasses.MISSING and field.name != "head_dim":
                raise ArgumentError(f"{field.name}: missing, expected in the configuration of a {cls.ARCHITECTURE}")
        if "head_dim" not in fields:
            hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
            if not (_fits(hidden, int) and _fits(heads, int)) or hidden % heads:
                raise ArgumentError(f"head_dim: missing, and hidden_size {show(hidden)} is no multiple of "
                                    f"num_attention_heads {show(heads)}")
            fields["head_dim"] = hidden // heads
        return cls(**fields)

    @classmethod
    def _read(cls, settings: Settings) -> dict[str, Any]:
        """Fields that are not simply there under their name."""
        return {"rope_theta": read_rope(settings, cls.rope_theta, scaled=False)[0]}

    @classmethod
    def _check_architecture(cls, settings: Settings) -> None:
        architectures, model_type = (settings.get(name, default=None) for name in ("architectures", "model_type"))
        if architectures is not None and architectures != [cls.ARCHITECTURE]:
            raise UnsupportedError(f"architectures: got {show(architectures)}, expected ['{cls.ARCHITECTURE}']")
        if model_type != cls.MODEL_TYPE and not (model_type is None and architectures):
            raise UnsupportedError(f"model_type: got {show(model_type)}, expected '{cls.MODEL_TYPE}'")


def _fits(value: Any, kind: type) -> bool:
    if kind is bool or kind is str:
        return isinstance(value, kind)
    if kind is int:
        return is_integer(value) and value >= 1
    return is_positive(value)
