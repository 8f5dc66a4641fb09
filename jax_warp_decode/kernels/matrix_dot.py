"""Row dots on the tensor cores, for rows that four lanes cover: one `mma.sync` takes eight rows of a warp.

The weights of a warp, eight rows side by side with four lanes each, lie in registers exactly as the second operand of
mma.m16n8k16 wants them: its column n is the row of lanes 4 n .. 4 n + 3, whatever columns of the weight a lane holds,
as long as the first operand holds the activations of the same columns. The product sums over the four lanes, but their
scales differ. So the first operand, which has 16 rows, spreads the activation over four of them: row r holds what lane
r of every four meets, and zeros elsewhere. Row r of the product is then the sum over lane r alone, one float32 for
each row of weights and lane, as without tensor cores.

Operands are float16, which holds E2M1 and E4M3 exactly. Activations are multiplied by a power of two for each lane's
chunk, so that the largest lies at 2^14: what lies 2^-38 below it is rounded, far below the rounding of a float32 sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.simt import Int

LANES = 4  # of a row
FULL_WARP = -1

_TO_HALVES = """{
    .reg .b16 lo, hi;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
}"""
_MULTIPLY = ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
             "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};")


def halve(parts: tuple[jax.Array, ...], layout) -> tuple[jax.Array, ...]:
    """Activations [.., V] in float32 to (*the same in float16, scaled per chunk; what undoes the scaling [..])."""
    largest = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, parts)), axis=-1)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23
    exponent = jnp.minimum(jnp.int32(268) - exponent, jnp.int32(253))  # of the factor; infinity and NaN stay
    factor = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    undo = lax.bitcast_convert_type((jnp.int32(254) - exponent) << 23, jnp.float32)
    shape = parts[0].shape
    factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, shape, tuple(range(len(shape) - 1))), layout)
    return *((part * factor).astype(jnp.float16) for part in parts), undo


def product(split, stored: jax.Array, halves: tuple[jax.Array, ...], layouts, out) -> jax.Array:
    """Sums over the chunks of a warpgroup's rows times the scaled activations: one float32 per row and lane.

    Args:
      split: (a 32-bit word of stored items) -> for each array of halves, the E4M3 word that it meets.
      stored: the weights, as loaded.
      halves: of `halve`.
      layouts: of stored and of the halves.
      out: shape and layout of the result, a `plgpu.ShapeDtypeStruct`.
    """

    def body(_ctx, values, *halves):
        lane = simt.thread() % 32
        row, quarter = lane // LANES, lane % LANES
        own, odd, source = row.equals(quarter), (row & 1).equals(1), quarter * LANES + (row >> 1)
        (registers,) = {half.registers.size for half in halves}
        assert registers == 1, "a lane has one chunk of the activation"
        operands = [[simt.select(own, word, Int(0)) for word in _words(half.registers.flat[0])] for half in halves]
        sums = []
        for register in values.registers.flat:
            met = [[] for _ in halves]
            for word in _words(register):
                for pairs, e4m3 in zip(met, split(word), strict=True):
                    pairs += utils.inline_ptx(_TO_HALVES, e4m3.v, result_types=[simt.i32()] * 2)
            sums.append(vector.from_elements(ir.VectorType.get((1,), ir.F32Type.get()),
                                             [_chunk(operands, met, source, odd)]))
        layout = out.layout.to_mgpu()
        shaped = np.empty(len(sums), object)
        shaped[:] = sums
        return mgpu.FragmentedArray(_registers=shaped.reshape(layout.registers_shape(out.shape)), _layout=layout,
                                    _is_signed=None)

    stored_layout, half_layout = layouts
    return plgpu.inline_mgpu(arg_types=(stored_layout, *[half_layout] * len(halves)), return_type=out)(body)(
        stored, *halves)


def _chunk(operands, met, source, odd):
    f32, zero = ir.F32Type.get(), Int(0).v
    total = [arith.constant(f32, 0.0)] * 4
    for activations, weights in zip(operands, met, strict=True):
        for i in range(0, len(weights), 2):
            total = utils.inline_ptx(
                _MULTIPLY, activations[i].v, zero, activations[i + 1].v, zero, weights[i], weights[i + 1], *total,
                result_types=[f32] * 4, has_side_effects=False, convergent=True)
    first, second = (_from_lane(total[i], source) for i in range(2))
    return arith.select(odd, second, first)


def _from_lane(value, lane: Int):
    bits = arith.bitcast(simt.i32(), value)
    got = nvvm.shfl_sync(Int(FULL_WARP).v, bits, lane.v, Int(31).v, nvvm.ShflKind.idx)
    return arith.bitcast(ir.F32Type.get(), got)


def _words(register) -> list[Int]:
    """A vector register as 32-bit words."""
    kind = ir.VectorType(register.type)
    n = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
    words = utils.bitcast(register, ir.VectorType.get((n,), simt.i32()))
    return [Int(vector.extract(words, [], [i])) for i in range(n)]
