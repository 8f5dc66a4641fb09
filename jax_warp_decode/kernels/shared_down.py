"""moe_down_shared: p[t, k] = w_down[e] @ h[t, k] with e = ids[t, k], each expert read once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode import compat
from jax_warp_decode.experts import Weight
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, shared_common, shared_stream
from jax_warp_decode.kernels.expert_index import ExpertIndex
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.routing import float32_weights, int32_ids

THREADS = 128  # of a warpgroup
H_DTYPES = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def moe_down_shared(
    h: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w_down: Weight,
    *,
    b_down: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    out_dtype=jnp.bfloat16,
    config: SharedConfig | None = None,
    interpret=False,
) -> jax.Array:
    """Down projection of every routed slot with one read of every touched expert, then a token's weighted sum.

    The products of all slots go to a float32 [T * K, H] temporary; a second small kernel adds a token's slots in order,
    so that a token's result does not depend on the rest of the batch.

    Args:
      h: float32 or bfloat16 [T, K, I] from `moe_gate_up_shared`, rounded to bfloat16 for the product with bfloat16
        weights; to float16 with a scale of its row for others, see `shared_half`.
      ids: [T, K] integer expert ids. A slot whose id lies outside [0, E) adds exactly 0, whatever its weight and its
        row of h hold.
      weights: [T, K] routing weights, used in float32.
      w_down: [E, H, I] bfloat16, float16 or a `QuantizedArray`, see `STREAM_FORMATS`; H and I multiples of 64, H at
        least 128.
      b_down: [E, H] floats added to the product in float32, before the routing weight, or None; [L, E, H] with stacked
        weights.
      layer: with weights of several layers, [L, E, H, I], the one to read: an integer scalar, may be traced. Nothing is
        copied. A layer outside [0, L) yields 0.
      out_dtype: dtype of the result.
      config: `SharedConfig`; None takes `SharedConfig.heuristic`.
      interpret: True (or `InterpretGPUParams`) runs the kernel on the CPU, for tests.

    Returns:
      y [T, H] in `out_dtype`, rounded once from the float32 sum.

    Raises:
      ArgumentError: wrong rank, shape or dtype, or a config that does not fit.
      UnsupportedError: sizes, formats or a device that the kernel cannot use.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.shared_down import moe_down_shared
      >>> h, w = jnp.ones((1, 2, 64), jnp.float32), jnp.ones((4, 128, 64), jnp.bfloat16) / 64
      >>> y = moe_down_shared(h, jnp.array([[3, -1]]), jnp.array([[0.5, 9.0]]), w, interpret=True)
      >>> y.shape, float(y[0, 0])
      ((1, 128), 0.5)
    """
    ids, out_dtype = int32_ids(ids, "ids"), checks.out_dtype(out_dtype)
    weights = float32_weights(weights, "weights")
    index = ExpertIndex.of("w_down", w_down, layer)
    layers, E = index.operands(layer), index.num_experts
    T, K, H, I, _ = checks.down_shapes(h, ids, weights, w_down, b_down, index, H_DTYPES)
    format = shared_common.format_of("w_down", w_down)
    if T * K == 0:
        return jnp.zeros((T, H), out_dtype)
    config = shared_common.check_sizes("w_down", H, I, T, K, E, format, 1, config)
    interpret = compat.interpret_params(interpret)
    kernel = shared_stream.build(
        "moe_down_shared", T * K, T * K, index, H, I, format, 1, (b_down is not None,), _as_is,
        h.dtype == jnp.float32, jnp.dtype(jnp.float32), config,
        shared_common.grid_size(config, interpret), interpret)
    operands = [*shared_common.weight_operands(index.flatten(w_down)),
                *(index.flatten(b).reshape(-1) for b in (b_down,) if b is not None)]
    products = kernel(ids.reshape(-1), h.reshape(T * K, I), *layers, *operands)
    return _build_sum(T, K, index, H, out_dtype, interpret)(ids.reshape(-1), weights.reshape(-1), products, *layers)


def _as_is(product: jax.Array) -> jax.Array:
    return product


@functools.cache
def _build_sum(T: int, K: int, index: ExpertIndex, H: int, out_dtype, interpret):
    """The kernel (ids [T * K], weights [T * K], products [T * K, H], *layer) -> y [T, H]; a CTA: a piece of a row."""
    vec = next(v for v in (4, 2, 1) if THREADS * v <= H)
    size = THREADS * vec
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vec)

    def body(ids_ref, weights_ref, products_ref, *refs):
        *layer_refs, y_ref = refs
        token = lax.axis_index("token")
        # The last piece may overlap another, and then stores the same.
        piece = pl.ds(jnp.minimum(lax.axis_index("piece") * size, H - size), size)
        slots = [token * K + k for k in range(K)]
        routed = [index.lookup(ids_ref, s, layer_refs)[1] for s in slots]
        weights = [weights_ref[s] for s in slots]
        # Nobody wrote the rows of slots that are not routed: another slot's is read, and dropped by a select.
        stand_in = jnp.int32(-1)
        for s, is_routed in zip(slots, routed, strict=True):
            stand_in = jnp.where(is_routed, s, stand_in)
        zeros = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)

        @pl.when(stand_in >= 0)
        def _():
            rows = [plgpu.load(products_ref.at[jnp.where(is_routed, s, stand_in), piece], layout=layout,
                               optimized=False) for s, is_routed in zip(slots, routed, strict=True)]
            y = zeros
            for is_routed, weight, row in zip(routed, weights, rows, strict=True):
                y = y + jnp.where(lax.broadcast_in_dim(is_routed, (size,), ()), weight * row, jnp.float32(0))
            compat.store_unaligned(y_ref.at[token, piece], y.astype(out_dtype))

        @pl.when(stand_in < 0)
        def _():
            compat.store_unaligned(y_ref.at[token, piece], zeros.astype(out_dtype))

    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, H), out_dtype),
        grid=(-(-H // size), T),
        grid_names=("piece", "token"),
        kernel_name="moe_sum_slots",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )), f"moe_sum_slots: {checks.NO_GRADIENT}")
