"""Experts spread over the devices of a mesh: expert parallel, tensor parallel, and both with data parallel tokens.

JAX is the engine (`jax.shard_map`, `psum`, `psum_scatter`, `all_gather`). Each device keeps its share of the weights
and runs `moe` on it: expert ids of other devices become -1, which adds exactly 0, so that nothing is copied or sorted
again; the shares are then summed over the axes on which they are partial, and over no other.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_warp_decode import batch_axes
from jax_warp_decode import exchange as exchanges
from jax_warp_decode.choose import choose
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import FORMATS, QuantizedArray
from jax_warp_decode.kernels import checks
from jax_warp_decode.moe import apply
from jax_warp_decode.routing import Routing, float32_weights, int32_ids

Axes = str | tuple[str, ...] | None

# What each axis of each tensor is; stacked layers come before.
DIMENSIONS = {"w_gate": "EIH", "w_up": "EIH", "w_down": "EHI", "b_gate": "EI", "b_up": "EI", "b_down": "EH"}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ExpertSharding:
    """Which axes of a mesh split what. Every axis takes one name, several, or None for "not split".

    It has no arrays: `jax.jit` takes it as an argument like any pytree, and traces anew for another one.

    Attributes:
      mesh: `jax.sharding.Mesh`.
      expert_axis: splits the experts, E (expert parallel).
      tensor_axis: splits the intermediate neurons, I (tensor parallel).
      token_axis: splits the first axis of x, of the routing and of y (data parallel). It may share names with the
        others: tokens are then gathered over these before, and y is scattered over them after.

    Raises:
      ArgumentError: an axis the mesh does not have, or one that would split both E and I.

    Example:
      >>> import jax
      >>> from jax_warp_decode import ExpertWeights
      >>> from jax_warp_decode.parallel import ExpertSharding
      >>> mesh = jax.make_mesh((1, 1), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
      >>> sharding = ExpertSharding(mesh, expert_axis="expert", token_axis="data")
      >>> w = jax.ShapeDtypeStruct((8, 64, 128), "bfloat16")
      >>> tuple(sharding.specs(ExpertWeights(w, w, jax.ShapeDtypeStruct((8, 128, 64), "bfloat16"))).w_gate)
      ('expert', None, None)
    """

    mesh: jax.sharding.Mesh
    expert_axis: Axes = None
    tensor_axis: Axes = None
    token_axis: Axes = None

    def __post_init__(self):
        if not isinstance(self.mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
            raise ArgumentError(f"mesh: got {type(self.mesh).__name__}, expected a jax.sharding.Mesh, as jax.make_mesh "
                                "makes it")
        for name in ("expert_axis", "tensor_axis", "token_axis"):
            axes = _axes(given) if isinstance(given := getattr(self, name), str | tuple | list | None) else (given,)
            unknown = [axis for axis in axes if axis not in self.mesh.axis_names]
            if unknown or len(set(axes)) < len(axes):
                raise ArgumentError(f"{name}: got {getattr(self, name)!r}, expected different axes of the mesh, "
                                    f"{self.mesh.axis_names}")
        _check_disjoint(self.expert_axis, self.tensor_axis)

    def size(self, axes: Axes) -> int:
        """Devices along these axes of the mesh."""
        return math.prod(self.mesh.shape[axis] for axis in _axes(axes))

    def specs(self, experts: ExpertWeights) -> ExpertWeights:
        """The `PartitionSpec` of every array in the experts, in the same tree (arrays or `jax.ShapeDtypeStruct`s).

        A block of a quantised format is never cut, and a scale that counts for a whole axis goes to every device.

        Raises:
          ArgumentError: E or I that the mesh does not divide, or a block of the format that it would cut.
        """
        present = experts.weights | experts.biases
        return dataclasses.replace(experts, **{name: self.spec(name, w) for name, w in present.items()})

    def shardings(self, experts: ExpertWeights) -> ExpertWeights:
        """The same as `NamedSharding`s, for `jax.jit`, `jax.device_put`, loaders and checkpointers."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(experts),
                            is_leaf=lambda leaf: isinstance(leaf, P))

    def shard(self, experts: ExpertWeights) -> ExpertWeights:
        """Puts the weights in their places on the mesh, once."""
        return jax.device_put(experts, self.shardings(experts))

    def spec(self, name: str, w: jax.Array | QuantizedArray) -> P | QuantizedArray:
        """The specs of one tensor of an `ExpertWeights`: `name` is its field, w the tensor or its shape."""
        split = {"E": _axes(self.expert_axis), "I": _axes(self.tensor_axis)}
        dimensions = "L" * (w.ndim - len(DIMENSIONS[name])) + DIMENSIONS[name]
        axes = [split.get(dimension, ()) for dimension in dimensions]
        rows_and_columns = FORMATS[w.format].block_shape if isinstance(w, QuantizedArray) else (1, 1)
        blocks = (1,) * (len(axes) - 2) + rows_and_columns
        for dimension, size, names, block in zip(dimensions, w.shape, axes, blocks, strict=True):
            parts = self.size(names)
            if size % parts:
                raise ArgumentError(f"experts.{name}: got {dimension} = {size}, expected a multiple of {parts}, the "
                                    f"devices along {names} of the mesh; choose another split")
            if block and parts > 1 and size // parts % block:
                raise ArgumentError(
                    f"experts.{name}: got {dimension} = {size} in blocks of {block} ({w.format}) to split over {parts} "
                    f"devices, which would cut a block: {size // parts} is no multiple of {block}; split over a number "
                    f"of devices that divides {math.ceil(size / block)} blocks")
        spec = P(*(names or None for names in map(_one, axes)))
        if not isinstance(w, QuantizedArray):
            return spec
        scales = P(*(name if block else None for name, block in zip(spec, blocks, strict=True)))
        once = None if w.global_scale is None else P(*spec[:-2], None, None)  # one for each expert
        return dataclasses.replace(w, values=spec, scales=scales, global_scale=once)


