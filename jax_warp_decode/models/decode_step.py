"""A lean decode step of any of our decoders: plain arrays in, logits and the cache out, nothing but the arithmetic.

`Decoder` is the module to train, load and save; this is the form to serve it in. Rows have lengths of their own
("ragged"), so prompts of different lengths decode together. Every layer is the same jitted function, so that L layers
trace and lower once, and XLA puts the whole step into one CUDA graph. Donate the cache: it is then written in place.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.kernels import dense_rows
from jax_warp_decode.kernels.attend import attend as fused_attention
from jax_warp_decode.kernels.rms_norm import rms_norm
from jax_warp_decode.models.cache import RaggedCache
from jax_warp_decode.models.decode_attention import ATTENTION, FUSED, attend_masked, resolve, seen_positions
from jax_warp_decode.models.decode_weights import DecoderWeights, LayerWeights
from jax_warp_decode.models.decoder import Decoder
from jax_warp_decode.models.decoder_config import DecoderConfig
from jax_warp_decode.models.rope import rotate, rotation
from jax_warp_decode.moe import moe
from jax_warp_decode.route_tokens import norm_and_route, route_tokens
from jax_warp_decode.routing import Routing


@dataclasses.dataclass(frozen=True)
class DecodeModel:
    """What is static about a step: sizes, and how experts and attention run. Hashable, a key of the jit cache.

    Attributes:
      config: sizes of the decoder.
      experts: (x [T, H], routing, experts) -> y [T, H]; `moe` unless something is compared with it.
      attention: "auto", "fused", or a name in `decode_attention.ATTENTION`. "fused" goes with kernels of this package
        for everything around it, too: projections, norms, rotation and cache in five launches per layer, six
        for several rows. Sliding windows and sinks are XLA's.
      dtype: of the residual stream and the matrix products.
      interpret: run the kernels of "fused" on the CPU, for tests.
    """

    config: DecoderConfig
    experts: Callable = moe
    attention: str = "auto"
    dtype: Any = jnp.bfloat16
    interpret: bool = False

    @property
    def resolved_attention(self) -> str:
        """What "auto" stands for here."""
        c = self.config
        masked = c.attention_sinks or any(c.window(n) is not None for n in range(c.num_hidden_layers))
        return resolve(self.attention, c.num_attention_heads, c.num_key_value_heads, c.head_dim, masked=masked,
                       normed=c.qk_norm and not c.attention_bias)

    @classmethod
    def of(cls, model: Decoder) -> "DecodeModel":
        """The step of a module, with its strategy and activation."""
        options = dict(strategy=model.strategy, activation=model.config.activation)
        return cls(model.config, MoeOptions(tuple(options.items())), dtype=model.dtype)

    def new_cache(self, batch: int, max_len: int) -> RaggedCache:
        """An empty cache for `batch` rows of up to `max_len` positions, in the order that the attention reads."""
        name = self.resolved_attention
        heads_first = name == FUSED or ATTENTION[name].heads_first
        return RaggedCache.create(self.config, batch, max_len, self.dtype, heads_first)


@dataclasses.dataclass(frozen=True)
class MoeOptions:
    """`moe` with options; unlike a `functools.partial`, equal ones are equal."""

    options: tuple

    def __call__(self, x, routing, experts):
        return moe(x, routing, experts, **dict(self.options))


def decode_step(
    model: DecodeModel, weights: DecoderWeights, cache: RaggedCache, tokens: jax.Array
) -> tuple[jax.Array, RaggedCache]:
    """Reads one token per row and predicts the next.

    Args:
      model: static.
      weights: of all layers.
      cache: keys and values of the positions before; row b has `cache.lengths[b]` of them.
      tokens: int32 [B], token b is written at position `cache.lengths[b]`.

    Returns:
      logits [B, V] float32, and the cache with every row one longer. The logits of a row are NaN if its token is
      outside the vocabulary or its cache is full.

    Raises:
      ArgumentError: tokens of the wrong shape or dtype, or a cache for another number of rows.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_warp_decode.models import Qwen3Moe, Qwen3MoeConfig
      >>> from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights, decode_step
      >>> config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
      ...                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
      ...                         num_experts_per_tok=2)
      >>> module = Qwen3Moe(config, strategy="reference", rngs=nnx.Rngs(0))
      >>> model, weights = DecodeModel.of(module), DecoderWeights.from_model(module)
      >>> cache = model.new_cache(batch=1, max_len=16)
      >>> step = jax.jit(decode_step, static_argnums=0, donate_argnums=2)
      >>> logits, cache = step(model, weights, cache, jnp.array([72], jnp.int32))
      >>> logits.shape, cache.lengths.tolist()
      ((1, 256), [1])
    """
    logits, cache, _ = decode_step_with_routing(model, weights, cache, tokens)
    return logits, cache


def decode_step_with_routing(
    model: DecodeModel, weights: DecoderWeights, cache: RaggedCache, tokens: jax.Array
) -> tuple[jax.Array, RaggedCache, jax.Array]:
    """`decode_step`, and the experts that it used: ids int32 [L, B, K]."""
    _check(tokens, cache, 1)
    attention = model.resolved_attention
    with jax.named_scope("embed"):
        x = _embed(model, weights, tokens, cache.lengths < cache.max_len)
        turn = turn_of(model.config, cache.lengths)
        delta = None
    ks, vs, ids = [], [], []
    for number, (layer, k, v) in enumerate(zip(weights.layers, cache.k, cache.v, strict=True)):
        state = turn, cache.lengths, k, v
        if attention == FUSED:
            x, delta, k, v, chosen = _fused_layer(model, layer, x, delta, *state)
        else:
            window = model.config.window(number)
            x, k, v, chosen = _decode_layer(ATTENTION[attention], window, model, layer, x, *state)
        ks.append(k)
        vs.append(v)
        ids.append(chosen)
    with jax.named_scope("attention"):
        cache = RaggedCache(tuple(ks), tuple(vs), cache.lengths + 1, cache.heads_first)
    with jax.named_scope("head"):
        if attention == FUSED:
            logits = _project(model, _terms(x, delta), weights.head, gain=weights.norm, out_dtype=jnp.float32,
                              name="head_dense_rows")
        else:
            logits = _logits(model, weights, x)
    return logits, cache, jnp.stack(ids)


def prefill(
    model: DecodeModel, weights: DecoderWeights, cache: RaggedCache, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, RaggedCache]:
    """Reads whole prompts of different lengths into an empty cache.

    Args:
      model, weights: as in `decode_step`.
      cache: an empty one; what it holds is overwritten.
      tokens: int32 [B, S], row b has lengths[b] tokens and then any padding. S at most `cache.max_len`.
      lengths: int32 [B], from 1 to S.

    Returns:
      logits [B, V] float32 after the last token of every prompt, and the cache with `lengths` positions filled. Padding
      reaches no expert and nothing reads it.
    """
    _check(tokens, cache, 2)
    B, S = tokens.shape
    if S > cache.max_len:
        raise ArgumentError(f"tokens: got {S} per row, expected at most {cache.max_len}, the cache's max_len")
    with jax.named_scope("embed"):
        x = _embed(model, weights, tokens.reshape(-1), jnp.broadcast_to(jnp.bool_(True), (B * S,)))
        turn = turn_of(model.config, jnp.tile(jnp.arange(S, dtype=jnp.int32), B))
        real = (jnp.arange(S, dtype=jnp.int32) < lengths[:, None]).reshape(-1)
    ks, vs = [], []
    for number, (layer, k, v) in enumerate(zip(weights.layers, cache.k, cache.v, strict=True)):
        x, k, v = _prefill_layer(
            model, model.config.window(number), cache.heads_first, layer, x, turn, real, k, v)
        ks.append(k)
        vs.append(v)
    with jax.named_scope("head"):
        logits = _logits(model, weights, x.reshape(B, S, -1)[jnp.arange(B), lengths - 1])
    return logits, RaggedCache(tuple(ks), tuple(vs), lengths, cache.heads_first)


# -------------------------------------------------------------------------------------------------------- one layer


@functools.partial(jax.jit, static_argnums=0)
def _fused_layer(model, layer, x, delta, turn, lengths, k_cache, v_cache):
    """A layer on the residual stream x + delta: who reads it adds the two, so that no launch is spent on the sum.

    delta is None for the first layer.
    """
    config, T = model.config, x.shape[0]
    with jax.named_scope("attention"):
        with jax.named_scope("qkv"):
            heads = _project(model, _terms(x, delta), layer.w_qkv, gain=layer.input_norm)
        with jax.named_scope("attend"):
            y, k, v = fused_attention(
                heads.reshape(T, -1, config.head_dim), layer.q_norm, layer.k_norm, turn, k_cache, v_cache, lengths,
                eps=config.rms_norm_eps, interpret=model.interpret)
        with jax.named_scope("output"):
            x = _project(model, (y.reshape(T, -1),), layer.w_o, residuals=_terms(x, delta))
    h, routing = norm_and_route(x, layer.post_norm, layer.w_router, config.router, eps=config.rms_norm_eps,
                                bias=layer.router_bias, interpret=model.interpret)
    return x, _experts(model, layer, h, routing), k, v, routing.ids


def _terms(x, delta) -> tuple[jax.Array, ...]:
    return (x,) if delta is None else (x, delta)


def _project(model, xs, w, *, gain=None, residuals=(), out_dtype=None, name="dense_rows"):
    """`dense_rows`, or the same through XLA for sizes that it does not take."""
    (T, M), N = xs[0].shape, w.shape[0]
    if T > 1 and gain is not None:  # every warp would norm every token: a launch of its own is cheaper
        with jax.named_scope("norm"):
            xs, gain = (rms_norm(xs, gain, eps=model.config.rms_norm_eps, interpret=model.interpret),), None
    if not dense_rows.refusal(T, N, M, w.dtype) and w.dtype == xs[0].dtype:
        return dense_rows.dense_rows(xs, w, gain=gain, eps=model.config.rms_norm_eps, residuals=residuals,
                                     out_dtype=out_dtype, name=name, interpret=model.interpret)
    x = sum(a.astype(jnp.float32) for a in xs).astype(xs[0].dtype)
    y = _dense(x if gain is None else _norm(model.config, x, gain), w, jnp.float32)
    return sum((a.astype(jnp.float32) for a in residuals), y).astype(out_dtype or x.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode_layer(attention, window, model, layer, x, turn, lengths, k_cache, v_cache):
    def attend(q, k, v):
        k_new = attention.write(k_cache, lengths, k)
        v_new = attention.write(v_cache, lengths, v)
        if window is None and layer.sinks is None:
            y = attention.attend(q, k_new, v_new, lengths + 1)
        else:  # `resolve` lets no other attention through than "xla", which reads the cache in this order
            seen = seen_positions(lengths[:, None], k_new.shape[1], window)
            y = attend_masked(q[:, None], k_new, v_new, seen, layer.sinks)[:, 0]
        return y, (k_new, v_new)

    x, (k, v), ids = decoder_layer(model, layer, x, turn, attend)
    return x, k, v, ids


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill_layer(model, window, heads_first, layer, x, turn, real, k_cache, v_cache):
    B, S = k_cache.shape[0], x.shape[0] // k_cache.shape[0]

    def attend(q, k, v):
        q, k, v = (a.reshape(B, S, *a.shape[1:]) for a in (q, k, v))
        if layer.sinks is None:
            # cuDNN's does not write the S x S logits to memory.
            library = "cudnn" if jax.default_backend() == "gpu" and model.dtype != jnp.float32 else "xla"
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=library,
                                             local_window_size=None if window is None else (window - 1, 0))
        else:
            seen = seen_positions(jnp.arange(S, dtype=jnp.int32)[None], S, window)
            y = attend_masked(q, k, v, seen, layer.sinks)
        if heads_first:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        write = functools.partial(jax.lax.dynamic_update_slice, start_indices=(0, 0, 0, 0))
        return y.reshape(B * S, *y.shape[2:]), (write(k_cache, k.astype(k_cache.dtype)),
                                                write(v_cache, v.astype(v_cache.dtype)))

    x, (k, v), _ = decoder_layer(model, layer, x, turn, attend, real)
    return x, k, v


def decoder_layer(model: DecodeModel, layer: LayerWeights, x: jax.Array, turn: tuple, attend: Callable, real=None):
    """One layer on T tokens, in any XLA backend.

    Args:
      x: [T, H] residual stream.
      turn: from `turn_of`.
      attend: (q [T, N, D], k [T, KVH, D], v [T, KVH, D]) -> (attended values [T, N, D], anything).
      real: bool [T], tokens that are no padding; None for all.

    Returns:
      x [T, H], what else `attend` returned, and ids [T, K].
    """
    config, T = model.config, x.shape[0]
    N, KVH, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    with jax.named_scope("norm"):
        h = _norm(config, x, layer.input_norm)
    with jax.named_scope("attention"):
        with jax.named_scope("qkv"):
            heads = _dense(h, layer.w_qkv, bias=layer.b_qkv).reshape(T, N + 2 * KVH, D)
        with jax.named_scope("rotate"):
            qk = heads[:, :N + KVH]
            if layer.q_norm is not None and layer.k_norm is not None:
                gains = jnp.where(jnp.arange(N + KVH)[:, None] < N, layer.q_norm, layer.k_norm)
                qk = _norm(config, qk, gains)
            qk = rotate(qk, turn)
        with jax.named_scope("attend"):
            y, state = attend(qk[:, :N], qk[:, N:], heads[:, N + KVH:])
        with jax.named_scope("output"):
            x = x + _dense(y.reshape(T, N * D), layer.w_o, bias=layer.b_o)
    with jax.named_scope("norm"):
        h = _norm(config, x, layer.post_norm)
    routing = route_tokens(h, layer.w_router, config.router, bias=layer.router_bias)
    if real is not None:  # padding goes to no expert
        with jax.named_scope("router"):
            routing = Routing(jnp.where(real[:, None], routing.ids, jnp.int32(-1)), routing.weights)
    y = _experts(model, layer, h, routing)
    with jax.named_scope("norm"):  # where XLA puts this sum: into the next norm
        return x + y, state, routing.ids


def _experts(model: DecodeModel, layer: LayerWeights, h: jax.Array, routing: Routing) -> jax.Array:
    with jax.named_scope("experts"):
        return model.experts(h, routing, layer.experts)


def _norm(config: DecoderConfig, x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMSNorm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(config.rms_norm_eps))
    return (wide * scale * gain.astype(jnp.float32)).astype(x.dtype)


def _dense(x: jax.Array, w: jax.Array, out_dtype=None, bias: jax.Array | None = None) -> jax.Array:
    """x [T, M] times w [N, M] transposed plus bias [N], summed in float32; with float32 operands truly so."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("tm,nm->tn", x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(out_dtype or x.dtype)


def turn_of(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, D/2] of the rotary angles at positions [T]."""
    return rotation(positions, config.rope_theta, config.head_dim, config.yarn)


def _embed(model: DecodeModel, weights: DecoderWeights, tokens: jax.Array, fits: jax.Array) -> jax.Array:
    """x [T, H]; NaN for a token outside the vocabulary or one that does not fit."""
    x = weights.embed.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return jnp.where(fits[:, None], x, jnp.asarray(jnp.nan, x.dtype)).astype(model.dtype)


def _logits(model: DecodeModel, weights: DecoderWeights, x: jax.Array) -> jax.Array:
    return _dense(_norm(model.config, x, weights.norm), weights.head, jnp.float32)


def _check(tokens, cache: RaggedCache, ndim: int) -> None:
    if tokens.ndim != ndim or tokens.dtype != jnp.int32 or tokens.shape[0] != cache.batch:
        expected = "[B]" if ndim == 1 else "[B, S]"
        raise ArgumentError(f"tokens: got {tokens.dtype}{list(tokens.shape)}, expected int32 {expected} with "
                            f"B = {cache.batch}, the rows of the cache")
