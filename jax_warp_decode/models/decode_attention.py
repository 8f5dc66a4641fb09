"""Attention of one query per row over the cached keys of that row: library kernels in a table.

Beside them there is "fused": the launches of `kernels.attend`, which take norms, rotation and the cache along.
"""

import dataclasses
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

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

    def run(self, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return self.attend(q, k, v, lengths)

    def write(self, cache: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
        """The cache of one layer with new [B, KVH, D] stored at positions [B]; in place where it is donated.

        A position beyond the cache stores nothing, or for a single row something at the last position: the caller has
        made that row NaN.
        """
        new = new.astype(cache.dtype)
        if new.shape[0] == 1:  # one slice update is a smaller kernel than a scatter
            new, zero = new[:, :, None] if self.heads_first else new[:, None], jnp.int32(0)
            at = (zero, zero, positions[0], zero) if self.heads_first else (zero, positions[0], zero, zero)
            return jax.lax.dynamic_update_slice(cache, new, at)
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


def resolve(name: str, query_heads: int, key_heads: int, head_dim: int) -> str:
    """`FUSED` or a key of `ATTENTION`; "auto" is "fused" on a GPU if its kernels can take these heads, else "xla".

    Raises:
      ArgumentError: an unknown name.
      UnsupportedError: "fused", asked for by name, cannot take these heads.

    Example:
      >>> from jax_warp_decode.models.decode_attention import resolve
      >>> resolve("cudnn", 32, 4, 128)
      'cudnn'
    """
    refused = kernel.refusal(query_heads, key_heads, head_dim)
    if name == "auto":
        return FUSED if jax.default_backend() == "gpu" and not refused else "xla"
    if name == FUSED and refused:
        raise UnsupportedError(f"attention: 'fused' cannot run: {refused}; attention='xla' can")
    if name not in (FUSED, *ATTENTION):
        raise ArgumentError(f"attention: got {name!r}, expected 'auto' or one of {[FUSED, *ATTENTION]}")
    return name
