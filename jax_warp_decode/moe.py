"""The op: check the arguments once, choose a strategy, run it."""

import jax
import jax.numpy as jnp

from jax_warp_decode.activations import get_activation
from jax_warp_decode.choose import choose, no_gpu_reason
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import DENSE_FORMATS, ExpertWeights
from jax_warp_decode.paths import expert_centric, reference, warp_decode
from jax_warp_decode.routing import Routing

ACTIVATION_FORMATS = (None, "mxfp8")


def moe(
    x: jax.Array,
    routing: Routing,
    experts: ExpertWeights,
    *,
    activation: str = "silu",
    strategy: str = "auto",
    activation_format: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Routed experts of one layer: y[t] = sum_k weights[t, k] * expert_{ids[t, k]}(x[t]).

    Args:
      x: [T, H] bfloat16, float16 or float32.
      routing: `Routing` with ids [T, K] and weights [T, K]; a slot whose id lies outside [0, E) adds exactly 0, and
        ids may repeat.
      experts: `ExpertWeights`, all three tensors in one format.
      activation: name in `ACTIVATIONS`.
      strategy: "auto" picks by batch size and device, see `choose`; "warp_decode" (few tokens, NVIDIA GPU),
        "expert_centric" (many tokens, training; Hopper GPUs and CPUs) or "reference" (float32, slow, any device) run or
        raise. Under vmap the batch size is that of one mapped call.
      activation_format: None, or "mxfp8" to quantise the activations before both projections, as conventional MXFP8
        serving does; "expert_centric" only.
      interpret: run the kernels of "warp_decode" on the CPU, for tests; "auto" then chooses as on a GPU.

    Returns:
      y [T, H] in x.dtype; accumulated in float32, rounded once.

    Raises:
      ArgumentError: wrong rank, shape, dtype or name, at trace time.
      UnsupportedError: a named strategy that cannot run with these arguments or on this device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, moe, route
      >>> keys = jax.random.split(jax.random.key(0), 5)
      >>> make = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16) / 8
      >>> experts = ExpertWeights(make(keys[0], 8, 64, 128), make(keys[1], 8, 64, 128), make(keys[2], 8, 128, 64))
      >>> x, w_router = make(keys[3], 2, 128), make(keys[4], 8, 128)
      >>> logits = jnp.dot(x, w_router.T, preferred_element_type=jnp.float32)
      >>> y = jax.jit(moe)(x, route(logits, 2), experts)
      >>> y.shape, str(y.dtype)
      ((2, 128), 'bfloat16')
    """
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise ArgumentError(f"x: got shape {x.shape}, expected [T, H]; reshape leading axes with x.reshape(-1, H)")
    if jnp.dtype(x.dtype) not in DENSE_FORMATS:
        raise ArgumentError(f"x: got dtype {x.dtype}, expected bfloat16, float16 or float32; cast x")
    if not isinstance(experts, ExpertWeights):
        raise ArgumentError(f"experts: got {type(experts).__name__}, expected ExpertWeights(w_gate, w_up, w_down)")
    if not isinstance(routing, Routing):
        raise ArgumentError(f"routing: got {type(routing).__name__}, expected Routing(ids, weights); see route")
    experts.check()
    if x.shape[1] != experts.hidden:
        raise ArgumentError(f"x: got shape {x.shape}, expected [T, {experts.hidden}] to match w_gate [E, I, H] "
                            f"{experts.w_gate.shape}")
    if activation_format not in ACTIVATION_FORMATS:
        raise ArgumentError(f"activation_format: got {activation_format!r}, expected one of {ACTIVATION_FORMATS}")
    routing = routing.check(tokens=x.shape[0], num_experts=experts.num_experts)
    act = get_activation(activation)
    if activation_format and strategy == "auto":
        strategy = "expert_centric"
    try:
        choice = choose(x.shape[0], experts, experts_per_token=routing.ids.shape[1], x_dtype=x.dtype, strategy=strategy,
                        interpret=interpret)
    except UnsupportedError as error:
        if strategy != "warp_decode" or interpret or not no_gpu_reason():
            raise
        raise UnsupportedError(f"{error}; or pass interpret=True to run the kernels slowly on the CPU") from None
    if activation_format and choice.strategy != "expert_centric":
        raise ArgumentError(f"activation_format: got {activation_format!r} with strategy {choice.strategy!r}, which "
                            "never quantises activations; use strategy='expert_centric' or activation_format=None")
    with jax.named_scope(f"moe_{choice.strategy}"):
        if choice.strategy == "warp_decode":
            return warp_decode.run(x, routing, experts, activation=act, interpret=interpret)
        if choice.strategy == "expert_centric":
            return expert_centric.run(x, routing, experts, activation=act, activation_format=activation_format)
        return reference.run(x, routing, experts, activation=act)
