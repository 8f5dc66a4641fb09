"""Slots: which tensor of a folder fills which parameter, checked as a whole before anything is read."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.checkpoints import reader
from jax_warp_decode.checkpoints.names import MAX_NAMES, summary
from jax_warp_decode.errors import ArgumentError, CheckpointError, counted
from jax_warp_decode.experts import DENSE_FORMATS
from jax_warp_decode.formats import QuantizedArray

FLOATS = ("BF16", "F16", "F32")
MAX_MISSING = 1000  # missing tensors that are named before the search stops; a hostile config may promise billions
Report = Callable[[int, int], None]

# Which rows of a tensor that gate and up share: halves one after the other, or alternating (gpt-oss).
HALVES = {
    "": lambda n: slice(None), "first": lambda n: slice(0, n // 2), "second": lambda n: slice(n // 2, n),
    "even": lambda n: slice(0, n, 2), "odd": lambda n: slice(1, n, 2)}


@dataclasses.dataclass(slots=True)  # a frozen one takes thrice as long to make, and a folder has 100,000s
class Slot:
    """One tensor of the folder, or a half of it, and where its content goes.

    Attributes:
      name: in the folder.
      shape: in the folder.
      param: dotted path of the parameter, for example "layers.0.moe.w_up".
      dtypes: safetensors' names of the types that it may have.
      expert: (index, E) in the leading axis of the parameter; None if the tensor is the whole parameter.
      blocks: the last two axes of the folder's tensor are one, cut into blocks.
      transpose: the folder has the last two axes the other way round.
      half: key of `HALVES`; which part of `half_axis` belongs to this parameter.
      half_axis: counted after transposing.
      part: field of the `QuantizedArray` of format `format` that the tensor belongs to; empty for a plain array.
      exact: a plain array that is never converted to another dtype.
    """

    name: str
    shape: tuple[int, ...]
    param: str
    dtypes: tuple[str, ...] = FLOATS
    expert: tuple[int, int] | None = None
    blocks: bool = False
    transpose: bool = False
    half: str = ""
    half_axis: int = -2
    part: str = ""
    format: str = ""
    exact: bool = False

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of what this slot fills."""
        shape = list(self.shape)
        if self.blocks:
            shape[-2:] = [shape[-2] * shape[-1]]
        if self.transpose:
            shape[-2:] = shape[:-3:-1]
        if self.half:
            shape[self.half_axis] //= 2
        return tuple(shape)

    @property
    def param_shape(self) -> tuple[int, ...]:
        return self.target_shape if self.expert is None else (self.expert[1], *self.target_shape)

    def one(self) -> "Slot":
        """The slot of one entry of the tensor's leading axis."""
        return dataclasses.replace(self, shape=self.shape[1:])

    def read(self, stored: reader.StoredTensor, out: np.ndarray) -> None:
        """Fills `out`, of `target_shape`, with what is stored; holds at most one expert's matrix besides."""
        whole = not (self.transpose or self.half)
        if whole:
            stored.read_into(out.reshape(self.shape) if self.blocks else out)
        elif len(self.shape) > (3 if self.blocks else 2):
            for entry, part in zip(stored, out, strict=True):
                self.one().read(entry, part)
        elif not self.half:
            stored.read_into(out.T)
        else:
            array = np.empty(self.shape, reader.DTYPES[stored.dtype])
            stored.read_into(array)
            array = array.reshape(*self.shape[:-2], -1) if self.blocks else array
            array = np.moveaxis(array.T if self.transpose else array, self.half_axis, 0)
            np.moveaxis(out, self.half_axis, 0)[...] = array[HALVES[self.half](len(array))].astype(
                out.dtype, copy=False)


def check_dtype(dtype: Any) -> Any:
    """The argument `dtype` as a dtype or None; `ArgumentError` for one that weights cannot have."""
    try:
        dtype = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        raise ArgumentError(f"dtype: got {dtype!r}, expected bfloat16, float16, float32 or None") from None
    if dtype is not None and dtype not in DENSE_FORMATS:
        raise ArgumentError(f"dtype: got {dtype}, expected bfloat16, float16, float32 or None")
    return dtype


