"""Parameters of Flax NNX modules on a mesh: experts split as `ExpertSharding` says, all else on every device."""

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import BIASES, MATRICES, ExpertWeights
from jax_warp_decode.parallel import ExpertSharding, check_sharding


def module_specs(module: nnx.Module, sharding: ExpertSharding) -> nnx.State:
    """A `PartitionSpec` for every array in the state of a module, in the tree of `nnx.state(module)`.

    Args:
      module: `MoE`, or any module that has some inside, such as a whole decoder; also one from `nnx.eval_shape`. Its
        experts are the parameters called w_gate, w_up, w_down, b_gate, b_up and b_down of one submodule. If that is
        called "shared", every token uses them, and they lie on every device that splits E.
      sharding: which axes of the mesh split what. A `MoE` layer with shared experts has the parameters for a mesh that
        splits E if it was made for one, or after `set_sharding`.

    Raises:
      ArgumentError: no experts in the module; and as `ExpertSharding.specs`.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from jax_warp_decode.layers import MoE
      >>> from jax_warp_decode.module_sharding import module_specs
      >>> from jax_warp_decode.parallel import ExpertSharding
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = MoE(64, 32, num_experts=8, num_experts_per_token=2, rngs=nnx.Rngs(0))
      >>> specs = module_specs(layer, ExpertSharding(mesh, expert_axis="expert"))
      >>> tuple(specs["w_up"].get_value()), tuple(specs["router"].get_value())
      (('expert', None, None), ())
    """
    check_sharding(sharding)
    flat = dict(nnx.to_flat_state(nnx.state(module)))
    owners = {path[:-1] for path in flat if path and path[-1] == "w_up"}
    if not owners:
        raise ArgumentError(f"module: got {type(module).__name__}, expected a module with experts, parameters w_up, "
                            "w_down and so on")
    specs = {path: jax.tree.map(lambda _: P(), variable) for path, variable in flat.items()}
    for owner in owners:
        names = [name for name in (*MATRICES, *BIASES) if (*owner, name) in flat]
        values = {name: flat[(*owner, name)].get_value() for name in names}
        everyone = owner and owner[-1] == "shared"
        found = (sharding.of_shared if everyone else sharding).specs(
            ExpertWeights(**{"w_gate": None, "w_down": None} | values), "shared" if everyone else "experts")
        for name in names:
            if values[name] is not None:
                path = (*owner, name)
                specs[path] = flat[path].replace(getattr(found, name))
    return nnx.from_flat_state(specs)


def module_shardings(module: nnx.Module, sharding: ExpertSharding) -> nnx.State:
    """The same as `NamedSharding`s: for `jax.jit`, `jax.device_put`, orbax and other loaders."""
    return jax.tree.map(lambda spec: NamedSharding(sharding.mesh, spec), module_specs(module, sharding),
                        is_leaf=lambda leaf: isinstance(leaf, P))


def shard_module(module: nnx.Module, sharding: ExpertSharding) -> None:
    """Puts the parameters of a module in their places on the mesh, and tells its MoE layers about it (`set_sharding`).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_warp_decode.layers import MoE
      >>> from jax_warp_decode.module_sharding import shard_module
      >>> from jax_warp_decode.parallel import ExpertSharding
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = MoE(64, 32, num_experts=8, num_experts_per_token=2, rngs=nnx.Rngs(0))
      >>> shard_module(layer, ExpertSharding(mesh, expert_axis="expert"))
      >>> layer.w_up.get_value().sharding.spec[0]
      'expert'

    Raises:
      ArgumentError: as `module_specs`; the module is then as it was.
    """
    check_sharding(sharding)
    layers = [node for _, node in nnx.iter_graph(module) if hasattr(node, "set_sharding")]
    before = [layer.sharding for layer in layers]
    try:
        for layer in layers:  # first, because shared experts may become parameters of their own
            layer.set_sharding(sharding)
        shardings = module_shardings(module, sharding)
    except ArgumentError:
        for layer, old in zip(layers, before, strict=True):
            layer.set_sharding(old)
        raise
    nnx.update(module, jax.device_put(nnx.state(module), shardings))
