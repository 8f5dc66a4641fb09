"""`QuantizedArray`: narrow values with their scales, as a pytree that stands in for a weight."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Format:
    """One storage format for weights: how its parts look and how to convert to and from it.

    Attributes:
      name: key in `FORMATS`.
      block: consecutive elements along the last axis that share one scale.
      values_dtype: dtype of `QuantizedArray.values`.
      scales_dtype: dtype of `QuantizedArray.scales`.
      quantize: array [..., N] -> QuantizedArray.
      dequantize: (values, scales, dtype) -> array [..., N] of that dtype.
    """

    name: str
    block: int
    values_dtype: jnp.dtype
    scales_dtype: jnp.dtype
    quantize: "Callable[[jax.Array], QuantizedArray]"
    dequantize: Callable[..., jax.Array]

    @property
    def bytes_per_value(self) -> float:
        """Bytes of memory that one weight takes, its share of the scale included."""
        return self.values_dtype.itemsize + self.scales_dtype.itemsize / self.block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A quantised weight [..., N]: narrow values and one scale per block along the last axis.

    Attributes:
      values: narrow values, for "mxfp8" float8_e4m3fn [..., N].
      scales: scales, for "mxfp8" the E8M0 bytes as uint8 [..., N // 32].
      format: a key of `jax_warp_decode.formats.FORMATS`; static, part of the tree structure.

    Construction checks nothing, so that a pytree transform may hold shapes, shardings or gradients in it; `check` does.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode.formats import quantize
      >>> w = quantize(jax.random.normal(jax.random.key(0), (4, 8, 64)), "mxfp8")
      >>> w.shape, w.scales.shape, w.nbytes
      ((4, 8, 64), (4, 8, 2), 2112)
      >>> w[1].dequantize(jnp.bfloat16).shape
      (8, 64)
    """

    values: jax.Array
    scales: jax.Array
    format: str = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """bfloat16: the dtype that quantised weights replace. `dequantize` can give others."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""
        return sum(a.size * jnp.dtype(a.dtype).itemsize for a in (self.values, self.scales))

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """The array it stands for, in `dtype`. Raises `ArgumentError` as `check` does."""
        self.check("QuantizedArray")
        return _format(self.format, "QuantizedArray").dequantize(self.values, self.scales, dtype)

    def __getitem__(self, index) -> "QuantizedArray":
        """Indexes leading axes (integers, slices, integer arrays, None), traced ones too. The last axis stays whole."""
        index = index if isinstance(index, tuple) else (index,)
        if any(i is Ellipsis or jnp.result_type(i) == jnp.bool_ for i in index if not isinstance(i, slice | None)):
            raise ArgumentError(
                f"index: got {index}, expected integers, slices, integer arrays or None on the leading axes of a "
                f"QuantizedArray {self.shape}; dequantise it first for anything else")
        if sum(i is not None for i in index) >= self.ndim:
            raise ArgumentError(
                f"index: got {index} for a QuantizedArray {self.shape}, expected at most {self.ndim - 1} entries: the "
                f"blocks of the last axis stay together; dequantise it first to index that axis")
        return dataclasses.replace(
            self, values=jnp.asarray(self.values)[index], scales=jnp.asarray(self.scales)[index])

    def check(self, name: str) -> None:
        """Raises `ArgumentError`, its message starting with `name`, unless format, dtypes and shapes fit together."""
        spec = _format(self.format, name)
        for part, want in (("values", spec.values_dtype), ("scales", spec.scales_dtype)):
            array = getattr(self, part)
            if jnp.dtype(array.dtype) != want:
                raise ArgumentError(
                    f"{name}.{part}: got dtype {array.dtype}, expected {want} for format {self.format!r}; reinterpret "
                    f"bytes with jax.lax.bitcast_convert_type, convert other formats by dequantising and quantising")
        if self.ndim == 0 or self.shape[-1] % spec.block:
            raise ArgumentError(
                f"{name}.values: got shape {self.shape}, expected a last axis that is a multiple of {spec.block}, the "
                f"block of format {self.format!r}; pad the weight before quantising it")
        want = (*self.shape[:-1], self.shape[-1] // spec.block)
        if tuple(self.scales.shape) != want:
            raise ArgumentError(
                f"{name}.scales: got shape {tuple(self.scales.shape)}, expected {want}: one scale per {spec.block} "
                f"elements along the last axis of values {self.shape}")


def _format(format: str, name: str) -> Format:
    from jax_warp_decode.formats import FORMATS  # the table is built on top of this module

    if format not in FORMATS:
        raise ArgumentError(f"{name}.format: got {format!r}, expected one of {sorted(FORMATS)}")
    return FORMATS[format]
