"""Grouped matrix products over rows sorted by expert: Mosaic GPU kernels on CUDA, a scan elsewhere.

Three products, each bilinear, and each the derivative of the other two: `grouped_gemm` multiplies rows by the weights
of their expert, `grouped_gemm_transposed` by their transpose, `grouped_outer` sums the outer products of two sets of
rows, expert by expert.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode import varying
from jax_warp_decode.device import BLACKWELL, HOPPER, capability
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.paths import grouped_kernels


@jax.custom_vjp
def grouped_gemm(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each group of rows by the weights of its expert.

    Args:
      rows: [M, K], sorted by expert: the first group_sizes[0] rows belong to expert 0, and so on.
      w: [E, N, K].
      group_sizes: int32 [E], with a sum of at most M.

    Returns:
      float32 [M, N]. On CUDA, if an operand is bfloat16, both go through `ragged_dot_mgpu` from JAX as bfloat16
      (Hopper's wgmma, float32 accumulation), whose result is rounded once to bfloat16. Everything else is a scan over
      all experts in full float32 precision: work grows with M * E. Rows beyond the sum of group_sizes hold anything,
      NaN included, so select, never multiply by zero. No row depends on another row or on another expert's weights.

    Reverse-mode differentiable in rows and w, any number of times. The products of the backward pass take the same
    way. Cotangents of rows in no group are ignored, and gradients for them are zero.

    Raises:
      UnsupportedError: on a GPU, if N or K is no multiple of 64 or the GPU is not a Hopper.
    """
    return _product(rows, w, group_sizes, transposed=False)


def scanned(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`grouped_gemm` as a scan over all experts, which runs on any device."""
    return _scan(rows, w, group_sizes, contract=1)


@jax.custom_vjp
def grouped_gemm_transposed(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """As `grouped_gemm` with the transpose of each expert's weights: rows [M, N] and w [E, N, K] -> float32 [M, K].

    Rows in no group are zero here.
    """
    out = _product(rows, w, group_sizes, transposed=True)
    return jnp.where(_grouped(out, group_sizes), out, jnp.float32(0))


@jax.custom_vjp
def grouped_outer(a: jax.Array, b: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sums a[row] b[row]^T over the rows of each expert: a [M, N] and b [M, K] -> float32 [E, N, K].

    Rows in no group do not count, whatever they hold, and the sum of an expert without rows is zero. On CUDA with a
    bfloat16 operand, the products are bfloat16 and the float32 sum is rounded once to bfloat16.
    """
    if jnp.bfloat16 not in (a.dtype, b.dtype):
        return _scan_outer(a, b, group_sizes)
    n, k = a.shape[1], b.shape[1]
    return _on_cuda(grouped_kernels.outer, _scan_outer, n, k)(a, b, group_sizes)


def refusal(n: int, k: int) -> str:
    """Why the CUDA kernels cannot multiply by weights [E, N, K] here, or an empty string."""
    multiple = grouped_kernels.MULTIPLE
    if n % multiple or k % multiple:
        return (f"experts: got a weight [E, {n}, {k}], the grouped GEMM of 'expert_centric' needs multiples of "
                f"{multiple} on a GPU; pad the weights with zeros once, or use strategy='auto' or 'reference'")
    return device_refusal()


def device_refusal() -> str:
    """Why the default device cannot run a bfloat16 grouped GEMM of any size, or an empty string."""
    if capability() in ("", HOPPER):
        return ""
    users, way_out = "", "strategy='auto' or 'reference'"
    if capability() in BLACKWELL:  # where all else has kernels of its own
        users, way_out = ", for gradients,", "strategy='reference' for gradients"
    return (f"strategy: 'expert_centric' got a GPU of compute capability {capability()}, its grouped GEMM{users} needs "
            f"{HOPPER} (Hopper); use {way_out}")


def _product(rows, w, group_sizes, *, transposed):
    scan = functools.partial(_scan, contract=0 if transposed else 1)
    if jnp.bfloat16 not in (rows.dtype, w.dtype):
        return scan(rows, w, group_sizes)
    kernel = functools.partial(grouped_kernels.product, transposed=transposed)
    return _on_cuda(kernel, scan, *w.shape[1:])(rows, w, group_sizes)


def _on_cuda(kernel, scan, n, k):
    """`kernel` on CUDA with bfloat16 operands, `scan` elsewhere."""
    reason = refusal(n, k)
    if reason and jax.default_backend() == "gpu":
        raise UnsupportedError(reason)
    if reason:  # no CUDA branch: lowering for CUDA from here fails too
        return functools.partial(lax.platform_dependent, cpu=scan)

    def cuda(a, b, group_sizes):
        return varying.like(kernel(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), group_sizes), a, b, group_sizes)

    return functools.partial(lax.platform_dependent, cuda=cuda, default=scan)


def _grouped(rows, group_sizes):
    """[M, 1], whether a row belongs to any group."""
    return jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None] < jnp.sum(group_sizes, dtype=jnp.int32)


def _bounds(group_sizes):
    ends = lax.cumsum(group_sizes)
    return ends - group_sizes, ends


# The selects of the scans keep the bits of other experts and rows out of every result.
def _scan(rows, w, group_sizes, contract):
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    rows32 = rows.astype(jnp.float32)

    def step(out, group):
        start, end, w_e = group
        mine = (row >= start) & (row < end)
        w_e = jnp.where(end > start, w_e.astype(jnp.float32), jnp.float32(0))
        product = lax.dot_general(jnp.where(mine, rows32, jnp.float32(0)), w_e, (((1,), (contract,)), ((), ())),
                                  precision=lax.Precision.HIGHEST)
        return jnp.where(mine, product, out), None

    out = jnp.zeros((rows.shape[0], w.shape[2 - contract]), jnp.float32)
    return lax.scan(step, varying.like(out, rows, w, group_sizes), (*_bounds(group_sizes), w))[0]


def _scan_outer(a, b, group_sizes):
    row = jnp.arange(a.shape[0], dtype=jnp.int32)[:, None]

    def step(_, group):
        start, end = group
        a_e, b_e = (jnp.where((row >= start) & (row < end), m.astype(jnp.float32), jnp.float32(0)) for m in (a, b))
        return None, lax.dot_general(a_e, b_e, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)

    return lax.scan(step, None, _bounds(group_sizes))[1]


def _derivatives(product, first, second):
    """Makes `product(a, b, group_sizes)` differentiable: first(ct, a, b, ...) is the gradient for a, second for b."""

    def save(a, b, group_sizes):
        return product(a, b, group_sizes), (a, b, group_sizes)

    def backward(saved, cotangent):
        a, b, group_sizes = saved
        return (first(cotangent, a, b, group_sizes).astype(a.dtype),
                second(cotangent, a, b, group_sizes).astype(b.dtype), None)

    product.defvjp(save, backward)


def _grouped_only(rows, w, group_sizes):
    out = grouped_gemm(rows, w, group_sizes)
    return jnp.where(_grouped(out, group_sizes), out, jnp.float32(0))


_derivatives(grouped_gemm,
             lambda ct, rows, w, sizes: grouped_gemm_transposed(ct, w, sizes),
             lambda ct, rows, w, sizes: grouped_outer(ct, rows, sizes))
_derivatives(grouped_gemm_transposed,
             lambda ct, rows, w, sizes: _grouped_only(ct, w, sizes),
             lambda ct, rows, w, sizes: grouped_outer(rows, ct, sizes))
_derivatives(grouped_outer,
             lambda ct, a, b, sizes: _grouped_only(b, ct, sizes),
             lambda ct, a, b, sizes: grouped_gemm_transposed(a, ct, sizes))
