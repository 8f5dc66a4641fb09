"""How a warp walks along rows of a weight matrix: what the two warp-decode kernels share.

A `RowTile` says which weights a warpgroup (4 warps) has in registers at one step. Every lane reads 16 contiguous
bytes of a row (a *chunk*; 8 bytes of nvfp4, and fewer where rows are short); `lanes` neighbouring lanes cover one row,
so a step covers `lanes * vec` columns, and a row result is a butterfly over `lanes` lanes. With `lanes = 32` a warp
owns one row at a time. Short rows use fewer lanes, and the warp then owns `32 / lanes` rows side by side. Each warp
repeats this for `rows` row groups, which reuse the same piece of the activation.

    step s of warp w        columns s * step ...                      (lanes = 32, rows = 2, bf16)
    row 0 * 4 + w           | lane 0: 8 values | lane 1: 8 values | ... | lane 31 |
    row 1 * 4 + w           | lane 0: 8 values | lane 1: 8 values | ... | lane 31 |

A row length that a step does not divide needs no padding: the last step starts early, at `cols - step`, and the
columns it shares with the step before are dropped with a select. Nothing outside the row is ever read.

Tile axes, in order; an axis of length 1 is left out because Mosaic wants canonical layouts:

    S side by side | W warp || G group of chunks | C chunk of a scale block || V stored item of a chunk

The first axis is `rows` times as long as the layout, once per row group. G and C are the lanes of a row.

Weights are of any format of `kernel_format`. The scales of a step are loaded beside its values, each in the layout of
the lanes and rows that share it, and applied to the sum over a chunk.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels import kernel_format
from jax_warp_decode.kernels.kernel_format import Scale

WARPS = 4  # warps in a warpgroup
LANES = 32  # lanes in a warp

# No barriers: no thread reads what another writes. Lane semantics: every layout is given here, so that nothing has to
# be inferred, a search that grows with the square of a kernel's length.
COMPILER_PARAMS = plgpu.CompilerParams(
    unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True)
class RowTile:
    """Geometry of a warpgroup's tile over a weight matrix [n, cols], see the module docstring.

    Attributes:
      cols: row length, the reduction dimension.
      format: of the weights, a key of `KERNEL_FORMATS`.
      lanes: lanes per row, a power of two from 4 to 32.
      rows: row groups per warp.
      vector_dtype: of the activation; four-bit formats read it as 32-bit pairs, which do not say.
      interpreted: whether the kernel runs in the interpreter.
    """

    cols: int
    format: str
    lanes: int
    rows: int
    vector_dtype: jnp.dtype = jnp.dtype(jnp.bfloat16)
    interpreted: bool = False

    # ----------------------------------------------------------------------------------------------- geometry

    @property
    def spec(self) -> kernel_format.KernelFormat:
        return kernel_format.find(self.format, self.cols)

    @property
    def vec(self) -> int:
        """Values per lane and load: the length of a chunk."""
        return self.spec.vec

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
    def _block(self) -> int:
        """Columns that start where a step may start: those under one scale, or a chunk where scales do not line up."""
        cols = next((s.cols for s in self.spec.scales if s.cols), self.vec)
        return cols if self.cols % cols == 0 and cols <= self.step else self.vec

    @property
    def _lane_axes(self) -> dict[str, int]:
        """Axes over the lanes of a row; G is sliced to choose the step. A step of one block has none: an index does it.

        (Register layouts refuse axes of size 1.)
        """
        shared = self._block // self.vec
        axes = dict(G=self.lanes // shared, C=shared)
        return {name: size for name, size in axes.items() if size > 1}

    @property
    def _axes(self) -> dict[str, int]:
        return {**self._row_axes, **self._lane_axes, "V": self.spec.items}

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
        shared = self._block // self.vec
        return (self.cols // self._block, shared) if shared > 1 else (self.cols // self.vec,)

    def weight_operands(self, w: jax.Array | QuantizedArray) -> tuple[jax.Array, ...]:
        """Views of a weight [E, n, cols] in the shape the kernel loads from. Reshapes only, no copy."""
        rows = self.result_shape(w.shape[1])
        if not isinstance(w, QuantizedArray):
            return (w.reshape(w.shape[0], *rows, *self._chunks, self.spec.items),)

        def view(scale, a):
            n, cols = a.shape[1:]
            own_rows = rows if scale.rows == 1 else (n,) if scale.rows else ()
            return a.reshape(a.shape[0], *own_rows, *((cols,) if scale.cols else ()))

        stored = (w.scales,) if w.global_scale is None else (w.scales, w.global_scale)
        return (w.values.reshape(w.shape[0], *rows, *self._chunks, self.spec.items),
                *map(view, self.spec.scales, stored))

    @property
    def num_weight_operands(self) -> int:
        return 1 + len(self.spec.scales)

    def row_operand(self, b: jax.Array) -> jax.Array:
        """View of [E, n], one number per row of the weights."""
        return b.reshape(b.shape[0], *self.result_shape(b.shape[1]))

    def vector_operand(self, v: jax.Array) -> jax.Array:
        """View of an activation [..., cols]."""
        if self.spec.paired:
            v = lax.bitcast_convert_type(v.reshape(*v.shape[:-1], v.shape[-1] // 2, 2), jnp.uint32)
        return v.reshape(*v.shape[:-1], *self._chunks, self.spec.items)

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

    def row_index(self, row_tile) -> tuple:
        """The same as an index of all axes of `result_shape`."""
        return self.row_slice(row_tile), *[slice(None)] * (len(self._row_axes) - 1)

    def _start(self, step):
        """First group of a step; the last step starts early if the steps do not divide the row."""
        per_step = self._lane_axes.get("G", 1)
        if isinstance(step, int):
            return min(step * per_step, self._chunks[0] - per_step)
        return jnp.minimum(step * per_step, self._chunks[0] - per_step) if self.cols % self.step else step * per_step

    def _columns(self, step):
        """A step as an index of the first axis of `_chunks`."""
        start = self._start(step)
        return pl.ds(start, self._lane_axes["G"]) if "G" in self._lane_axes else start

    def load(self, refs, expert, row_tile, step) -> tuple:
        """Raw weights and scales of one step: nothing computed yet."""
        values_ref, *scale_refs = refs
        index = (expert, *self.row_index(row_tile), self._columns(step))
        values = plgpu.load(values_ref.at[index], layout=self._layout("SWGCV"), optimized=False)
        return values, *(self._load_scale(scale, ref, expert, row_tile, step)
                         for scale, ref in zip(self.spec.scales, scale_refs, strict=True))

    def _load_scale(self, scale: Scale, ref, expert, row_tile, step):
        index: tuple = (expert,)
        if scale.rows == 1:
            index += self.row_index(row_tile)
        elif scale.rows:  # `config_fits` sees to it that a tile lies under one row of scales
            index += (lax.div(row_tile * self.out_rows, jnp.int32(scale.rows)),)
        if self._lines_up(scale):
            axes = self._scale_axes(scale)
            index += (self._columns(step),) if scale.cols else ()
            return plgpu.load(ref.at[index], layout=self._layout(axes), optimized=False) if axes else ref[index]
        # Lanes of a row see up to `most` scales, the first of them from some column on: load these, `_scale` selects.
        assert scale.cols is not None  # else it lines up
        first, _ = self._first_column(scale, step)
        most, last = (scale.cols - self.vec + self.step - 1) // scale.cols + 1, (self.cols - 1) // scale.cols
        clamp = min if isinstance(first, int) else jnp.minimum
        return [ref[(*index, clamp(first + j, last))] for j in range(most)]

    def _scale_axes(self, scale: Scale) -> str:
        """Axes of the tile along which a scale differs."""
        return ("SW" if scale.rows == 1 else "") + ("G" if scale.cols and "G" in self._lane_axes else "")

    def _lines_up(self, scale: Scale) -> bool:
        """Whether every group of chunks lies under one scale, in every step."""
        return not scale.cols or scale.cols == self._block

    def _first_column(self, scale: Scale, step) -> tuple:
        """Which scale the first column of a step lies under, and how far in."""
        assert scale.cols is not None
        return divide(self._start(step) * self.vec, scale.cols)

    def _scale(self, scale: Scale, raw, step) -> jax.Array:
        """A loaded scale in float32: a scalar, or one for each row and lane."""
        axes = self._scale_axes(scale)
        if not axes:
            return scale.to_f32(raw)
        if self._lines_up(scale):
            factor = scale.to_f32(raw)
        else:
            column = plgpu.broadcasted_iota(jnp.int32, (self.lanes,), 0, layout=self._layout("G")) * self.vec
            column += self._first_column(scale, step)[1]
            factor = lax.broadcast_in_dim(scale.to_f32(raw[0]), (self.lanes,), ())
            assert scale.cols is not None
            for j, later in enumerate(raw[1:], start=1):
                factor = jnp.where(column >= j * scale.cols, scale.to_f32(later), factor)
        lanes = [i for i, name in enumerate(self._axes) if name in axes]
        return plgpu.layout_cast(
            lax.broadcast_in_dim(factor, self._shape("SWGC"), lanes), self._layout("SWGC"))

    def load_vector(self, ref, index: tuple, step) -> jax.Array:
        """The piece of an activation that meets the weights of `step`, as stored; the same in every warp and row."""
        piece = ref.at[(*index, self._columns(step))]
        return plgpu.load(piece, layout=self._layout("GCV"), optimized=False)

    def widen(self, vector: jax.Array) -> tuple[jax.Array, ...]:
        """An activation piece in float32, repeated for every row of the tile; even and odd values apart if paired."""
        return tuple(map(self._every_row, self._parts(vector)))

    def _parts(self, vector: jax.Array) -> tuple[jax.Array, ...]:
        if not self.spec.paired:
            return (vector.astype(jnp.float32),)
        if self.vector_dtype == jnp.bfloat16:  # its bits are the upper half of a float32
            halves = vector << jnp.uint32(16), vector & jnp.uint32(0xFFFF0000)
            return tuple(lax.bitcast_convert_type(half, jnp.float32) for half in halves)
        halves = (vector & jnp.uint32(0xFFFF)).astype(jnp.uint16), (vector >> jnp.uint32(16)).astype(jnp.uint16)
        return tuple(lax.bitcast_convert_type(half, self.vector_dtype).astype(jnp.float32) for half in halves)

    def _every_row(self, part: jax.Array) -> jax.Array:
        shape = self._shape("SWGCV")
        wide = lax.broadcast_in_dim(part, shape, tuple(range(len(self._row_axes), len(shape))))
        return plgpu.layout_cast(wide, self._layout("SWGCV"))

    def dot(self, weights: tuple, vector: tuple[jax.Array, ...], step) -> jax.Array:
        """Dequantised weights times a widened vector, summed inside each lane: one float32 per row and lane."""
        stored, *scales = weights
        values = self.spec.decode(stored, self._layout("SWGCV"), self.interpreted)
        partial = functools.reduce(
            operator.add, (jnp.sum(value * part, axis=-1) for value, part in zip(values, vector, strict=True)))
        if self.spec.gain != 1:
            partial = partial * jnp.float32(self.spec.gain)
        for scale, raw in zip(self.spec.scales, scales, strict=True):  # once for a whole chunk
            partial = partial * self._scale(scale, raw, step)
        seen = step * self._lane_axes.get("G", 1) - self._start(step) if self.cols % self.step else 0
        if not isinstance(seen, int) or seen:
            group = plgpu.broadcasted_iota(
                jnp.int32, partial.shape, len(self._row_axes), layout=self._layout("SWGC"))
            partial = jnp.where(group >= seen, partial, jnp.float32(0))
        return partial

    def load_rows(self, ref, expert, row_tile) -> jax.Array:
        """One number per row of the tile, from [E, *result_shape(n)], in float32."""
        index = (expert, *self.row_index(row_tile))
        return plgpu.load(ref.at[index], layout=self._layout("SW"), optimized=False).astype(jnp.float32)

    def sums_type(self) -> plgpu.ShapeDtypeStruct:
        """What `reduce` returns."""
        return plgpu.ShapeDtypeStruct(self._shape("SW"), jnp.float32, layout=self._layout("SW"))

    def activate(self, sums, bias_refs: list[list], activation, expert, routed, row_tile) -> jax.Array:
        """Results of the projections, with biases where there are any, to the activation; 0 where nothing is routed."""
        biased = any(bias_refs)
        if biased:
            own = jnp.where(routed, expert, jnp.int32(0))
            sums = [total + self.load_rows(refs[0], own, row_tile) if refs else total
                    for total, refs in zip(sums, bias_refs, strict=True)]
        h = activation.apply(*([None] * (2 - len(sums))), *sums)
        return jnp.where(lax.broadcast_in_dim(routed, h.shape, ()), h, jnp.float32(0)) if biased else h

    def reduce(self, accumulator: jax.Array) -> jax.Array:
        """Butterfly over the lanes of a row: the row results, equal in all its lanes."""
        for _ in self._lane_axes:
            accumulator = jnp.sum(accumulator, axis=-1)
        return accumulator


def pick_tile(cols: int, n: int, format: str, per_warp: int) -> tuple[int, int]:
    """Lanes per row and row groups for a warp that owns about `per_warp` rows of a weight [n, cols].

    The widest rows that read a tenth twice at most win, if a warp may own as many rows side by side as they
    need; else the widest that waste at most a third.
    """
    vec = kernel_format.find(format, cols).vec
    fits = [lanes for lanes in (32, 16, 8, 4) if lanes * vec <= cols]
    waste = {lanes: -cols % (lanes * vec) / cols for lanes in fits}
    snug = [lanes for lanes in fits if waste[lanes] <= 0.1 and LANES // lanes <= per_warp]
    even = [lanes for lanes in fits if waste[lanes] <= 0.34] or [min(fits, key=waste.__getitem__, default=4)]
    lanes = (snug or even)[0]
    rows = max(1, per_warp * lanes // LANES)
    while n % (WARPS * rows * LANES // lanes):  # ends at rows = 1, as n is a multiple of 32 and lanes at least 4
        rows //= 2
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