def moe_sharded(x: jax.Array, routing: Routing, experts: ExpertWeights, sharding: ExpertSharding, *,
                layer: jax.Array | int | None = None, reduce_dtype=jnp.float32, exchange: str = "auto",
                **options) -> jax.Array:
    """`moe` over the devices of a mesh: routed experts of one layer, weights staying where they are.

    Args:
      x: [T, H] or [..., H], split over `sharding.token_axis` along the first axis, and the same on all devices along
        other axes of the mesh.
      routing: `Routing` with the ids of all experts of the layer, [T, K] or [..., K], split as x.
      experts: all experts of the layer, as `sharding.shard` places them. Under `jit` that cannot be checked: weights
        elsewhere are then moved on every call.
      sharding: which axes of the mesh split what.
      layer: as in `moe`, for stacked weights.
      reduce_dtype: what the shares are summed in. With float32, y is that of one device but for the rounding of
        that sum: shares are not rounded before it, and y is rounded to x.dtype once after it. (On a GPU,
        "expert_centric" rounds every projection to bfloat16, so also each device's part of a split I.) bfloat16 halves
        the bytes on the wire and rounds every share.
      exchange: how tokens meet their experts where one axis splits both: "gather", "all_to_all" (GPUs), or "auto", the
        one that takes less time by its bytes, see `jax_warp_decode.exchange`.
      **options: activation, strategy, activation_format, weight_on, interpret, as in `moe`. The strategy "auto" decides
        from the pairs that a device's experts can expect.

    Returns:
      y, shape, dtype and split of x.

    Works under `jit` and is differentiable where the strategy is. Inside a `shard_map` of your own, call `moe_local`.
    A term that is not routed, such as a shared expert, is added outside, once.

    Raises:
      ArgumentError: as `moe`, and for sizes that the mesh does not divide, or weights that lie elsewhere.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, Routing
      >>> from jax_warp_decode.parallel import ExpertSharding, moe_sharded
      >>> mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> sharding = ExpertSharding(mesh, expert_axis="expert")
      >>> w = jnp.ones((8, 32, 32), jnp.bfloat16) / 32
      >>> experts = sharding.shard(ExpertWeights(w, w, w))
      >>> routing = Routing(jnp.array([[0, 7]]), jnp.array([[0.5, 0.5]]))
      >>> y = jax.jit(moe_sharded)(jnp.ones((1, 32), jnp.bfloat16), routing, experts, sharding)
      >>> round(float(y[0, 0]), 2)
      0.73
    """
    x = jnp.asarray(x)
    if not isinstance(experts, ExpertWeights):
        raise ArgumentError(f"experts: got {type(experts).__name__}, expected ExpertWeights(w_gate, w_up, w_down)")
    if not isinstance(routing, Routing):
        raise ArgumentError(f"routing: got {type(routing).__name__}, expected Routing(ids, weights); see route")
    if not isinstance(sharding, ExpertSharding):
        raise ArgumentError(f"sharding: got {type(sharding).__name__}, expected ExpertSharding(mesh, expert_axis=..)")
    experts.check()
    specs = sharding.specs(experts)
    _check_places(experts, sharding.shardings(experts))
    _check_devices(sharding.mesh, x=x, **{f"routing.{name}": getattr(routing, name) for name in ("ids", "weights")})
    parts = sharding.size(sharding.token_axis)
    if parts > 1 and (x.ndim < 2 or x.shape[0] % parts):
        raise ArgumentError(f"x: got shape {x.shape}, expected a first axis that is a multiple of {parts}, the devices "
                            f"along token_axis = {sharding.token_axis!r}; pad x, with -1 as the ids of the padding")
    tokens = P(_one(_axes(sharding.token_axis)) or None)

    traced = layer if isinstance(layer, jax.Array) else None

    def local(x, routing, experts, traced):
        return moe_local(x, routing, experts, expert_axis=sharding.expert_axis, tensor_axis=sharding.tensor_axis,
                         token_axis=sharding.token_axis, layer=layer if traced is None else traced,
                         reduce_dtype=reduce_dtype, exchange=exchange, **options)

    routing = Routing(int32_ids(routing.ids), float32_weights(routing.weights))
    if AxisType.Explicit in sharding.mesh.axis_types:  # there, shard_map takes no argument that is split otherwise
        x, routing = jax.reshard((x, routing), NamedSharding(sharding.mesh, tokens))
    return jax.shard_map(local, mesh=sharding.mesh, in_specs=(tokens, tokens, specs, P()), out_specs=tokens)(
        x, routing, experts, traced)


