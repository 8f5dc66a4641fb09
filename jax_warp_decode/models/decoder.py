"""The decoder: RMSNorm, grouped-query attention with rotation, experts. Its config says what an architecture has."""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_warp_decode.choose import Choice
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.layers.moe import MoE
from jax_warp_decode.models.cache import KVCache
from jax_warp_decode.models.decode_attention import attend_masked, seen_positions
from jax_warp_decode.models.decoder_config import DecoderConfig
from jax_warp_decode.models.rope import rotate, rotation


def _known_ids(tokens: jax.Array | np.ndarray, vocab_size: int) -> jax.Array:
    """int32 token ids of any integers; those outside [0, V) become -1, also where 32 bits or less would hide that."""
    xp = np if isinstance(tokens, np.ndarray) else jnp
    wide = tokens.astype(np.int32) if tokens.dtype.itemsize < 4 else tokens
    known = (wide >= 0) & (wide < vocab_size)
    return jnp.asarray(xp.where(known, wide.astype(np.int32), np.int32(-1)))


class Attention(nnx.Module):
    """Causal grouped-query attention over the KV cache."""

    def __init__(self, config: DecoderConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(
            nnx.Linear, use_bias=config.attention_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        norm = functools.partial(
            nnx.RMSNorm, config.head_dim, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.query_heads = (config.num_attention_heads, config.head_dim)
        self.key_heads = (config.num_key_value_heads, config.head_dim)
        self.q_proj = linear(config.hidden_size, query_size)
        self.k_proj = linear(config.hidden_size, key_size)
        self.v_proj = linear(config.hidden_size, key_size)
        self.o_proj = linear(query_size, config.hidden_size)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        heads = config.num_attention_heads
        self.sinks = nnx.Param(jnp.zeros(heads, param_dtype)) if config.attention_sinks else None

    def __call__(self, x: jax.Array, turn: tuple[jax.Array, jax.Array], mask: jax.Array, cache: KVCache, layer: int):
        """x [B, S, H], cosine and sine [S, D/2], mask [1, S, max_len] -> ([B, S, H], cache with this layer's keys)."""
        rows = x.shape[:2]
        q, k = self.q_proj(x).reshape(*rows, *self.query_heads), self.k_proj(x).reshape(*rows, *self.key_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, turn), rotate(k, turn)
        cache = cache.write(layer, k, self.v_proj(x).reshape(*rows, *self.key_heads))
        sinks = None if self.sinks is None else self.sinks.get_value()
        y = attend_masked(q, cache.k[layer].astype(q.dtype), cache.v[layer].astype(q.dtype), mask, sinks)
        return self.o_proj(y.reshape(*rows, math.prod(self.query_heads))), cache


class DecoderLayer(nnx.Module):
    """Attention and experts, each on a normalised copy of the residual stream."""

    def __init__(self, config: DecoderConfig, *, strategy: str, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        norm = functools.partial(
            nnx.RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=param_dtype,
            rngs=rngs)
        self.input_norm = norm()
        self.attention = Attention(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.post_norm = norm()
        self.moe = MoE(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok,
            router=config.router, router_bias=config.router_bias, use_bias=config.expert_bias,
            activation=config.activation, strategy=strategy, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array, turn: tuple[jax.Array, jax.Array], mask: jax.Array, cache: KVCache, layer: int):
        with jax.named_scope(f"layer_{layer}"):
            with jax.named_scope("norm"):
                h = self.input_norm(x)
            with jax.named_scope("attention"):
                attended, cache = self.attention(h, turn, mask, cache, layer)
                x = x + attended
            with jax.named_scope("norm"):
                h = self.post_norm(x)
            with jax.named_scope("experts"):
                return x + self.moe(h), cache


class Decoder(nnx.Module):
    """A language model (Qwen3-MoE, Mixtral, gpt-oss) that reads tokens, keeps a KV cache and returns logits.

    The same call serves prefill (many tokens, empty cache) and decode (one token, filled cache). Norms, rotations,
    router and softmax are float32, the residual stream is `dtype`. With dtype float32 every matrix product is true
    float32, also on GPUs whose default is TF32.

    Args:
      config: a `DecoderConfig` of an architecture: `Qwen3MoeConfig`, `MixtralConfig` or `GptOssConfig`.
      strategy: how the experts run, see `MoE`.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters made here; `checkpoints.load_model` puts those of a folder in.
      rngs: the `params` stream draws the parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_warp_decode.models import Decoder, KVCache, Qwen3MoeConfig
      >>> config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
      ...                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
      ...                         num_experts_per_tok=2)
      >>> model = Decoder(config, strategy="reference", rngs=nnx.Rngs(0))
      >>> cache = KVCache.create(config, batch=1, max_len=16, dtype=model.dtype)
      >>> logits, cache = model(jnp.array([[72, 101, 108]]), cache)   # prefill
      >>> logits, cache = model(jnp.array([[108]]), cache)            # one decode step
      >>> logits.shape, int(cache.length)
      ((1, 1, 256), 4)
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        strategy: str = "auto",
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.bfloat16,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        options = dict(dtype=self.dtype, param_dtype=param_dtype, rngs=rngs)
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, **options)
        self.layers = nnx.List(
            DecoderLayer(config, strategy=strategy, **options) for _ in range(config.num_hidden_layers))
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, **options)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nnx.Embed(config.vocab_size, config.hidden_size, **options)

    @property
    def strategy(self) -> str:
        return self.layers[0].moe.strategy

    def set_strategy(self, strategy: str) -> None:
        """Selects "auto" or one strategy by name in every layer."""
        for layer in self.layers:
            layer.moe.set_strategy(strategy)

    def choice(self, tokens: int) -> Choice:
        """The strategy that every layer takes, and why, for a call with B * S = `tokens` tokens."""
        return self.layers[0].moe.choice(tokens)

    def hidden_states(self, tokens: jax.Array, cache: KVCache | None = None) -> tuple[jax.Array, KVCache]:
        """The normalised states [B, S, H] in front of the head; arguments as in `__call__`."""
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ArgumentError(f"tokens: got {tokens.dtype}{list(tokens.shape)}, expected integers [B, S]")
        B, S = tokens.shape
        cache = KVCache.create(self.config, B, max(S, 1), self.dtype) if cache is None else cache
        config = self.config
        expected = (config.num_hidden_layers, B, cache.max_len, config.num_key_value_heads, config.head_dim)
        if cache.k.shape != expected:
            raise ArgumentError(
                f"cache: got {cache.k.shape}, expected {expected} = [L, B, max_len, KVH, D] for tokens {tokens.shape}")
        filled = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
        if filled + S > cache.max_len:
            raise ArgumentError(
                f"cache: got room for {cache.max_len} positions of which {filled} are filled, expected room for {S} "
                f"more; create it with a larger max_len")

        windows = [config.window(number) for number in range(config.num_hidden_layers)]
        with jax.named_scope("embed"):
            positions = cache.length + jnp.arange(S, dtype=jnp.int32)
            turn = rotation(positions, config.rope_theta, config.head_dim, config.yarn)
            masks = {window: seen_positions(positions[None], cache.max_len, window) for window in windows}
            x = self.embed.embedding.get_value().at[_known_ids(tokens, config.vocab_size)].get(
                mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(self.dtype)
            # Inside jit the length is unknown: NaN instead of silently overwriting the last positions.
            x = jnp.where(cache.length + S <= cache.max_len, x, jnp.asarray(jnp.nan, x.dtype))
        with self._precision():
            for number, layer in enumerate(self.layers):
                x, cache = layer(x, turn, masks[windows[number]], cache, number)
        with jax.named_scope("norm"):
            return self.norm(x), cache.advance(S)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of the states [..., H] that `hidden_states` returned, or of a slice of them."""
        head = self.embed if self.lm_head is None else self.lm_head
        with self._precision(), jax.named_scope("head"):
            return jnp.einsum("...h,vh->...v", hidden, head.embedding.get_value().astype(self.dtype),
                              preferred_element_type=jnp.float32)

    def __call__(self, tokens: jax.Array, cache: KVCache | None = None) -> tuple[jax.Array, KVCache]:
        """Reads tokens behind the cached ones and predicts the token after each of them.

        Args:
          tokens: [B, S] integers, B and S may be 0. An id outside [0, V) makes the logits of its row NaN.
          cache: a `KVCache` for B rows with room for S more positions; None takes a fresh one of length S.

        Returns:
          logits [B, S, V] float32, and the cache with S more positions.

        Raises:
          ArgumentError: tokens or cache have the wrong shape or dtype, or the cache is full. Where only the device
            knows that it is full (its length is traced), the logits are NaN.
        """
        hidden, cache = self.hidden_states(tokens, cache)
        return self.logits(hidden), cache

    def _precision(self) -> contextlib.AbstractContextManager:
        float32 = self.dtype == jnp.dtype(jnp.float32)
        return jax.default_matmul_precision("highest") if float32 else contextlib.nullcontext()
