"""The RMSNorm of a token inside a kernel whose warps see the whole token anyway, each in the pieces of its `RowTile`.

Every warp computes it, in the same order and so with the same bits; nothing is exchanged.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from jax_warp_decode import compat
from jax_warp_decode.kernels import tile
from jax_warp_decode.kernels.tile import LANES, WARPS, RowTile


def walk(rows: RowTile, unroll: int, early: list, load: Callable, add: Callable, init):
    """`add(steps, loaded, sum)` over all steps of a row; what the first ones need is loaded already, as `early`."""

    def group(steps, total):
        steps = [len(early) + s for s in steps]
        return add(steps, list(map(load, steps)), total)

    first = add(range(len(early)), early, init)
    return tile.unrolled_loop(rows.steps - len(early), unroll, jnp.bool_(True), group, first)


@dataclasses.dataclass(frozen=True)
class RowNorm:
    """x / sqrt(mean(x ** 2) + eps) * gain in float32, rounded once to the dtype of x.

    Attributes:
      rows: of the weight that x meets: all lanes of a warp read one row, in an unscaled format.
      unroll: steps along x whose loads are issued before any arithmetic.
      eps: added to the mean square.
      interpreted: whether the kernel runs in the interpreter.
    """

    rows: RowTile
    unroll: int
    eps: float
    interpreted: bool

    def scale(self, early: list, load: Callable) -> jax.Array:
        """The factor of the whole token, one per lane and value of a piece; see `walk`."""
        rows = self.rows

        def add(steps, pieces, total):
            for step, piece in zip(steps, map(rows.widen, pieces), strict=True):
                total = total + rows.dot(piece, piece, step)  # which drops what the last step sees twice
            return total

        squares = rows.reduce(walk(rows, self.unroll, early, load, add, rows.zeros()))
        return self._everywhere(lax.rsqrt(squares * np.float32(1 / rows.cols) + np.float32(self.eps)))

    def apply(self, piece: jax.Array, scale: jax.Array, gain: jax.Array) -> jax.Array:
        """A piece of the token, as loaded, to what a norm of its own would have stored."""
        return (piece.astype(jnp.float32) * scale * gain.astype(jnp.float32)).astype(piece.dtype)

    def store(self, ref, step, piece: jax.Array) -> None:
        """Stores a piece; ref is of one token, in the shape of `RowTile.vector_operand`."""
        start = jnp.minimum(step * jnp.int32(LANES), jnp.int32(self.rows.cols // self.rows.vec - LANES))
        compat.store_unaligned(ref.at[pl.ds(start, LANES)], piece)

    def _everywhere(self, values: jax.Array) -> jax.Array:
        """One number per row of the tile, the same for all of them, in the shape and layout of a piece."""
        shape = LANES, self.rows.vec
        if self.interpreted:
            return lax.broadcast_in_dim(values[0], shape, ())
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((WARPS, *shape),)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1).reduce(0)

        @plgpu.inline_mgpu(arg_types=(self.rows.sums_type().layout,),
                           return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout))
        def splat(_, values):
            [number, *_] = values.registers.flat
            number = vector.extract(number, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
            return mgpu.FragmentedArray.splat(number, shape, layout.to_mgpu())

        return splat(values)
