"""dense_rows: y[t] = w @ rms_norm(x[t] + delta[t]) + residual, a projection of few tokens in one launch.

Ownership as in `moe_gate_up_3d_batched`: a warp owns `rows` rows of w from the first byte to the stored values, here
for all T tokens, so that w is read once. The norm costs no launch and no second pass: its gain multiplies x on the way
in, and every warp, which sees the whole of x anyway, sums the squares beside the products; their root divides the
result.

Grid: (row tile).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode import compat
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import tile
from jax_warp_decode.kernels.tile import LANES, RowTile

MAX_TOKENS = 8
MIN_WARPS = 1280  # more rows per warp would leave a GPU of 132 multiprocessors too few loads in flight
DTYPES = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """How `dense_rows` uses a warp.

    Attributes:
      rows: rows of w that a warp owns; they share the loads of x.
      unroll: steps along a row whose weights are loaded before any arithmetic.
    """

    rows: int
    unroll: int

    @classmethod
    def heuristic(cls, T: int, N: int, M: int) -> "DenseConfig":
        """Rows that share the loads of x, as long as warps enough are left (`bench.tune_dense`).

        Example:
          >>> [DenseConfig.heuristic(T, N=5120, M=2048).rows for T in (1, 2, 4, 8)]
          [4, 2, 2, 4]
          >>> DenseConfig.heuristic(T=1, N=2048, M=4096)
          DenseConfig(rows=1, unroll=8)
        """
        most = 2 if T in (2, 3, 4) else 4
        rows = next((r for r in (most, 2) if N % (tile.WARPS * r) == 0 and N >= MIN_WARPS * r), 1)
        return cls(rows, unroll=max(1, min(M // (LANES * 8), 8 // rows)))


@functools.cache
def _build(name: str, T: int, N: int, terms: int, residuals: int, gain: bool, eps: float, rows: RowTile, unroll: int,
           out_dtype, interpret):
    """One jitted kernel per static configuration, so that equal layers share one trace and one compiled kernel."""

    def body(*refs):
        refs = list(refs)
        x_refs, residual_refs = [refs.pop(0) for _ in range(terms)], [refs.pop(0) for _ in range(residuals)]
        gain_refs, (w_ref, y_ref) = refs[:gain], refs[gain:]
        row_tile = lax.axis_index("row_tile")

        def group(steps, carry):
            loaded = [rows.load((w_ref,), jnp.int32(0), row_tile, s) for s in steps]
            sums, squares = map(list, carry)
            for s, raw in zip(steps, loaded, strict=True):
                scale = [rows.load_vector(ref, (), s).astype(jnp.float32) for ref in gain_refs]
                for t in range(T):
                    parts = [rows.load_vector(ref, (t,), s).astype(jnp.float32) for ref in x_refs]
                    v = functools.reduce(jnp.add, parts)
                    if gain:
                        square = rows.widen(v)[0]
                        squares[t] = squares[t] + jnp.sum(square * square, axis=-1)
                        v = v * scale[0]
                    sums[t] = sums[t] + rows.dot(raw, rows.widen(v), s)
            return sums, squares

        zeros = [rows.zeros() for _ in range(T)]
        sums, squares = tile.unrolled_loop(
            rows.steps, unroll, jnp.bool_(True), group, (zeros, zeros if gain else []))
        for t in range(T):
            y = rows.reduce(sums[t])
            if gain:
                mean = rows.reduce(squares[t]) * np.float32(1 / rows.cols)
                y = y * lax.rsqrt(mean + np.float32(eps))
            for ref in residual_refs:
                y = y + rows.load_rows(ref, t, row_tile)
            compat.store_unaligned(y_ref.at[t, rows.row_slice(row_tile)], y.astype(out_dtype))

    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, N), out_dtype),
        grid=(N // rows.out_rows,),
        grid_names=("row_tile",),
        kernel_name=name,
        compiler_params=tile.COMPILER_PARAMS,
        interpret=interpret,
    )), "dense_rows: has no gradient; use jax.numpy.einsum")


def dense_rows(
    xs: tuple[jax.Array, ...],
    w: jax.Array,
    *,
    gain: jax.Array | None = None,
    eps: float = 1e-6,
    residuals: tuple[jax.Array, ...] = (),
    out_dtype=None,
    name: str = "dense_rows",
    config: DenseConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """y = norm(sum of xs) @ w.T + sum of residuals, in float32 and rounded once.

    Args:
      xs: one array [T, M] or more, bfloat16 or float16, which are added in float32; T up to 8.
      w: [N, M], dtype of xs.
      gain: [M] of an RMSNorm of the sum; None for no norm.
      eps: added to the mean square.
      residuals: [T, N] each, added to the result.
      out_dtype: None takes that of xs.
      name: of the kernel, in profiles.
      config: `DenseConfig`; None takes the heuristic.
      interpret: run the kernel on the CPU, for tests.

    Returns:
      y [T, N].

    Raises:
      ArgumentError: shapes or dtypes that do not fit each other.
      UnsupportedError: sizes that the kernel cannot walk, see `refusal`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.dense_rows import dense_rows
      >>> x, w = jnp.full((1, 256), 2, jnp.bfloat16), jnp.ones((8, 256), jnp.bfloat16)
      >>> y = dense_rows((x,), w, gain=jnp.ones(256, jnp.bfloat16), interpret=True)
      >>> y.shape, float(y[0, 0])  # the norm makes every 2 a 1
      ((1, 8), 256.0)
    """
    first = xs[0]
    T, M, N = *first.shape, w.shape[0]
    dtype = jnp.dtype(first.dtype)
    wrong = [a for a in xs if a.shape != (T, M) or a.dtype != dtype] + [a for a in residuals if a.shape != (T, N)]
    if wrong or w.shape != (N, M) or w.dtype != dtype or (gain is not None and gain.shape != (M,)):
        got = [f"{a.dtype}{list(a.shape)}" for a in (*xs, w, *residuals, *([] if gain is None else [gain]))]
        raise ArgumentError(f"xs, w, residuals, gain: got {got}, expected [T, M] each and [N, M] of one dtype, [T, N] "
                            "and [M]")
    if reason := refusal(T, N, M, dtype):
        raise UnsupportedError(f"dense_rows: {reason}; use jax.numpy.einsum")
    config = DenseConfig.heuristic(T, N, M) if config is None else config
    rows = RowTile(M, DTYPES[dtype], LANES, config.rows, dtype, bool(interpret))
    kernel = _build(name, T, N, len(xs), len(residuals), gain is not None, float(eps), rows, config.unroll,
                    jnp.dtype(out_dtype or dtype), compat.interpret_params(interpret))
    gains = () if gain is None else (rows.vector_operand(gain),)
    return kernel(*map(rows.vector_operand, xs), *map(rows.row_operand, residuals), *gains,
                  *rows.weight_operands(w[None]))


def refusal(T: int, N: int, M: int, dtype) -> str:
    """Why the kernel cannot take x [T, M] and w [N, M], or an empty string."""
    step = LANES * 8
    reasons = [
        (jnp.dtype(dtype) not in DTYPES, f"got {jnp.dtype(dtype)}, expected bfloat16 or float16"),
        (not 1 <= T <= MAX_TOKENS, f"got T = {T}, expected 1 to {MAX_TOKENS}"),
        (M % step, f"got M = {M}, expected a multiple of {step}"),
        (N % tile.WARPS, f"got N = {N}, expected a multiple of {tile.WARPS}"),
    ]
    return next((reason for holds, reason in reasons if holds), "")


def aot_cases():
    """Cases for a deviceless compile, see tests/aot.py: (name, function, arguments, limits)."""
    x, w, gain = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 2048), (5120, 2048), (2048,)))
    yield ("dense_rows-norm-T1", lambda x, d, w, g: dense_rows((x, d), w, gain=g), (x, x, w, gain),
           dict(max_narrow_loads=0))
    for T in (1, 4, 8):
        y, o, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((T, 4096), (2048, 4096), (T, 2048)))
        yield (f"dense_rows-residual-T{T}", lambda y, w, x, d: dense_rows((y,), w, residuals=(x, d)), (y, o, x, x), {})
