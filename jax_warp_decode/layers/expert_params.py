"""The parameters of a group of experts in a module: w_gate, w_up, w_down and the biases, each an attribute or None."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import BIASES, MATRICES, ExpertWeights
from jax_warp_decode.parallel import DIMENSIONS, ExpertSharding

EXPERT_TENSORS = (*MATRICES, *BIASES)


class SharedExperts(nnx.Module):
    """Parameters of experts that every token uses, where they do not stand behind the routed ones."""

    def __init__(self, params: Mapping[str, nnx.Param | None]) -> None:
        assign(self, params)


def assign(module: nnx.Module, params: Mapping[str, nnx.Param | None]) -> None:
    """Makes parameters attributes of the module."""
    for name in EXPERT_TENSORS:
        setattr(module, name, params.get(name))


def read(module: nnx.Module) -> ExpertWeights:
    """The weights in the parameters of a module."""
    values: dict[str, Any] = {name: None if (p := getattr(module, name)) is None else p.get_value()
                              for name in EXPERT_TENSORS}
    return ExpertWeights(**values)


def write(module: nnx.Module, experts: ExpertWeights) -> None:
    """Replaces the weights in the parameters of a module; `check` them before."""
    for name, value in (experts.weights | experts.biases).items():
        getattr(module, name).set_value(value)


def check(module: nnx.Module, experts: ExpertWeights, owner: str) -> None:
    """Whether weights fit the parameters of a module; `owner` is what messages call them.

    Raises:
      ArgumentError: other sizes, or tensors that the module does not have or lacks.
    """
    shapes = {name: p.get_value().shape for name in EXPERT_TENSORS if (p := getattr(module, name)) is not None}
    given = experts.weights | experts.biases
    if missing := shapes.keys() ^ given.keys():
        raise ArgumentError(f"{owner}: got {', '.join(given)}, expected {', '.join(shapes)}; {', '.join(missing)} "
                            "depend on use_bias and on the activation's gate")
    for name, want in shapes.items():
        if given[name].shape != want:
            raise ArgumentError(f"{owner}.{name}: got shape {given[name].shape}, expected {want} = "
                                f"[{', '.join(DIMENSIONS[name])}]")


def part(experts: ExpertWeights, entries: slice) -> ExpertWeights:
    """Some of the experts, of one layer."""
    return experts.map(lambda w: jax.tree.map(lambda a: a[entries], w))


def placed(sharding: ExpertSharding | None, dimensions: str) -> dict[str, Any]:
    """Metadata of a parameter, each of whose axes is "E", "I" or one that is not split."""
    if sharding is None:
        return {}
    axes = {"E": sharding.expert_axis, "I": sharding.tensor_axis}
    return dict(out_sharding=tuple(axes.get(dimension) for dimension in dimensions), mesh=sharding.mesh)
