"""Experts on a mesh under plain `jax.jit`: the compiler says how they lie, and every device keeps its share.

Under `jit`, a kernel is a black box to XLA's partitioner, which gathers all its operands on every device. Here the op
brings its own rule (`jax.experimental.custom_partitioning`, for the Shardy partitioner): tokens split together, and the
splits of E and I are read off the weights, which stay where they are.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_warp_decode import batch_axes, placement
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.moe import check_operands, moe
from jax_warp_decode.parallel import ExpertSharding, checked_reduce_dtype, moe_local
from jax_warp_decode.routing import Routing

NO_GRADIENT = ("moe_partitioned: has no gradient, because JAX cannot differentiate a custom partitioning rule; "
               "differentiate moe_sharded, with the same weights")


def moe_partitioned(x: jax.Array, routing: Routing, experts: ExpertWeights, *, layer: jax.Array | int | None = None,
                    reduce_dtype: DTypeLike = jnp.float32, **options: Any) -> jax.Array:
    """`moe` for code that leaves the mesh to `jit`: the same arguments, on one device or on many.

    On a mesh with `AxisType.Auto` axes (of `jax.sharding.Mesh`, or of `jax.make_mesh` with these axis_types) the splits
    of E and I are those of the weights, and the split of the tokens is that of x. Each device computes its share as
    `moe_local` does; weights are never gathered or moved. Where the mesh is at hand, `moe_sharded` says the same in
    arguments. It has gradients, and its programs can be exported and are found again in JAX's persistent compilation
    cache; the rule here is a Python function, which allows none of that.

    Args:
      x, routing, experts, layer: as in `moe`. Weights lie as `ExpertSharding.shard` places them.
      reduce_dtype: what the shares are summed in, as in `moe_sharded`.
      **options: activation, strategy and so on, as in `moe`; JAX can interpret kernels here on one device alone.

    Returns:
      y, shape of x, in out_dtype or the dtype of x, split along the tokens as x.

    Raises:
      ArgumentError: as `moe`, at trace time; a mesh with `AxisType.Explicit` axes; concrete weights that are split in
        no way that `ExpertSharding` describes, or through a block of their format.
      UnsupportedError: when differentiated or mapped by `vmap` (pass leading axes instead, [..., H]).
      jax.errors.JaxRuntimeError: the same of traced weights, whose places are known when XLA compiles. XLA wraps what
        Python raises there; the line of ours begins with "ArgumentError: experts".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, Routing
      >>> from jax_warp_decode.parallel import ExpertSharding
      >>> from jax_warp_decode.partitioned import moe_partitioned
      >>> mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> w = jnp.ones((8, 32, 32), jnp.bfloat16) / 32
      >>> experts = ExpertSharding(mesh, expert_axis="expert").shard(ExpertWeights(w, w, w))
      >>> routing = Routing(jnp.array([[0, 7]]), jnp.array([[0.5, 0.5]]))
      >>> y = jax.jit(moe_partitioned)(jnp.ones((1, 32), jnp.bfloat16), routing, experts)
      >>> round(float(y[0, 0]), 2)
      0.73
    """
    x, reduce_dtype = check_operands(x, routing, experts), checked_reduce_dtype(reduce_dtype)
    for a in jax.tree.leaves((x, routing, experts)):
        if isinstance(a, jax.Array) and AxisType.Explicit in jax.typeof(a).sharding.mesh.axis_types:
            raise ArgumentError(f"experts: got arrays on a mesh with explicit axes, {jax.typeof(a).sharding.mesh}, "
                                "expected AxisType.Auto; with explicit axes the mesh is at hand, use moe_sharded")
    leaves = jax.tree.leaves(experts)
    if all(isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) for a in leaves):
        _split(next((a.sharding.mesh for a in leaves if isinstance(a.sharding, NamedSharding)), None), experts)
    shape = x.shape
    tokens, routing = batch_axes.merge(x, routing)
    traced = layer if isinstance(layer, jax.Array) else None
    leaves, tree = jax.tree.flatten((tokens, routing, experts, traced))

    def run(moe_fn, *leaves):
        tokens, routing, experts, traced = jax.tree.unflatten(tree, leaves)
        return moe_fn(tokens, routing, experts, layer=layer if traced is None else traced, **options)

    def partition(mesh, args, result):
        sharding, wanted = _arrange(mesh, *jax.tree.unflatten(tree, args))
        local = functools.partial(
            moe_local, expert_axis=sharding.expert_axis, tensor_axis=sharding.tensor_axis,
            token_axis=sharding.token_axis, reduce_dtype=reduce_dtype)
        y = NamedSharding(mesh, P(sharding.token_axis, None))
        return mesh, functools.partial(run, local), y, tuple(wanted)

    op = custom_partitioning(functools.partial(run, moe))
    op.def_partition(partition, sharding_rule=_rule)

    # One object for both: `without_gradient` refuses derivatives, the rule under it refuses `vmap`.
    @jax.custom_batching.custom_vmap
    def guarded(*leaves):
        return op(*leaves)

    @guarded.def_vmap
    def _(*_):
        raise UnsupportedError("moe_partitioned: vmap is not supported; pass x and the routing with leading axes, "
                               "[..., H] and [..., K]")

    return without_gradient(guarded, NO_GRADIENT)(*leaves).reshape(shape)


def _rule(mesh, operands, results):
    """Shardy's rule: only the tokens go from x to y. What E and I mean for each part of a weight, `_arrange` knows."""
    fresh = (f"f{i}" for i in itertools.count())
    name = lambda type, tokens: " ".join(
        ["t"] * tokens + list(itertools.islice(fresh, len(type.shape) - tokens))) if len(type.shape) else ""
    operands = [name(type, tokens=i < 3) for i, type in enumerate(operands)]  # x, ids and weights come first
    return f"{', '.join(operands)} -> {name(results[0], tokens=True)}"


