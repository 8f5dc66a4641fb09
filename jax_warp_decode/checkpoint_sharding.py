"""Experts of a checkpoint straight onto a mesh. Whole decoders: `checkpoints.load_model` with `sharding`."""

from collections.abc import Iterable
from typing import Any

from jax_warp_decode.checkpoints import slots
from jax_warp_decode.checkpoints.blocks import MoEFolder
from jax_warp_decode.checkpoints.mesh_fill import mesh_fill
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.parallel import DIMENSIONS, ExpertSharding


def load_experts(folder: Any, sharding: ExpertSharding, layers: Iterable[int] | None = None, *,
                 dtype: Any = None) -> dict[int, ExpertWeights]:
    """The routed experts of a Hugging Face folder on a mesh, in the format that the folder stores.

    Every name, shape, type and file size is checked before anything is read. The devices may belong to several
    processes (`jax.distributed`), all of which call this alike.

    Args:
      folder: path, of a family that `load_moe_blocks` knows.
      sharding: which axes of the mesh split what.
      layers: numbers of layers; None loads all that have experts.
      dtype: dtype of plain weights; None keeps each as it is stored.

    Raises:
      CheckpointError: anything wrong with the folder.
      ArgumentError: a layer without experts, or a split that the sizes or the blocks of the format do not allow.

    Example:
      >>> import jax
      >>> from jax_warp_decode.checkpoint_sharding import load_experts
      >>> from jax_warp_decode.demo import bundled_model
      >>> from jax_warp_decode.parallel import ExpertSharding
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> experts = load_experts(bundled_model("mxfp8"), ExpertSharding(mesh, expert_axis="expert"), layers=[0])[0]
      >>> tuple(experts.w_up.values.sharding.spec)
      ('expert', None, None)
    """
    if layers is not None and not isinstance(layers, Iterable):
        raise ArgumentError(f"layers: got {layers!r}, expected numbers of layers, such as [{layers!r}], or None, for "
                            "all")
    opened = MoEFolder(folder, dtype=dtype)
    layers = list(opened.layers if layers is None else layers)
    if unknown := [n for n in layers if n not in opened.slots]:
        raise ArgumentError(f"layers: got {unknown[:8]}, expected layers with experts, of {list(opened.layers)[:8]} ..")
    fill, found = mesh_fill(sharding), {}
    for n in layers:
        wanted = [slot for slot in opened.slots[n] if slot.param.partition(".")[2] in DIMENSIONS]
        values = {path.partition(".")[2]: value for path, value in fill(
            opened.opened, wanted, slots.check_dtype(dtype), lambda done, total: None)}
        found[n] = ExpertWeights(**{"w_gate": None} | values)
    return found
