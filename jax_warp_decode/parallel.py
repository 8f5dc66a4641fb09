"""Experts spread over the devices of a mesh: expert parallel, tensor parallel, and both with data parallel tokens.

JAX is the engine (`jax.shard_map`, `psum`, `psum_scatter`, `all_gather`). Each device keeps its share of the weights
and runs `moe` on it: expert ids of other devices become -1, which adds exactly 0, so that nothing is copied or sorted
again; the shares are then summed over the axes on which they are partial, and over no other. Experts that every token
uses lie whole on every device that splits E, and each of these counts them for its part of the tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_warp_decode import batch_axes, placement
from jax_warp_decode import exchange as exchanges
from jax_warp_decode.choose import decide, warn_of
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import ExpertWeights, check_experts, describe, is_float_array
from jax_warp_decode.formats import FORMATS, QuantizedArray
from jax_warp_decode.kernels import checks
from jax_warp_decode.moe import apply, check_operands
from jax_warp_decode.routing import Routing, int32_ids
from jax_warp_decode.shared_experts import with_shared

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
            if isinstance(getattr(self, name), list):  # hashable, as a static argument must be
                object.__setattr__(self, name, tuple(getattr(self, name)))
            axes = _axes(given) if isinstance(given := getattr(self, name), str | tuple | list | None) else (given,)
            unknown = [axis for axis in axes if axis not in self.mesh.axis_names]
            if unknown or len(set(axes)) < len(axes):
                raise ArgumentError(f"{name}: got {getattr(self, name)!r}, expected different axes of the mesh, "
                                    f"{self.mesh.axis_names}")
        _check_disjoint(self.expert_axis, self.tensor_axis)

    def size(self, axes: Axes) -> int:
        """Devices along these axes of the mesh."""
        return math.prod(self.mesh.shape[axis] for axis in _axes(axes))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split tokens and no weight: along the others, every device works on all tokens."""
        weights = _axes(self.expert_axis) + _axes(self.tensor_axis)
        return tuple(axis for axis in _axes(self.token_axis) if axis not in weights)

    @property
    def of_shared(self) -> "ExpertSharding":
        """How experts lie that every token uses: split over I alone."""
        return dataclasses.replace(self, expert_axis=None)

    def specs(self, experts: ExpertWeights, owner: str = "experts") -> ExpertWeights:
        """The `PartitionSpec` of every array in the experts, in the same tree (arrays or `jax.ShapeDtypeStruct`s).

        A block of a quantised format is never cut, and a scale that counts for a whole axis goes to every device.
        `owner` is what messages call the experts.

        Raises:
          ArgumentError: E or I that the mesh does not divide, or a block of the format that it would cut.
        """
        check_experts(experts, owner)
        present = experts.weights | experts.biases
        specs: dict[str, Any] = {name: self.spec(name, w, owner) for name, w in present.items()}
        return dataclasses.replace(experts, **specs)

    def shardings(self, experts: ExpertWeights, owner: str = "experts") -> ExpertWeights:
        """The same as `NamedSharding`s, for `jax.jit`, `jax.device_put`, loaders and checkpointers."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(experts, owner),
                            is_leaf=lambda leaf: isinstance(leaf, P))

    def shard(self, experts: ExpertWeights) -> ExpertWeights:
        """Puts the weights in their places on the mesh, once."""
        if isinstance(self.mesh, jax.sharding.AbstractMesh):
            raise ArgumentError("mesh: got an AbstractMesh, which has no devices, expected a jax.sharding.Mesh")
        return jax.device_put(experts, self.shardings(experts))

    def spec(self, name: str, w: jax.Array | QuantizedArray, owner: str = "experts") -> P | QuantizedArray:
        """The specs of one tensor of an `ExpertWeights`: `name` is its field, w the tensor or its shape."""
        split = {"E": _axes(self.expert_axis), "I": _axes(self.tensor_axis)}
        dimensions = "L" * (w.ndim - len(DIMENSIONS[name])) + DIMENSIONS[name]
        axes = [split.get(dimension, ()) for dimension in dimensions]
        format = w.format if isinstance(w, QuantizedArray) else ""
        rows_and_columns = FORMATS[format].block_shape if format else (1, 1)
        blocks = (1,) * (len(axes) - 2) + rows_and_columns
        for dimension, size, names, block in zip(dimensions, w.shape, axes, blocks, strict=True):
            parts = self.size(names)
            if size % parts:
                raise ArgumentError(f"{owner}.{name}: got {dimension} = {size}, expected a multiple of {parts}, the "
                                    f"devices along {names} of the mesh; choose another split")
            if block and parts > 1 and size // parts % block:
                raise ArgumentError(
                    f"{owner}.{name}: got {dimension} = {size} in blocks of {block} ({format}) to split over {parts} "
                    f"devices, which would cut a block: {size // parts} is no multiple of {block}; split over a number "
                    f"of devices that divides {math.ceil(size / block)} blocks")
        spec = P(*(names or None for names in map(_one, axes)))
        if not isinstance(w, QuantizedArray):
            return spec
        scales = P(*(name if block else None for name, block in zip(spec, blocks, strict=True)))
        once = None if w.global_scale is None else P(*spec[:-2], None, None)  # one for each expert
        parts_of: dict[str, Any] = dict(values=spec, scales=scales, global_scale=once)  # a tree of other leaves
        return dataclasses.replace(w, **parts_of)


def moe_sharded(x: jax.Array, routing: Routing, experts: ExpertWeights, sharding: ExpertSharding, *,
                shared: ExpertWeights | None = None, shared_weight: jax.Array | None = None,
                layer: jax.Array | int | None = None, reduce_dtype: DTypeLike = jnp.float32, exchange: str = "auto",
                **options: Any) -> jax.Array:
    """`moe` over the devices of a mesh: the experts of one layer, weights staying where they are.

    Args:
      x: [T, H] or [..., H], split over `sharding.token_axis` along the first axis, and the same on all devices along
        other axes of the mesh.
      routing: `Routing` with the ids of all experts of the layer, [T, K] or [..., K], split as x.
      experts: all routed experts of the layer, as `sharding.shard` places them. Weights elsewhere are refused where
        that can be known: concrete arrays, other meshes, and mesh axes of type `AxisType.Explicit`. While a `jit` is
        traced, nobody knows how `AxisType.Auto` axes split its arguments: weights on the right mesh but split
        otherwise, and such that nobody put anywhere, are moved, silently and on every call. With
        in_shardings=sharding.shardings(experts), `jit` itself refuses what was put elsewhere.
      sharding: which axes of the mesh split what.
      shared: S experts that every token uses, [S, ..] in any format, as `sharding.of_shared.shard` places them: whole
        along expert_axis, split along tensor_axis. Their term is added once, on whatever mesh.
      shared_weight: [T, 1] or [..., 1] floats that multiply the shared term; None is 1.
      layer: as in `moe`, for stacked weights.
      reduce_dtype: what the shares are summed in: float32, bfloat16 or float16. With float32, y is that of one device
        but for the rounding of that sum: shares are not rounded before it, and y is rounded to x.dtype once after it.
        (On a GPU, "expert_centric" rounds every projection to bfloat16, so also each device's part of a split I.)
        bfloat16 halves the bytes on the wire and rounds every share.
      exchange: how tokens meet their experts where one axis splits both: "gather", "all_to_all" (GPUs), or "auto", the
        one that takes less time by its bytes, see `jax_warp_decode.exchange`.
      **options: activation, strategy, activation_format, weight_on, out_dtype, interpret, as in `moe`. The strategy
        "auto" decides from the pairs that a device's experts can expect.

    Returns:
      y, shape and split of x, in out_dtype or the dtype of x.

    Works under `jit` and is differentiable where the strategy is. Inside a `shard_map` of your own, call `moe_local`.
    Any other term that is not routed is added outside, once.

    Raises:
      ArgumentError: as `moe`, and for sizes that the mesh does not divide, or weights that lie elsewhere.
      UnsupportedError: as `moe`, and "all_to_all" where it cannot be.

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
    check_sharding(sharding)
    x = check_operands(x, routing, experts)
    batch_axes.check_numbers(x, routing, options.get("strategy", "auto"))
    placement.check_surroundings(
        sharding.mesh, _axes(sharding.expert_axis) + _axes(sharding.tensor_axis) + _axes(sharding.token_axis))
    specs = {}
    for name, weights, places in (("experts", experts, sharding), ("shared", shared, sharding.of_shared)):
        if weights is not None:
            wanted = places.shardings(weights, name)
            specs[name] = jax.tree.map(lambda place: place.spec, wanted)
            placement.check_weights(name, weights, wanted)
    placement.check_devices(sharding.mesh, **{"x": x, "routing.ids": routing.ids, "routing.weights": routing.weights,
                                              "shared_weight": shared_weight})
    parts = sharding.size(sharding.token_axis)
    if parts > 1 and (x.ndim < 2 or x.shape[0] % parts):
        raise ArgumentError(f"x: got shape {x.shape}, expected a first axis that is a multiple of {parts}, the devices "
                            f"along token_axis = {sharding.token_axis!r}; pad x, with -1 as the ids of the padding, or "
                            "leave token_axis out of the sharding")
    _check_shared(x, shared, shared_weight, options)
    routing = batch_axes.matching(x, routing)  # here, where shapes are those of the whole
    if (k := routing.ids.shape[-1]) > experts.num_experts:
        raise ArgumentError(f"routing.ids: got K = {k} slots per token, expected at most E = {experts.num_experts}, "
                            "the experts")
    tokens = P(_one(_axes(sharding.token_axis)) or None)

    traced = layer if isinstance(layer, jax.Array) else None

    def local(rows, weights, traced):
        x, routing, shared_weight = rows
        return moe_local(x, routing, weights["experts"], shared=weights.get("shared"), shared_weight=shared_weight,
                         expert_axis=sharding.expert_axis, tensor_axis=sharding.tensor_axis,
                         token_axis=sharding.token_axis, layer=layer if traced is None else traced,
                         reduce_dtype=reduce_dtype, exchange=exchange, **options)

    rows = x, routing, shared_weight
    given = {"experts": experts} | ({} if shared is None else {"shared": shared})
    if AxisType.Explicit in sharding.mesh.axis_types:  # there, shard_map takes no argument that is split otherwise
        rows = jax.reshard(rows, NamedSharding(sharding.mesh, tokens))
    return jax.shard_map(local, mesh=sharding.mesh, in_specs=(tokens, specs, P()), out_specs=tokens)(
        rows, given, traced)


def moe_local(x: jax.Array, routing: Routing, experts: ExpertWeights, *, shared: ExpertWeights | None = None,
              shared_weight: jax.Array | None = None, expert_axis: Axes = None, tensor_axis: Axes = None,
              token_axis: Axes = None, layer: jax.Array | int | None = None, reduce_dtype: DTypeLike = jnp.float32,
              exchange: str = "auto", **options: Any) -> jax.Array:
    """What one device does for `moe_sharded`, to be called inside `jax.shard_map`, with check_vma on or off.

    Args:
      x: this device's tokens.
      routing: `Routing` of these tokens, with the ids of all experts of the layer.
      experts: this device's share of the weights, cut as `ExpertSharding.specs` says.
      shared, shared_weight: as in `moe_sharded`; cut as `ExpertSharding.of_shared.specs` says, and of these tokens.
      expert_axis, tensor_axis, token_axis: as in `ExpertSharding`.
      layer, reduce_dtype, exchange, **options: as in `moe_sharded`.

    Returns:
      y for this device's tokens, in out_dtype or the dtype of x, complete: equal on all devices along expert_axis and
      tensor_axis, unless these split the tokens.

    Raises:
      ArgumentError: as `moe`, and for an axis that the surrounding `shard_map` does not have.
      UnsupportedError: as `moe_sharded`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_warp_decode import ExpertWeights, Routing
      >>> from jax_warp_decode.parallel import moe_local
      >>> mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def block(x, routing, experts):
      ...     return 2 * moe_local(x, routing, experts, expert_axis="expert", out_dtype=jnp.float32)
      >>> w = jnp.ones((8, 32, 32), jnp.bfloat16) / 32
      >>> routing = Routing(jnp.array([[0, 7]]), jnp.array([[0.5, 0.5]]))
      >>> y = jax.shard_map(block, mesh=mesh, in_specs=(P(), P(), P("expert")), out_specs=P())(
      ...     jnp.ones((1, 32), jnp.bfloat16), routing, ExpertWeights(w, w, w))
      >>> round(float(y[0, 0]), 2), str(y.dtype)
      (1.46, 'float32')
    """
    axes = {"expert_axis": _axes(expert_axis), "tensor_axis": _axes(tensor_axis), "token_axis": _axes(token_axis)}
    _check_disjoint(expert_axis, tensor_axis)
    for name, names in axes.items():
        _check_manual(name, names)
    x = check_operands(x, routing, experts)
    if shared is not None:
        check_experts(shared, "shared")
    _check_shared(x, shared, shared_weight, options)
    reduce_dtype = checked_reduce_dtype(reduce_dtype)
    partial = axes["expert_axis"] + axes["tensor_axis"]
    placement.check_same_tokens(x, routing, partial, axes["token_axis"])
    # Tokens that differ between devices holding different weights must meet all of them.
    gathered = tuple(axis for axis in axes["token_axis"] if axis in partial)
    summed = tuple(axis for axis in partial if axis not in gathered)
    shape, own = x.shape, None
    way = exchanges.resolve(
        exchange, gathered, axes["expert_axis"], tokens=math.prod(shape[:-1]), hidden=shape[-1],
        itemsize=reduce_dtype.itemsize, devices=lax.axis_size(gathered) if gathered else 1,
        experts_per_token=routing.ids.shape[-1])
    options = dict(strategy="auto", activation="silu", activation_format=None, interpret=False) | options
    out_dtype = options.pop("out_dtype", None)
    run: Callable[..., jax.Array] = functools.partial(
        _share, layer=layer, expert_axes=axes["expert_axis"], tensor_axes=axes["tensor_axis"],
                            out_dtype=reduce_dtype, **options)
    if way == "all_to_all":  # rows that come from elsewhere have their shared term there
        x, routing = batch_axes.merge(x, routing)
        if shared is not None:
            own = run(x, None, shared, shared_weight, expert_axes=())
        x, routing, home = exchanges.all_to_all(x, routing, gathered[0], experts.num_experts)
    elif gathered:
        (x, shared_weight), routing, home = exchanges.gather((x, shared_weight), routing, gathered)
    y = run(x, routing, experts)
    if shared is not None and own is None:
        y = y + run(x, None, shared, shared_weight)
    if summed:
        y, own = lax.psum((y, own), summed)
    if gathered:
        y = home(y).reshape(shape)
    if own is not None:
        y = y + own.reshape(shape)
    return y.astype(x.dtype if out_dtype is None else checks.out_dtype(out_dtype))


def _share(x, routing, experts, weight=None, *, expert_axes, tensor_axes, layer, strategy, **options):
    """What this device's experts add for rows x: routed ones, or without a routing those that all rows use."""
    if tensor_axes and experts.b_down is not None:  # whole on every device, and counted on one
        once = lax.axis_index(tensor_axes) == 0
        experts = experts.map(lambda b: jnp.where(once, b, jnp.zeros((), b.dtype)), "b_down")
    E, rows = experts.num_experts, x.shape[:-1]
    shares = lax.axis_size(expert_axes) if expert_axes else 1
    me = lax.axis_index(expert_axes).astype(jnp.int32) if expert_axes else jnp.int32(0)
    if routing is None:  # row t counts on device t % n
        every = with_shared(None, 0, E, None if weight is None else weight.reshape(-1, 1), tokens=math.prod(rows))
        mine = jnp.arange(math.prod(rows), dtype=jnp.int32)[:, None] % jnp.int32(shares) == me
        routing = Routing(jnp.where(mine, every.ids, jnp.int32(-1)), every.weights)
        routing = jax.tree.map(lambda a: a.reshape(*rows, E), routing)
    else:
        ids = int32_ids(routing.ids)
        routing = Routing(local_ids(ids, me * jnp.int32(E), E) if expert_axes else ids, routing.weights)
    if strategy == "auto" and options["activation_format"]:  # as in `moe`
        strategy = "expert_centric"
    choice = decide(
        math.prod(rows), experts, experts_per_token=routing.ids.shape[-1], x_dtype=x.dtype, strategy=strategy,
        interpret=options["interpret"], shares=shares)
    warn_of(choice, strategy)
    return apply(x, routing, experts, layer=layer, strategy=choice.strategy, whole=False, **options)


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


def check_sharding(sharding: ExpertSharding) -> None:
    """Refuses anything else."""
    if not isinstance(sharding, ExpertSharding):
        raise ArgumentError(f"sharding: got {type(sharding).__name__}, expected ExpertSharding(mesh, expert_axis=..)")


def checked_reduce_dtype(dtype) -> jnp.dtype:
    """The dtype of the sum over devices, or an error."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in checks.OUT_DTYPES:
        raise ArgumentError(f"reduce_dtype: got {dtype if found is None else found!s}, expected "
                            f"{', '.join(map(str, checks.OUT_DTYPES))}, in which the shares are summed")
    return found


def _check_shared(x, shared, weight, options):
    if weight is None:
        return
    if shared is None:
        raise ArgumentError("shared_weight: got an array without shared experts, expected None")
    want = (*x.shape[:-1], 1)
    if not is_float_array(weight) or weight.shape != want:
        raise ArgumentError(f"shared_weight: got {describe(weight)}, expected floats {want}, one for each token")
    if options.get("weight_on") == "input":
        raise ArgumentError("shared_weight: got an array with weight_on='input', expected None; it is a factor of the "
                            "output")


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
