"""Grouped matrix product over rows sorted by expert: JAX's own Mosaic GPU kernel on CUDA, a scan elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode.errors import UnsupportedError

# The kernel stores any number of rows of a shared-memory tile through TMA, which wants them to start at 128 bytes:
# tiles of 64 two-byte columns. A tile of 96 columns compiles, and faults on the GPU.
MULTIPLE = 64
ROW_MULTIPLE = 8  # its shared-memory tiles hold rows in eights; rows are padded to that, in no group
HOPPER = "9.0"


@dataclasses.dataclass(frozen=True)
class GroupedGemmConfig:
    """Tiles of the CUDA kernel. One CTA owns block_m rows by block_n columns of the output at a time.

    Attributes:
      block_m: rows; at least 64, the M of Hopper's wgmma. Rows of other experts in the tile are computed in vain.
      block_n: columns; divides N.
      block_k: reduction step; divides K.
      max_concurrent_steps: depth of the pipeline through shared memory.
      grid_block_n: column tiles that run side by side on the same rows, so that these come from L2.
    """

    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int


def choose_config(m: int, n: int, groups: int) -> GroupedGemmConfig:
    """Tiles for M rows in `groups` groups and N output columns, a multiple of 64.

    Example:
      >>> choose_config(m=4096 * 8, n=768, groups=128)
      GroupedGemmConfig(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=6)
    """
    block_n = 128 if n % 128 == 0 else 64
    block_m = 128 if m > 64 * groups else 64
    # Both stay below the 227 KB of shared memory of a Hopper SM, output tile included.
    steps = 4 if block_m == 128 else 6
    side_by_side = max(b for b in range(1, 9) if n // block_n % b == 0)
    return GroupedGemmConfig(block_m, block_n, 64, steps, side_by_side)


@jax.custom_vjp
def grouped_gemm(rows: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each group of rows by the weights of its expert.

    Args:
      rows: [M, K], sorted by expert: the first group_sizes[0] rows belong to expert 0, and so on.
      w: [E, N, K], same dtype as rows.
      group_sizes: int32 [E], with a sum of at most M.

    Returns:
      float32 [M, N]. On CUDA, bfloat16 rows go through `ragged_dot_mgpu` from JAX (Hopper's wgmma, float32
      accumulation), whose result is rounded once to the dtype of rows. Everything else is a scan over all experts in
      full float32 precision: work grows with M * E. Rows beyond the sum of group_sizes hold anything, NaN included, so
      select, never multiply by zero. No row depends on another row or on the weights of another expert.

    Reverse-mode differentiable in rows and w; the backward pass is the scan's on every device.

    Raises:
      UnsupportedError: on a GPU, if N or K is no multiple of 64 or the GPU is not a Hopper.
    """
    return _forward(rows, w, group_sizes)


def _forward(rows, w, group_sizes):
    if rows.dtype != jnp.bfloat16:
        return _scan(rows, w, group_sizes)
    n, k = w.shape[1:]
    reason = refusal(n, k)
    if reason and jax.default_backend() == "gpu":
        raise UnsupportedError(reason)
    if reason:  # no CUDA branch: lowering for CUDA from here fails too
        return lax.platform_dependent(rows, w, group_sizes, cpu=_scan)
    on_cuda = kernel(choose_config(rows.shape[0], n, w.shape[0]))
    return lax.platform_dependent(rows, w, group_sizes, cuda=on_cuda, default=_scan)


def refusal(n: int, k: int) -> str:
    """Why the CUDA kernel cannot multiply by weights [E, N, K] here, or an empty string."""
    if n % MULTIPLE or k % MULTIPLE:
        return (f"experts: got a weight [E, {n}, {k}], the grouped GEMM of 'expert_centric' needs multiples of "
                f"{MULTIPLE} on a GPU; pad the weights with zeros once, or use strategy='auto' or 'reference'")
    return device_refusal()


def device_refusal() -> str:
    """Why the default device cannot run a bfloat16 grouped GEMM of any size, or an empty string."""
    if jax.default_backend() == "gpu":
        capability = getattr(jax.devices()[0], "compute_capability", "unknown")
        if capability != HOPPER:
            return (f"strategy: 'expert_centric' got a GPU of compute capability {capability}, its grouped GEMM needs "
                    f"{HOPPER} (Hopper); use strategy='auto' or 'reference'")
    return ""


@functools.cache
def kernel(config: GroupedGemmConfig):
    """JAX's ragged dot for one config, with a batching rule: (rows, w, group_sizes) -> float32 [M, N]."""

    @jax.jit  # equal layers share one trace, hence one compiled kernel
    def launch(rows, w, group_sizes):
        # Imported late: the module pulls in JAX's test utilities.
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

        m = rows.shape[0]
        rows = jnp.pad(rows, ((0, -m % ROW_MULTIPLE), (0, 0)))
        out = ragged_dot_mgpu.ragged_dot(
            rows, w, group_sizes=group_sizes, transpose_rhs=True, **dataclasses.asdict(config))[:m]
        return out.astype(jnp.float32)  # as the scan; XLA fuses the cast into whatever reads the product

    batchable = jax.custom_batching.custom_vmap(launch)

    @batchable.def_vmap
    def _(size, mapped, rows, w, group_sizes):
        rows, group_sizes = (a if m else jnp.broadcast_to(a, (size, *a.shape))
                             for a, m in ((rows, mapped[0]), (group_sizes, mapped[2])))
        if mapped[1]:
            return lax.map(lambda args: batchable(*args), (rows, w, group_sizes)), True
        # Shared weights: the groups of all batch elements are merged, expert by expert.
        row = jnp.arange(rows.shape[1], dtype=jnp.int32)
        ends = lax.cumsum(group_sizes, axis=1)
        expert = jnp.sum(row[None, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        out = batchable(rows.reshape(-1, rows.shape[2])[order], w, jnp.sum(group_sizes, axis=0, dtype=jnp.int32))
        return jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*rows.shape[:2], -1), True

    return batchable


def _scan(rows, w, group_sizes):
    ends = lax.cumsum(group_sizes)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    rows32 = rows.astype(jnp.float32)

    def step(out, group):
        start, end, w_e = group
        mine = (row >= start) & (row < end)
        # The selects keep the bits of other experts and rows out of the result and of the gradients.
        w_e = jnp.where(end > start, w_e.astype(jnp.float32), jnp.float32(0))
        product = lax.dot_general(jnp.where(mine, rows32, jnp.float32(0)), w_e, (((1,), (1,)), ((), ())),
                                  precision=lax.Precision.HIGHEST)
        return jnp.where(mine, product, out), None

    out = jnp.zeros((rows.shape[0], w.shape[1]), jnp.float32)
    return lax.scan(jax.checkpoint(step, prevent_cse=False), out, (ends - group_sizes, ends, w))[0]


def _save(rows, w, group_sizes):
    return _forward(rows, w, group_sizes), (rows, w, group_sizes)


def _backward(saved, cotangent):
    rows, w, group_sizes = saved
    _, pull = jax.vjp(lambda rows, w: _scan(rows, w, group_sizes), rows, w)
    return *pull(cotangent), None


grouped_gemm.defvjp(_save, _backward)
