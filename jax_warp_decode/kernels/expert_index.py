"""Which weights a slot reads: its expert, in the layer of a stack that the call names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import Weight


@dataclasses.dataclass(frozen=True)
class ExpertIndex:
    """From a slot's expert id to a row of the flattened weights [L * E, n, cols].

    Attributes:
      num_experts: E.
      layers: L for stacked weights [L, E, n, cols], None for the weights of one layer.
    """

    num_experts: int
    layers: int | None

    @classmethod
    def of(cls, name: str, w: Weight, layer) -> "ExpertIndex":
        """The index for a weight [E, n, cols], or [L, E, n, cols] with the `layer` to read.

        Raises:
          ArgumentError: a stack without a layer or the other way round, or a layer that is known to be out of range.
        """
        ndim = getattr(w, "ndim", None)
        if layer is None:
            if ndim == 4:
                raise ArgumentError(
                    f"layer: got None with stacked weights {name} {w.shape}, expected the layer to read, an integer "
                    "scalar; or index the stack yourself, which copies the layer")
            return cls(w.shape[0] if ndim else 0, None)
        if ndim != 4:
            raise ArgumentError(f"layer: got {layer} with {name} {getattr(w, 'shape', None)}, expected stacked weights "
                                "[L, E, ..]; leave layer out for the weights of one layer")
        return cls(w.shape[1], w.shape[0])

    @property
    def num_operands(self) -> int:
        return 0 if self.layers is None else 1

    def operands(self, layer) -> tuple[jax.Array, ...]:
        """What the kernel needs to know of the layer: nothing, or its number as int32 [1]."""
        return () if self.layers is None else (check_layer(layer, self.layers).reshape(1),)

    def flatten[W: Weight](self, w: W) -> W:
        """A view [L * E, n, cols] of stacked weights; other weights as they are."""
        return w if self.layers is None else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w)

    def lookup(self, ids_ref, slot, layer_refs: tuple) -> tuple[jax.Array, jax.Array]:
        """In a kernel: the row of the flattened weights for ids_ref[slot], and whether the slot is routed at all."""
        expert = ids_ref[slot]
        routed = (expert >= 0) & (expert < self.num_experts)
        if self.layers is None:
            return expert, routed
        layer = layer_refs[0][0]
        return layer * self.num_experts + expert, routed & (layer >= 0) & (layer < self.layers)


def take(refs: list, count: int) -> list:
    """The first `count` of a kernel's references, which leave the list."""
    taken = refs[:count]
    del refs[:count]
    return taken


def check_layer(layer, layers: int) -> jax.Array:
    """`layer` as an int32 scalar; refuses other dtypes, other shapes and numbers known to lie outside [0, layers)."""
    # NumPy looks at it first: without x64, jnp would drop the upper half of an int64 and make it a valid layer.
    got = layer if isinstance(layer, jax.Array) else np.asarray(layer)
    if isinstance(layer, int) and not isinstance(layer, bool):
        known: int | None = layer  # of any size
    elif got.ndim or not jnp.issubdtype(got.dtype, jnp.integer):
        raise ArgumentError(f"layer: got {got.dtype} {got.shape}, expected an integer scalar")
    else:
        known = None if isinstance(got, jax.core.Tracer) else int(got)
    if layers < 1:
        raise ArgumentError("layer: got a stack of no layers, expected weights of at least one")
    if known is None and got.dtype.itemsize <= 4:
        return jnp.asarray(got, jnp.int32)
    if known is None:  # what does not fit int32 must stay outside the range; in a scan this would be a launch a layer
        return jnp.where((got >= 0) & (got < layers), got.astype(jnp.int32), jnp.int32(-1))
    if not 0 <= known < layers:
        raise ArgumentError(f"layer: got {known}, expected 0 <= layer < {layers}, the layers of the stacked weights")
    return jnp.int32(known)
