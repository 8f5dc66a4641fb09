"""The weights of a decoder as plain arrays, in the order that the decode step reads them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One layer; every matrix has its reduction dimension last.

    Attributes:
      input_norm, post_norm: [H] gains of the norms in front of attention and experts.
      w_qkv: [(N + 2 KVH) D, H] projections to queries, keys and values, in this order.
      q_norm, k_norm: [D] gains of the norms of queries and keys, or None.
      w_o: [H, N D] output projection.
      w_router: [E, H].
      experts: `ExpertWeights` [E, ..], or what `DecodeModel.experts` takes instead.
      b_qkv, b_o, router_bias: [(N + 2 KVH) D], [H] and [E] added to the projections and the router's logits, or None.
      sinks: [N] one more logit in the softmax of every head, which carries no value, or None.
    """

    input_norm: jax.Array
    w_qkv: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    w_o: jax.Array
    post_norm: jax.Array
    w_router: jax.Array
    experts: Any
    b_qkv: jax.Array | None = None
    b_o: jax.Array | None = None
    router_bias: jax.Array | None = None
    sinks: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder: embed [V, H], the layers, norm [H] and head [V, H] (may be the same array as embed)."""

    embed: jax.Array
    layers: tuple[LayerWeights, ...]
    norm: jax.Array
    head: jax.Array

    @classmethod
    def from_model(cls, model: Decoder) -> "DecoderWeights":
        """The weights of a module. Only the three projections of a layer's attention are copied, into one.

        Raises:
          UnsupportedError: a model on a mesh, whose weights a step on one device would gather every time.
        """
        if any(layer.moe.sharding is not None for layer in model.layers):
            raise UnsupportedError(
                "model: got one on a mesh, whose weights a lean step would gather every time; use models.generate, or "
                "DecodeModel(config, experts=functools.partial(moe_sharded, sharding=sharding)) and its own weights")

        def value(param):
            return None if param is None else param.get_value()

        def layer(source) -> LayerWeights:
            a = source.attention
            qkv = a.q_proj, a.k_proj, a.v_proj
            biases = None if a.o_proj.bias is None else jnp.concatenate([value(p.bias) for p in qkv])
            q_gain, k_gain = (None if norm is None else value(norm.scale) for norm in (a.q_norm, a.k_norm))
            return LayerWeights(
                value(source.input_norm.scale), jnp.concatenate([value(p.kernel).T for p in qkv]), q_gain, k_gain,
                value(a.o_proj.kernel).T, value(source.post_norm.scale), value(source.moe.router), source.moe.experts,
                biases, value(a.o_proj.bias), value(source.moe.router_bias), value(a.sinks))

        head = model.embed if model.lm_head is None else model.lm_head
        return cls(value(model.embed.embedding), tuple(map(layer, model.layers)), value(model.norm.scale),
                   value(head.embedding))
