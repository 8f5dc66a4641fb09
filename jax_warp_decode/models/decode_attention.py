"""Attention of one query per row over the cached keys of that row: library kernels in a table.

Beside them there is "fused": the launches of `kernels.attend`, which take norms, rotation and the cache along. Windows
and sinks, for any number of queries, are `attend_masked`.
"""

import dataclasses
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.kernels import attend as kernel


@dataclasses.dataclass(frozen=True)
class Attention:
    """One way to attend.

    Attributes:
      name: key in `ATTENTION`.
      heads_first: whether it reads the cache as [B, KVH, S, D]; else as [B, S, KVH, D].
      attend: (q [B, N, D], k, v, lengths [B]) -> [B, N, D]; row b sees its first lengths[b] positions.
    """

    name: str
    heads_first: bool
    attend: Callable

    def write(self, cache: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
        """The cache of one layer with new [B, KVH, D] stored at positions [B]; in place where it is donated.

        A position beyond the cache stores nothing, or for a single row something at the last position: the caller has
        made that row NaN.
        """
        new = new.astype(cache.dtype)
        if new.shape[0] == 1:  # one slice update is a smaller kernel than a scatter
            new, zero = new[:, :, None] if self.heads_first else new[:, None], jnp.int32(0)
            start = (zero, zero, positions[0], zero) if self.heads_first else (zero, positions[0], zero, zero)
            return jax.lax.dynamic_update_slice(cache, new, start)
        rows = jnp.arange(new.shape[0], dtype=jnp.int32)
        at = cache.at[rows, :, positions] if self.heads_first else cache.at[rows, positions]
        return at.set(new, mode="drop", unique_indices=True)


def _dot_product_attention(implementation):
    def attend(q, k, v, lengths):
        return jax.nn.dot_product_attention(
            q[:, None], k, v, key_value_seq_lengths=lengths, implementation=implementation)[:, 0]

    return attend


def _split_k(q, k, v, lengths, *, splits=None, block=64):
    """JAX's Pallas kernel; every head splits its positions, whose partial results XLA adds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the module says so of itself on import
        from jax.experimental.pallas.ops.gpu import decode_attention

    positions = k.shape[2]
    if splits is None:  # a block per split, as long as all splits of a row fit the GPU a few times
        splits = max(1, min(positions // block, 64))
    y = decode_attention.gqa(q.astype(k.dtype), k.swapaxes(1, 2), v.swapaxes(1, 2), kv_seq_len=lengths,
                             block_k=block, k_splits=splits, num_stages=3)
    return y.astype(q.dtype)


FUSED = "fused"
ATTENTION = {a.name: a for a in (
    Attention("xla", False, _dot_product_attention("xla")),
    Attention("cudnn", False, _dot_product_attention("cudnn")),
    Attention("split_k", True, _split_k),
)}


def resolve(name: str, query_heads: int, key_heads: int, head_dim: int, *, masked: bool = False,
            normed: bool = True) -> str:
    """`FUSED` or a key of `ATTENTION`; "auto" is "fused" on a GPU if its kernels can take the model, else "xla".

    Args:
      name: "auto" or what is wanted.
      query_heads, key_heads, head_dim: N, KVH and D.
      masked: some layer has a sliding window or sinks, which only "xla" knows.
      normed: queries and keys are normalised and have no biases, as "fused" takes for granted.

    Raises:
      ArgumentError: an unknown name.
      UnsupportedError: what was asked for by name cannot take the model.

    Example:
      >>> from jax_warp_decode.models.decode_attention import resolve
      >>> resolve("cudnn", 32, 4, 128)
      'cudnn'
    """
    unmasked = "it knows no sliding windows and no sinks" if masked else ""
    unfused = "" if normed else "it takes normalised queries and keys, without biases"
    unfused = unmasked or unfused or kernel.refusal(query_heads, key_heads, head_dim)
    if name == "auto":
        return FUSED if jax.default_backend() == "gpu" and not unfused else "xla"
    if name not in (FUSED, *ATTENTION):
        raise ArgumentError(f"attention: got {name!r}, expected 'auto' or one of {[FUSED, *ATTENTION]}")
    if refused := {FUSED: unfused, "xla": ""}.get(name, unmasked):
        raise UnsupportedError(f"attention: {name!r} cannot run: {refused}; attention='xla' can")
    return name


def seen_positions(positions: jax.Array, max_len: int, window: int | None) -> jax.Array:
    """[B, S, max_len]: which cached positions the tokens at `positions` [B, S] see, at most the last `window` ones."""
    cached, last = jnp.arange(max_len, dtype=jnp.int32), positions[..., None]
    seen = cached <= last
    return seen if window is None else seen & (cached > last - np.int32(window))


def attend_masked(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Attended values [B, S, N, D] of queries [B, S, N, D], keys and values [B, M, KVH, D], mask [B or 1, S, M].

    With sinks [N], a head's softmax has one more entry, its sink, which carries no value.
    """
    if sinks is None:
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="xla")
    B, S, N, D = q.shape
    grouped = q.reshape(B, S, k.shape[2], -1, D)
    scores = jnp.einsum("bshgd,bmhd->bhgsm", grouped, k, preferred_element_type=jnp.float32) * np.float32(D**-0.5)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
    largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    weights = jnp.exp(scores - largest)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - largest))
    y = jnp.einsum("bhgsm,bmhd->bshgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return y.reshape(B, S, N, D).astype(q.dtype)
