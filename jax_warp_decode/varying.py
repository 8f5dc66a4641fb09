"""Manual mesh axes: inside `jax.shard_map`, JAX types know along which axes the devices hold different values."""

import jax
from jax import lax


def axes(*operands) -> frozenset[str]:
    """The manual mesh axes over which any leaf of the operands varies; empty outside of `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(operands)))


def like(tree, *operands):
    """The same values, typed as varying wherever an operand does.

    A loop carry that starts as a constant needs it, and so does the result of a Pallas kernel, which JAX takes for
    equal on all devices. With check_vma=False, and outside of `jax.shard_map`, nothing changes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import varying
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> spec = jax.sharding.PartitionSpec("data")
      >>> @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
      ... def total(x):
      ...     return jax.lax.scan(lambda sum, a: (sum + a, None), varying.like(jnp.zeros((1,)), x), x[:, None])[0]
      >>> total(jnp.arange(4.0)).tolist()
      [6.0]
    """
    wanted = axes(*operands)

    def cast(a):
        missing = wanted - axes(a)
        return lax.pcast(a, tuple(sorted(missing)), to="varying") if missing else a

    return jax.tree.map(cast, tree)
