"""Key/value caches of a decoder: preallocated, written in place when donated, never reallocated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers for the positions seen so far, as a pytree.

    Attributes:
      k: [L, B, max_len, KVH, D] keys after normalisation and rotation.
      v: [L, B, max_len, KVH, D] values.
      length: int32 scalar, positions filled so far; the same for every row of the batch.

    Every method returns a new cache. Inside `jit`, donate the cache argument (`donate_argnames`) and the update
    happens in place.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.models import KVCache, Qwen3MoeConfig
      >>> config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
      ...                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
      ...                         num_experts_per_tok=2)
      >>> cache = KVCache.create(config, 1, 16, jnp.bfloat16)
      >>> cache.k.shape, cache.max_len, int(cache.length)
      ((2, 1, 16, 2, 32), 16, 0)
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array

    @classmethod
    def create(cls, config: Any, batch: int, max_len: int, dtype: Any) -> "KVCache":
        """An empty cache.

        Args:
          config: has num_hidden_layers, num_key_value_heads and head_dim, as `Qwen3MoeConfig`.
          batch: B, rows.
          max_len: positions that the cache can hold, prompt and new tokens together.
          dtype: floating dtype of keys and values, usually the model's `dtype`.

        Raises:
          ArgumentError: for a batch below 0 or a max_len below 1.
        """
        if batch < 0 or max_len < 1:
            raise ArgumentError(f"batch, max_len: got {batch}, {max_len}, expected batch >= 0 and max_len >= 1")
        shape = (config.num_hidden_layers, batch, max_len, config.num_key_value_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))

    @property
    def max_len(self) -> int:
        return self.k.shape[2]

    def write(self, layer: int, k: jax.Array, v: jax.Array) -> "KVCache":
        """Stores k, v [B, S, KVH, D] of one layer at positions length ... length + S - 1; length stays."""
        zero = jnp.int32(0)
        start = (jnp.int32(layer), zero, self.length, zero, zero)
        return dataclasses.replace(
            self,
            k=jax.lax.dynamic_update_slice(self.k, k[None].astype(self.k.dtype), start),
            v=jax.lax.dynamic_update_slice(self.v, v[None].astype(self.v.dtype), start))

    def advance(self, tokens: int) -> "KVCache":
        """Counts `tokens` more positions as filled, once all layers have written them."""
        return dataclasses.replace(self, length=self.length + jnp.int32(tokens))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("k", "v", "lengths"), meta_fields=("heads_first",))
@dataclasses.dataclass(frozen=True)
class RaggedCache:
    """Keys and values of rows with lengths of their own, one array per layer, as a pytree.

    Attributes:
      k: per layer [B, max_len, KVH, D] keys after normalisation and rotation, or [B, KVH, max_len, D].
      v: values, likewise.
      lengths: int32 [B], positions filled in each row.
      heads_first: which of the two orders.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.models import Qwen3MoeConfig
      >>> from jax_warp_decode.models.cache import RaggedCache
      >>> config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2,
      ...                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
      ...                         num_experts_per_tok=2)
      >>> cache = RaggedCache.create(config, 3, 16, jnp.bfloat16, heads_first=True)
      >>> len(cache.k), cache.k[0].shape, cache.max_len, cache.lengths.tolist()
      (2, (3, 2, 16, 32), 16, [0, 0, 0])
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    lengths: jax.Array
    heads_first: bool

    @classmethod
    def create(cls, config: Any, batch: int, max_len: int, dtype: Any, heads_first: bool) -> "RaggedCache":
        """An empty cache; arguments as in `KVCache.create`.

        Raises:
          ArgumentError: for a batch or a max_len below 1.
        """
        if batch < 1 or max_len < 1:
            raise ArgumentError(f"batch, max_len: got {batch}, {max_len}, expected at least 1")
        heads = config.num_key_value_heads
        middle = (heads, max_len) if heads_first else (max_len, heads)
        arrays = [jnp.zeros((batch, *middle, config.head_dim), dtype) for _ in range(2 * config.num_hidden_layers)]
        return cls(tuple(arrays[::2]), tuple(arrays[1::2]), jnp.zeros((batch,), jnp.int32), heads_first)

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def max_len(self) -> int:
        return self.k[0].shape[2 if self.heads_first else 1]