def _arrange(mesh, x, routing, experts, traced) -> tuple[ExpertSharding, list[NamedSharding]]:
    """The split that the operands (shapes with shardings) are in, and the sharding that each of them must have."""
    sharding, weights = _split(mesh, experts)
    assert sharding is not None  # else the op would not have been partitioned
    if isinstance(x.sharding, NamedSharding):
        sharding = dataclasses.replace(sharding, token_axis=x.sharding.spec[0])
    tokens = [NamedSharding(mesh, P(sharding.token_axis, None))] * 3
    return sharding, tokens + weights + [NamedSharding(mesh, P())] * (traced is not None)


def _split(mesh, experts) -> tuple[ExpertSharding | None, list[NamedSharding]]:
    """How the mesh splits the experts (arrays, or shapes with shardings), and the sharding that each leaf must have.

    Raises:
      ArgumentError: they are split otherwise. Nothing is known, and nothing refused, of weights on one device.
    """
    leaves = jax.tree_util.tree_leaves_with_path(experts)
    if mesh is None and all(len(a.sharding.device_set) == 1 for _, a in leaves):
        return None, []
    for path, a in leaves:
        if not isinstance(a.sharding, NamedSharding) or a.sharding.mesh != mesh:
            raise ArgumentError(f"experts{jax.tree_util.keystr(path)}: got {a.sharding}, expected all weights on one "
                                f"mesh; {placement.WAY_OUT}")
    w_up = _matrix(experts.w_up)
    spec = (*w_up.sharding.spec, *[None] * (len(w_up.shape) - len(w_up.sharding.spec)))
    sharding = ExpertSharding(mesh, expert_axis=spec[-3], tensor_axis=spec[-2])
    weights = jax.tree.leaves(sharding.shardings(experts))
    for (path, a), want in zip(leaves, weights, strict=True):
        if not a.sharding.is_equivalent_to(want, len(a.shape)):
            raise ArgumentError(f"experts{jax.tree_util.keystr(path)}: got {a.sharding.spec}, expected {want.spec} to "
                                f"match w_up {w_up.sharding.spec}; {placement.WAY_OUT}")
    return sharding, weights


def _matrix(w):
    return w.values if dataclasses.is_dataclass(w) and hasattr(w, "values") else w
