"""The mixture-of-experts layer for Flax NNX: router, experts and the choice of strategy in one module."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_warp_decode.activations import Activation, get_activation
from jax_warp_decode.choose import TABLE, Choice
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import BIASES, MATRICES, ExpertWeights
from jax_warp_decode.explain import Explanation, explain
from jax_warp_decode.moe import WEIGHT_ON, moe
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
from jax_warp_decode.route_tokens import route_tokens
from jax_warp_decode.routers import Router
from jax_warp_decode.routing import Routing, as_router
from jax_warp_decode.shared_experts import with_shared

DEFAULT_KERNEL_INIT = nnx.initializers.lecun_normal()  # as nnx.Linear
DEFAULT_BIAS_INIT = nnx.initializers.zeros_init()
EXPERT_TENSORS = (*MATRICES, *BIASES)


class RouterState(nnx.Variable):
    """What a rule updates, such as the correction bias of DeepSeek-V3; optimisers of `nnx.Param` leave it alone."""


class MoE(nnx.Module):
    """A block of experts of which every token uses K: y = sum_k weight_k expert_k(x) + gate shared(x).

    An expert is w_down act(w_gate x + b_gate, w_up x + b_up) + b_down. The router works in float32 at every batch size.
    Which strategy runs the experts is decided when the call is traced, from the number of tokens, so one layer serves
    prefill, decode and training from the same parameters.

    The kernels of the decode strategies read 2-byte and narrower weights: `set_experts(layer.experts.astype(bfloat16))`
    or `.quantize("mxfp8")` makes a layer that trained in float32 ready for them. An expert that has more than one
    shared expert's neurons counts as several, see `shared_experts`.

    Args:
      hidden_size: H.
      intermediate_size: I.
      num_experts: E, routed ones.
      num_experts_per_token: K, at most E; shared experts come on top.
      router: a `Router` with k = K, such as a row of `ROUTERS`; None is that of Qwen3-MoE, a softmax.
      renormalize: with `router` None: whether the K weights of a token sum to 1 (`norm_topk_prob` of Qwen3-MoE); None
        is True.
      router_bias: adds a trained bias to the logits (gpt-oss).
      correction_bias: adds a bias to the scores for the choice alone (DeepSeek-V3), kept as float32 `RouterState`.
      expert_scale: multiplies each expert's routing weights by a trained factor (Gemma-4).
      use_bias: whether the projections of the experts have biases.
      num_shared_experts: experts that every token uses, with I neurons each.
      shared_gate: whether sigmoid(shared_gate x) weighs the shared experts (Qwen3-Next).
      weight_on: where routing weights multiply, "output" or "input", see `moe`.
      activation: a key of `ACTIVATIONS`, or an `Activation`.
      strategy: "auto" or a key of `available_strategies()`; may be assigned later through `set_strategy`.
      dtype: dtype of the computation and of y; None takes that of x. Weights are read as they are stored.
      param_dtype: dtype of the parameters made here.
      kernel_init: initialiser of every matrix, called with the shape [in, out] as in `nnx.Linear`, once an expert.
      bias_init: initialiser of `router_bias` and, for each expert, its biases.
      sharding: `ExpertSharding` of a mesh on which the layer runs; parameters carry `out_sharding` and `mesh`, and are
        made in their places. Shared experts count as experts where E is split. `module_sharding.shard_module` moves
        a layer that exists.
      rngs: the `params` stream draws the parameters.

    Attributes:
      router: Param [E, H]; router_bias and expert_scale: Params [E] or None; correction_bias: RouterState [E] or None.
      w_gate, w_up: Params [E + S, I, H], or with a `QuantizedArray` as value; w_gate is None without a gate.
      w_down: Param [E + S, H, I], likewise.
      b_gate, b_up: Params [E + S, I] or None; b_down: Param [E + S, H] or None.
      shared_gate: Param [1, H] or None.

    Raises:
      ArgumentError: for sizes below 1, K > E, a router that does not fit, an unknown activation or strategy.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_warp_decode.layers import MoE
      >>> layer = MoE(64, 32, num_experts=8, num_experts_per_token=2, strategy="reference", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 5, 64), jnp.bfloat16)).shape
      (2, 5, 64)
      >>> layer.choice(tokens=10).strategy
      'reference'
      >>> layer.set_experts(layer.experts.quantize("mxfp8"))
      >>> layer.experts.format
      'mxfp8'
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        router: Router | None = None,
        renormalize: bool | None = None,
        router_bias: bool = False,
        correction_bias: bool = False,
        expert_scale: bool = False,
        use_bias: bool = False,
        num_shared_experts: int = 0,
        shared_gate: bool = False,
        weight_on: str = "output",
        activation: str | Activation = "silu",
        strategy: str = "auto",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = DEFAULT_KERNEL_INIT,
        bias_init: nnx.Initializer = DEFAULT_BIAS_INIT,
        sharding: ExpertSharding | None = None,
        rngs: nnx.Rngs,
    ):
        sizes = dict(hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts,
                     num_experts_per_token=num_experts_per_token)
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(f"{name}: got {size}, expected at least 1")
        if num_experts_per_token > num_experts:
            raise ArgumentError(
                f"num_experts_per_token: got {num_experts_per_token}, expected at most num_experts {num_experts}")
        if num_shared_experts < 0 or (shared_gate and not num_shared_experts):
            raise ArgumentError(f"num_shared_experts: got {num_shared_experts} with shared_gate={shared_gate}, "
                                f"expected at least {int(shared_gate)}")
        if weight_on not in WEIGHT_ON:
            raise ArgumentError(f"weight_on: got {weight_on!r}, expected one of {WEIGHT_ON}")
        if weight_on == "input" and shared_gate:
            raise ArgumentError("shared_gate: got True with weight_on='input', expected False; the gate is a factor of "
                                "the shared experts' output")
        routing = as_router(num_experts_per_token if router is None else router, renormalize)
        if routing.k != num_experts_per_token:
            raise ArgumentError(f"router: got k={routing.k}, expected num_experts_per_token {num_experts_per_token}; "
                                f"use dataclasses.replace(router, k={num_experts_per_token})")
        routing.check(num_experts)

        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.num_shared_experts = num_shared_experts
        self.routing = routing
        self.weight_on = weight_on
        self.activation = get_activation(activation)
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.set_sharding(sharding)
        self.set_strategy(strategy)
        total = num_experts + num_shared_experts
        gated = self.activation.gated
        if sharding is not None:  # refuses a split that does not divide before anything is drawn
            up = jax.ShapeDtypeStruct((total, intermediate_size, hidden_size), param_dtype)
            down = jax.ShapeDtypeStruct((total, hidden_size, intermediate_size), param_dtype)
            sharding.specs(ExpertWeights(up if gated else None, up, down))

        def param(value, *dimensions, kind=nnx.Param):
            return kind(value, **_placed(sharding, dimensions))

        def kernel(size_in, size_out):
            return kernel_init(rngs.params(), (size_in, size_out), param_dtype).T

        def each(init, *shape):
            keys = jax.random.split(rngs.params(), total)
            return jax.vmap(lambda key: init(key, shape, param_dtype).T)(keys)

        self.router = param(kernel(hidden_size, num_experts), None, None)
        self.w_gate = param(each(kernel_init, hidden_size, intermediate_size), "E", "I", None) if gated else None
        self.w_up = param(each(kernel_init, hidden_size, intermediate_size), "E", "I", None)
        self.w_down = param(each(kernel_init, intermediate_size, hidden_size), "E", None, "I")
        self.b_gate = param(each(bias_init, intermediate_size), "E", "I") if use_bias and gated else None
        self.b_up = param(each(bias_init, intermediate_size), "E", "I") if use_bias else None
        self.b_down = param(each(bias_init, hidden_size), "E", None) if use_bias else None
        self.router_bias = param(bias_init(rngs.params(), (num_experts,), param_dtype), None) if router_bias else None
        self.correction_bias = (
            param(jnp.zeros((num_experts,), jnp.float32), None, kind=RouterState) if correction_bias else None)
        self.expert_scale = param(jnp.ones((num_experts,), param_dtype), None) if expert_scale else None
        self.shared_gate = param(kernel(hidden_size, 1), None, None) if shared_gate else None

    @classmethod
    def from_weights(cls, w_router: jax.Array, experts: ExpertWeights, num_experts_per_token: int, **options) -> "MoE":
        """A layer around weights that exist, for example those of a block that it replaces. Nothing is drawn or copied.

        Args:
          w_router: [E, H] floats.
          experts: `ExpertWeights` [E + S, ..], the shared ones last, see `append_shared`.
          num_experts_per_token: K.
          **options: as of `MoE`; the sizes, `use_bias` and `rngs` follow from the weights.

        Parameters of the router and gates beside these start as 0, scales as 1; assign them with `set_value`.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_warp_decode import ExpertWeights
          >>> from jax_warp_decode.layers import MoE
          >>> w = jnp.ones((9, 32, 32))
          >>> MoE.from_weights(jnp.ones((8, 32)), ExpertWeights(w, w, w), 2, num_shared_experts=1).num_experts
          8
        """
        experts.check()
        shared = options.get("num_shared_experts", 0)
        if w_router.shape != (experts.num_experts - shared, experts.hidden):
            raise ArgumentError(f"w_router: got shape {w_router.shape}, expected "
                                f"{(experts.num_experts - shared, experts.hidden)} = [E, H] to match w_up "
                                f"{experts.w_up.shape} with {shared} shared experts")

        def build():
            return cls(experts.hidden, experts.intermediate, len(w_router), num_experts_per_token,
                       use_bias=bool(experts.biases), rngs=nnx.Rngs(0), **options)

        layer = nnx.eval_shape(build)
        layer.set_experts(experts)
        everywhere = None if layer.sharding is None else NamedSharding(layer.sharding.mesh, PartitionSpec())
        layer.router.set_value(w_router if everywhere is None else jax.device_put(w_router, everywhere))
        for name, start in (("router_bias", 0), ("correction_bias", 0), ("expert_scale", 1), ("shared_gate", 0)):
            if (variable := getattr(layer, name)) is not None:
                variable.set_value(jnp.full(variable.shape, start, variable.dtype, device=everywhere))
        return layer

    @property
    def experts(self) -> ExpertWeights:
        """The weights of routed and shared experts, [E + S, ..], as `moe` takes them."""
        return ExpertWeights(**{name: None if (p := getattr(self, name)) is None else p.get_value()
                                for name in EXPERT_TENSORS})

    def set_experts(self, experts: ExpertWeights) -> None:
        """Replaces the expert weights, for example by `layer.experts.quantize("mxfp8")`; sizes must stay."""
        experts.check()
        shapes = {name: p.get_value().shape for name in EXPERT_TENSORS if (p := getattr(self, name)) is not None}
        given = experts.weights | experts.biases
        if missing := shapes.keys() ^ given.keys():
            raise ArgumentError(f"experts: got {', '.join(given)}, expected {', '.join(shapes)}; {', '.join(missing)} "
                                "depend on use_bias and on the activation's gate")
        for name, want in shapes.items():
            if given[name].shape != want:
                axes = {"w_down": "E, H, I", "b_down": "E, H"}.get(name, "E, I, H"[: 3 * len(want) - 2])
                raise ArgumentError(f"experts.{name}: got shape {given[name].shape}, expected {want} = [{axes}]")
        if self.sharding is not None:
            given = (placed := self.sharding.shard(experts)).weights | placed.biases
        for name, value in given.items():
            getattr(self, name).set_value(value)

    def set_strategy(self, strategy: str) -> None:
        """Selects "auto" or one strategy by name, for every later call."""
        names = ["auto", *TABLE]
        if strategy not in names:
            raise ArgumentError(f"strategy: got {strategy!r}, expected one of {names}")
        self.strategy = strategy

    def set_sharding(self, sharding: ExpertSharding | None) -> None:
        """Runs every later call on this mesh; the parameters must lie there, see `module_sharding.shard_module`."""
        self.sharding = sharding

    def choice(self, tokens: int, x_dtype: Any = None) -> Choice:
        """The strategy, and why, for a call with `tokens` tokens; arguments as of `explain`."""
        return self.explain(tokens, x_dtype).choice

    def explain(self, tokens: int, x_dtype: Any = None) -> Explanation:
        """The strategy for a call with `tokens` tokens, why, and the configurations of its kernels; print it.

        Args:
          tokens: T, the product of the leading axes of x.
          x_dtype: dtype that x will have; matters only to a layer with `dtype` None, which computes in it. None stands
            for the dtype of the router's parameter.
        """
        return explain(self.experts, tokens=tokens, experts_per_token=self.routing.k + self.num_shared_experts,
                       x_dtype=self.dtype or x_dtype or self.router.get_value().dtype, strategy=self.strategy,
                       sharding=self.sharding)

    def route(self, x: jax.Array, strategy: str = "xla") -> Routing:
        """Routing of tokens x [T, H] to routed experts: logits, choice and weights in float32 at every batch size.

        Only strategy "xla" has gradients, see `route_tokens`.
        """
        arrays = {name: None if (p := getattr(self, attribute)) is None else p.get_value() for name, attribute in
                  (("bias", "router_bias"), ("correction_bias",) * 2, ("expert_scale",) * 2)}
        return route_tokens(x, self.router.get_value(), self.routing, strategy=strategy, **arrays)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [..., H]; returns [..., H] in `dtype`, or that of x.

        Raises:
          ArgumentError: x is no floating array with a last dimension H, or the parameters do not fit each other.
          UnsupportedError: the selected strategy cannot run here.
        """
        x = jnp.asarray(x)
        if x.ndim < 1 or x.shape[-1] != self.hidden_size or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ArgumentError(
                f"x: got {x.dtype}{list(x.shape)}, expected a floating array [..., H] with H = {self.hidden_size}")
        tokens = x.astype(self.dtype or x.dtype).reshape(math.prod(x.shape[:-1]), self.hidden_size)
        experts = self.experts
        experts.check()
        # Refused here, a strategy comes without the hint of `moe` at an option that the layer does not have.
        strategy = self.choice(tokens.shape[0], tokens.dtype).strategy
        routing = self.route(tokens, "auto" if TABLE[strategy].decode else "xla")
        if self.num_shared_experts:
            routing = with_shared(routing, self.num_experts, experts.num_experts, self._gate(tokens))
        run = moe if self.sharding is None else functools.partial(moe_sharded, sharding=self.sharding)
        y = run(tokens, routing, experts, activation=self.activation, strategy=strategy, weight_on=self.weight_on)
        return y.reshape(x.shape)

    def _gate(self, tokens: jax.Array) -> jax.Array | None:
        """[T, 1], the weight of the shared experts."""
        if self.shared_gate is None:
            return None
        w = self.shared_gate.get_value().astype(jnp.float32)
        return jax.nn.sigmoid(jnp.einsum("th,gh->tg", tokens.astype(jnp.float32), w, precision="highest"))


def _placed(sharding: ExpertSharding | None, dimensions) -> dict[str, Any]:
    """Metadata of a parameter whose axes are "E", "I" or not split."""
    if sharding is None:
        return {}
    axes = {"E": sharding.expert_axis, "I": sharding.tensor_axis}
    return dict(out_sharding=tuple(axes.get(dimension) for dimension in dimensions), mesh=sharding.mesh)
