"""The mixture-of-experts layer for Flax NNX: router, experts and the choice of strategy in one module."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_warp_decode.activations import get_activation
from jax_warp_decode.choose import Choice, available_strategies, choose
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.moe import moe
from jax_warp_decode.route_tokens import route_tokens
from jax_warp_decode.routing import Routing

DEFAULT_KERNEL_INIT = nnx.initializers.lecun_normal()  # as nnx.Linear


class MoE(nnx.Module):
    """A block of E gated experts of which every token uses K, as in Qwen3-MoE: y = sum_k weight_k * expert_k(x).

    The router computes softmax probabilities in float32, takes the K largest (ties to the lower id) and divides them
    by their sum if `renormalize`. Which strategy runs the experts is decided when the call is traced, from the number
    of tokens, so one layer serves prefill, decode and training.

    Args:
      hidden_size: H.
      intermediate_size: I.
      num_experts: E.
      num_experts_per_token: K, at most E.
      renormalize: whether the K routing weights of a token sum to 1 (`norm_topk_prob` of Qwen3-MoE).
      activation: a key of `ACTIVATIONS`.
      strategy: "auto" or a key of `available_strategies()`; may be assigned later through `set_strategy`.
      dtype: dtype of the computation and of y; None takes that of x. Weights are read as they are stored.
      param_dtype: dtype of the parameters made here.
      kernel_init: initialiser of every matrix, called with the shape [in, out] as in `nnx.Linear`, once an expert.
      rngs: the `params` stream draws the parameters.

    Attributes:
      router: Param [E, H].
      w_gate, w_up: Params [E, I, H], or with a `QuantizedArray` as value.
      w_down: Param [E, H, I], or with a `QuantizedArray` as value.

    Raises:
      ArgumentError: for sizes below 1, K > E, an unknown activation or strategy.

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
        renormalize: bool = True,
        activation: str = "silu",
        strategy: str = "auto",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = DEFAULT_KERNEL_INIT,
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
        get_activation(activation)

        def kernel(size_in: int, size_out: int) -> jax.Array:
            return kernel_init(rngs.params(), (size_in, size_out), param_dtype).T

        def kernels(size_in: int, size_out: int) -> jax.Array:
            keys = jax.random.split(rngs.params(), num_experts)
            return jax.vmap(lambda key: kernel_init(key, (size_in, size_out), param_dtype).T)(keys)

        self.hidden_size = hidden_size
        self.num_experts_per_token = num_experts_per_token
        self.renormalize = renormalize
        self.activation = activation
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.set_strategy(strategy)
        self.router = nnx.Param(kernel(hidden_size, num_experts))
        self.w_gate = nnx.Param(kernels(hidden_size, intermediate_size))
        self.w_up = nnx.Param(kernels(hidden_size, intermediate_size))
        self.w_down = nnx.Param(kernels(intermediate_size, hidden_size))

    @property
    def experts(self) -> ExpertWeights:
        """The expert weights as `moe` takes them."""
        return ExpertWeights(self.w_gate.get_value(), self.w_up.get_value(), self.w_down.get_value())

    def set_experts(self, experts: ExpertWeights) -> None:
        """Replaces the expert weights, for example by `layer.experts.quantize("mxfp8")`; sizes must stay."""
        experts.check()
        expected = self.w_gate.get_value().shape
        if experts.w_gate.shape != expected:
            raise ArgumentError(f"experts.w_gate: got shape {experts.w_gate.shape}, expected {expected} = [E, I, H]")
        self.w_gate.set_value(experts.w_gate)
        self.w_up.set_value(experts.w_up)
        self.w_down.set_value(experts.w_down)

    def set_strategy(self, strategy: str) -> None:
        """Selects "auto" or one strategy by name, for every later call."""
        names = ["auto", *available_strategies()]
        if strategy not in names:
            raise ArgumentError(f"strategy: got {strategy!r}, expected one of {names}")
        self.strategy = strategy

    def choice(self, tokens: int, x_dtype: Any = None) -> Choice:
        """The strategy, and why, for a call with `tokens` tokens.

        Args:
          tokens: T, the product of the leading axes of x.
          x_dtype: dtype that x will have; matters only to a layer with `dtype` None, which computes in it. None stands
            for the dtype of the router's parameter.
        """
        return choose(
            tokens, self.experts, experts_per_token=self.num_experts_per_token,
            x_dtype=self.dtype or x_dtype or self.router.get_value().dtype, strategy=self.strategy)

    def route(self, x: jax.Array, strategy: str = "xla") -> Routing:
        """Routing of tokens x [T, H]: logits, softmax, choice and weights in float32 at every batch size.

        Only strategy "xla" has gradients, see `route_tokens`.
        """
        return route_tokens(x, self.router.get_value(), self.num_experts_per_token, renormalize=self.renormalize,
                            strategy=strategy)

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
        routing = self.route(tokens, "auto" if strategy == "warp_decode" else "xla")
        y = moe(tokens, routing, experts, activation=self.activation, strategy=strategy)
        return y.reshape(x.shape)
