"""`QuantizedArray`: narrow values with their scales, as a pytree that stands in for a weight, and its `Format`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_warp_decode.errors import ArgumentError

INPUT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Format:
    """One storage format for weights: how its parts look and how to convert to and from it.

    A value is element * scale, and with a global scale element * (scale * global scale). Scales have the rank of the
    array: each of its last two axes holds one entry per block, rounded up, as blocks at the edge may be partial.

    Attributes:
      name: key in `FORMATS`.
      bits: bits per element; four-bit elements lie two to a byte along the last axis, the low nibble first.
      block_shape: (rows, columns) that share one scale; None is the whole axis.
      block: the last axis must be a multiple of it; 1 where a partial block may end a row.
      values_dtype: dtype of `QuantizedArray.values`.
      scales_dtypes: dtypes that `QuantizedArray.scales` may have; `quantize` makes the first one.
      global_scale: whether there is a second, float32 scale for each matrix (the last two axes).
      quantize: array [..., N] -> QuantizedArray.
      dequantize: (QuantizedArray, dtype) -> array [..., N] of that dtype.
    """

    name: str
    bits: int
    block_shape: tuple[int | None, int | None]
    block: int
    values_dtype: jnp.dtype
    scales_dtypes: tuple[jnp.dtype, ...]
    quantize: "Callable[[Any], QuantizedArray]"
    dequantize: "Callable[[QuantizedArray, jnp.dtype], jax.Array]"
    global_scale: bool = False

    @property
    def values_per_item(self) -> int:
        """Elements that one item of `QuantizedArray.values` holds: 2 for packed four-bit formats, else 1."""
        return 8 * self.values_dtype.itemsize // self.bits

    @property
    def matrix_axes(self) -> int:
        """How many of the last axes share scales, so that only the axes before them can be indexed."""
        return 2 if self.block_shape[0] != 1 or self.global_scale else 1

    def values_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of `values` for an array of this shape."""
        return (*shape[:-1], shape[-1] // self.values_per_item)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of `scales` for an array of this shape."""
        tail = shape[-2:]
        blocks = zip(tail, self.block_shape[-len(tail):], strict=True)
        return (*shape[:-2], *(min(n, 1) if block is None else math.ceil(n / block) for n, block in blocks))

    def global_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of `global_scale` for an array of this shape, if the format has one."""
        return (*shape[:-2], 1, 1)

    def structs(self, shape: tuple[int, ...], scales_dtype: DTypeLike | None = None) -> "QuantizedArray":
        """The parts of an array of this shape as `jax.ShapeDtypeStruct`, for ahead-of-time compiling and loaders."""
        self.check_shape("shape", shape)
        struct: Any = jax.ShapeDtypeStruct  # a pytree holds any leaves, its fields are typed as what they usually are
        return QuantizedArray(
            struct(self.values_shape(shape), self.values_dtype),
            struct(self.scales_shape(shape), scales_dtype or self.scales_dtypes[0]), self.name,
            struct(self.global_scale_shape(shape), jnp.float32) if self.global_scale else None)

    def nbytes(self, shape: tuple[int, ...], scales_dtype: DTypeLike | None = None) -> int:
        """Bytes of memory of an array of this shape, scales included; `scales_dtype` defaults to the first one.

        Example:
          >>> from jax_warp_decode.formats import FORMATS
          >>> FORMATS["mxfp4"].nbytes((128, 768, 2048)) / (128 * 768 * 2048)
          0.53125
        """
        return self.structs(shape, scales_dtype).nbytes

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises `ArgumentError`, its message starting with `name`, unless the format can hold this shape."""
        if not self._holds(shape):
            raise ArgumentError(f"{name}: got shape {shape}, expected {self._rule}; pad or reshape it")

    def _holds(self, shape: tuple[int, ...]) -> bool:
        return len(shape) >= self.matrix_axes and shape[-1] % self.block == 0

    @property
    def _rule(self) -> str:
        rules = []
        if self.matrix_axes > 1:
            rules.append("at least two axes")
        if self.block > 1:
            rules.append(f"a last axis that is a multiple of {self.block}")
        return f"{' and '.join(rules) or 'at least one axis'} for format {self.name!r}"

    def check_input(self, x: jax.Array) -> None:
        """Raises `ArgumentError` unless x is an array that the format can quantise."""
        dtype = getattr(x, "dtype", None)
        if dtype not in INPUT_DTYPES:
            raise ArgumentError(
                f"x: got {dtype if dtype is not None else type(x).__name__}, expected a float32, bfloat16 or float16 "
                f"array; convert it with astype")
        self.check_shape("x", tuple(x.shape))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A quantised weight [..., N]: narrow values and their scales, in the layout of its `Format`.

    Attributes:
      values: narrow values: for "mxfp8" float8_e4m3fn [..., N], for "mxfp4" uint8 [..., N // 2].
      scales: scales: for "mxfp8" the E8M0 bytes as uint8 [..., N // 32]; `Format.scales_shape` has the rule.
      format: a key of `jax_warp_decode.formats.FORMATS`; static, part of the tree structure.
      global_scale: float32 [..., 1, 1], a second scale for each matrix, or None in formats without one.

    Construction checks nothing, so that a pytree transform may hold shapes, shardings or gradients in it; `check` does.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode.formats import quantize
      >>> w = quantize(jax.random.normal(jax.random.key(0), (4, 8, 64)), "mxfp4")
      >>> w.shape, w.values.shape, w.scales.shape, w.nbytes
      ((4, 8, 64), (4, 8, 32), (4, 8, 2), 1088)
      >>> w[1].dequantize(jnp.bfloat16).shape
      (8, 64)
    """

    values: jax.Array
    scales: jax.Array
    format: str = dataclasses.field(metadata=dict(static=True))
    global_scale: jax.Array | None = None

    @property
    def spec(self) -> Format:
        """The row of `FORMATS`."""
        return find_format(self.format, "QuantizedArray")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        stored = tuple(self.values.shape)
        return (*stored[:-1], stored[-1] * self.spec.values_per_item) if stored else stored

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """bfloat16: the dtype that quantised weights replace. `dequantize` can give others."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(self))

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The array it stands for, a copy of prod(shape) * itemsize bytes in `dtype`.

        Raises:
          ArgumentError: as `check`, and for a dtype that is not floating.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ArgumentError(f"dtype: got {dtype}, expected a floating dtype such as float32 or bfloat16")
        self.check("QuantizedArray")
        return self.spec.dequantize(self, jnp.dtype(dtype))

    def __getitem__(self, index) -> "QuantizedArray":
        """Indexes leading axes (integers, slices, integer arrays, None), traced ones too. Blocks stay whole."""
        index = index if isinstance(index, tuple) else (index,)
        if any(i is Ellipsis or jnp.result_type(i) == jnp.bool_ for i in index if not isinstance(i, slice | None)):
            raise ArgumentError(
                f"index: got {index}, expected integers, slices, integer arrays or None on the leading axes of a "
                f"QuantizedArray {self.shape}; dequantise it first for anything else")
        whole = self.spec.matrix_axes
        if sum(i is not None for i in index) > self.ndim - whole:
            raise ArgumentError(
                f"index: got {index} for a QuantizedArray {self.shape}, expected at most {self.ndim - whole} entries: "
                f"format {self.format!r} has blocks on the last {'axis' if whole == 1 else 'two axes'}, which stay "
                f"together; dequantise it first to index further")
        return jax.tree.map(lambda a: jnp.asarray(a)[index], self)

    def check_parts(self, name: str) -> None:
        """Raises `ArgumentError`, its message starting with `name`, unless values and scales are arrays."""
        for part in ("values", "scales", "global_scale"):
            array = getattr(self, part)
            if not hasattr(array, "dtype") and (array is not None or part != "global_scale"):
                raise ArgumentError(f"{name}.{part}: got {type(array).__name__}, expected an array; see `quantize`")

    def check(self, name: str) -> None:
        """Raises `ArgumentError`, its message starting with `name`, unless format, dtypes and shapes fit together."""
        spec = find_format(self.format, name)
        self.check_parts(name)
        wants = [("values", (spec.values_dtype,)), ("scales", spec.scales_dtypes)]
        if spec.global_scale and self.global_scale is not None:
            wants.append(("global_scale", (jnp.dtype(jnp.float32),)))
        for part, dtypes in wants:
            dtype = jnp.dtype(getattr(self, part).dtype)
            if dtype not in dtypes:
                raise ArgumentError(
                    f"{name}.{part}: got dtype {dtype}, expected {' or '.join(map(str, dtypes))} for format "
                    f"{self.format!r}; {_dtype_hint(part, dtype, spec)}")
        if (self.global_scale is None) == spec.global_scale:
            got, needed = ("None", "float32 [..., 1, 1]") if spec.global_scale else ("an array", "None")
            raise ArgumentError(f"{name}.global_scale: got {got}, expected {needed} for format {self.format!r}")
        if not spec._holds(self.shape):
            pack = spec.values_per_item
            packed = f", {self.shape[-1]} values at {pack} a byte" if pack > 1 and self.ndim else ""
            raise ArgumentError(f"{name}.values: got shape {tuple(self.values.shape)}{packed}, expected {spec._rule}; "
                                f"pad the weight before quantising it")
        for part, want in (("scales", spec.scales_shape(self.shape)),
                           ("global_scale", spec.global_scale_shape(self.shape))):
            array = getattr(self, part)
            if array is not None and tuple(array.shape) != want:
                raise ArgumentError(
                    f"{name}.{part}: got shape {tuple(array.shape)}, expected {want} for {_per(part, spec)} of values "
                    f"{self.shape} in format {self.format!r}{_shape_hint(tuple(array.shape), want, self, spec)}")


def find_format(format: str, name: str = "") -> Format:
    """The row of `FORMATS`, or an `ArgumentError` that names `name`'s format."""
    from jax_warp_decode.formats import FORMATS  # the table is built on top of this module

    if format not in FORMATS:
        raise ArgumentError(f"{name + '.' if name else ''}format: got {format!r}, expected one of {list(FORMATS)}")
    return FORMATS[format]


def _per(part: str, spec: Format) -> str:
    if part == "global_scale":
        return "one scale per matrix"
    rows, cols = ("all" if n is None else n for n in spec.block_shape)
    return f"one scale per {rows} x {cols} elements" if rows != 1 else f"one scale per {cols} elements of the last axis"


def _dtype_hint(part: str, dtype: np.dtype, spec: Format) -> str:
    if part == "values" and spec.bits == 4:
        if dtype in (jnp.int32, jnp.uint32):
            return ("words of eight values are bytes in the same order: use numpy's .view(uint8), or "
                    "lax.bitcast_convert_type and a reshape")
        return "pack two values a byte, the low nibble first; `pack_nibbles` does"
    return "reinterpret bytes with jax.lax.bitcast_convert_type, convert other formats by dequantising and quantising"


def _shape_hint(got: tuple, want: tuple, q: QuantizedArray, spec: Format) -> str:
    """What the wrong shape looks like, as the end of a message."""
    if len(got) != len(want):
        return "; reshape it" if math.prod(got) == math.prod(want) else ""
    if len(got) > 1 and got == (*want[:-2], *want[:-3:-1]):
        return "; it looks transposed: swap the last two axes"
    tail = list(zip(q.shape[-2:], got[-2:], strict=True))
    if got[:-2] != want[:-2] or any(n == 0 or size % n for size, n in tail):
        return ""
    blocks = tuple(size // n for size, n in tail)
    expected = spec.block_shape[-len(blocks):]
    hint = f"; it would fit blocks of {' x '.join(map(str, blocks))}, another format"
    if spec.values_per_item > 1 and (*blocks[:-1], blocks[-1] // spec.values_per_item) == expected:
        hint += ", or values that are not packed yet: `pack_nibbles` puts two into a byte"
    return hint
