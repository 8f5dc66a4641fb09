"""Reads Hugging Face checkpoint folders: every header is checked before the first weight is read.

safetensors validates each file; the bytes are then read straight into the arrays that will hold them, because its numpy
front end (0.8) has no FP8 and would allocate every tensor once more. A folder may come from anybody: whatever it holds,
the answer is a `CheckpointError` after work and memory that the limits below bound. Nothing in it is ever executed, and
nothing but regular files with content is read, see `sources`.
"""

import collections
import contextlib
import dataclasses
import gc
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from jax_warp_decode.checkpoints.sources import open_regular
from jax_warp_decode.errors import ArgumentError, CheckpointError
from jax_warp_decode.models.settings import show

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Of JSON: of one file each, and of the headers of all shards. Published shards have headers of 0.1 MB; DeepSeek-V3 has
# 91,000 tensors in 163 of them and an index of 9 MB, Kimi-K2 140,000. A model of 48 layers of 128 experts in one file
# has a header of 2.3 MB in bfloat16, 4.8 MB with scales, and 9.2 MB (73,728 tensors) where a weight is stored as four.
# A folder at these limits is answered within about two seconds, of which each tensor takes 12 us: 8 to read its header
# (safetensors 3, json 2, index 1), 4 to find its place. 250,000 would take over three seconds; the models that have so
# many, Kimi-K2 in int4 and in NVFP4, are quantised in ways that no family here stores.
MAX_CONFIG_BYTES, MAX_HEADER_BYTES, MAX_HEADERS_BYTES, MAX_INDEX_BYTES = 2**20, 2**24, 2**26, 2**25
MAX_TENSORS = 3 * 2**15  # of one file
MAX_INDEX_TENSORS = 9 * 2**14  # of all shards
MAX_SHARDS = 2000
MAX_VALUES = 6  # for each tensor, as commas: it has six with three dimensions
MAX_INDEX_NESTING = 100  # objects and lists; an index has three

# safetensors' names of the types that a checkpoint may use here.
DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    **{f"{kind}{bits}": np.dtype(f"{name}{bits}")
       for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(np.bool_)}


