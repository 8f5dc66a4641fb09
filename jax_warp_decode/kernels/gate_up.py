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

from jax_warp_decode import compat
from jax_warp_decode.activations import Activation, get_activation
from jax_warp_decode.experts import Weight
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, tile
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
        lanes, rows = tile.pick_tile(H, I, itemsize, copies=T * K, most_rows=1 if itemsize == 2 else 8)
        in_flight = 8 if itemsize == 2 else 16
        return cls(lanes, rows, unroll=min(RowTile(H, itemsize, lanes, rows).steps, max(1, in_flight // (2 * rows))))


@functools.cache
def _build(T: int, K: int, E: int, H: int, I: int, itemsize: int, activation: Activation, out_dtype,
           config: GateUpConfig, interpret):
    """One jitted kernel per static configuration, so that equal layers share one trace and one compiled kernel."""
    rows = RowTile(H, itemsize, config.lanes, config.rows)

    def body(ids_ref, x_ref, *refs):
        *weight_refs, h_ref = refs
        gate_refs, up_refs = weight_refs[: len(weight_refs) // 2], weight_refs[len(weight_refs) // 2:]
        row_tile, pair = lax.axis_index("row_tile"), lax.axis_index("pair")
        token = lax.div(pair, jnp.int32(K))
        expert = ids_ref[pair]
        routed = (expert >= 0) & (expert < E)

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
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )), f"moe_gate_up_3d_batched: {checks.NO_GRADIENT}")


def moe_gate_up_3d_batched(
    x: jax.Array,
    ids: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    *,
    activation: str = "silu",
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
      activation: name in `ACTIVATIONS`.
      out_dtype: dtype of the result; float32 keeps the intermediate unrounded, which is free with two-byte
        weights and slows the down kernel with MXFP8 (bench/NOTES.md).
      config: `GateUpConfig`; None takes `GateUpConfig.heuristic`.
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
    E, T, K, H, I = checks.gate_up_shapes(x, ids, w_gate, w_up)
    itemsize = checks.weight_itemsize("w_gate", w_gate)
    if T * K == 0:
        return jnp.zeros((T, K, I), out_dtype)
    checks.dimensions("w_gate", H, I, itemsize)
    config = checks.config_type(config or GateUpConfig.heuristic(T, K, H, I, itemsize), GateUpConfig)
    rows = RowTile(H, itemsize, config.lanes, config.rows)
    checks.config_fits("w_gate", rows, I, config.unroll)
    kernel = _build(T, K, E, H, I, itemsize, get_activation(activation), out_dtype, config,
                    compat.interpret_params(interpret))
    h = kernel(ids.reshape(-1), rows.vector_operand(x),
               *rows.weight_operands(w_gate), *rows.weight_operands(w_up))
    return h.reshape(T, K, I)
