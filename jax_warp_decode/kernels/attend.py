"""attend: attention of one decode step, from projected heads to attended values, in two launches.

The first normalises and rotates queries and the new key, stores the new key and value in the cache, and attends: the
cached positions of a row are split evenly over programs, whatever the length of the cache, and each writes a partial
result with its largest logit and its sum ("split-K", as in FlashDecoding). The second adds the parts. Every program of
a split repeats the few operations on its queries: cheaper than a launch.

Grids: (row, key head, split), then (row, query head).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_warp_decode.errors import UnsupportedError

PROGRAMS = 256  # in all, about two per multiprocessor
MAX_SPLITS = 64
QUERIES = 16  # least rows of a tensor-core product; those that are no query are masked
NEVER = -1e30  # logit of a position that does not exist; finite, so that differences are


def _normalised(halves, gains, eps: float):
    """RMSNorm over both halves of the last axis, in float32."""
    wide = [half.astype(jnp.float32) for half in halves]
    size = 2 * wide[0].shape[-1]
    total = sum(jnp.sum(half * half, axis=-1, keepdims=True) for half in wide)
    scale = lax.rsqrt(total * np.float32(1 / size) + np.float32(eps))
    return [half * scale * gain.astype(jnp.float32)[None] for half, gain in zip(wide, gains, strict=True)]


def _rotated(halves, cos, sin, dtype):
    first, second = halves
    return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)


def _partial_kernel(heads_ref, q_gain_ref, k_gain_ref, cos_ref, sin_ref, lengths_ref, k_ref, v_ref,
                    out_ref, top_ref, sum_ref, k_out_ref, v_out_ref, *, group, block, splits, eps):
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_heads, positions, D = k_ref.shape[1:]
    N, half = group * key_heads, D // 2
    lower, upper = pl.ds(0, half), pl.ds(half, half)
    dtype = k_ref.dtype
    cos, sin = cos_ref[row, :][None], sin_ref[row, :][None]
    real = (jnp.arange(QUERIES, dtype=jnp.int32) < group)[:, None]

    queries = pl.ds(head * group, QUERIES)
    q = [plgpu.load(heads_ref.at[row, queries, part], mask=real, other=0.0) for part in (lower, upper)]
    q = _rotated(_normalised(q, [q_gain_ref[lower], q_gain_ref[upper]], eps), cos, sin, dtype)
    k_new = [heads_ref[row, N + head, part][None] for part in (lower, upper)]
    k_new = _rotated(_normalised(k_new, [k_gain_ref[lower], k_gain_ref[upper]], eps), cos, sin, dtype)
    v_new = heads_ref[row, N + key_heads + head, :].astype(dtype)

    length = lengths_ref[row]
    here = (split == 0) & (length < positions)
    for part, value in zip((lower, upper), k_new, strict=True):
        plgpu.store(k_out_ref.at[row, head, pl.ds(length, 1), part], value, mask=here[None, None])
    plgpu.store(v_out_ref.at[row, head, pl.ds(length, 1), :], v_new[None], mask=here[None, None])

    scale = np.float32(1 / math.sqrt(D))
    own = sum(jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1) for a, b in zip(q, k_new, strict=True))
    first = split == 0  # the new position is the first split's, taken from registers
    top = jnp.where(first, own * scale, NEVER)
    total = jnp.where(first, jnp.ones_like(top), 0.0)
    out = jnp.where(first, jnp.broadcast_to(v_new.astype(jnp.float32)[None], (QUERIES, D)), 0.0)

    blocks = pl.cdiv(pl.cdiv(length, splits), block)  # of every split
    start = split * blocks * block

    def body(i, carry):
        top, total, out = carry
        at = start + i * block
        exists = (at + jnp.arange(block, dtype=jnp.int32)) < length
        cached = pl.ds(at, block)
        k = [plgpu.load(k_ref.at[row, head, cached, part], mask=exists[:, None], other=0.0) for part in (lower, upper)]
        v = plgpu.load(v_ref.at[row, head, cached, :], mask=exists[:, None], other=0.0)
        logits = sum(plgpu.dot(a, b.T) for a, b in zip(q, k, strict=True)) * scale
        logits = jnp.where(exists[None], logits, NEVER)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        kept = jnp.exp(top - new_top)
        weights = jnp.where(exists[None], jnp.exp(logits - new_top[:, None]), 0.0)
        out = out * kept[:, None] + plgpu.dot(weights.astype(dtype), v)
        return new_top, total * kept + jnp.sum(weights, axis=-1), out

    mine = jnp.clip(pl.cdiv(length - start, block), 0, blocks)
    top, total, out = lax.fori_loop(0, mine, body, (top, total, out))
    plgpu.store(out_ref.at[row, queries, split, :], out, mask=real)
    plgpu.store(top_ref.at[row, queries, split], top, mask=real[:, 0])
    plgpu.store(sum_ref.at[row, queries, split], total, mask=real[:, 0])


def _combine_kernel(lengths_ref, out_ref, top_ref, sum_ref, y_ref, *, block, splits):
    row, head = pl.program_id(0), pl.program_id(1)
    length = lengths_ref[row]
    blocks = jnp.maximum(pl.cdiv(pl.cdiv(length, splits), block), 1)
    used = jnp.arange(splits, dtype=jnp.int32) < jnp.maximum(pl.cdiv(length, blocks * block), 1)  # others are not read
    every = pl.ds(0, splits)
    top = plgpu.load(top_ref.at[row, head, every], mask=used, other=NEVER)
    weights = jnp.exp(top - jnp.max(top, axis=-1))
    total = jnp.sum(plgpu.load(sum_ref.at[row, head, every], mask=used, other=0.0) * weights, axis=-1)
    out = plgpu.load(out_ref.at[row, head, every, :], mask=used[:, None], other=0.0)
    y_ref[row, head, :] = (jnp.sum(out * weights[:, None], axis=0) / total).astype(y_ref.dtype)


def splits_of(batch: int, key_heads: int, positions: int, block: int) -> int:
    """Splits per row and key head: a power of two that gives the GPU enough programs."""
    most = max(1, min(MAX_SPLITS, PROGRAMS // (batch * key_heads), pl.cdiv(positions, block)))
    return 1 << (most.bit_length() - 1)


@functools.partial(jax.jit, static_argnames=("eps", "block", "interpret"))
def attend(
    heads: jax.Array, q_gain: jax.Array, k_gain: jax.Array, rotation: tuple[jax.Array, jax.Array], k_cache: jax.Array,
    v_cache: jax.Array, lengths: jax.Array, *, eps: float, block: int = 64, interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one new position per row over the cache and itself.

    Args:
      heads: [B, N + 2 KVH, D] projections of the new token: queries, then keys, then values.
      q_gain, k_gain: [D] gains of the norms of queries and keys.
      rotation: cos and sin [B, D / 2] float32 of the new positions' angles; dimension i is paired with i + D / 2.
      k_cache, v_cache: [B, KVH, S, D], of which row b has lengths[b] positions; donate them.
      lengths: int32 [B]. A row with S positions is full: its new key and value are used, but not stored.
      eps: of the norms.
      block: positions at a time, a power of two from 16.
      interpret: run on the CPU, for tests.

    Returns:
      y [B, N, D] in the dtype of heads, and the caches with the new position.

    Raises:
      UnsupportedError: sizes that the kernel cannot take, see `refusal`.

    Source: FlashDecoding (2023) for the split; RoPE, arXiv:2104.09864.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.attend import attend
      >>> heads, gain, cache = jnp.ones((1, 4, 32)), jnp.ones(32), jnp.zeros((1, 1, 64, 32))
      >>> turned = jnp.ones((1, 16)), jnp.zeros((1, 16))
      >>> y, k, v = attend(heads, gain, gain, turned, cache, cache, jnp.array([0]), eps=0.0, interpret=True)
      >>> y.shape, float(y[0, 0, 0]), float(k[0, 0, 0, 0]), float(v[0, 0, 1, 0])
      ((1, 2, 32), 1.0, 1.0, 0.0)
    """
    B, total, D = heads.shape
    KVH, S = k_cache.shape[1:3]
    N = total - 2 * KVH
    if reason := refusal(N, KVH, D):
        raise UnsupportedError(f"heads: {reason}; use jax.nn.dot_product_attention")
    splits = splits_of(B, KVH, S, block)
    cos, sin = rotation
    shapes = ((B, N, splits, D), (B, N, splits), (B, N, splits))
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    *partial, k_cache, v_cache = pl.pallas_call(
        functools.partial(_partial_kernel, group=N // KVH, block=block, splits=splits, eps=eps),
        grid=(B, KVH, splits),
        out_shape=(*parts, *(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in (k_cache, v_cache))),
        input_output_aliases={6: 3, 7: 4},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention_partial",
    )(heads, q_gain, k_gain, cos, sin, lengths, k_cache, v_cache)
    y = pl.pallas_call(
        functools.partial(_combine_kernel, block=block, splits=splits),
        grid=(B, N),
        out_shape=jax.ShapeDtypeStruct((B, N, D), heads.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="decode_attention_combine",
    )(lengths, *partial)
    return y, k_cache, v_cache


def refusal(query_heads: int, key_heads: int, D: int) -> str:
    """Why the kernel cannot take these heads, or an empty string."""
    group = query_heads // key_heads
    if group > QUERIES:
        return f"got {group} queries per key head, expected at most {QUERIES}"
    if D < 32 or D & (D - 1):
        return f"got head_dim {D}, expected a power of two from 32"
    return ""
