"""attend: attention of one decode step, from projected heads to attended values, in one launch.

A program normalises and rotates its queries and the new key, one of them stores the new key and value in the cache, and
attends: the cached positions of a row are split evenly over programs, whatever the length of the cache ("split-K", as
in FlashDecoding). Every program of a split repeats the few operations on its queries: cheaper than a launch.

Where a row has more than one split, each program stores a part, with its largest logit and its sum, and draws a ticket,
an integer of the row and key head. The last one to draw adds the parts, in the order of the splits: which program that
is makes no difference to a bit of the result. This is sound because
- all threads of a program have stored their part before one of them draws (`debug_barrier`), and drawing is an atomic
  addition that releases what came before it and acquires what others released, at the scope of the GPU;
- no program waits for another: whoever is not the last ends;
- the last one puts the ticket back to 0, when no other program of that row and key head will touch it. Tickets are an
  ordinary operand and result, aliased: zeros come in, zeros go out, and whatever JAX does with arrays (jit, scan,
  donation, CUDA graphs) holds for them. Nothing is kept between calls behind JAX's back.

Grid: (row, key head, split).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

PROGRAMS = 256  # in all, about two per multiprocessor
MAX_SPLITS = 64
ADDED = 16384  # numbers that a program adds at a time, 128 registers a thread
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


def _kernel(heads_ref, q_gain_ref, k_gain_ref, cos_ref, sin_ref, lengths_ref, k_ref, v_ref, _, y_ref, k_out_ref,
            v_out_ref, tickets_ref, *part_refs, group, block, splits, eps, interpret):
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length = lengths_ref[row]
    blocks = jnp.maximum(pl.cdiv(pl.cdiv(length, splits), block), 1)  # of every split
    used = jnp.maximum(pl.cdiv(length, blocks * block), 1)  # splits with a position; the first has the new one
    queries = pl.ds(head * group, QUERIES)
    real = (jnp.arange(QUERIES, dtype=jnp.int32) < group)[:, None]

    @pl.when(split < used)
    def _():
        top, total, out = _attend(
            (row, head, split), heads_ref, q_gain_ref, k_gain_ref, cos_ref, sin_ref, length, k_ref, v_ref, k_out_ref,
            v_out_ref, blocks=blocks, group=group, block=block, eps=eps)

        @pl.when(used == 1)
        def _():
            plgpu.store(y_ref.at[row, queries, :], (out / total[:, None]).astype(y_ref.dtype), mask=real)

        if splits == 1:
            return

        @pl.when(used > 1)
        def _():
            for ref, part in zip(part_refs, (top, total), strict=False):
                plgpu.store(ref.at[row, split, queries], part, mask=real[:, 0])
            plgpu.store(part_refs[2].at[row, split, queries, :], out, mask=real)
            if not interpret:  # which runs one program after the other
                plgpu.debug_barrier()
            ticket = plgpu.atomic_add(tickets_ref, (row, head), jnp.int32(1))

            @pl.when(ticket == used - 1)
            def _():
                tickets_ref[row, head] = jnp.int32(0)
                _add((row, head), *part_refs, y_ref, used, group=group, splits=splits)


def _attend(at, heads_ref, q_gain_ref, k_gain_ref, cos_ref, sin_ref, length, k_ref, v_ref, k_out_ref, v_out_ref, *,
            blocks, group, block, eps):
    """Largest logit, sum and unscaled values [QUERIES (, D)] of a split."""
    row, head, split = at
    key_heads, positions, D = k_ref.shape[1:]
    N, half = group * key_heads, D // 2
    lower, upper = pl.ds(0, half), pl.ds(half, half)
    dtype = k_ref.dtype
    start = split * blocks * block

    def load(i):
        at = start + i * block
        exists = (at + jnp.arange(block, dtype=jnp.int32)) < length
        cached = pl.ds(at, block)
        k = [plgpu.load(k_ref.at[row, head, cached, part], mask=exists[:, None], other=0.0) for part in (lower, upper)]
        return exists, k, plgpu.load(v_ref.at[row, head, cached, :], mask=exists[:, None], other=0.0)

    # Everything is on its way before the first norm.
    first_block = load(0)
    real = (jnp.arange(QUERIES, dtype=jnp.int32) < group)[:, None]
    queries = pl.ds(head * group, QUERIES)
    q = [plgpu.load(heads_ref.at[row, queries, part], mask=real, other=0.0) for part in (lower, upper)]
    k_new = [heads_ref[row, N + head, part][None] for part in (lower, upper)]
    v_new = heads_ref[row, N + key_heads + head, :].astype(dtype)
    q_gain, k_gain = ([ref[part] for part in (lower, upper)] for ref in (q_gain_ref, k_gain_ref))
    cos, sin = cos_ref[row, :][None], sin_ref[row, :][None]
    q = _rotated(_normalised(q, q_gain, eps), cos, sin, dtype)
    k_new = _rotated(_normalised(k_new, k_gain, eps), cos, sin, dtype)

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

    def body(loaded, carry):
        top, total, out = carry
        exists, k, v = loaded
        logits = sum(plgpu.dot(a, b.T) for a, b in zip(q, k, strict=True)) * scale
        logits = jnp.where(exists[None], logits, NEVER)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        kept = jnp.exp(top - new_top)
        weights = jnp.where(exists[None], jnp.exp(logits - new_top[:, None]), 0.0)
        out = out * kept[:, None] + plgpu.dot(weights.astype(dtype), v)
        return new_top, total * kept + jnp.sum(weights, axis=-1), out

    mine = jnp.clip(pl.cdiv(length - start, block), 1, blocks)
    carry = lax.fori_loop(1, mine, lambda i, carry: body(load(i), carry), (top, total, out))
    return body(first_block, carry)


def _add(at, top_ref, sum_ref, out_ref, y_ref, used, *, group, splits):
    """The attended values of a row and key head, from the parts of its splits."""
    (row, head), D = at, y_ref.shape[-1]
    size = pl.next_power_of_2(group)
    chunk = min(splits, max(1, ADDED // (size * D)))
    queries = pl.ds(head * group, size)
    real = jnp.arange(size, dtype=jnp.int32) < group

    def load(ref, first, count):  # past the L1 cache, which knows nothing of other multiprocessors
        mask = ((first + jnp.arange(count, dtype=jnp.int32)) < used)[:, None] & real[None]
        piece = ref.at[row, pl.ds(first, count), queries, *[slice(None)] * (len(ref.shape) - 3)]
        mask = jnp.broadcast_to(jnp.expand_dims(mask, tuple(range(2, len(piece.shape)))), piece.shape)
        return plgpu.load(piece, mask=mask, other=NEVER if ref is top_ref else 0.0, volatile=True)

    def body(i, carry):
        largest, total, y = carry
        top, sums, out = (load(ref, i * chunk, chunk) for ref in (top_ref, sum_ref, out_ref))
        new_largest = jnp.maximum(largest, jnp.max(top, axis=0))
        kept, weights = jnp.exp(largest - new_largest), jnp.exp(top - new_largest[None])
        y = y * kept[:, None] + jnp.sum(out * weights[:, :, None], axis=0)
        return new_largest, total * kept + jnp.sum(sums * weights, axis=0), y

    nothing = jnp.full((size,), NEVER, jnp.float32), jnp.zeros((size,), jnp.float32), jnp.zeros((size, D), jnp.float32)
    _, total, y = lax.fori_loop(0, pl.cdiv(used, chunk), body, nothing)
    y = (y / jnp.where(real, total, 1.0)[:, None]).astype(y_ref.dtype)
    plgpu.store(y_ref.at[row, queries, :], y, mask=real[:, None])


def splits_of(batch: int, key_heads: int, positions: int, block: int) -> int:
    """Splits per row and key head: a power of two that gives the GPU enough programs."""
    most = max(1, min(MAX_SPLITS, PROGRAMS // (batch * key_heads), pl.cdiv(positions, block)))
    return 1 << (most.bit_length() - 1)


@functools.partial(jax.jit, static_argnames=("eps", "block", "interpret"))
def attend(
    heads: jax.Array, q_gain: jax.Array, k_gain: jax.Array, rotation: tuple[jax.Array, jax.Array], k_cache: jax.Array,
    v_cache: jax.Array, lengths: jax.Array, tickets: jax.Array | None = None, *, eps: float, block: int = 64,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Attention of one new position per row over the cache and itself.

    Args:
      heads: [B, N + 2 KVH, D] projections of the new token: queries, then keys, then values.
      q_gain, k_gain: [D] gains of the norms of queries and keys.
      rotation: cos and sin [B, D / 2] float32 of the new positions' angles; dimension i is paired with i + D / 2.
      k_cache, v_cache: [B, KVH, S, D], of which row b has lengths[b] positions; donate them.
      lengths: int32 [B]. A row with S positions is full: its new key and value are used, but not stored.
      tickets: int32 [B, KVH], all zeros, as every call returns them; None makes new ones, a launch of its own.
      eps: of the norms.
      block: positions at a time, a power of two from 16.
      interpret: run on the CPU, for tests.

    Returns:
      y [B, N, D] in the dtype of heads, the caches with the new position, and the tickets, zeros again.

    Raises:
      UnsupportedError: sizes that the kernel cannot take, see `refusal`.

    Source: FlashDecoding (2023) for the split; RoPE, arXiv:2104.09864.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.attend import attend
      >>> heads, gain, cache = jnp.ones((1, 4, 32)), jnp.ones(32), jnp.zeros((1, 1, 64, 32))
      >>> turned = jnp.ones((1, 16)), jnp.zeros((1, 16))
      >>> y, k, v, tickets = attend(heads, gain, gain, turned, cache, cache, jnp.array([0]), eps=0.0, interpret=True)
      >>> y.shape, float(y[0, 0, 0]), float(k[0, 0, 0, 0]), float(v[0, 0, 1, 0]), tickets.tolist()
      ((1, 2, 32), 1.0, 1.0, 0.0, [[0]])
    """
    B, total, D = heads.shape
    KVH, S = k_cache.shape[1:3]
    N = total - 2 * KVH
    splits = splits_of(B, KVH, S, block)
    cos, sin = rotation
    tickets = new_tickets(B, KVH) if tickets is None else tickets
    shapes = ((B, splits, N), (B, splits, N), (B, splits, N, D)) if splits > 1 else ()
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    y, k_cache, v_cache, tickets, *_ = pl.pallas_call(
        functools.partial(_kernel, group=N // KVH, block=block, splits=splits, eps=eps, interpret=interpret),
        grid=(B, KVH, splits),
        out_shape=(jax.ShapeDtypeStruct((B, N, D), heads.dtype),
                   *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (k_cache, v_cache, tickets)), *parts),
        input_output_aliases={6: 1, 7: 2, 8: 3},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(heads, q_gain, k_gain, cos, sin, lengths, k_cache, v_cache, tickets)
    return y, k_cache, v_cache, tickets


def new_tickets(batch: int, key_heads: int) -> jax.Array:
    """Tickets [B, KVH] for the first call of `attend`."""
    return jnp.zeros((batch, key_heads), jnp.int32)


def refusal(query_heads: int, key_heads: int, D: int) -> str:
    """Why the kernel cannot take these heads, or an empty string."""
    group = query_heads // key_heads
    if group > QUERIES:
        return f"got {group} queries per key head, expected at most {QUERIES}"
    if D < 32 or D & (D - 1):
        return f"got head_dim {D}, expected a power of two from 32"
    return ""
