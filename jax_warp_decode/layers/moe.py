"""The mixture-of-experts layer for Flax NNX: router, experts and the choice of strategy in one module."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_warp_decode import batch_axes
from jax_warp_decode.activations import Activation, get_activation
from jax_warp_decode.choose import TABLE, Choice, warn_of
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import ExpertWeights, check_experts, is_float
from jax_warp_decode.explain import Explanation, explain
from jax_warp_decode.layers import expert_params
from jax_warp_decode.moe import WEIGHT_ON, moe
from jax_warp_decode.parallel import ExpertSharding, check_sharding, moe_sharded
from jax_warp_decode.route_tokens import route_tokens
from jax_warp_decode.routers import Router, static_integer
from jax_warp_decode.routing import Routing, as_router
from jax_warp_decode.shared_experts import append_shared, with_shared

DEFAULT_KERNEL_INIT = nnx.initializers.lecun_normal()  # as nnx.Linear
DEFAULT_BIAS_INIT = nnx.initializers.zeros_init()


class RouterState(nnx.Variable):
    """What a rule updates, such as the correction bias of DeepSeek-V3; optimisers of `nnx.Param` leave it alone."""


class MoE(nnx.Module):
    """A block of experts of which every token uses K: y = sum_k weight_k expert_k(x) + gate shared(x).

    An expert is w_down act(w_gate x + b_gate, w_up x + b_up) + b_down. The router works in float32 at every batch size.
    Which strategy runs the experts is decided when the call is traced, from the number of tokens, so one layer serves
    prefill, decode and training from the same parameters.

    The kernels of the decode strategies read 2-byte and narrower weights: `set_experts(layer.experts.astype(bfloat16))`
    or `.quantize("mxfp8")` makes a layer that trained in float32 ready for them. A shared expert of n * I neurons
    counts as n shared experts, see `shared_experts`.

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
        made in their places. `module_sharding.shard_module` moves a layer that exists. The same `rngs` make the same
        layer on any mesh.
      rngs: the `params` stream draws the parameters.

    Attributes:
      router: Param [E, H]; router_bias and expert_scale: Params [E] or None; correction_bias: RouterState [E] or None.
      w_gate, w_up: Params [E + S, I, H], or with a `QuantizedArray` as value; w_gate is None without a gate.
      w_down: Param [E + S, H, I], likewise.
      b_gate, b_up: Params [E + S, I] or None; b_down: Param [E + S, H] or None.
      shared: None; where a mesh splits E, which E + S would not be divided by, a module that has the shared experts'
        parameters under the same names, [S, ..], on every device that splits E; those above are then [E, ..].
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
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise ArgumentError(f"{name}: got {size!r}, expected an integer of at least 1")
        for name, of_name in (("dtype", dtype), ("param_dtype", param_dtype)):
            if of_name is not None and not is_float(of_name):
                raise ArgumentError(f"{name}: got {of_name!r}, expected a floating dtype such as bfloat16")
        for name, init in (("kernel_init", kernel_init), ("bias_init", bias_init)):
            if not callable(init):
                raise ArgumentError(f"{name}: got {init!r}, expected an initialiser, (key, shape, dtype) -> array, "
                                    "such as those of jax.nn.initializers")
        if not callable(getattr(rngs, "params", None)):
            raise ArgumentError(f"rngs: got {type(rngs).__name__}, expected nnx.Rngs, such as nnx.Rngs(0)")
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
        self.sharding = sharding
        self.set_strategy(strategy)
        apart = self._apart(sharding)
        total = num_experts + num_shared_experts
        gated = self.activation.gated
        if sharding is not None:  # refuses a split that does not divide before anything is drawn
            w_up, w_down = (cast(Any, jax.ShapeDtypeStruct((num_experts if apart else total, *shape), param_dtype))
                            for shape in ((intermediate_size, hidden_size), (hidden_size, intermediate_size)))
            sharding.specs(ExpertWeights(w_up if gated else None, w_up, w_down))

        def param(value, dimensions, kind=nnx.Param, places=sharding):
            return kind(value, **expert_params.placed(places, dimensions))

        def kernel(size_in, size_out):
            return kernel_init(rngs.params(), (size_in, size_out), param_dtype).T

        def each(init, *shape, dimensions):
            """A parameter of all experts, or of the routed and of the shared ones; the numbers are the same."""
            keys = jax.random.split(rngs.params(), total)
            draw = jax.vmap(lambda key: init(key, shape, param_dtype).T)
            if not apart:
                return param(draw(keys), dimensions), None
            return (param(draw(keys[:num_experts]), dimensions),
                    param(draw(keys[num_experts:]), dimensions, places=sharding.of_shared))

        up, down = (hidden_size, intermediate_size), (intermediate_size, hidden_size)
        self.router = param(kernel(hidden_size, num_experts), "-H")
        experts = dict(
            w_gate=each(kernel_init, *up, dimensions="EIH") if gated else None,
            w_up=each(kernel_init, *up, dimensions="EIH"),
            w_down=each(kernel_init, *down, dimensions="EHI"),
            b_gate=each(bias_init, up[1], dimensions="EI") if use_bias and gated else None,
            b_up=each(bias_init, up[1], dimensions="EI") if use_bias else None,
            b_down=each(bias_init, down[1], dimensions="EH") if use_bias else None)
        routed, shared = ({name: both and both[i] for name, both in experts.items()} for i in (0, 1))
        expert_params.assign(self, routed)
        self.shared = nnx.data(expert_params.SharedExperts(shared) if apart else None)
        self.router_bias = param(bias_init(rngs.params(), (num_experts,), param_dtype), "-") if router_bias else None
        self.correction_bias = (
            param(jnp.zeros((num_experts,), jnp.float32), "-", kind=RouterState) if correction_bias else None)
        self.expert_scale = param(jnp.ones((num_experts,), param_dtype), "-") if expert_scale else None
        self.shared_gate = param(kernel(hidden_size, 1), "-H") if shared_gate else None

    @classmethod
    def from_weights(
            cls, w_router: jax.Array, experts: ExpertWeights, num_experts_per_token: int, **options: Any) -> "MoE":
        """A layer around weights that exist, for example those of a block that it replaces. Nothing is drawn or copied.

        Args:
          w_router: [E, H] floats.
          experts: `ExpertWeights` [E + S, ..], the shared ones last, see `append_shared`.
          num_experts_per_token: K.
          **options: as of `MoE`; the sizes, `use_bias` and `rngs` follow from the weights.

        Parameters of the router and gates beside these start as 0, scales as 1; assign them with `set_value`.

        Raises:
          ArgumentError: weights that do not fit each other, the options or K.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_warp_decode import ExpertWeights
          >>> from jax_warp_decode.layers import MoE
          >>> w = jnp.ones((9, 32, 32))
          >>> MoE.from_weights(jnp.ones((8, 32)), ExpertWeights(w, w, w), 2, num_shared_experts=1).num_experts
          8
        """
        check_experts(experts)
        shared = static_integer("num_shared_experts", options.get("num_shared_experts", 0), "of at least 0")
        if getattr(w_router, "shape", None) is None:
            raise ArgumentError(f"w_router: got {type(w_router).__name__}, expected an array [E, H]")
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
        """The weights of routed and shared experts, [E + S, ..], as `moe` takes them; [E, ..] beside a `shared`."""
        return expert_params.read(self)

    @property
    def shared_experts(self) -> ExpertWeights | None:
        """The weights of `shared`, [S, ..], as `moe_sharded` takes them."""
        return None if self.shared is None else expert_params.read(self.shared)

    def set_experts(self, experts: ExpertWeights, shared: ExpertWeights | None = None) -> None:
        """Replaces the expert weights, for example by `layer.experts.quantize("mxfp8")`; sizes must stay.

        Args:
          experts: [E + S, ..]; also [E, ..] where `shared` has the shared ones, which then stay as they are.
          shared: [S, ..], to replace those.

        Raises:
          ArgumentError: other sizes, or tensors that the layer does not have or lacks.
        """
        check_experts(experts)
        if shared is not None:
            check_experts(shared, "shared")
        if self.shared is None and shared is not None:
            raise ArgumentError("shared: got ExpertWeights, expected None; here shared experts stand behind the routed "
                                "ones, see append_shared")
        if self.shared is not None and shared is None and experts.num_experts != self.num_experts:
            experts, shared = (expert_params.part(experts, entries) for entries in (
                slice(None, self.num_experts), slice(self.num_experts, None)))
        groups: list[tuple[Any, ExpertWeights, str, ExpertSharding | None]] = [
            (self, experts, "experts", self.sharding)]
        if shared is not None:
            places = None if self.sharding is None else self.sharding.of_shared
            groups.append((self.shared, shared, "shared", places))
        for module, weights, owner, _ in groups:
            expert_params.check(module, weights, owner)
        for module, weights, _, where in groups:
            expert_params.write(module, weights if where is None else where.shard(weights))

    def set_strategy(self, strategy: str) -> None:
        """Selects "auto" or one strategy by name, for every later call."""
        names = ["auto", *TABLE]
        if not isinstance(strategy, str) or strategy not in names:
            raise ArgumentError(f"strategy: got {strategy!r}, expected one of {names}")
        self.strategy = strategy

    def set_sharding(self, sharding: ExpertSharding | None) -> None:
        """Runs every later call on this mesh; the parameters must lie there, see `module_sharding.shard_module`.

        Where the mesh splits E, shared experts become parameters of `shared`, elsewhere experts like any other.
        """
        own, shared, apart = self.experts, self.shared_experts, self._apart(sharding)
        experts: ExpertWeights | None = None  # what changes
        if apart and shared is None:
            experts, shared = (expert_params.part(own, entries) for entries in (
                slice(None, self.num_experts), slice(self.num_experts, None)))
        elif not apart and shared is not None:
            experts, shared = append_shared(own, shared), None
        if experts is not None:
            expert_params.assign(self, _params(experts))
            self.shared = nnx.data(expert_params.SharedExperts(_params(shared)) if apart and shared else None)
        self.sharding = sharding

    def _apart(self, sharding: ExpertSharding | None) -> bool:
        """Whether the shared experts need parameters of their own."""
        if sharding is None:
            return False
        check_sharding(sharding)
        return self.num_shared_experts > 0 and sharding.size(sharding.expert_axis) > 1

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
        slots = self.routing.k + (0 if self.shared else self.num_shared_experts)
        return explain(self.experts, tokens=tokens, experts_per_token=slots,
                       x_dtype=self.dtype or x_dtype or self.router.get_value().dtype, strategy=self.strategy,
                       sharding=self.sharding)

    def route(self, x: jax.Array, strategy: str = "xla") -> Routing:
        """Routing of tokens x [T, H] to routed experts: logits, choice and weights in float32 at every batch size.

        Only strategy "xla" has gradients, see `route_tokens`.
        """
        arrays: dict[str, Any] = {
            name: None if (p := getattr(self, attribute)) is None else p.get_value() for name, attribute in
            (("bias", "router_bias"), ("correction_bias",) * 2, ("expert_scale",) * 2)}
        return route_tokens(x, self.router.get_value(), self.routing, strategy=strategy, **arrays)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [..., H]; returns [..., H] in `dtype`, or that of x.

        Raises:
          ArgumentError: x is no floating array with a last dimension H, or the parameters do not fit each other.
          UnsupportedError: the selected strategy cannot run here.
        """
        x = batch_axes.as_array(x, self.hidden_size)
        tokens = x.astype(self.dtype or x.dtype).reshape(math.prod(x.shape[:-1]), self.hidden_size)
        experts = self.experts
        experts.check()
        # Refused here, a strategy comes without the hint of `moe` at an option that the layer does not have.
        choice = self.choice(tokens.shape[0], tokens.dtype)
        strategy = choice.strategy
        routing = self.route(tokens, "auto" if TABLE[strategy].decode else "xla")
        options: dict[str, Any] = dict(activation=self.activation, weight_on=self.weight_on)
        gate = self._gate(tokens)
        if self.num_shared_experts and self.shared is None:
            routing, gate = with_shared(routing, self.num_experts, experts.num_experts, gate), None
        if self.sharding is None:
            if not choice.copied_bytes:  # of which `moe` warns
                warn_of(choice, self.strategy)
            y = moe(tokens, routing, experts, strategy=strategy, **options)
        else:  # which chooses for the shared experts apart
            y = moe_sharded(tokens, routing, experts, self.sharding, shared=self.shared_experts, shared_weight=gate,
                            strategy=self.strategy, **options)
        return y.reshape(x.shape)

    def _gate(self, tokens: jax.Array) -> jax.Array | None:
        """[T, 1], the weight of the shared experts."""
        if self.shared_gate is None:
            return None
        w = self.shared_gate.get_value().astype(jnp.float32)
        return jax.nn.sigmoid(jnp.einsum("th,gh->tg", tokens.astype(jnp.float32), w, precision="highest"))


def _params(experts: ExpertWeights) -> dict[str, nnx.Param]:
    return {name: nnx.Param(w) for name, w in (experts.weights | experts.biases).items()}
