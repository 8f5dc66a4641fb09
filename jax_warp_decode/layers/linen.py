"""The mixture-of-experts layer for Flax Linen: `layers.MoE` through `flax.nnx.bridge`, with the same options."""

from typing import Any

from flax import nnx

from jax_warp_decode.layers.moe import MoE


def linen_moe(*sizes: int, name: str | None = None, **options: Any) -> nnx.bridge.ToLinen:
    """`MoE` as a Linen module: the same arguments, without `rngs`.

    Its parameters are those of `MoE`, under the same names, in the collection "params" (the correction bias in
    "RouterState"). `init` needs a key for "params", `apply` none. To serve quantised or converted weights, put them
    into the collection: a `QuantizedArray` may stand for any expert matrix.

    Args:
      *sizes, **options: as of `MoE`.
      name: of the module in its parent.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode.layers import linen_moe
      >>> layer = linen_moe(64, 32, num_experts=8, num_experts_per_token=2)
      >>> x = jnp.ones((2, 5, 64), jnp.bfloat16)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> sorted(variables["params"]), variables["params"]["w_down"].shape
      (['router', 'w_down', 'w_gate', 'w_up'], (8, 64, 32))
      >>> jax.jit(layer.apply)(variables, x).shape
      (2, 5, 64)
    """
    return nnx.bridge.to_linen(MoE, *sizes, name=name, **options)
