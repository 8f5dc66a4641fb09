"""The decoder that bench.decode, bench.first_token and bench.accuracy run: Qwen3-30B-A3B's sizes, random weights."""

import dataclasses
import functools
import itertools
import math
import os

import jax
import jax.numpy as jnp

from bench.decode_report import OURS
from bench.peers import STRATEGIES
from jax_warp_decode import moe
from jax_warp_decode.measure import inputs
from jax_warp_decode.models import Qwen3MoeConfig
from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights, LayerWeights
from jax_warp_decode.presets import Preset

MODEL = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1e6,
    max_position_embeddings=262144)
SHARED_LEN = 32768
LIBRARY = "cudnn"
FORMS = ("fused", "split_k", LIBRARY, "xla")  # of the step around the experts, the first that works is used


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      format: of the experts.
      strategy: "auto" or a key of `bench.peers.STRATEGIES`.
      batch, context: rows, and positions that each of them sees.
      attention: see `DecodeModel`; the same for all that are compared.
    """

    format: str
    strategy: str
    batch: int
    context: int
    attention: str

    def __str__(self) -> str:
        return f"{self.format} {self.strategy} {self.attention} B={self.batch} {self.context}"

    @property
    def max_len(self) -> int:
        """Positions that the cache has room for: one program for many contexts, where attention looks at lengths."""
        shared = self.attention == FORMS[0] and self.batch <= 4 and self.context <= SHARED_LEN
        return SHARED_LEN if shared else self.context

    @property
    def program(self) -> tuple:
        """Cases that are equal in this run the same compiled step."""
        return self.format, self.strategy, self.batch, self.max_len, self.attention


def default_cases(attention: str) -> list[Case]:
    """In order of importance within a format; what a format's weights are made for comes together."""
    small, contexts = (1, 2, 4), (1024, 4096, 16384, 32768)
    grid, others = itertools.product, [(1, 1024), (4, 1024), (32, 1024), (2, 1024), (8, 1024), (1, 32768), (4, 32768)]
    return [
        *(Case("mxfp8", OURS, 1, c, attention) for c in contexts),
        *(Case("mxfp8", OURS, b, c, attention) for b, c in grid((2, 4), contexts)),
        *(Case("mxfp8", OURS, b, 1024, attention) for b in (8, 32)),
        Case("mxfp8", OURS, 1, 131072, attention),
        *(Case("mxfp8", OURS, 1, 1024, other) for other in FORMS if other != attention),
        *(Case("mxfp8", "expert_centric_mxfp8", b, c, attention) for b, c in others),
        *(Case("mxfp8", "expert_centric", b, 1024, attention) for b in (1, 4, 32)),
        *(Case("bf16", OURS, b, c, attention) for b, c in grid(small, contexts)),
        *(Case("bf16", OURS, b, 1024, attention) for b in (8, 32)),
        *(Case("bf16", "tokamax_mosaic", b, c, attention) for b, c in grid(small, contexts)),
        *(Case("bf16", "tokamax_mosaic", b, 1024, attention) for b in (8, 32)),
        # With nothing of this package around the experts but the router: a path that has none of it.
        *(Case("bf16", "tokamax_mosaic", b, c, LIBRARY) for b, c in [*grid(small, (1024, 32768)), (4, 16384)]),
        *(Case("bf16", "expert_centric", b, c, attention) for b, c in others),
        *(Case("bf16", "lax_ragged_dot", b, 1024, attention) for b in (1, 4)),
    ]


AS_IT_IS = STRATEGIES["warp_decode"].prepare


def take_memory() -> None:
    """Lets JAX have nearly all of the GPU: weights take 62 GB, caches up to 50. Before its first use."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def layer_function(strategy: str):
    return moe if strategy == OURS else STRATEGIES[strategy].layer


def layout(case: Case):
    """What brings the experts into the layout of the case's strategy."""
    return AS_IT_IS if case.strategy == OURS else STRATEGIES[case.strategy].prepare


def missing(case: Case) -> str:
    """Why the strategy of a case cannot run here, or an empty string."""
    return "" if case.strategy == OURS else STRATEGIES[case.strategy].missing()


@functools.cache
def decode_model(strategy: str, attention: str, layers: int) -> DecodeModel:
    return DecodeModel(dataclasses.replace(MODEL, num_hidden_layers=layers), layer_function(strategy), attention)


def model_of(case: Case, weights: DecoderWeights) -> DecodeModel:
    return decode_model(case.strategy, case.attention, len(weights.layers))


def make_layer(config: Qwen3MoeConfig, number: int, format: str) -> LayerWeights:
    """A layer of random weights, scaled so that every projection keeps the size of its input."""
    c = config
    w_qkv, w_o, w_router = _dense_weights(c, jax.random.key(1000 + number))
    gain, head_gain = (jnp.ones((n,), jnp.bfloat16) for n in (c.hidden_size, c.head_dim))
    preset = Preset("", c.hidden_size, c.moe_intermediate_size, c.num_experts, c.num_experts_per_tok, format)
    experts = inputs.make_experts(jax.random.key(number), preset, format)
    return LayerWeights(gain, w_qkv, head_gain, head_gain, w_o, gain, w_router, experts)


def _matrix(key, n, m):
    return jax.random.normal(key, (n, m), jnp.bfloat16) * jnp.bfloat16(1 / math.sqrt(m))


@functools.partial(jax.jit, static_argnums=0)
def _dense_weights(c: Qwen3MoeConfig, key):
    heads, key_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    keys = jax.random.split(key, 3)
    return (_matrix(keys[0], heads + 2 * key_heads, c.hidden_size), _matrix(keys[1], c.hidden_size, heads),
            _matrix(keys[2], c.num_experts, c.hidden_size))


def make_weights(format: str, layers: int) -> DecoderWeights:
    """Random weights of the whole decoder."""
    V, H = MODEL.vocab_size, MODEL.hidden_size
    embed = jax.jit(lambda key: jax.random.normal(key, (V, H), jnp.bfloat16))(jax.random.key(1))
    head = jax.jit(lambda key: _matrix(key, V, H))(jax.random.key(2))
    found = tuple(make_layer(MODEL, number, format) for number in range(layers))
    return jax.block_until_ready(DecoderWeights(embed, found, jnp.ones((H,), jnp.bfloat16), head))


def prepared(weights: DecoderWeights, prepare) -> DecoderWeights:
    """The same weights with every layer's experts in another layout; one layer at a time, freeing the old one."""
    layers = list(weights.layers)
    for number, layer in enumerate(layers):
        experts = jax.block_until_ready(prepare(layer.experts))
        for array in jax.tree.leaves(layer.experts):
            array.delete()
        layers[number] = dataclasses.replace(layer, experts=experts)
    return dataclasses.replace(weights, layers=tuple(layers))


@functools.partial(jax.jit, static_argnums=1)
def _random(key, like):
    return jax.random.normal(key, like.shape, like.dtype)


def make_cache(model: DecodeModel, case: Case, spent: int):
    """A cache with random content, so many positions filled that `spent` steps reach `context` of them."""
    cache = jax.eval_shape(lambda: model.new_cache(case.batch, case.max_len))

    flat, tree = jax.tree.flatten((cache.k, cache.v))
    like = jax.ShapeDtypeStruct(flat[0].shape, flat[0].dtype)
    k, v = jax.tree.unflatten(tree, [_random(jax.random.key(i), like) for i in range(len(flat))])
    return dataclasses.replace(cache, k=k, v=v, lengths=jnp.full((case.batch,), case.context - spent, jnp.int32))
