"""The narrow numbers that blocks are made of: E4M3, E5M2 and E2M1, rounding to them, nibbles and powers of two.

Source: OCP Microscaling Formats (MX) specification v1.0, section 5.3. Where a result may be subnormal in float32 the
arithmetic is done on the bits, because float32 arithmetic on the CPU flushes subnormals.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MANTISSA = np.int32(0x007FFFFF)  # fields of a float32
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
NAN = np.int32(0x7FC00000)
HIDDEN_BIT = np.int32(0x00800000)
SMALLEST_E8M0 = np.int32(0x00400000)  # 2^-127, a subnormal
NAN_SCALE = 255  # the E8M0 byte


@dataclasses.dataclass(frozen=True)
class Element:
    """A narrow floating-point type: sign, exponent and mantissa, with subnormals.

    Attributes:
      max: largest finite value.
      max_exponent: its binary exponent; block scales put the largest value of a block there.
      min_exponent: exponent of the smallest normal value; below it the grid stays as it is.
      mantissa: bits of the mantissa.
    """

    max: float
    max_exponent: int
    min_exponent: int
    mantissa: int


E4M3 = Element(448.0, 8, -6, 3)
E5M2 = Element(57344.0, 15, -14, 2)
E2M1 = Element(6.0, 2, 0, 1)


def round_to_element(x: jax.Array, element: Element) -> jax.Array:
    """Float32 rounded to the nearest value of the element type, ties to even, saturating; NaN and signs stay.

    A cast of the result to the narrow dtype is exact, whatever rounding the backend gives it.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = jnp.minimum(lax.bitcast_convert_type(bits & MAGNITUDE, jnp.float32), np.float32(element.max))
    exponent = (lax.bitcast_convert_type(magnitude, jnp.int32) >> 23) - np.int32(127)
    grid = jnp.maximum(exponent, np.int32(element.min_exponent)) - np.int32(element.mantissa)
    rounded = jnp.round(magnitude * power_of_two(-grid)) * power_of_two(grid)
    rounded = jnp.minimum(rounded, np.float32(element.max))
    return jnp.where(bits < 0, -rounded, rounded)


@jax.jit
def e2m1_to_codes(x: jax.Array) -> jax.Array:
    """Float32 values on the E2M1 grid to their codes 0..15, uint8; bit 3 is the sign. NaN gives 6."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & MAGNITUDE
    normal = (magnitude >> 22) - np.int32(252)  # two bits of exponent, one of mantissa
    code = jnp.where(magnitude < np.int32(0x3F800000), (magnitude != 0).astype(jnp.int32), jnp.minimum(normal, 7))
    return (code | jnp.where(bits < 0, np.int32(8), np.int32(0))).astype(jnp.uint8)


@jax.jit
def e2m1_from_codes(codes: jax.Array) -> jax.Array:
    """Codes 0..15 to float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and, from 8 on, the same with a minus sign."""
    codes = codes.astype(jnp.int32)
    magnitude = codes & np.int32(7)
    normal = (magnitude + np.int32(252)) << 22
    half = jnp.where(magnitude == 1, np.int32(0x3F000000), np.int32(0))
    bits = jnp.where(magnitude < 2, half, normal) | ((codes & np.int32(8)) << 28)
    return lax.bitcast_convert_type(bits, jnp.float32)


@jax.jit
def pack_nibbles(codes: jax.Array) -> jax.Array:
    """Codes 0..15 [..., N] to bytes [..., N // 2]: element 2j is the low nibble of byte j, element 2j + 1 the high one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import pack_nibbles
      >>> [hex(b) for b in pack_nibbles(jnp.array([1, 2, 3, 4], jnp.uint8)).tolist()]
      ['0x21', '0x43']
    """
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << np.uint8(4))


@jax.jit
def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """The reverse of `pack_nibbles`: bytes [..., N // 2] to codes [..., N], uint8.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.formats import unpack_nibbles
      >>> unpack_nibbles(jnp.array([0x21, 0x43], jnp.uint8)).tolist()
      [1, 2, 3, 4]
    """
    pairs = jnp.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent as float32 for exponents -126..127, zero below."""
    return lax.bitcast_convert_type(jnp.maximum(exponent + np.int32(127), 0) << 23, jnp.float32)


@jax.jit
def e8m0_to_float32(scales: jax.Array) -> jax.Array:
    """E8M0 bytes to float32, exactly: 2^(byte - 127), of which byte 0 is subnormal; byte 255 is NaN."""
    scale = scales.astype(jnp.int32)
    bits = jnp.where(scale == 0, SMALLEST_E8M0, jnp.where(scale == NAN_SCALE, NAN, scale << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def times_e8m0(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Element values (float32) times 2^(scale byte - 127), exactly, subnormals included; shapes broadcast.

    Byte 255 gives NaN, as does a NaN value; infinity stays; products from 2^128 on give infinity. Exact because every
    nonzero element value is a normal float32 with at most three mantissa bits: a shift into a subnormal loses nothing.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    scale = scales.astype(jnp.int32)
    magnitude = bits & MAGNITUDE
    # Multiplying by a power of two adds to the exponent field.
    exponent = (magnitude >> 23) + scale - np.int32(127)
    normal = magnitude + ((scale - np.int32(127)) << 23)
    subnormal = ((magnitude & MANTISSA) | HIDDEN_BIT) >> jnp.clip(np.int32(1) - exponent, 0, 31)
    product = jnp.where(exponent > 0, normal, subnormal)
    product = jnp.where((exponent >= 255) | (magnitude == INFINITY), INFINITY, product)
    product = jnp.where(magnitude == 0, np.int32(0), product)
    bad = (scale == NAN_SCALE) | (magnitude > INFINITY)
    return lax.bitcast_convert_type(jnp.where(bad, NAN, product | (bits & ~MAGNITUDE)), jnp.float32)