def moe_local(x: jax.Array, routing: Routing, experts: ExpertWeights, *, expert_axis: Axes = None,
              tensor_axis: Axes = None, token_axis: Axes = None, layer: jax.Array | int | None = None,
              reduce_dtype=jnp.float32, exchange: str = "auto", **options) -> jax.Array:
    """What one device does for `moe_sharded`, to be called inside `jax.shard_map`, with check_vma on or off.

    Args:
      x: this device's tokens.
      routing: `Routing` of these tokens, with the ids of all experts of the layer.
      experts: this device's share of the weights, cut as `ExpertSharding.specs` says.
      expert_axis, tensor_axis, token_axis: as in `ExpertSharding`.
      layer, reduce_dtype, exchange, **options: as in `moe_sharded`.

    Returns:
      y for this device's tokens, complete: equal on all devices along expert_axis and tensor_axis, unless these split
      the tokens.

    Raises:
      ArgumentError: as `moe`, and for an axis that the surrounding `shard_map` does not have.
    """
    axes = {"expert_axis": _axes(expert_axis), "tensor_axis": _axes(tensor_axis), "token_axis": _axes(token_axis)}
    _check_disjoint(expert_axis, tensor_axis)
    for name, names in axes.items():
        _check_manual(name, names)
    partial = axes["expert_axis"] + axes["tensor_axis"]
    # Tokens that differ between devices holding different weights must meet all of them.
    gathered = tuple(axis for axis in axes["token_axis"] if axis in partial)
    summed = tuple(axis for axis in partial if axis not in gathered)
    shape = x.shape
    if gathered:
        way = exchanges.resolve(
            exchange, gathered, axes["expert_axis"], tokens=math.prod(x.shape[:-1]), hidden=x.shape[-1],
            itemsize=jnp.dtype(reduce_dtype).itemsize, devices=lax.axis_size(gathered),
            experts_per_token=routing.ids.shape[-1])
        if way == "gather":
            x, routing, home = exchanges.gather(x, routing, gathered)
        else:
            x, routing, home = exchanges.all_to_all(*batch_axes.merge(x, routing), gathered[0], experts.num_experts)

    if axes["tensor_axis"] and experts.b_down is not None:  # whole on every device, and counted on one
        once = lax.axis_index(axes["tensor_axis"]) == 0
        experts = experts.map(lambda b: jnp.where(once, b, jnp.zeros((), b.dtype)), "b_down")
    E = experts.num_experts
    ids, shares = int32_ids(routing.ids), 1
    if axes["expert_axis"]:
        shares = lax.axis_size(axes["expert_axis"])
        first = lax.axis_index(axes["expert_axis"]).astype(jnp.int32) * jnp.int32(E)
        ids = local_ids(ids, first, E)
    options = dict(strategy="auto", activation="silu", activation_format=None, interpret=False) | options
    strategy, out_dtype = options.pop("strategy"), options.pop("out_dtype", None)
    if strategy == "auto" and options["activation_format"]:  # as in `moe`
        strategy = "expert_centric"
    strategy = choose(
        math.prod(x.shape[:-1]), experts, experts_per_token=max(1, ids.shape[-1] // shares), x_dtype=x.dtype,
        strategy=strategy, interpret=options["interpret"]).strategy
    y = apply(x, Routing(ids, routing.weights), experts, layer=layer, strategy=strategy, out_dtype=reduce_dtype,
              whole=False, **options)
    if summed:
        y = lax.psum(y, summed)
    if gathered:
        y = home(y).reshape(shape)
    return y.astype(x.dtype if out_dtype is None else checks.out_dtype(out_dtype))


def local_ids(ids: jax.Array, first: jax.Array, num_experts: int) -> jax.Array:
    """Ids of the layer's experts -> ids of experts first .. first + num_experts - 1, -1 for all others.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.parallel import local_ids
      >>> local_ids(jnp.array([0, 5, 6, 7, -1, 8]), jnp.int32(6), 2).tolist()
      [-1, -1, 0, 1, -1, -1]
    """
    here = (ids >= first) & (ids - first < jnp.int32(num_experts))
    return jnp.where(here, ids - first, jnp.int32(-1))


def _axes(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _one(names: tuple[str, ...]):
    """A single name alone, as a `PartitionSpec` shows it."""
    return names[0] if len(names) == 1 else names


def _check_disjoint(expert_axis, tensor_axis):
    both = set(_axes(expert_axis)) & set(_axes(tensor_axis))
    if both:
        raise ArgumentError(f"tensor_axis: got {tensor_axis!r}, expected other axes than expert_axis = "
                            f"{expert_axis!r}; an axis of the mesh splits E or I")


def _check_manual(name, names):
    for axis in names:
        try:
            lax.axis_size(axis)
        except NameError:
            raise ArgumentError(f"{name}: got {axis!r}, expected an axis of a surrounding jax.shard_map that is manual "
                                f"there; outside of one, use moe_sharded") from None


def _check_places(experts, shardings):
    """Concrete weights must already lie where the mesh wants them: anything else copies all of them on every call."""
    for (path, w), want in zip(jax.tree_util.tree_leaves_with_path(experts), jax.tree.leaves(shardings), strict=True):
        if isinstance(w, jax.core.Tracer) or not isinstance(w, jax.Array):
            continue
        if not w.sharding.is_equivalent_to(want, w.ndim):
            raise ArgumentError(
                f"experts{jax.tree_util.keystr(path)}: got {w.sharding}, expected {want}; place the weights once, with "
                f"ExpertSharding.shard or a jit with out_shardings=ExpertSharding.shardings(experts)")


def _check_devices(mesh, **arrays):
    """Concrete arrays that were put somewhere must be on the devices of the mesh."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return
    for name, a in arrays.items():
        if isinstance(a, jax.core.Tracer) or not isinstance(a, jax.Array) or not a.committed:
            continue
        if a.sharding.device_set != set(mesh.devices.flat):
            raise ArgumentError(
                f"{name}: got an array put on {len(a.sharding.device_set)} devices, {a.sharding}, expected one "
                f"on the {mesh.size} devices of the mesh {dict(mesh.shape)}; put it there with jax.device_put(.., "
                "NamedSharding(mesh, P(token_axis)))")
