"""moe_gate_up_shared: h[t, k] = act(w_gate[e] @ x[t], w_up[e] @ x[t]) with e = ids[t, k], each expert read once."""

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
    layer: jax.Array | int | None = None,
    activation: str | Activation = "silu",
    config: SharedConfig | None = None,
    interpret=False,
) -> jax.Array:
    """Gate and up projections of every routed slot, and the activation, with one read of every touched expert.

    Args:
      x: [T, H] bfloat16.
      ids: [T, K] integer expert ids. A slot whose id lies outside [0, E) is skipped.
      w_gate, w_up: [E, I, H] bfloat16 or MXFP8 `QuantizedArray`; H and I multiples of 64.
      layer: with weights of several layers, [L, E, I, H], the one to read: an integer scalar, may be traced. Nothing is
        copied. A layer outside [0, L) writes nothing.
      activation: name in `ACTIVATIONS`, or an `Activation` of your own; gated, applied in float32.
      config: `SharedConfig`; None takes `SharedConfig.heuristic`.
      interpret: True (or `InterpretGPUParams`) runs the kernel on the CPU, for tests.

    Returns:
      h float32 [T, K, I]. Rows of skipped slots are not written: they hold anything, NaN included.

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
    index = ExpertIndex.of("w_gate", w_gate, layer)
    layers, E = index.operands(layer), index.num_experts
    T, K, H, I = checks.gate_up_shapes(x, ids, w_gate, w_up, index)
    if x.dtype != jnp.bfloat16:
        raise UnsupportedError(f"x: got {x.dtype}, 'shared_decode' takes bfloat16; {checks.WAY_OUT}")
    itemsize = shared_common.half_weight_itemsize("w_gate", w_gate)
    if T * K == 0:
        return jnp.zeros((T, K, I), jnp.float32)
    config = shared_common.check_sizes("w_gate", I, H, T, K, E, itemsize, 2, config)
    interpret = compat.interpret_params(interpret)
    kernel = shared_stream.build(
        "moe_gate_up_shared", T * K, T, index, I, H, itemsize, 2, get_activation(activation).apply, False,
        config, shared_common.grid_size(config, interpret), interpret)
    values, scales = zip(*(_parts(index.flatten(w)) for w in (w_gate, w_up)), strict=True)
    return kernel(ids.reshape(-1), x, *layers, *values, *(s for part in scales for s in part)).reshape(T, K, I)


def _parts(w: Weight) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    values, *scales = shared_common.weight_operands(w)
    return values, tuple(scales)
