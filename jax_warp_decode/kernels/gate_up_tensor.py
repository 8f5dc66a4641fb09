"""`moe_gate_up_3d_batched` for weights of a byte or less, with its dots on the tensor cores.

Ownership: a warp owns 8 * `tiles` intermediate neurons of one (token, slot) pair. Eight gate rows and the up rows of
the same neurons are the sixteen rows of a product (`row_products`), so that both dots of a neuron end in the same lane,
and the activation follows. Without a gate, both halves are up rows. The four warps of a CTA share the token's
activations in shared memory, behind one barrier; the first weights are under way by then.

Grid: (row tile, pair), pairs fastest.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jax_warp_decode import compat
from jax_warp_decode.activations import Activation
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, row_activations, row_products, simt, tile
from jax_warp_decode.kernels.expert_index import ExpertIndex, take
from jax_warp_decode.kernels.row_products import FORMATS, QUAD, NarrowFormat, Walk
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int
from jax_warp_decode.kernels.tile import RowTile

REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class GateUpTensorConfig:
    """How the kernel uses a warp.

    Attributes:
      tiles: neurons of a warp, in eights; they share the loads of x.
      unroll: groups of 256 columns whose loads are issued together.

    Example:
      >>> GateUpTensorConfig.heuristic(T=8, K=8, H=2048, I=768, format="mxfp4")
      GateUpTensorConfig(tiles=1, unroll=1)
    """

    tiles: int
    unroll: int

    @classmethod
    def heuristic(cls, T: int, K: int, H: int, I: int, format: str) -> "GateUpTensorConfig | None":
        """Where it beats `GateUpConfig`, or None."""
        # Four-bit weights are bound by their conversion once there are neurons enough (bench/NOTES.md).
        config = cls(tiles=1, unroll=1)
        return config if format == "mxfp4" and T * K * I >= 8192 and checks.fits(config, H, I, K, format) else None

    def check(self, H: int, I: int, K: int, format: str) -> None:
        """Raises `ArgumentError` if it does not fit."""
        checks.positive_integers(self)
        row_products.check(self, format, H, I, QUAD * 8 * self.tiles, lambda: self.walk(H, FORMATS[format]).shared(1))

    def walk(self, H: int, spec: NarrowFormat) -> Walk:
        return Walk(spec, H, self.tiles, 32, self.unroll)


@functools.cache
def build(T: int, K: int, H: int, I: int, format: str, index: ExpertIndex, biases: tuple[bool, bool], x_dtype,
          activation: Activation, out_dtype, spec: NarrowFormat, config: GateUpTensorConfig):
    """The kernel: (ids [T K], x [T, H], layer, values and scales, biases) -> h, see `RowTile.result_shape`."""
    matrices, walk = 2 if activation.gated else 1, config.walk(H, spec)
    rows = RowTile(H, format, QUAD, config.tiles)  # whose rows and stores these are, too
    sums_type = rows.sums_type()

    def products(_ctx, x, x_s, factors_s, token, expert, routed, row_tile, *weights):
        token, expert, routed, row_tile = (Int(a.registers.item()) for a in (token, expert, routed, row_tile))
        lane, warp = simt.thread() % LANES, simt.thread() // LANES
        first = row_tile * rows.out_rows
        own, block = expert * I + first + lane // QUAD * 4 + warp, expert * -(-I // 128) + first // 128
        # Of rows g and g + 8 of a product. Without a gate they are the same, and half of the arithmetic is for nothing.
        values, scales = weights[::2], weights[1::2]
        values = [walk.value_address(values[i % matrices], own) for i in range(2)]
        scales = [walk.scale_address(scales[i % matrices], own if spec.scale_bytes == 1 else block)
                  for i in range(2)]
        shared, f32 = (x_s, factors_s), ir.F32Type.get()

        def fill():
            row_activations.fill(walk, x, x_dtype, token, 1, WARPGROUP, shared)
            simt.meet(WARPGROUP)

        totals = row_products.pipelined(
            routed * walk.batches, lambda i: walk.load(values, scales, i * config.unroll),
            lambda i, *parts: walk.multiply(*parts, shared, 1, Int(0), i * config.unroll),
            [arith.constant(f32, 0.0)] * (2 * config.tiles), fill)
        totals = [row_products.over_quads(total) for total in totals]

        def array(values):
            registers = np.empty(len(values), object)
            registers[:] = [vector.from_elements(ir.VectorType.get((1,), f32), [v]) for v in values]
            layout = sums_type.layout.to_mgpu()
            return mgpu.FragmentedArray(_registers=registers.reshape(layout.registers_shape(sums_type.shape)),
                                        _layout=layout, _is_signed=None)

        return array(totals[::2]), array(totals[1::2])

    def body(ids_ref, x_ref, *refs):
        refs = list(refs)
        layer_refs, weight_refs = take(refs, index.num_operands), take(refs, 2 * matrices)
        bias_refs = [take(refs, present) for present in biases[-matrices:]]
        h_ref, x_s, factors_s = refs
        row_tile, pair = lax.axis_index("row_tile"), lax.axis_index("pair")
        expert, routed = index.lookup(ids_ref, pair, layer_refs)
        own = jnp.where(routed, expert, jnp.int32(0))
        arg_types = (REF, REF, REF, SCALAR, SCALAR, SCALAR, SCALAR, *[REF] * len(weight_refs))
        sums = plgpu.inline_mgpu(arg_types=arg_types, return_type=(sums_type, sums_type))(products)(
            x_ref, x_s, factors_s, lax.div(pair, jnp.int32(K)), own, routed.astype(jnp.int32), row_tile, *weight_refs)
        h = rows.activate(sums[:matrices], bias_refs, activation, expert, routed, row_tile)
        compat.store_unaligned(h_ref.at[pair, rows.row_slice(row_tile)], h.astype(out_dtype))

    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T * K, *rows.result_shape(I)), out_dtype),
        grid=(I // rows.out_rows, T * K),
        grid_names=("row_tile", "pair"),
        scratch_types=[plgpu.SMEM((size,), dtype) for size, dtype in zip(walk.shared(1), (jnp.float16, jnp.float32))],
        kernel_name="moe_gate_up_tensor",
        compiler_params=tile.COMPILER_PARAMS,
    )), f"moe_gate_up_3d_batched: {checks.NO_GRADIENT}")
