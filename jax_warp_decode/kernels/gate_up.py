"""moe_gate_up_3d_batched: h[t, k] = act(w_gate[e] @ x[t], w_up[e] @ x[t]) with e = ids[t, k].

Ownership: a warp owns `rows` intermediate neurons of one (token, slot) pair from the first byte to the stored value.
It reads the expert id, streams each neuron's gate row and up row once against the token's activation, keeps both
dots in registers, reduces them with a butterfly, applies the activation and writes one value per neuron. No shared
memory, no barrier, no gather, no padding.

Grid: (row tile, pair), pairs fastest, so that tokens which share an expert read its rows at about the same time and
all but one of them hit L2.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode import compat, tuning
from jax_warp_decode.activations import Activation, get_activation
from jax_warp_decode.experts import Weight, weight_format
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, tile
from jax_warp_decode.kernels.expert_index import ExpertIndex
from jax_warp_decode.kernels.tile import RowTile
from jax_warp_decode.routing import int32_ids


@dataclasses.dataclass(frozen=True)
class GateUpConfig:
    """How `moe_gate_up_3d_batched` uses a warp.

    Attributes:
      lanes: lanes per weight row; fewer lanes let a warp own several neurons side by side.
      rows: neurons (times 32 / lanes) that a warp owns; they share the loads of x.
      unroll: steps along the row whose loads are issued before any arithmetic.
    """

    lanes: int
    rows: int
    unroll: int

    @classmethod
    def heuristic(cls, T: int, K: int, H: int, I: int, itemsize: int) -> "GateUpConfig":
        """A good configuration for any shape the kernel takes."""
        # Converting one-byte weights costs more than loading x, so that rows which share x pay (bench/NOTES.md). The
        # H200 wants a thousand warps and more to keep its memory busy.
        per_warp = 1 if itemsize == 2 else next((r for r in (4, 2) if T * K * I >= 1024 * r), 1)
        lanes, rows = tile.pick_tile(H, I, itemsize, per_warp)
        in_flight = 8 if itemsize == 2 else 16
        return cls(lanes, rows, unroll=min(RowTile(H, itemsize, lanes, rows).steps, max(1, in_flight // (2 * rows))))


@functools.cache
def _build(T: int, K: int, H: int, I: int, index: ExpertIndex, itemsize: int, activation: Activation, out_dtype,
           config: GateUpConfig, interpret):
    """One jitted kernel per static configuration, so that equal layers share one trace and one compiled kernel."""
    rows = RowTile(H, itemsize, config.lanes, config.rows)

    def body(ids_ref, x_ref, *refs):
        layer_refs, (*weight_refs, h_ref) = refs[:index.num_operands], refs[index.num_operands:]
        gate_refs, up_refs = weight_refs[: len(weight_refs) // 2], weight_refs[len(weight_refs) // 2:]
        row_tile, pair = lax.axis_index("row_tile"), lax.axis_index("pair")
        token = lax.div(pair, jnp.int32(K))
        expert, routed = index.lookup(ids_ref, pair, layer_refs)

        def group(steps, sums):
            loaded = [(rows.load(gate_refs, expert, row_tile, s), rows.load(up_refs, expert, row_tile, s),
                       rows.load_vector(x_ref, (token,), s)) for s in steps]
            gate, up = sums
            for s, (w_gate, w_up, vector) in zip(steps, loaded, strict=True):
                vector = rows.widen(vector)
                gate = gate + rows.dot(w_gate, vector, s)
                up = up + rows.dot(w_up, vector, s)
            return gate, up

        gate, up = tile.unrolled_loop(
            rows.steps, config.unroll, routed, group, (rows.zeros(), rows.zeros()))
        h = activation.apply(rows.reduce(gate), rows.reduce(up))
        compat.store_unaligned(h_ref.at[pair, rows.row_slice(row_tile)], h.astype(out_dtype))

    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T * K, *rows.result_shape(I)), out_dtype),
        grid=(I // rows.out_rows, T * K),
        grid_names=("row_tile", "pair"),
        kernel_name="moe_gate_up_3d_batched",
        compiler_params=tile.COMPILER_PARAMS,
        interpret=interpret,
    )), f"moe_gate_up_3d_batched: {checks.NO_GRADIENT}")


def moe_gate_up_3d_batched(
    x: jax.Array,
    ids: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    *,
    layer: jax.Array | int | None = None,
    activation: str | Activation = "silu",
    out_dtype=jnp.float32,
    config: GateUpConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """Gate and up projections of every (token, slot) pair, with the activation between them.

    Args:
      x: [T, H] activations, bfloat16 or float16. Never quantised.
      ids: [T, K] integer expert ids. A slot whose id lies outside [0, E) reads no weight and yields 0.
      w_gate: [E, I, H] bfloat16, float16 or MXFP8 `QuantizedArray`; dequantised in registers.
      w_up: [E, I, H], same format.
      layer: with weights of several layers, [L, E, I, H], the one to read: an integer scalar, may be traced, for
        example the index of a `lax.scan`. Nothing is copied. A layer outside [0, L) reads no weight and yields 0.
      activation: name in `ACTIVATIONS`, or an `Activation` of your own; gated.
      out_dtype: dtype of the result; float32 keeps the intermediate unrounded, which is free with two-byte
        weights and slows the down kernel with MXFP8 (bench/NOTES.md).
      config: `GateUpConfig`; None takes a measured one or the heuristic, see `tuning`.
      interpret: True (or `InterpretGPUParams`) runs the kernel on the CPU, for tests.

    Returns:
      h [T, K, I] in `out_dtype`.

    Raises:
      ArgumentError: wrong rank, shape or dtype, or a config that does not fit.
      UnsupportedError: H or I that the kernel cannot walk.

    Source: "warp decode" (Cursor, 2026); OCP Microscaling Formats v1.0 for MXFP8.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode.kernels import moe_gate_up_3d_batched
      >>> x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((2, 32, 64), jnp.bfloat16) / 64
      >>> h = moe_gate_up_3d_batched(x, jnp.array([[1, -1]]), w, w, interpret=True)
      >>> h.shape, h[0, :, 0].round(3).tolist()
      ((1, 2, 32), [0.7310000061988831, 0.0])
    """
    ids, out_dtype = int32_ids(ids, "ids"), checks.out_dtype(out_dtype)
    index = ExpertIndex.of("w_gate", w_gate, layer)
    layers = index.operands(layer)
    T, K, H, I = checks.gate_up_shapes(x, ids, w_gate, w_up, index)
    itemsize = checks.weight_itemsize("w_gate", w_gate)
    if T * K == 0:
        return jnp.zeros((T, K, I), out_dtype)
    checks.dimensions("w_gate", H, I, itemsize)
    found = tuning.find("moe_gate_up", GateUpConfig, config, format=weight_format(w_gate), itemsize=itemsize,
                        T=T, K=K, H=H, I=I)
    config = checks.config_type(found.config, GateUpConfig)
    rows = RowTile(H, itemsize, config.lanes, config.rows)
    checks.config_fits("w_gate", rows, I, config.unroll)
    kernel = _build(T, K, H, I, index, itemsize, get_activation(activation), out_dtype, config,
                    compat.interpret_params(interpret))
    h = kernel(ids.reshape(-1), rows.vector_operand(x), *layers,
               *rows.weight_operands(index.flatten(w_gate)), *rows.weight_operands(index.flatten(w_up)))
    return h.reshape(T, K, I)
