"""Which strategy a layer would run with, which configurations its kernels would take, and why."""

import dataclasses

import jax
from jax import export
from jax.typing import DTypeLike

from jax_warp_decode import tuning
from jax_warp_decode.choose import Choice, choose
from jax_warp_decode.device import capability
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import ExpertWeights, check_experts
from jax_warp_decode.kernels import checks, down, gate_up
from jax_warp_decode.parallel import ExpertSharding, check_sharding
from jax_warp_decode.paths import grouped_layer, shared_decode, warp_decode
from jax_warp_decode.routers import static_integer

# The config classes of each kernel, by the name that its measurements carry; see `tuning.rule_of_thumb`.
KERNELS = {"moe_gate_up": gate_up.CONFIGS, "moe_down": down.CONFIGS}


def explain_config(experts: ExpertWeights, *, tokens: int, experts_per_token: int,
                   interpret: bool = False) -> dict[str, tuning.Found]:
    """What `warp_decode` would run with here: {kernel: `tuning.Found(config, source)`}.

    Args:
      experts: the layer's weights, or their shapes (`jax.ShapeDtypeStruct`s).
      tokens: T.
      experts_per_token: K.
      interpret: the kernels will be interpreted.

    Raises:
      ArgumentError, UnsupportedError: weights that the kernels cannot take, more slots than experts, a file of tuned
        configurations that cannot be used, or a configuration of `tuning.override` that does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> from jax_warp_decode.explain import explain_config
      >>> S = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
      >>> experts = ExpertWeights(S(8, 64, 256), S(8, 64, 256), S(8, 256, 64))
      >>> list(explain_config(experts, tokens=1, experts_per_token=2))
      ['moe_gate_up', 'moe_down']
    """
    check_experts(experts)
    _check_slots(experts, experts_per_token)
    return _configs(experts, tokens, experts_per_token, interpret)


def _check_slots(experts: ExpertWeights, experts_per_token: int) -> None:
    """As `moe` does for the experts of a whole layer."""
    K, E = experts_per_token, experts.num_experts
    if not export.is_symbolic_dim(K) and static_integer("experts_per_token", K, "of at least 1") > E:
        raise ArgumentError(f"experts_per_token: got {K}, expected at most E = {E}, the experts")


def _configs(experts: ExpertWeights, tokens: int, experts_per_token: int, interpret: bool) -> dict[str, tuning.Found]:
    """`explain_config`, also for one device's share of the experts."""
    for name, value in (("tokens", tokens), ("experts_per_token", experts_per_token)):
        if static_integer(name, value, "of at least 1") < 1:
            raise ArgumentError(f"{name}: got {value}, expected at least 1")
    checks.matrices(experts)
    H, I, format = experts.hidden, experts.intermediate, experts.format
    return {kernel: tuning.find(kernel, kinds, None, format=format, T=tokens, K=experts_per_token, H=H, I=I,
                                interpret=bool(interpret)) for kernel, kinds in KERNELS.items()}


def _shared_configs(experts: ExpertWeights, tokens: int, K: int, interpret: bool) -> dict[str, tuning.Found]:
    """Of `shared_decode`, whose kernels have a heuristic alone."""
    configs = shared_decode.configs(tokens, K, experts)
    return {name: tuning.Found(config, "heuristic") for name, config in configs.items()}


# Strategies whose kernels have configurations to tell.
CONFIGS = {"warp_decode": _configs, "shared_decode": _shared_configs}


def _temporary_bytes(strategy: str, experts: ExpertWeights, tokens: int, K: int, x_dtype) -> int | None:
    if strategy == "warp_decode":
        return warp_decode.temporary_bytes(tokens, K, experts)
    if strategy == "shared_decode":
        return shared_decode.temporary_bytes(tokens, K, experts, x_dtype)
    if strategy == "expert_centric" and capability() and not grouped_layer.refusal(x_dtype, experts):
        return grouped_layer.temporary_bytes(tokens, K, experts)
    return None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What runs, and why.

    Attributes:
      choice: the strategy and the reason for it.
      configs: {kernel: `tuning.Found(config, source)`}, of the strategies in `CONFIGS`.
      temporary_bytes: of device memory, besides arguments and result; None where XLA decides, see `choice.warning`.

    Example:
      >>> from jax_warp_decode import Choice, Explanation
      >>> print(Explanation(Choice("reference", "asked for by name"), {}, None))
      reference (asked for by name)
    """

    choice: Choice
    configs: dict[str, tuning.Found]
    temporary_bytes: int | None = None

    def __str__(self) -> str:
        lines = [f"{name}: {found.config} ({found.source})" for name, found in self.configs.items()]
        if self.temporary_bytes is not None:
            lines.append(f"temporaries: {self.temporary_bytes:,} bytes")
        return "\n  ".join([str(self.choice), *lines])


def explain(experts: ExpertWeights, *, tokens: int, experts_per_token: int, x_dtype: DTypeLike,
            strategy: str = "auto", sharding: ExpertSharding | None = None, interpret: bool = False) -> Explanation:
    """The strategy of a call, why, and the configurations of its kernels.

    Args:
      experts: the layer's weights (arrays or `jax.ShapeDtypeStruct`s).
      tokens: T.
      experts_per_token: K.
      x_dtype, strategy, interpret: as in `choose`.
      sharding: `ExpertSharding`, for what each device of a mesh runs; T and K are then of the whole call.

    Raises:
      ArgumentError, UnsupportedError: as `choose` and `explain_config`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> from jax_warp_decode.explain import explain
      >>> w = jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16)
      >>> print(explain(ExpertWeights(w, w, w), tokens=1, experts_per_token=2, x_dtype=w.dtype, strategy="reference"))
      reference (asked for)
    """
    shares, whole = 1, experts
    if sharding is not None:
        check_sharding(sharding)
        experts = jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(place.shard_shape(a.shape), a.dtype), experts,
                               sharding.shardings(experts))
        shares, parts = sharding.size(sharding.expert_axis), sharding.size(sharding.token_axis)
        if not export.is_symbolic_dim(tokens) and static_integer("tokens", tokens, "of at least 0") % parts:
            raise ArgumentError(f"tokens: got {tokens}, expected a multiple of {parts}, the devices along token_axis = "
                                f"{sharding.token_axis!r}; pad x, with -1 as the ids of the padding, or leave "
                                "token_axis out of the sharding")
        tokens //= sharding.size(sharding.batch_axes)
    choice = choose(tokens, experts, experts_per_token=experts_per_token, x_dtype=x_dtype, strategy=strategy,
                    interpret=interpret, shares=shares)
    _check_slots(whole, experts_per_token)
    configs = {}
    if tokens and choice.strategy in CONFIGS:
        configs = CONFIGS[choice.strategy](experts, tokens, experts_per_token, interpret)
    known = not export.is_symbolic_dim(tokens)
    temporary = _temporary_bytes(choice.strategy, experts, tokens, experts_per_token, x_dtype) if known else None
    return Explanation(choice, configs, temporary)
