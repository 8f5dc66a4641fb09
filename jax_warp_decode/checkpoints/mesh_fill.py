"""Parameters of checkpoints straight onto a mesh: a host reads the parts of the files that its own devices keep."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_warp_decode.checkpoints import reader, slots
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.parallel import DIMENSIONS, ExpertSharding, check_sharding

PAGE_BYTES = 4096  # a disk reads no less: what lies closer between two wanted pieces is read along
E8M0 = reader.DTYPES["F8_E8M0"]


def mesh_fill(sharding: ExpertSharding) -> Callable:
    """A `slots.fill` that puts experts where `sharding` says and all else on every device.

    Experts are read one by one, and of an expert only the rows and columns that this host keeps, as far as they are a
    page apart in the file. Tensors that the folder stores transposed, or with gate and up in one, are read whole,
    expert by expert. Experts called "shared" stay whole, on every device.

    Raises:
      ArgumentError: `sharding` is no `ExpertSharding`.
    """
    check_sharding(sharding)

    def fill(opened: reader.Folder, wanted: list[slots.Slot], dtype: Any, report) -> Iterator[tuple[str, Any]]:
        """As `slots.fill`; `report` counts the bytes of the folder that are dealt with, read here or elsewhere.

        Raises:
          ArgumentError: a split that the sizes or the blocks of a format do not allow; nothing has been read.
        """
        size = lambda slot: opened.tensors[slot.name].nbytes // (2 if slot.half else 1)
        params = {path: list(group) for path, group in itertools.groupby(wanted, key=lambda slot: slot.param)}
        planned = {path: _plan(opened, sharding, path, group, dtype) for path, group in params.items()}
        total, done = sum(map(size, wanted)), 0
        report(0, total)
        for path, (value, specs, parts) in planned.items():
            made = {part: _make(opened, of, struct, NamedSharding(
                sharding.mesh, specs if part == "" else getattr(specs, part))) for part, (struct, of) in parts.items()}
            jax.block_until_ready(made)  # bounds the host memory: a transfer in flight keeps its source alive
            done += sum(map(size, params[path]))
            report(done, total)
            yield path, made[""] if "" in made else replace(value, **made)

    return fill


def _plan(opened, sharding, path, group, dtype):
    """A parameter as shapes, its specs, and for each of its parts the shape and the slots that fill it."""
    parts: dict[str, list[slots.Slot]] = {}
    for slot in group:
        parts.setdefault(slot.part, []).append(slot)
    structs = {part: jax.ShapeDtypeStruct(of[0].param_shape, _dtype(opened, of[0], dtype))
               for part, of in parts.items()}
    value = structs[""] if "" in parts else QuantizedArray(**structs, format=group[0].format)
    return value, _specs(sharding, path, value), {part: (structs[part], of) for part, of in parts.items()}


def _dtype(opened, slot, dtype):
    stored = reader.DTYPES[opened.tensors[slot.name].dtype]
    if stored == E8M0:
        return jnp.dtype(jnp.uint8)  # scales of MX formats count as bytes
    return stored if slot.part or slot.exact or dtype is None else jnp.dtype(dtype)


def _specs(sharding, path, value):
    owner, _, name = path.rpartition(".")
    if name in DIMENSIONS and owner.rpartition(".")[2] != "shared":
        return sharding.spec(name, value)
    return jax.tree.map(lambda _: P(), value)


def _make(opened, group, struct, sharding) -> jax.Array:
    """The array of one part of a parameter; what several devices of this host keep is read once."""
    shape, read = struct.shape, {}
    resolved = lambda index: tuple(slice(*i.indices(n)[:2]) for i, n in zip(index, shape, strict=True))
    local = [resolved(index) for index in sharding.addressable_devices_indices_map(shape).values()]

    def part(index):
        *rows, columns = resolved(index)
        wide = _join(columns, [other[-1] for other in local if list(other[:-1]) == rows])
        key = tuple((i.start, i.stop) for i in (*rows, wide))
        if key not in read:
            read[key] = _read(opened, group, (*rows, wide), struct.dtype)
        return read[key][..., columns.start - wide.start:columns.stop - wide.start]

    return jax.make_array_from_callback(shape, sharding, part, dtype=struct.dtype)


def _join(columns: slice, others: list[slice]) -> slice:
    """The columns, and those of the others that touch them or each other, so that neighbours in a row are read at once.

    Example:
      >>> _join(slice(2, 4), [slice(0, 2), slice(2, 4), slice(4, 5), slice(6, 8)])
      slice(0, 5, None)
    """
    start, stop = columns.start, columns.stop
    for other in sorted(others, key=lambda other: other.start):
        if other.start <= stop < other.stop and other.start >= start:
            stop = other.stop
    for other in sorted(others, key=lambda other: -other.stop):
        if other.start < start <= other.stop and other.stop <= stop:
            start = other.start
    return slice(start, stop)


def _read(opened, group, index, dtype) -> np.ndarray:
    out = np.empty(tuple(i.stop - i.start for i in index), dtype)
    for slot in group:
        stored = opened.tensors[slot.name]
        # Bytes are bytes: E8M0 scales are read as they are.
        stored = replace(stored, dtype="U8") if reader.DTYPES[stored.dtype] == E8M0 else stored
        if slot.expert is None:
            _read_slot(slot, stored, index, out)
        elif index[0].start <= slot.expert[0] < index[0].stop:
            _read_slot(slot, stored, index[1:], out[slot.expert[0] - index[0].start])
    return out


def _read_slot(slot, stored, index, out) -> None:
    """Fills `out` with what `slot` gives at `index`, slices of its target."""
    if not (slot.transpose or slot.half):
        read_slice(replace(stored, shape=slot.target_shape), index, out)
    elif len(slot.target_shape) > 2:
        one = replace(slot, shape=slot.shape[1:])
        for i, part in zip(range(index[0].start, index[0].stop), out, strict=True):
            _read_slot(one, stored[i], index[1:], part)
    else:
        whole = np.empty(slot.target_shape, out.dtype)
        slot.read(stored, whole)
        out[...] = whole[index]


def read_slice(stored: reader.StoredTensor, index: tuple[slice, ...], out: np.ndarray) -> None:
    """Fills `out` with stored[index], reading little else.

    Args:
      stored: the tensor.
      index: slices of step 1 with start and stop, one for each axis.
      out: array of the shape of the slices, of any dtype and strides.

    Raises:
      CheckpointError: the file has shrunk or cannot be read any more.
    """
    if not index:
        stored.read_into(out)
        return
    first, *rest = index
    entry = stored.nbytes // max(1, stored.shape[0])
    rows = replace(stored, shape=(first.stop - first.start, *stored.shape[1:]),
                   offset=stored.offset + first.start * entry, nbytes=(first.stop - first.start) * entry)
    whole = [slice(0, n) for n in stored.shape[1:]]
    if rest == whole:
        rows.read_into(out)
    elif len(rest) == 1 and entry - (rest[0].stop - rest[0].start) * (entry // stored.shape[1]) < PAGE_BYTES:
        read = np.empty(rows.shape, reader.DTYPES[stored.dtype])
        rows.read_into(read)
        out[...] = read[:, rest[0]].astype(out.dtype)
    else:
        for i, part in enumerate(out):
            read_slice(rows[i], tuple(rest), part)

