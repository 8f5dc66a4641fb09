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
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_warp_decode import compat, tuning
from jax_warp_decode.activations import Activation, get_activation
from jax_warp_decode.experts import Weight
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, gate_up_tensor, kernel_format, row_products, tile
from jax_warp_decode.kernels.expert_index import ExpertIndex, take
from jax_warp_decode.kernels.gate_up_tensor import GateUpTensorConfig
from jax_warp_decode.kernels.tile import RowTile
from jax_warp_decode.routing import int32_ids


@dataclasses.dataclass(frozen=True)
class GateUpConfig:
    """How `moe_gate_up_3d_batched` uses a warp.

    Attributes:
      lanes: lanes per weight row; fewer lanes let a warp own several neurons side by side.
      rows: neurons (times 32 / lanes) that a warp owns; they share the loads of x.
      unroll: steps along the row whose loads are issued before any arithmetic.

    Example:
      >>> GateUpConfig.heuristic(T=1, K=8, H=2048, I=768, format="bf16")
      GateUpConfig(lanes=32, rows=1, unroll=4)
    """

    lanes: int
    rows: int
    unroll: int

    @classmethod
    def heuristic(cls, T: int, K: int, H: int, I: int, format: str) -> "GateUpConfig":
        """A good configuration for any shape the kernel takes."""
        # Converting narrow weights costs more than loading x, so that rows which share x pay (bench/NOTES.md). The
        # H200 wants a thousand warps and more to keep its memory busy.
        narrow = kernel_format.find(format).narrow
        per_warp = next((r for r in (4, 2) if T * K * I >= 1024 * r), 1) if narrow else 1
        lanes, rows = tile.pick_tile(H, I, format, per_warp)
        in_flight = 16 if narrow else 8
        return cls(lanes, rows, unroll=min(RowTile(H, format, lanes, rows).steps, max(1, in_flight // (2 * rows))))

    def check(self, H: int, I: int, K: int, format: str) -> None:
        """Raises `ArgumentError` if it does not fit."""
        checks.config_fits("w_gate", checks.row_tile(H, format, self), I, self.unroll)


CONFIGS = (GateUpConfig, GateUpTensorConfig)


@functools.cache
def _build(T: int, K: int, rows: RowTile, I: int, index: ExpertIndex, biases: tuple[bool, bool], activation: Activation,
           out_dtype, unroll: int, interpret):
    """One jitted kernel per static configuration, so that equal layers share one trace and one compiled kernel."""
    matrices = 2 if activation.gated else 1

    def body(ids_ref, x_ref, *refs):
        refs = list(refs)
        layer_refs = take(refs, index.num_operands)
        weight_refs = [take(refs, rows.num_weight_operands) for _ in range(matrices)]
        bias_refs = [take(refs, present) for present in biases[-matrices:]]
        (h_ref,) = refs
        row_tile, pair = lax.axis_index("row_tile"), lax.axis_index("pair")
        token = lax.div(pair, jnp.int32(K))
        expert, routed = index.lookup(ids_ref, pair, layer_refs)

        def group(steps, sums):
            loaded = [([rows.load(each, expert, row_tile, s) for each in weight_refs],
                       rows.load_vector(x_ref, (token,), s)) for s in steps]
            for s, (raw, vector) in zip(steps, loaded, strict=True):
                vector = rows.widen(vector)
                sums = [total + rows.dot(w, vector, s) for total, w in zip(sums, raw, strict=True)]
            return sums

        sums = tile.unrolled_loop(rows.steps, unroll, routed, group, [rows.zeros() for _ in range(matrices)])
        sums = [rows.reduce(total) for total in sums]
        h = rows.activate(sums, bias_refs, activation, expert, routed, row_tile)
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
    w_gate: Weight | None,
    w_up: Weight,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    activation: str | Activation = "silu",
    out_dtype: DTypeLike = jnp.float32,
    config: GateUpConfig | GateUpTensorConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """Gate and up projections of every (token, slot) pair, with the activation between them.

    Args:
      x: [T, H] activations, bfloat16 or float16. Never quantised.
      ids: [T, K] integer expert ids. A slot whose id lies outside [0, E) reads no weight and yields 0.
      w_gate: [E, I, H] bfloat16, float16 or a `QuantizedArray` of any format, dequantised in registers; None for an
        activation without a gate.
      w_up: [E, I, H], same format.
      b_gate, b_up: [E, I] biases of the projections, float32, bfloat16 or float16, or None; [L, E, I] with stacked
        weights.
      layer: with weights of several layers, [L, E, I, H], the one to read: an integer scalar, may be traced, for
        example the index of a `lax.scan`. Nothing is copied. A layer outside [0, L) reads no weight and yields 0.
      activation: name in `ACTIVATIONS`, or an `Activation` of your own.
      out_dtype: dtype of the result; float32 keeps the intermediate unrounded, which is free with two-byte weights,
        costs a layer 2 to 3 % where the down kernel has one-byte weights on tensor cores and more elsewhere
        (bench/NOTES.md), and is not taken by it with four-bit weights.
      config: `GateUpConfig`, or `GateUpTensorConfig` for dots on the tensor cores (see `row_products` for the formats);
        None takes a measured one or the heuristic, see `tuning`.
      interpret: True (or `InterpretGPUParams`) runs the kernel on the CPU, for tests.

    Returns:
      h [T, K, I] in `out_dtype`.

    Raises:
      ArgumentError: wrong rank, shape or dtype, or a config that does not fit.
      UnsupportedError: H or I that the kernel cannot walk.

    Source: "warp decode" (Cursor, 2026); `formats` for those of the weights.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode.kernels import moe_gate_up_3d_batched
      >>> x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((2, 32, 64), jnp.bfloat16) / 64
      >>> h = moe_gate_up_3d_batched(x, jnp.array([[1, -1]]), w, w, interpret=True)
      >>> h.shape, h[0, :, 0].round(3).tolist()
      ((1, 2, 32), [0.7310000061988831, 0.0])
    """
    ids, out_dtype = int32_ids(ids, "ids"), checks.out_dtype(out_dtype)
    activation = get_activation(activation)
    name, w = ("w_up", w_up) if w_gate is None else ("w_gate", w_gate)
    index = ExpertIndex.of(name, w, layer)
    layers = index.operands(layer)
    T, K, H, I, format = checks.gate_up_shapes(x, ids, w_gate, w_up, b_gate, b_up, activation, index)
    if T * K * index.num_experts == 0:
        return jnp.zeros((T, K, I), out_dtype)
    checks.dimensions(name, H, I)
    found = tuning.find("moe_gate_up", CONFIGS, config, format=format, T=T, K=K, H=H, I=I, interpret=bool(interpret))
    config = checks.config_type(found.config, CONFIGS, interpret)
    config.check(H, I, K, format)
    biases = b_gate, b_up
    biased = tuple(b is not None for b in biases)
    if isinstance(config, GateUpTensorConfig):
        rows = RowTile(H, format, row_products.QUAD, config.tiles)
        spec = row_products.stored(w, w_up)
        kernel = gate_up_tensor.build(T, K, H, I, format, index, biased, x.dtype, activation, out_dtype, spec, config)
        view = x
        parts: Callable[..., tuple] = functools.partial(row_products.operands, spec=spec)
    else:
        rows = RowTile(H, format, config.lanes, config.rows, x.dtype, bool(interpret))
        kernel = _build(T, K, rows, I, index, biased, activation, out_dtype, config.unroll,
                        compat.interpret_params(interpret))
        view, parts = rows.vector_operand(x), rows.weight_operands
    weights = [part for w in (w_gate, w_up) if w is not None for part in parts(index.flatten(w))]
    with checks.launching("moe_gate_up_3d_batched"):
        h = kernel(ids.reshape(-1), view, *layers, *weights,
                   *(rows.row_operand(index.flatten(b)) for b in biases if b is not None))
    return h.reshape(T, K, I)
