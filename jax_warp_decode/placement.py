"""Whether arrays lie where a mesh wants them, checked before anything runs: a mistake would copy weights in secret.

What can be known: where concrete arrays lie; the mesh of traced ones; and along its axes of type `AxisType.Explicit`,
what splits them. How `AxisType.Auto` axes split a traced array, JAX does not know before it compiles.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_warp_decode import varying
from jax_warp_decode.errors import ArgumentError

WAY_OUT = ("place the weights once, with ExpertSharding.shard or a jit with "
           "out_shardings=ExpertSharding.shardings(experts)")
SHOWN = 8  # device numbers in a message


def check_weights(name: str, weights, shardings) -> None:
    """Weights must already lie as the `NamedSharding`s say.

    Args:
      name: what messages call the tree.
      weights: pytree of arrays, concrete or traced.
      shardings: the same tree.

    Raises:
      ArgumentError: a concrete array anywhere else, one on another mesh, or one that explicit axes split otherwise.
    """
    for (path, w), want in zip(jax.tree_util.tree_leaves_with_path(weights), jax.tree.leaves(shardings), strict=True):
        if not isinstance(w, jax.Array):
            continue
        where = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(w, jax.core.Tracer):
            _check_type(where, w, want)
            continue
        if isinstance(want.mesh, AbstractMesh):
            continue
        _check_order(where, w, want.mesh)
        if not w.sharding.is_equivalent_to(want, w.ndim):
            raise ArgumentError(f"{where}: got {w.sharding}, expected {want}; {WAY_OUT}")


def _check_type(where: str, w: jax.core.Tracer, want: NamedSharding) -> None:
    """What the type of a traced array says of its place."""
    got = jax.typeof(w).sharding
    explicit = AxisType.Explicit in (*got.mesh.axis_types, *want.mesh.axis_types)
    if AxisType.Manual in got.mesh.axis_types or got.mesh.empty and not explicit:
        return
    if dict(got.mesh.shape) != dict(want.mesh.shape):
        raise ArgumentError(f"{where}: got an array on the mesh {dict(got.mesh.shape)}, expected one on "
                            f"{dict(want.mesh.shape)}; {WAY_OUT}")
    if explicit and _split(got.spec, w.ndim, got.mesh) != _split(want.spec, w.ndim, got.mesh):
        raise ArgumentError(f"{where}: got an array split as {got.spec}, expected {want.spec}; {WAY_OUT}")


def check_devices(mesh: Mesh | AbstractMesh, **arrays) -> None:
    """Concrete arrays that were put somewhere must be on the devices of the mesh, in its order.

    Raises:
      ArgumentError: naming the array.
    """
    if isinstance(mesh, AbstractMesh):
        return
    for name, a in arrays.items():
        if isinstance(a, jax.core.Tracer) or not isinstance(a, jax.Array) or not a.committed:
            continue
        if a.sharding.device_set != set(mesh.devices.flat):
            raise ArgumentError(
                f"{name}: got an array put on {len(a.sharding.device_set)} devices, {a.sharding}, expected one "
                f"on the {mesh.size} devices of the mesh {dict(mesh.shape)}; put it there with jax.device_put(.., "
                "NamedSharding(mesh, P(token_axis)))")
        _check_order(name, a, mesh)


def _check_order(name, a, mesh):
    if not isinstance(a.sharding, NamedSharding) or not isinstance(a.sharding.mesh, Mesh):
        return
    got, want = ([device.id for device in m.devices.flat] for m in (a.sharding.mesh, mesh))
    if got != want and sorted(got) == sorted(want):
        raise ArgumentError(f"{name}: got an array on a mesh of devices {_listing(got)}, expected the order "
                            f"{_listing(want)} of the mesh of `sharding`; make one mesh and use it for every array")


def _listing(ids):
    return f"[{', '.join(map(str, ids[:SHOWN]))}{', ..' if len(ids) > SHOWN else ''}]"


def _split(spec: P, ndim: int, mesh: AbstractMesh) -> list[tuple[str, ...]]:
    """For each dimension the axes that split it, of those that types show."""
    shown = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
             if kind == AxisType.Explicit and mesh.shape[name] > 1}
    entries = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in spec]
    return [tuple(axis for axis in axes if axis in shown) for axes in entries + [()] * (ndim - len(entries))]


def check_explicit(x, routing, experts, *, follows: bool) -> None:
    """Refuses arrays that `AxisType.Explicit` axes split: sorts and kernels have no rule for them.

    Args:
      follows: whether the strategy is plain JAX, which follows a split of the tokens.

    Raises:
      ArgumentError: naming the array, and what takes it.
    """
    for name, tree in (("experts", experts), ("x", x), ("routing", routing)):
        if follows and name != "experts":
            continue
        for path, a in jax.tree_util.tree_leaves_with_path(tree):
            sharding = jax.typeof(a).sharding
            if any(_split(sharding.spec, jnp.ndim(a), sharding.mesh)):
                raise ArgumentError(
                    f"{name}{jax.tree_util.keystr(path)}: got a split {sharding.spec} over axes of type "
                    f"AxisType.Explicit, which moe cannot follow; call moe_sharded(x, routing, experts, "
                    f"ExpertSharding(mesh, expert_axis=.., token_axis=..)), or make the mesh with AxisType.Auto")


def check_surroundings(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> None:
    """Refuses a call from within a shard_map over the same axes, or under another mesh.

    Args:
      mesh: of the call.
      axes: of it, that split something there.

    Raises:
      ArgumentError: naming what to call there.
    """
    around = jax.sharding.get_abstract_mesh()
    if around.empty:
        return
    manual = [axis for axis, kind in zip(around.axis_names, around.axis_types, strict=True)
              if kind == AxisType.Manual and axis in mesh.axis_names]
    if manual and mesh != around:
        way_out = ("call moe_local there, on each device's own part" if set(manual) & set(axes) else
                   "there, make it of jax.sharding.get_abstract_mesh()")
        raise ArgumentError(
            f"sharding: got a mesh whose axes {manual} a surrounding shard_map splits already; {way_out}")
    if dict(around.shape) != dict(mesh.shape):
        raise ArgumentError(f"sharding: got the mesh {dict(mesh.shape)} under jax.set_mesh of {dict(around.shape)}, "
                            "expected one mesh")


def check_same_tokens(x, routing, partial: tuple[str, ...], tokens: tuple[str, ...]) -> None:
    """Inside a shard_map with check_vma, refuses tokens that differ between devices whose shares would be summed.

    Args:
      partial: axes along which devices hold different weights.
      tokens: axes that the call says split the tokens.

    Raises:
      ArgumentError: naming the array and the argument.
    """
    for name, a in (("x", x), ("routing.ids", routing.ids), ("routing.weights", routing.weights)):
        stray = [axis for axis in partial if axis in varying.axes(a) and axis not in tokens]
        if stray:
            raise ArgumentError(f"{name}: got one that varies over {stray}, along which the weights are split, so that "
                                f"devices would add up different tokens; add token_axis={stray[0]!r}")
