"""How a warp walks along rows of a weight matrix: what the two warp-decode kernels share.

A `RowTile` says which weights a warpgroup (4 warps) has in registers at one step. Every lane reads 16 contiguous
bytes of a row (a *chunk*); `lanes` neighbouring lanes cover one row, so a step covers `lanes * vec` columns, and a row
result is a butterfly over `lanes` lanes. With `lanes = 32` a warp owns one row at a time. Short rows use fewer lanes,
and the warp then owns `32 / lanes` rows side by side. Each warp repeats this for `rows` row groups, which reuse the
same piece of the activation.

    step s of warp w        columns s * step ...                      (lanes = 32, rows = 2, bf16)
    row 0 * 4 + w           | lane 0: 8 values | lane 1: 8 values | ... | lane 31 |
    row 1 * 4 + w           | lane 0: 8 values | lane 1: 8 values | ... | lane 31 |

A row length that a step does not divide needs no padding: the last step starts early, at `cols - step`, and the
columns it shares with the step before are dropped with a select. Nothing outside the row is ever read.

Tile axes, in order; an axis of length 1 is left out because Mosaic wants canonical layouts:

    S side by side | W warp || G group of chunks | C chunk of a scale block || V value of a chunk

The first axis is `rows` times as long as the layout, once per row group. G and C are the lanes of a row.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.formats import QuantizedArray

WARPS = 4  # warps in a warpgroup
LANES = 32  # lanes in a warp
LOAD_BYTES = 16  # per lane and load
MX_BLOCK = 32  # values that share one E8M0 scale

# No barriers: no thread reads what another writes. Lane semantics: every layout is given here, so that nothing has to
# be inferred, a search that grows with the square of a kernel's length.
COMPILER_PARAMS = plgpu.CompilerParams(
    unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


def e8m0_to_f32(scale: jax.Array) -> jax.Array:
    """E8M0 bytes (integers) to float32 in three instructions: 2**(s - 127); 0 -> 2**-127, 255 -> NaN."""
    # s << 23 is the exponent field. As integers, only s = 0 lies below the bits of 2**-127; s = 255 reads as infinity.
    bits = jnp.maximum(scale.astype(jnp.int32) << 23, jnp.int32(1 << 22))
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return power * jnp.float32(0) + power  # infinity becomes NaN, all others stay


@dataclasses.dataclass(frozen=True)
class RowTile:
    """Geometry of a warpgroup's tile over a weight matrix [n, cols], see the module docstring.

    Attributes:
      cols: row length, the reduction dimension.
      itemsize: bytes per stored value, 2 (bf16, f16) or 1 (mxfp8).
      lanes: lanes per row, a power of two from 4 to 32.
      rows: row groups per warp.
    """

    cols: int
    itemsize: int
    lanes: int
    rows: int

    # ----------------------------------------------------------------------------------------------- geometry

    @property
    def scaled(self) -> bool:
        return self.itemsize == 1

    @property
    def vec(self) -> int:
        """Values per lane and load: the length of a chunk."""
        return LOAD_BYTES // self.itemsize

    @property
    def step(self) -> int:
        """Columns per step."""
        return self.lanes * self.vec

    @property
    def steps(self) -> int:
        return math.ceil(self.cols / self.step)

    @property
    def side_by_side(self) -> int:
        """Rows that one warp covers at the same time."""
        return LANES // self.lanes

    @property
    def out_rows(self) -> int:
        """Rows that one warpgroup owns."""
        return WARPS * self.rows * self.side_by_side

    @property
    def _row_axes(self) -> dict[str, int]:
        return dict(W=WARPS) if self.side_by_side == 1 else dict(S=self.side_by_side, W=WARPS)

    @property
    def _lane_axes(self) -> dict[str, int]:
        """Axes over the lanes of a row; the first one is sliced to choose the step."""
        return dict(G=self.lanes // 2, C=2) if self.scaled else dict(G=self.lanes)

    @property
    def _axes(self) -> dict[str, int]:
        return {**self._row_axes, **self._lane_axes, "V": self.vec}

    def _shape(self, axes: str) -> tuple[int, ...]:
        """Shape of an array that has these of the tile's axes."""
        shape = [size for name, size in self._axes.items() if name in axes]
        if "W" in axes:
            shape[0] *= self.rows
        return tuple(shape)

    def _layout(self, axes: str):
        """Register layout of an array that has these of the tile's axes; it is the same in all the others."""
        at = {name: i - len(self._axes) for i, name in enumerate(self._axes)}
        layout = plgpu.Layout.TILED(
            plgpu.Tiling((tuple(self._axes.values()),)), warp_dims=(at["W"],),
            lane_dims=tuple(at[name] for name in self._axes if name in "SGC"), vector_dim=at["V"])
        for i, name in reversed(list(enumerate(self._axes))):
            if name not in axes:
                layout = layout.reduce(i)
        return layout

    # ------------------------------------------------------------------------------------- operands, outside

    @property
    def _chunks(self) -> tuple[int, ...]:
        """Shape of a row's chunks, whole row."""
        return (self.cols // MX_BLOCK, 2) if self.scaled else (self.cols // self.vec,)

    def weight_operands(self, w: jax.Array | QuantizedArray) -> tuple[jax.Array, ...]:
        """Views of a weight [E, n, cols] in the shape the kernel loads from. Reshapes only, no copy."""
        rows = (w.shape[0], *self.result_shape(w.shape[1]))
        if isinstance(w, QuantizedArray):
            return w.values.reshape(*rows, *self._chunks, self.vec), w.scales.reshape(*rows, self.cols // MX_BLOCK)
        return (w.reshape(*rows, *self._chunks, self.vec),)

    def vector_operand(self, v: jax.Array) -> jax.Array:
        """View of an activation [..., cols]."""
        return v.reshape(*v.shape[:-1], *self._chunks, self.vec)

    def result_shape(self, n: int) -> tuple[int, ...]:
        """Shape of n row results as the kernel stores them; a plain reshape of (n,)."""
        return (n,) if self.side_by_side == 1 else (n // WARPS, WARPS)

    # --------------------------------------------------------------------------------- registers, in a kernel

    def zeros(self) -> jax.Array:
        """A fresh accumulator: one float32 per row and lane."""
        return plgpu.layout_cast(jnp.zeros(self._shape("SWGC"), jnp.float32), self._layout("SWGC"))

    def row_slice(self, row_tile) -> pl.Slice:
        """Where the rows of this warpgroup lie along the first axis of `result_shape`."""
        size = self._shape("SW")[0]
        return pl.ds(row_tile * size, size)

    def _start(self, step):
        """First group of a step; the last step starts early if the steps do not divide the row."""
        per_step = self._lane_axes["G"]
        if isinstance(step, int):
            return min(step * per_step, self._chunks[0] - per_step)
        return jnp.minimum(step * per_step, self._chunks[0] - per_step) if self.cols % self.step else step * per_step

    def load(self, refs, expert, row_tile, step) -> tuple[jax.Array, ...]:
        """Raw weights (and scale bytes) of one step: 16-byte loads, nothing computed yet."""
        every_row = (slice(None),) * (len(self._row_axes) - 1)
        index = (expert, self.row_slice(row_tile), *every_row, pl.ds(self._start(step), self._lane_axes["G"]))
        layouts = (self._layout("SWGCV"), self._layout("SWG"))
        return tuple(plgpu.load(ref.at[index], layout=layout, optimized=False)
                     for ref, layout in zip(refs, layouts[:len(refs)], strict=True))

    def load_vector(self, ref, index: tuple, step) -> jax.Array:
        """The piece of an activation that meets the weights of `step`, as stored; the same in every warp and row."""
        piece = ref.at[(*index, pl.ds(self._start(step), self._lane_axes["G"]))]
        return plgpu.load(piece, layout=self._layout("GCV"), optimized=False)

    def widen(self, vector: jax.Array) -> jax.Array:
        """An activation piece in float32, repeated for every row of the tile."""
        shape = self._shape("SWGCV")
        wide = lax.broadcast_in_dim(vector.astype(jnp.float32), shape, tuple(range(len(self._row_axes), len(shape))))
        return plgpu.layout_cast(wide, self._layout("SWGCV"))

    def dot(self, weights: tuple[jax.Array, ...], vector: jax.Array, step) -> jax.Array:
        """Dequantised weights times a widened vector, summed inside each lane: one float32 per row and lane."""
        values, *scales = weights
        partial = jnp.sum(values.astype(jnp.float32) * vector, axis=-1)
        if scales:  # a lane's 16 bytes lie inside one block, so the scale is applied once, to their sum
            scale = lax.broadcast_in_dim(e8m0_to_f32(scales[0]), partial.shape, tuple(range(partial.ndim - 1)))
            partial = partial * plgpu.layout_cast(scale, self._layout("SWGC"))
        seen = step * self._lane_axes["G"] - self._start(step) if self.cols % self.step else 0
        if not isinstance(seen, int) or seen:
            group = plgpu.broadcasted_iota(
                jnp.int32, partial.shape, len(self._row_axes), layout=self._layout("SWGC"))
            partial = jnp.where(group >= seen, partial, jnp.float32(0))
        return partial

    def reduce(self, accumulator: jax.Array) -> jax.Array:
        """Butterfly over the lanes of a row: the row results, equal in all its lanes."""
        for _ in self._lane_axes:
            accumulator = jnp.sum(accumulator, axis=-1)
        return accumulator


def pick_tile(cols: int, n: int, itemsize: int, per_warp: int) -> tuple[int, int]:
    """Lanes per row and row groups for a warp that owns about `per_warp` rows of a weight [n, cols].

    The widest rows that read a tenth twice at most win, if a warp may own as many rows side by side as they
    need; else the widest that waste at most a third.
    """
    vec = LOAD_BYTES // itemsize
    fits = [lanes for lanes in (32, 16, 8, 4) if lanes * vec <= cols]
    waste = {lanes: -cols % (lanes * vec) / cols for lanes in fits}
    snug = [lanes for lanes in fits if waste[lanes] <= 0.1 and LANES // lanes <= per_warp]
    even = [lanes for lanes in fits if waste[lanes] <= 0.34] or [min(fits, key=waste.get, default=4)]
    lanes = (snug or even)[0]
    rows = max(1, per_warp * lanes // LANES)
    while n % (WARPS * rows * LANES // lanes):  # ends at rows = 1, as n is a multiple of 32 and lanes at least 4
        rows -= 1
    return lanes, rows


def unrolled_loop(steps: int, unroll: int, active: jax.Array, body, init):
    """Runs `body(steps_of_group, carry)` over groups of `unroll` steps, or not at all where `active` is false.

    A body sees a whole group, to issue its loads before any arithmetic. Steps that are left over form a last group. The
    steps of a group that runs once are Python integers: much less to lower.
    """

    def groups(first, count, size, carry):
        def group(g, carry):
            start = first if count == 1 else first + g * size
            return body([start + u for u in range(size)], carry)

        return lax.fori_loop(jnp.int32(0), jnp.where(active, jnp.int32(count), jnp.int32(0)), group, carry)

    full, rest = divmod(steps, unroll)
    carry = groups(0, full, unroll, init) if full else init
    return groups(full * unroll, 1, rest, carry) if rest else carry


def divide(n, size: int) -> tuple:
    """Quotient and remainder of a step number, which may be a Python integer or traced."""
    return divmod(n, size) if isinstance(n, int) else (lax.div(n, jnp.int32(size)), lax.rem(n, jnp.int32(size)))
