"""The op: check the arguments once, choose a strategy, run it."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_warp_decode import batch_axes, placement, varying
from jax_warp_decode.activations import Activation, get_activation
from jax_warp_decode.choose import TABLE, decide, no_gpu_reason, warn_of
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import DENSE_FORMATS, ExpertWeights, check_experts
from jax_warp_decode.kernels import checks
from jax_warp_decode.kernels.expert_index import check_layer
from jax_warp_decode.routing import Routing, is_routed

ACTIVATION_FORMATS = (None, "mxfp8")
WEIGHT_ON = ("output", "input")


def moe(
    x: jax.Array,
    routing: Routing,
    experts: ExpertWeights,
    *,
    layer: jax.Array | int | None = None,
    activation: str | Activation = "silu",
    strategy: str = "auto",
    activation_format: str | None = None,
    weight_on: str = "output",
    out_dtype: DTypeLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Routed experts of one layer: y[t] = sum_k weights[t, k] * expert_{ids[t, k]}(x[t]).

    An expert is w_down act(w_gate x + b_gate, w_up x + b_up) + b_down; biases are optional.

    Args:
      x: [T, H] bfloat16, float16 or float32, or any number of leading axes, [..., H].
      routing: `Routing` with ids and weights [T, K], or [..., K] with the leading axes of x; a slot whose id lies
        outside [0, E) adds exactly 0, and ids may repeat.
      experts: `ExpertWeights`, all matrices in one format.
      layer: with the stacked weights of L layers, [L, E, ..], the layer to run: an integer scalar, may be traced (the
        index of a `lax.scan` over the layers). The decode strategies read the stack in place, the others slice the
        layer out of it, which may copy it. A traced layer outside [0, L) yields y = 0.
      activation: name in `ACTIVATIONS`, or an `Activation` of your own, such as `SwiGLU("mine", limit=12.0)`.
      strategy: "auto" picks by batch size and device, see `choose`. "warp_decode" (few tokens, NVIDIA GPU),
        "shared_decode" (tokens that share experts, NVIDIA GPU), "expert_centric" (many tokens, training; Hopper GPUs
        and CPUs, data-centre Blackwell without gradients) or "reference" (float32, slow, any device) run or raise.
        Under vmap the batch size is that of one mapped call.
      activation_format: None, or "mxfp8" to quantise the activations before both projections, as conventional MXFP8
        serving does; "expert_centric" only.
      weight_on: "output", or "input" for y[t] = sum_k expert_{ids[t, k]}(weights[t, k] * x[t]) (Llama-4). The scaled
        rows, [T * K, H], are rounded to the dtype of x, in "reference" to float32.
      out_dtype: dtype of y: bfloat16, float16 or float32; None takes that of x.
      interpret: run the kernels of the decode strategies on the CPU, for tests; "auto" then chooses as on a GPU.

    Returns:
      y in the shape of x and in out_dtype; accumulated in float32, rounded once.

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
    return apply(x, routing, experts, layer=layer, activation=activation, strategy=strategy,
                 activation_format=activation_format, weight_on=weight_on, out_dtype=out_dtype, interpret=interpret,
                 whole=True)


def apply(x, routing, experts, *, layer, activation, strategy, activation_format, out_dtype, interpret, whole,
          weight_on="output"):
    """`moe`, also for one device's share of the experts (`whole` False), which may be fewer than a token's slots."""
    checks.interpret_type(interpret)
    x = check_operands(x, routing, experts)
    experts = jax.tree.map(jnp.asarray, experts)  # NumPy arrays, as elsewhere in JAX
    if (layer is None) != (experts.layers is None):
        raise ArgumentError(f"layer: got {layer} with w_up {experts.w_up.shape}, expected an integer scalar with "
                            "stacked weights [L, E, I, H], and only then")
    layer = None if layer is None else check_layer(layer, experts.layers)
    if activation_format not in ACTIVATION_FORMATS:
        raise ArgumentError(f"activation_format: got {activation_format!r}, expected one of {ACTIVATION_FORMATS}")
    if weight_on not in WEIGHT_ON:
        raise ArgumentError(f"weight_on: got {weight_on!r}, expected one of {WEIGHT_ON}")
    batch_axes.check_numbers(x, routing, strategy)
    shape = x.shape
    x, routing = batch_axes.merge(x, routing)
    routing = routing.check(tokens=x.shape[0])
    if whole and routing.ids.shape[1] > experts.num_experts:
        raise ArgumentError(f"routing.ids: got K = {routing.ids.shape[1]} slots per token, expected at most "
                            f"E = {experts.num_experts}, the experts; a share of them goes through `moe_local`")
    act = get_activation(activation)
    out_dtype = checks.out_dtype(x.dtype if out_dtype is None else out_dtype)
    if act.gated != (experts.w_gate is not None):
        got, want = ("None", "a gate projection") if act.gated else ("an array", "None")
        raise ArgumentError(f"experts.w_gate: got {got}, expected {want} for activation {act.name!r}")
    if activation_format and strategy == "auto":
        strategy = "expert_centric"
    try:
        choice = decide(x.shape[0], experts, experts_per_token=routing.ids.shape[1], x_dtype=x.dtype, strategy=strategy,
                        interpret=interpret)
    except UnsupportedError as error:
        if not TABLE[strategy].decode or interpret or not no_gpu_reason():
            raise
        raise UnsupportedError(f"{error}; or pass interpret=True to run the kernels slowly on the CPU") from None
    warn_of(choice, strategy)
    placement.check_explicit(x, routing, experts, follows=choice.strategy == "reference")
    path = TABLE[choice.strategy]
    if activation_format and not path.activation_format:
        takers = [name for name, s in TABLE.items() if s.activation_format]
        raise ArgumentError(f"activation_format: got {activation_format!r} with strategy {choice.strategy!r}, which "
                            f"never quantises activations; use strategy={' or '.join(map(repr, takers))} or "
                            "activation_format=None")
    operands = x, routing, experts
    if layer is not None and not path.decode:
        exists = (layer >= 0) & (layer < experts.layers)
        routing = Routing(jnp.where(exists, routing.ids, jnp.int32(-1)), routing.weights)
        experts, layer = experts[layer], None
    options = dict(layer=layer, interpret=interpret) if path.decode else {}
    if path.activation_format:
        options["activation_format"] = activation_format
    with jax.named_scope(f"moe_{choice.strategy}"):
        if weight_on == "input":
            rows, single = _weighted_rows(x, routing, experts.num_experts, choice.strategy)
            y = path.run(rows, single, experts, activation=act, out_dtype=jnp.dtype(jnp.float32), **options)
            y = jnp.sum(y.reshape(*routing.ids.shape, y.shape[-1]), axis=1).astype(out_dtype)
        else:
            y = path.run(x, routing, experts, activation=act, out_dtype=out_dtype, **options)
    return varying.like(y, operands).reshape(shape)  # inside shard_map, JAX takes a kernel's result for replicated


def check_operands(x, routing, experts) -> jax.Array:
    """x as an array; refuses what cannot be the three operands of a layer, whatever T and K."""
    x = batch_axes.as_array(x)
    if jnp.dtype(x.dtype) not in DENSE_FORMATS:
        raise ArgumentError(f"x: got dtype {x.dtype}, expected bfloat16, float16 or float32; cast x")
    check_experts(experts)
    if not isinstance(routing, Routing):
        raise ArgumentError(f"routing: got {type(routing).__name__}, expected Routing(ids, weights); see route")
    if x.shape[-1] != experts.hidden:
        swapped = x.shape[-1] == experts.intermediate
        way_out = "; weights are [E, I, H] and [E, H, I]: swap the last two axes of all of them" if swapped else ""
        raise ArgumentError(f"x: got shape {x.shape}, expected [..., {experts.hidden}] to match w_up "
                            f"{experts.w_up.shape}, H last{way_out}")
    return x


def _weighted_rows(x, routing, num_experts, strategy):
    """x [T, H] times each routing weight, [T * K, H], and the routing of these rows: one slot each, of weight 1."""
    weights = jnp.where(is_routed(routing.ids, num_experts), routing.weights, jnp.float32(0))
    rows = (x.astype(jnp.float32)[:, None] * weights[:, :, None]).reshape(-1, x.shape[-1])
    ids = routing.ids.reshape(-1, 1)
    rows = rows if strategy == "reference" else rows.astype(x.dtype)
    return rows, Routing(ids, jnp.ones(ids.shape, jnp.float32))