@dataclasses.dataclass(slots=True)  # a frozen one takes thrice as long to make, and a folder has 100,000s
class StoredTensor:
    """Where one tensor lies: its type by safetensors' name, shape, file, and byte range in that file."""

    dtype: str
    shape: tuple[int, ...]
    file: pathlib.Path
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> "StoredTensor":
        """One entry of the leading axis, as a tensor of its own; nothing is read."""
        size = self.nbytes // self.shape[0]
        return dataclasses.replace(self, shape=self.shape[1:], offset=self.offset + index * size, nbytes=size)

    def __iter__(self) -> Iterator["StoredTensor"]:
        return (self[index] for index in range(len(self)))

    def read_into(self, out: np.ndarray) -> None:
        """Fills `out`, which has this tensor's shape and may have another floating dtype or any strides.

        Raises:
          CheckpointError: the file has shrunk or cannot be read any more.
        """
        direct = out.flags.c_contiguous and out.dtype == DTYPES[self.dtype]
        target = out if direct else np.empty(self.shape, DTYPES[self.dtype])
        view = memoryview(target.reshape(-1).view(np.uint8))
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.offset)
                while len(view):
                    count = file.readinto(view)
                    if not count:
                        raise CheckpointError(f"{self.file}: ends early, {len(view)} bytes are missing")
                    view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read: {error}") from error
        if not direct:
            out[...] = target.astype(out.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Folder:
    """A checkpoint folder whose files are sound: parsed config.json and the place of every tensor."""

    path: pathlib.Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def as_path(folder: Any, name: str = "folder") -> pathlib.Path:
    """An argument as a path; `ArgumentError` if it is none, or empty, which would be the current folder."""
    try:
        path = pathlib.Path(folder)
    except TypeError:
        path = None
    if path is None or folder == "":
        raise ArgumentError(f"{name}: got {folder!r}, expected a path")
    return path


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """The garbage collector rests: of hundreds of thousands of objects, all in use, it would look at each in vain."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@no_collections()
def open_folder(path: Any) -> Folder:
    """Checks a folder with config.json and model.safetensors, or shards and model.safetensors.index.json.

    Args:
      path: folder as `save_pretrained` or `hf download` leaves it.

    Raises:
      ArgumentError: no path.
      CheckpointError: folder or file missing or unreadable, malformed JSON, truncated or malformed safetensors, an
        index that points to a missing file, outside the folder, or to the wrong shard, a tensor that is stored twice.
    """
    path = as_path(path)
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _open(path: pathlib.Path) -> Folder:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; fetch a model with `hf download REPO --local-dir {path}`")
    config = read_json(path / CONFIG_FILE, MAX_CONFIG_BYTES)
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(f"{path}: holds both {SINGLE_FILE} and {INDEX_FILE}, expected one; remove the stale one")
    if single.exists():
        return Folder(path, config, read_header(single))
    if not index.exists():
        raise CheckpointError(f"{path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}, expected one of them")
    return Folder(path, config, _read_shards(index))


def read_json(path: pathlib.Path, limit: int, flat: bool = False) -> Mapping[str, Any]:
    """Parses a file that holds one JSON object of at most `limit` bytes without repeated keys.

    A `flat` one, a table of names, is refused before parsing if it nests a lot or has too many entries.
    """
    with open_regular(path) as file:
        text = file.read(limit + 1)  # what the file system calls its size may be wrong
    if len(text) > limit:
        raise CheckpointError(f"{path}: got more than {limit} bytes, expected at most so many")
    if flat and text.count(b"{") + text.count(b"[") > MAX_INDEX_NESTING:
        raise CheckpointError(f"{path}: got over {MAX_INDEX_NESTING} objects and lists, expected a table of names")
    if flat and text.count(b",") > MAX_INDEX_TENSORS:
        raise CheckpointError(f"{path}: got over {MAX_INDEX_TENSORS} entries, expected at most so many tensors")
    try:
        return _parse_object(text)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: not a JSON object: {_printable(error)}") from error


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Validates one safetensors file and returns the place of each tensor; reads no weight."""
    return _read_file(path, _Room())


@dataclasses.dataclass
class _Room:
    """What the headers of the shards that are still to be read may hold together."""

    nbytes: int = MAX_HEADERS_BYTES
    tensors: int = MAX_INDEX_TENSORS
    values: int = MAX_VALUES * MAX_INDEX_TENSORS

    def take_bytes(self, count: int) -> None:
        if count > min(self.nbytes, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {count} bytes, expected at most {MAX_HEADER_BYTES}, and {MAX_HEADERS_BYTES} "
                             "in all shards together")
        self.nbytes -= count

    def take_content(self, text: bytes) -> None:
        """Refuses a header that would take long to parse, before it is parsed."""
        tensors, values = text.count(b"{") - 2, text.count(b",")  # the header itself and __metadata__ are two more
        if tensors > min(self.tensors, MAX_TENSORS):
            raise ValueError(f"{tensors} or more objects, expected at most {MAX_TENSORS} tensors, and "
                             f"{MAX_INDEX_TENSORS} in all shards together")
        if values > min(self.values, MAX_VALUES * MAX_TENSORS):
            raise ValueError(f"{values} or more values, expected at most {MAX_VALUES * MAX_TENSORS}, and "
                             f"{MAX_VALUES * MAX_INDEX_TENSORS} in all shards together")
        self.tensors -= max(0, tensors)
        self.values -= values


def _read_file(path: pathlib.Path, room: _Room) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, whose header takes its part of the room."""
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            room.take_bytes(size)
            text = file.read(size)
        room.take_content(text)
        # Opening checks sizes, types, and that the tensors cover the file without holes or overlap.
        with safetensors.safe_open(path, framework="numpy"):
            pass
        header = _parse_header(text)
    except CheckpointError:
        raise
    except (safetensors.SafetensorError, ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {_printable(error)}") from error
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), path, 8 + size + start, end - start)
    return tensors


def _parse_header(text: bytes) -> dict[str, Any]:
    """Parses a header that safetensors accepts: an object whose values are objects."""
    header = json.loads(text)
    if text.count(b"{") != 1 + len(header):  # more objects than names: names are repeated, or strings have braces
        # The hook keeps no object: twice through the text costs half of collecting the garbage that it would leave.
        json.loads(text, object_pairs_hook=_refuse_repeated)
    return header


def _read_shards(index: pathlib.Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index, MAX_INDEX_BYTES, flat=True).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object 'weight_map' from tensor names to file names")
    held: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        held.setdefault(name, set()).add(tensor)
    if len(held) > MAX_SHARDS:
        raise CheckpointError(f"{index}: got {len(held)} shards, expected at most {MAX_SHARDS}; save the model in "
                              "larger ones")
    tensors: dict[str, StoredTensor] = {}
    room = _Room()
    for name in sorted(held):
        if pathlib.PurePath(name).name != name or "\\" in name or not (
                name.isprintable() and name.endswith(".safetensors")):
            raise CheckpointError(f"{index}: got shard {show(name)}, expected the name of a .safetensors file "
                                  "beside it")
        shard = _read_file(index.parent / name, room)
        # Each shard at once: what a folder costs is bounded by its index, not by what lies beside it.
        if twice := sorted(shard.keys() & tensors.keys()):
            files = f"{tensors[twice[0]].file.name} and {name}"
            raise CheckpointError(f"{index.parent}: stored twice, in {files}: {listing(twice)}")
        if astray := sorted(held[name] - shard.keys()):
            raise CheckpointError(f"{index}: the shard does not hold what the index says: "
                                  f"{listing([f'{tensor} in {name}' for tensor in astray])}")
        # Not a difference of keys, which would look at the whole index for each shard.
        if unlisted := sorted(tensor for tensor in shard if tensor not in weight_map):
            raise CheckpointError(f"{index}: in a shard but not in the index: {listing(unlisted)}")
        tensors |= shard
    return tensors


def _parse_object(text: bytes) -> dict[str, Any]:
    value = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(value, dict):
        raise ValueError(f"got {type(value).__name__}, expected an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated(pairs)
    return dict(pairs)


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        twice = [name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"repeated keys: {listing(twice)}")


def listing(names: list[str], limit: int = 8) -> str:
    """At most `limit` names, printable and cut to 200 characters each, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(_printable, names[:limit])) + more


def _printable(text: Any, limit: int = 200) -> str:
    text = str(text)
    text = text if len(text) <= limit else f"{text[:limit]} ..."
    return text if text.isprintable() else ascii(text)
