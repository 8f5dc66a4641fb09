"""moe_down_3d_batched: y[t] = sum_k weights[t, k] * (w_down[e] @ h[t, k]) with e = ids[t, k].

Ownership: a warp owns `rows` output dimensions of one token. It loops over the token's K slots, streams the row of
each routed expert once against that slot's intermediate, folds the routing weight into one float32 accumulator per
row and lane, reduces it with a butterfly at the very end and writes one value per dimension. The expert-major buffer,
the scatter and the combine of a conventional layer do not exist. Slots are added in order, so a token's result does
not depend on the rest of the batch.

Grid: (row tile, token), tokens fastest, so that tokens which share an expert meet in L2.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_warp_decode import compat, tuning
from jax_warp_decode.experts import Weight
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, down_tensor, kernel_format, row_products, tile
from jax_warp_decode.kernels.down_tensor import DownTensorConfig
from jax_warp_decode.kernels.expert_index import ExpertIndex, take
from jax_warp_decode.kernels.tile import RowTile
from jax_warp_decode.routing import float32_weights, int32_ids


@dataclasses.dataclass(frozen=True)
class DownConfig:
    """How `moe_down_3d_batched` uses a warp.

    Attributes:
      lanes: lanes per weight row; fewer lanes let a warp own several output dimensions side by side.
      rows: output dimensions (times 32 / lanes) that a warp owns; they share the loads of h.
      unroll: steps, counted through all slots, whose loads are issued before any arithmetic.

    Example:
      >>> DownConfig.heuristic(T=1, K=8, H=2048, I=768, format="bf16")
      DownConfig(lanes=32, rows=2, unroll=4)
    """

    lanes: int
    rows: int
    unroll: int

    @classmethod
    def heuristic(cls, T: int, K: int, H: int, I: int, format: str) -> "DownConfig":
        """A good configuration for any shape the kernel takes."""
        # From sweeps (bench/NOTES.md): with narrow weights, rows that share h pay once there are warps enough.
        spec = kernel_format.find(format)
        narrow = spec.narrow
        per_warp = next((r for r in (4, 2) if T * H >= 2048 * r), 1) if narrow else 2
        # Lanes with long chunks meet 64 bytes of h each, and collide in L1: few lanes a row, and rows that share h.
        per_warp *= max(1, spec.vec // 16) ** 2
        lanes, rows = tile.pick_tile(I, H, format, per_warp)
        in_flight = 24 if rows == 1 else 12 if narrow or T > 1 else 8
        return cls(lanes, rows, unroll=min(K * RowTile(I, format, lanes, rows).steps, max(1, in_flight // rows)))

    def check(self, H: int, I: int, K: int, format: str) -> None:
        """Raises `ArgumentError` if it does not fit."""
        checks.config_fits("w_down", checks.row_tile(I, format, self), H, self.unroll)


CONFIGS = (DownConfig, DownTensorConfig)


@functools.cache
def _build(T: int, K: int, rows: RowTile, H: int, index: ExpertIndex, biased: bool, out_dtype, unroll: int, interpret):
    """One jitted kernel per static configuration, so that equal layers share one trace and one compiled kernel."""

    def body(ids_ref, weights_ref, h_ref, *refs):
        refs = list(refs)
        layer_refs, down_refs = take(refs, index.num_operands), take(refs, rows.num_weight_operands)
        *bias_refs, y_ref = refs
        row_tile, token = lax.axis_index("row_tile"), lax.axis_index("token")

        # A slot that is not routed reads the rows of a routed slot instead: they are in cache, nothing is read out
        # of bounds, and the loop needs no branch. Its sum is dropped by a select.
        stand_in = jnp.int32(-1)
        for k in reversed(range(K)):
            expert, routed = index.lookup(ids_ref, token * K + k, layer_refs)
            stand_in = jnp.where(routed, expert, stand_in)

        def bias(k):
            expert, routed = index.lookup(ids_ref, token * K + k, layer_refs)
            own = jnp.where(routed, expert, jnp.maximum(stand_in, 0))
            row_biases = weights_ref[token * K + k] * rows.load_rows(*bias_refs, own, row_tile)
            return jnp.where(lax.broadcast_in_dim(routed, row_biases.shape, ()), row_biases, jnp.float32(0))

        biases = [bias(k) for k in range(K)] if biased else []

        def group(steps, acc):
            def look_up(slot):
                at = token * K + slot
                return *index.lookup(ids_ref, at, layer_refs), weights_ref[at]

            once, loaded = functools.cache(look_up), []
            for n in steps:
                slot, step = tile.divide(n, rows.steps)
                expert, routed, weight = (once if isinstance(slot, int) else look_up)(slot)
                raw = rows.load(down_refs, jnp.where(routed, expert, stand_in), row_tile, step)
                loaded.append((step, routed, weight, raw, rows.load_vector(h_ref, (token, slot), step)))
            for step, routed, weight, raw, vector in loaded:
                partial = weight * rows.dot(raw, rows.widen(vector), step)
                acc = acc + jnp.where(lax.broadcast_in_dim(routed, partial.shape, ()), partial, jnp.float32(0))
            return acc

        acc = tile.unrolled_loop(K * rows.steps, unroll, stand_in >= 0, group, rows.zeros())
        y = functools.reduce(operator.add, biases, rows.reduce(acc))
        compat.store_unaligned(y_ref.at[token, rows.row_slice(row_tile)], y.astype(out_dtype))

    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, *rows.result_shape(H)), out_dtype),
        grid=(H // rows.out_rows, T),
        grid_names=("row_tile", "token"),
        kernel_name="moe_down_3d_batched",
        compiler_params=tile.COMPILER_PARAMS,
        interpret=interpret,
    )), f"moe_down_3d_batched: {checks.NO_GRADIENT}")


def moe_down_3d_batched(
    h: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_down: Weight,
    *,
    b_down: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    config: DownConfig | DownTensorConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """Down projection of every slot and the weighted sum over a token's slots, in one pass.

    Args:
      h: [T, K, I] intermediate from `moe_gate_up_3d_batched`: bfloat16, float16 or, unless the weights have four bits,
        float32.
      ids: [T, K] integer expert ids. A slot whose id lies outside [0, E) adds exactly 0, whatever its weight and its
        row of h hold.
      weights: [T, K] routing weights, used in float32.
      w_down: [E, H, I] bfloat16, float16 or a `QuantizedArray` of any format; dequantised in registers.
      b_down: [E, H] bias of the projection, float32, bfloat16 or float16, or None; multiplied by the routing weight
        like the product. [L, E, H] with stacked weights.
      layer: with weights of several layers, [L, E, H, I], the one to read: an integer scalar, may be traced. Nothing is
        copied. A layer outside [0, L) reads no weight and yields 0.
      out_dtype: dtype of the result.
      config: `DownConfig`, or `DownTensorConfig` for dots on the tensor cores (see `row_products` for the formats);
        None takes a measured one or the heuristic, see `tuning`.
      interpret: True (or `InterpretGPUParams`) runs the kernel on the CPU, for tests.

    Returns:
      y [T, H] in `out_dtype`, rounded once from the float32 sum.

    Raises:
      ArgumentError: wrong rank, shape or dtype, or a config that does not fit.
      UnsupportedError: H or I that the kernel cannot walk.

    Source: "warp decode" (Cursor, 2026); `formats` for those of the weights.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels import moe_down_3d_batched
      >>> h, w = jnp.ones((1, 2, 64), jnp.float32), jnp.ones((4, 32, 64), jnp.bfloat16) / 64
      >>> y = moe_down_3d_batched(h, jnp.array([[3, -1]]), jnp.array([[0.5, 9.0]]), w, interpret=True)
      >>> y.shape, float(y[0, 0])
      ((1, 32), 0.5)
    """
    ids, out_dtype = int32_ids(ids, "ids"), checks.out_dtype(out_dtype)
    weights = float32_weights(weights, "weights")
    index = ExpertIndex.of("w_down", w_down, layer)
    layers = index.operands(layer)
    T, K, H, I, format = checks.down_shapes(h, ids, weights, w_down, b_down, index)
    if T * K * index.num_experts == 0:
        return jnp.zeros((T, H), out_dtype)
    checks.dimensions("w_down", I, H)
    found = tuning.find("moe_down", CONFIGS, config, format=format, T=T, K=K, H=H, I=I, interpret=bool(interpret))
    config = checks.config_type(found.config, CONFIGS, interpret)
    config.check(H, I, K, format)
    slots = ids.reshape(-1), weights.reshape(-1)
    if isinstance(config, DownTensorConfig):
        bias_dtype = None if b_down is None else jnp.dtype(b_down.dtype)
        spec = row_products.stored(w_down)
        kernel = down_tensor.build(T, K, H, I, spec, index, bias_dtype, h.dtype, out_dtype, config)
        with checks.launching("moe_down_3d_batched"):
            return kernel(*slots, h.reshape(T * K, I), *layers, *row_products.operands(index.flatten(w_down), spec),
                          *(() if b_down is None else (index.flatten(b_down),)))
    rows = RowTile(I, format, config.lanes, config.rows, h.dtype, bool(interpret))
    kernel = _build(T, K, rows, H, index, b_down is not None, out_dtype, config.unroll,
                    compat.interpret_params(interpret))
    with checks.launching("moe_down_3d_batched"):
        y = kernel(*slots, rows.vector_operand(h), *layers,
                   *rows.weight_operands(index.flatten(w_down)),
                   *(() if b_down is None else (rows.row_operand(index.flatten(b_down)),)))
    return y.reshape(T, H)
