"""How the warp-decode kernels read each weight format: the table `KERNEL_FORMATS`, one row per format.

A lane reads a *chunk* of a row at once, turns it into float32 in registers and multiplies it with the activations it
meets. A row of the table says how long a chunk is, how its values become float32, and what each scale covers; `RowTile`
does the rest and knows no format. Values and scales are read in checkpoint order: nothing is packed for the kernels.

Four-bit formats hold two values a byte. They meet the activation as pairs: 32 bits of two 16-bit activations beside
each byte, so that even and odd values are multiplied apart and nothing has to be interleaved.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jax_warp_decode.formats import FORMATS

LOAD_BYTES = 16  # per lane and load
LEAST_LANES = 4  # that a row is spread over
MX_BLOCK = 32  # values that share one E8M0 scale


@dataclasses.dataclass(frozen=True)
class Scale:
    """One kind of scale of a weight [n, cols].

    Attributes:
      rows, cols: what one of them covers; None is the whole axis.
      to_f32: its stored form (an array or a scalar) to float32.
    """

    rows: int | None
    cols: int | None
    to_f32: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class KernelFormat:
    """How a lane reads one format.

    Attributes:
      vec: values of a chunk.
      items: stored items of a chunk; half of `vec` where two values share a byte.
      decode: (items, their register layout, whether the kernel is interpreted) -> float32 arrays in the same layout:
        the values, or the even and the odd ones. Up to `gain`.
      scales: multiply the sum over a chunk; a chunk never crosses the columns of one.
      gain: what decoded values have to be multiplied with. Not folded into a scale, with which it may overflow.
    """

    vec: int
    items: int
    decode: Callable[..., tuple[jax.Array, ...]]
    scales: tuple[Scale, ...] = ()
    gain: float = 1.0

    @property
    def paired(self) -> bool:
        """Whether a stored item holds an even and an odd value."""
        return self.vec > self.items

    @property
    def narrow(self) -> bool:
        """Less than two bytes a value: the conversion, not the load, is then what costs."""
        return self.vec > LOAD_BYTES // 2


# ------------------------------------------------------------------------------------------------- scales to float32


def e8m0_to_f32(scale: jax.Array) -> jax.Array:
    """E8M0 bytes (integers) to float32 in three instructions: 2**(s - 127); 0 -> 2**-127, 255 -> NaN."""
    # s << 23 is the exponent field. As integers, only s = 0 lies below the bits of 2**-127; s = 255 reads as infinity.
    bits = jnp.maximum(scale.astype(jnp.int32) << 23, jnp.int32(1 << 22))
    power = lax.bitcast_convert_type(bits, jnp.float32)
    return power * jnp.float32(0) + power  # infinity becomes NaN, all others stay


def to_f32(scale: jax.Array) -> jax.Array:
    return scale.astype(jnp.float32)


# ------------------------------------------------------------------------------------------------- values to float32


def widen(values: jax.Array, layout, interpreted: bool) -> tuple[jax.Array, ...]:
    """Floating-point values that the hardware converts."""
    return (values.astype(jnp.float32),)


def e2m1(packed: jax.Array, layout, interpreted: bool) -> tuple[jax.Array, ...]:
    """E2M1 nibbles to value / 64: the bits s eem as the E4M3 byte s 00ee m00, subnormal 0.5 included."""
    if interpreted:
        byte = packed.astype(jnp.int32)
        even, odd = (byte & 0x07) << 2 | (byte & 0x08) << 4, (byte & 0x70) >> 2 | (byte & 0x80)
        even, odd = (lax.bitcast_convert_type(b.astype(jnp.uint8), jnp.float8_e4m3fn) for b in (even, odd))
    else:
        out = plgpu.ShapeDtypeStruct(packed.shape, jnp.float8_e4m3fn, layout=layout)
        even, odd = plgpu.inline_mgpu(arg_types=(layout,), return_type=(out, out))(_e2m1_to_e4m3)(packed)
    return even.astype(jnp.float32), odd.astype(jnp.float32)


def _e2m1_to_e4m3(_ctx, packed):
    """Four bytes at a time: seven integer instructions for eight values."""
    even, odd = np.empty_like(packed.registers), np.empty_like(packed.registers)
    for at, register in np.ndenumerate(packed.registers):
        n = ir.VectorType(register.type).shape[0]
        words = ir.VectorType.get((n // 4,), ir.IntegerType.get_signless(32))
        w, e4m3 = utils.bitcast(register, words), ir.VectorType.get((n,), ir.Float8E4M3FNType.get())

        def masked(shift, by, mask, w=w, words=words):
            return arith.andi(shift(w, _splat(words, by)) if by else w, _splat(words, mask))

        even[at] = utils.bitcast(arith.ori(masked(arith.shli, 2, 0x1C1C1C1C), masked(arith.shli, 4, 0x80808080)), e4m3)
        odd[at] = utils.bitcast(arith.ori(masked(arith.shrui, 2, 0x1C1C1C1C), masked(arith.shrui, 0, 0x80808080)), e4m3)
    return tuple(_array(r, packed) for r in (even, odd))


def int4(packed: jax.Array, layout, interpreted: bool) -> tuple[jax.Array, ...]:
    """Nibbles that hold value + 8."""
    if interpreted:
        byte = packed.astype(jnp.int32)
        return tuple(n.astype(jnp.float32) - jnp.float32(8) for n in (byte & 15, byte >> 4))
    out = plgpu.ShapeDtypeStruct(packed.shape, jnp.float32, layout=layout)
    decode = functools.partial(_integers, bits=4, flip=0)
    return tuple(plgpu.inline_mgpu(arg_types=(layout,), return_type=(out, out))(decode)(packed))


def int8(values: jax.Array, layout, interpreted: bool) -> tuple[jax.Array, ...]:
    """Two's complement bytes. The hardware's conversion is four times slower than the arithmetic in `_integers`."""
    if interpreted:
        return (values.astype(jnp.float32),)
    out = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=layout)
    decode = functools.partial(_integers, bits=8, flip=0x80808080)
    return (plgpu.inline_mgpu(arg_types=(layout,), return_type=out)(decode)(values),)


def _integers(_ctx, stored, *, bits: int, flip: int):
    """Unsigned fields of a word, minus half their range, exactly.

    Two fields, 16 bits apart, become the mantissas of two float16 numbers 1024 + n; a packed subtraction leaves
    n - half, and conversion to float32 is exact. `flip` makes two's complement unsigned.
    """
    i32, f32, f16 = ir.IntegerType.get_signless(32), ir.F32Type.get(), ir.F16Type.get()
    pair, fields = ir.VectorType.get((2,), f16), 32 // bits
    parts = tuple(np.empty_like(stored.registers) for _ in range(8 // bits))
    bias = arith.constant(pair, ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get(f16, 1024 + 2 ** (bits - 1))))
    for at, register in np.ndenumerate(stored.registers):
        n = ir.VectorType(register.type).shape[0]
        words, values = utils.bitcast(register, ir.VectorType.get((n // 4,), i32)), [None] * (n // 4 * fields)
        for j in range(n // 4):
            word = vector.extract(words, [], [j])
            word = arith.xori(word, _constant(flip)) if flip else word
            for k in range(fields // 2):
                field = arith.shrui(word, _constant(k * bits)) if k else word
                field = arith.andi(field, _constant(0x00010001 * (2**bits - 1)))
                both = arith.subf(utils.bitcast(arith.ori(field, _constant(0x64006400)), pair), bias)
                for half in range(2):
                    values[fields * j + k + half * fields // 2] = arith.extf(f32, vector.extract(both, [], [half]))
        for start, part in enumerate(parts):
            part[at] = vector.from_elements(ir.VectorType.get((n,), f32), values[start::len(parts)])
    arrays = tuple(_array(r, stored) for r in parts)
    return arrays if len(arrays) > 1 else arrays[0]


def _array(registers, like) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def _constant(bits: int):
    return arith.constant(ir.IntegerType.get_signless(32), _signed(bits))


def _splat(words, bits: int):
    attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _signed(bits))
    return arith.constant(words, ir.DenseElementsAttr.get_splat(words, attribute))


# ------------------------------------------------------------------------------------------------------------- table


def _row(name: str, decode, scale_to_f32=to_f32, *, load_bytes: int = LOAD_BYTES, gain: float = 1.0) -> KernelFormat:
    spec = FORMATS[name]
    scales = (Scale(*spec.block_shape, scale_to_f32), *([Scale(None, None, to_f32)] if spec.global_scale else []))
    return KernelFormat(load_bytes * 8 // spec.bits, load_bytes // spec.values_dtype.itemsize, decode, scales, gain)


KERNEL_FORMATS = {
    "f32": KernelFormat(4, 4, widen),
    "bf16": KernelFormat(8, 8, widen),
    "f16": KernelFormat(8, 8, widen),
    "mxfp8": _row("mxfp8", widen, e8m0_to_f32),
    "mxfp8_e5m2": _row("mxfp8_e5m2", widen, e8m0_to_f32),
    "mxfp4": _row("mxfp4", e2m1, e8m0_to_f32, gain=64.0),
    "nvfp4": _row("nvfp4", e2m1, load_bytes=8, gain=64.0),  # half a load: 16 values share a scale
    "fp8_block128": _row("fp8_block128", widen),
    "fp8_channel": _row("fp8_channel", widen),
    "fp8_tensor": _row("fp8_tensor", widen),
    "int8_channel": _row("int8_channel", int8),
    "int4_group32": _row("int4_group32", int4),
}

@functools.cache
def find(format: str, cols: int | None = None) -> KernelFormat:
    """The row of a format (see `experts.weight_format` for the names); with shorter chunks if rows of `cols` are short.

    Example:
      >>> from jax_warp_decode.kernels import kernel_format
      >>> kernel_format.find("mxfp4").vec, kernel_format.find("mxfp4", cols=96).vec
      (32, 16)
    """
    row = KERNEL_FORMATS[format]
    while cols and LEAST_LANES * row.vec > cols:
        row = dataclasses.replace(row, vec=row.vec // 2, items=row.items // 2)
    return row
