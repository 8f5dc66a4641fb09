"""moe_gate_up_shared: h[t, k] = act(w_gate[e] @ x[t], w_up[e] @ x[t]) with e = ids[t, k], each expert read once."""

import itertools

import jax
import jax.numpy as jnp

from jax_warp_decode import compat
from jax_warp_decode.activations import Activation, get_activation
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.experts import Weight
from jax_warp_decode.kernels import checks, shared_common, shared_stream
from jax_warp_decode.kernels.expert_index import ExpertIndex
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.routing import int32_ids


def moe_gate_up_shared(
    x: jax.Array,
    ids: jax.Array,
    w_gate: Weight,
    w_up: Weight,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    activation: str | Activation = "silu",
    out_dtype=jnp.float32,
    config: SharedConfig | None = None,
    interpret=False,
) -> jax.Array:
    """Gate and up projections of every routed slot, and the activation, with one read of every touched expert.

    Args:
      x: [T, H] bfloat16; also float16 unless the weights are bfloat16.
      ids: [T, K] integer expert ids. A slot whose id lies outside [0, E) is skipped.
      w_gate, w_up: [E, I, H] bfloat16, float16 or a `QuantizedArray`, see `STREAM_FORMATS`; H and I multiples of 64.
      b_gate, b_up: [E, I] floats added to the projections in float32, or None; [L, E, I] with stacked weights.
      layer: with weights of several layers, [L, E, I, H], the one to read: an integer scalar, may be traced. Nothing is
        copied. A layer outside [0, L) writes nothing.
      activation: name in `ACTIVATIONS`, or an `Activation` of your own; gated, applied in float32.
      out_dtype: of the result, float32 or bfloat16.
      config: `SharedConfig`; None takes `SharedConfig.heuristic`.
      interpret: True (or `InterpretGPUParams`) runs the kernel on the CPU, for tests.

    Returns:
      h [T, K, I] in `out_dtype`. Rows of skipped slots are not written: they hold anything, NaN included.

    Raises:
      ArgumentError: wrong rank, shape or dtype, or a config that does not fit.
      UnsupportedError: sizes, formats or a device that the kernel cannot use.

    Source: the "weights as the M operand" form of FlashInfer's MonoMoE (arXiv 2609.04244), without its limits on T.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
      >>> x, w = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16) / 64
      >>> h = moe_gate_up_shared(x, jnp.array([[1, -1]]), w, w, interpret=True)
      >>> h.shape, round(float(h[0, 0, 0]), 3)
      ((1, 2, 64), 0.731)
    """
    ids = int32_ids(ids, "ids")
    if w_gate is None:
        raise UnsupportedError(f"w_gate: got None, 'shared_decode' needs a gate; {checks.WAY_OUT}")
    activation, out_dtype = get_activation(activation), checks.out_dtype(out_dtype)
    index = ExpertIndex.of("w_gate", w_gate, layer)
    layers, E = index.operands(layer), index.num_experts
    T, K, H, I, _ = checks.gate_up_shapes(x, ids, w_gate, w_up, b_gate, b_up, activation, index)
    format = shared_common.format_of("w_gate", w_gate)
    if (other := shared_common.format_of("w_up", w_up)) != format:
        raise UnsupportedError(f"w_up: got {other}, 'shared_decode' needs {format} as w_gate; {checks.WAY_OUT}")
    shared_common.check_x(x.dtype, format)
    if T * K == 0:
        return jnp.zeros((T, K, I), out_dtype)
    config = shared_common.check_sizes("w_gate", I, H, T, K, E, format, 2, config)
    interpret = compat.interpret_params(interpret)
    x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x
    kernel = shared_stream.build(
        "moe_gate_up_shared", T * K, T, index, I, H, format, 2, (b_gate is not None, b_up is not None),
        activation.apply, x.dtype == jnp.float32, out_dtype, config, shared_common.grid_size(config, interpret),
        interpret)
    weights = zip(*(shared_common.weight_operands(index.flatten(w)) for w in (w_gate, w_up)), strict=True)
    biases = (index.flatten(b).reshape(-1) for b in (b_gate, b_up) if b is not None)
    return kernel(ids.reshape(-1), x, *layers, *itertools.chain(*weights), *biases).reshape(T, K, I)