@reader.no_collections()
def check(opened: reader.Folder, expected: Iterable[Slot], dtype: Any, unclaimed: Callable[[str], bool]) -> list[Slot]:
    """All slots in order, once the folder has their tensors with fitting shapes and types.

    Args:
      opened: the folder.
      expected: slots; those of one parameter follow each other.
      dtype: what plain weights will be converted to, or None.
      unclaimed: whether a tensor of this name, for which there is no slot, is an error.

    Raises:
      CheckpointError: naming all that is missing, unexpected, of the wrong shape or type.
    """
    slots: list[Slot] = []
    missing: list[str] = []
    wrong: dict[str, Slot] = {}
    for slot in expected:
        stored = opened.tensors.get(slot.name)
        if stored is None:
            missing.append(slot.name)
            if len(missing) >= MAX_MISSING:
                break
            continue
        slots.append(slot)
        if stored.shape != slot.shape or stored.dtype not in slot.dtypes:
            wrong[slot.name] = slot
    missing = list(dict.fromkeys(missing))  # gate and up may share a tensor
    claimed = {slot.name for slot in slots}
    unexpected = [name for name in opened.tensors if name not in claimed and unclaimed(name)]
    problems = []
    if missing:
        number = f"{MAX_MISSING} or more tensors" if len(missing) >= MAX_MISSING else counted(len(missing), "tensor")
        problems.append(f"{number} missing: {summary(missing)}")
    if unexpected and len(missing) < MAX_MISSING:
        problems.append(f"{counted(len(unexpected), 'tensor')} unexpected: {summary(sorted(unexpected))}")
    if wrong:
        named = [f"{name}: {_difference(opened.tensors[name], slot)}"
                 for name, slot in itertools.islice(wrong.items(), MAX_NAMES)]
        problems.append(f"{counted(len(wrong), 'tensor')} of the wrong shape or type: {summary(named, len(wrong))}")
    if any(slot.part == "values" and opened.tensors[name].dtype in FLOATS for name, slot in wrong.items()):
        problems.append("modules that stay plain beside quantised ones must be named in modules_to_not_convert of the "
                        "quantization_config")
    if not problems and (mixed := _mixed(opened, slots, dtype)):
        problems.append(f"experts of mixed types in {counted(len(mixed), 'layer')}: {summary(mixed)}, expected one "
                        "type in a layer; dtype= converts plain ones")
    if problems:
        raise CheckpointError(f"{opened.path}: {'; '.join(problems)}")
    return slots


def _difference(stored: reader.StoredTensor, slot: Slot) -> str:
    return f"got {stored.dtype}{list(stored.shape)}, expected {'/'.join(slot.dtypes)}{list(slot.shape)}"


def _mixed(opened: reader.Folder, slots: list[Slot], dtype: Any) -> list[str]:
    """Layers whose expert matrices differ in format or type, so that no array could hold them as they are."""
    formats: dict[str, dict[str, None]] = {}
    found: dict[str, dict[str, dict[str, None]]] = {}
    kinds = dict.fromkeys((slot.param, slot.format, slot.part, opened.tensors[slot.name].dtype) for slot in slots)
    for param, format, part, stored in kinds:
        owner, _, weight = param.rpartition(".")
        if weight.startswith("w_"):
            formats.setdefault(owner, {})[format or "plain"] = None
            if part or dtype is None:  # all plain matrices of a layer have one type; of quantised ones, each part
                found.setdefault(f"{owner} {part}".rstrip(), {}).setdefault(weight, {})[stored] = None
    mixed = [f"{owner} ({' and '.join(names)})" for owner, names in formats.items() if len(names) > 1]
    return mixed + [f"{owner} ({', '.join(f'{weight} {"/".join(sorted(types))}' for weight, types in group.items())})"
                    for owner, group in found.items() if len({t for types in group.values() for t in types}) > 1]


def fill(opened: reader.Folder, slots: list[Slot], dtype: Any, report: Report) -> Iterator[tuple[str, Any]]:
    """Parameters with their values on JAX's default device, one after the other: (path, array or `QuantizedArray`).

    Host memory holds one parameter at a time. `report` gets (bytes read, bytes in all), at first with 0.
    """
    nbytes = {slot.name: opened.tensors[slot.name].nbytes // (2 if slot.half else 1) for slot in slots}
    total, done = sum(nbytes[slot.name] for slot in slots), 0
    report(0, total)
    for path, group in itertools.groupby(slots, key=lambda slot: slot.param):
        arrays: dict[str, np.ndarray] = {}
        for slot in group:
            stored = opened.tensors[slot.name]
            if slot.part not in arrays:
                keep = slot.part or slot.exact or dtype is None
                arrays[slot.part] = np.empty(
                    slot.param_shape, reader.DTYPES[stored.dtype] if keep else jnp.dtype(dtype))
            whole = arrays[slot.part]
            slot.read(stored, whole if slot.expert is None else whole[slot.expert[0]])
            done += nbytes[slot.name]
            report(done, total)
        # E8M0 scales count as bytes. Waiting bounds the host memory: a transfer in flight keeps its source alive.
        parts: dict[str, Any] = {
            part: jax.block_until_ready(jax.device_put(a.view(np.uint8) if a.dtype == _E8M0 else a))
            for part, a in arrays.items()}
        yield path, parts[""] if "" in parts else QuantizedArray(**parts, format=slot.format)


_E8M0 = reader.DTYPES["F8_E8M0"]
