"""Files of measured kernel configurations and layers: one kind of GPU each, JSON, checked when read, replaced whole.

    {"schema": 2, "device_kind": "NVIDIA H200", "configs": [
    {"kernel": "moe_down", "format": "bf16", "H": 2048, "I": 768, "K": 8, "T": 1,
     "config": {"lanes": 32, "rows": 2, "unroll": 4}, "us": 7.4, ...}
    ], "layers": [
    {"strategy": "warp_decode", "format": "bf16", "H": 2048, "I": 768, "E": 128, "K": 8, "T": 1, "us": 21.2, ...}
    ]}

The entries have the fields of `Entry` and of `LayerTime`; two of one shape and T are an error. A file may be without
"layers". A kernel, a strategy or a format that this version does not know is ignored, and kept when the file is
written: the user's file is shared by all versions that are installed. Two places are read: the user's file, see
`user_file`, and the package's own.
"""

import dataclasses
import datetime
import functools
import importlib.resources
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Sequence
from typing import Any

from jax_warp_decode.errors import ArgumentError

SCHEMA = 2
VARIABLE = "JAX_WARP_DECODE_TUNED"
MOST_SIZE = 2**31 - 1  # of H, I, E, K and T
MOST_US = 1e12  # eleven days


@dataclasses.dataclass(frozen=True)
class Entry:
    """A measured configuration, one entry of a file.

    Attributes:
      kernel, format, H, I, K, T: what was measured.
      config: fields of the kernel's config class, fastest candidate.
      us: microseconds per layer spent in this kernel.
      heuristic_us: the same with the heuristic's configuration.
      runner_up, runner_up_us: the second fastest candidate, None if there was one only.
      jax: version of jax that compiled it.
      date: UTC, ISO 8601.
    """

    kernel: str
    format: str
    H: int
    I: int
    K: int
    T: int
    config: dict
    us: float
    heuristic_us: float | None
    runner_up: dict | None
    runner_up_us: float | None
    jax: str
    date: str

    def is_sound(self) -> bool:
        """Whether the fields, which come from a file, have their types. A config that does not fit is found in use."""
        times = [self.us, *(t for t in (self.heuristic_us, self.runner_up_us) if t is not None)]
        return (isinstance(self.config, dict) and isinstance(self.runner_up, dict | None)
                and _are_sound((self.H, self.I, self.K, self.T), times,
                               (self.kernel, self.format, self.jax, self.date)))

    @property
    def shape(self) -> tuple:
        return self.kernel, self.format, self.H, self.I, self.K

    def __str__(self) -> str:
        return f"{self.kernel} {self.format} H={self.H} I={self.I} K={self.K} T={self.T}"


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """The measured time of a strategy on a layer's routed experts, one of the "layers" of a file.

    Attributes:
      strategy, format, H, I, E, K, T: what was measured, with bfloat16 x and uniform routing. Biases, the activation
        and whether there is a gate do not count.
      us: microseconds per layer.
      jax, date: as in `Entry`.
    """

    strategy: str
    format: str
    H: int
    I: int
    E: int
    K: int
    T: int
    us: float
    jax: str
    date: str

    def is_sound(self) -> bool:
        """Whether the fields, which come from a file, have their types."""
        return _are_sound((self.H, self.I, self.E, self.K, self.T), [self.us],
                          (self.strategy, self.format, self.jax, self.date))

    @property
    def shape(self) -> tuple:
        return self.strategy, self.format, self.H, self.I, self.E, self.K

    def __str__(self) -> str:
        return f"{self.strategy} {self.format} H={self.H} I={self.I} E={self.E} K={self.K} T={self.T}"


def _are_sound(sizes: tuple, times: list, texts: tuple) -> bool:
    return (all(type(n) is int and 0 < n <= MOST_SIZE for n in sizes)
            and all(type(t) in (int, float) and 0 < t <= MOST_US for t in times)
            and all(isinstance(text, str) for text in texts))


@dataclasses.dataclass(frozen=True)
class Table:
    """A file of measurements for one kind of GPU.

    Attributes:
      path, device_kind: the file, and the kind of GPU that it speaks for.
      shapes: entries by (kernel, format, H, I, K), then by T.
      layers: times by (strategy, format, H, I, E, K), then by T.
    """

    path: pathlib.Path
    device_kind: str
    shapes: dict[tuple, dict[int, Entry]]
    layers: dict[tuple, dict[int, LayerTime]]

    def entries(self) -> list[Entry | LayerTime]:
        """All of the file."""
        shapes: list[dict[int, Any]] = [*self.shapes.values(), *self.layers.values()]
        return [entry for by_tokens in shapes for entry in by_tokens.values()]


def slug(device_kind: str) -> str:
    """The file name of a kind of GPU.

    Example:
      >>> from jax_warp_decode.tuned_table import slug
      >>> slug("NVIDIA H200")
      'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")


def user_file(device_kind: str) -> pathlib.Path:
    """Where the user's measurements are: the path in the environment variable JAX_WARP_DECODE_TUNED if it is set.

    Else `jax_warp_decode/tuned/<device>.json` in the user's cache folder, which is $XDG_CACHE_HOME or ~/.cache.
    """
    if named := os.environ.get(VARIABLE):
        return pathlib.Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache, "jax_warp_decode", "tuned", f"{slug(device_kind)}.json")


def user_table(device_kind: str) -> Table | None:
    """The user's measurements, None if there are none.

    Raises:
      ArgumentError: the file is corrupt, of another schema or of another kind of GPU, or JAX_WARP_DECODE_TUNED names a
        file that does not exist.
    """
    path = user_file(device_kind)
    table = read_table(path, device_kind)
    if table is None and os.environ.get(VARIABLE):
        raise ArgumentError(f"tuned configurations: {path} does not exist, but the environment variable {VARIABLE} "
                            "names it; unset the variable, or let 'jax-warp-decode autotune' write the file")
    return table


def packaged_table(device_kind: str) -> Table | None:
    """The measurements that ship with the package for this kind of GPU, None if there are none."""
    return read_table(packaged_file(device_kind), device_kind)


def packaged_file(device_kind: str) -> pathlib.Path:
    """Where the package has its measurements for this kind of GPU, whether there are any or not."""
    return pathlib.Path(str(importlib.resources.files("jax_warp_decode"))) / "data/tuned" / f"{slug(device_kind)}.json"


def read_table(path: pathlib.Path, device_kind: str) -> Table | None:
    """A checked file, None if it does not exist. It is parsed once, and again when it has changed.

    Raises:
      ArgumentError: the file is corrupt, of another schema or of another kind of GPU.
    """
    try:
        found = os.stat(path)
        table = _parse(path, (found.st_mtime_ns, found.st_size, found.st_ino))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise refused(path, f"cannot be read ({error.strerror})") from None
    if table.device_kind != device_kind:
        raise refused(path, f"was measured on {table.device_kind!r}, this GPU is {device_kind!r}")
    return table


@functools.lru_cache(maxsize=8)
def _parse(path: pathlib.Path, version: tuple) -> Table:
    """`version` changes when the file does."""
    try:
        content = json.loads(path.read_bytes())
        schema = content["schema"]
        if schema != SCHEMA:
            raise refused(path, f"has schema {schema!r}, expected {SCHEMA}")
        table = Table(path, content["device_kind"], _entries(Entry, "configs", content["configs"]),
                      _entries(LayerTime, "layers", content.get("layers", [])))
        if not isinstance(table.device_kind, str):
            raise ValueError(f"device_kind is {table.device_kind!r}")
    except ArgumentError:
        raise
    except KeyError as error:
        raise refused(path, f"has no {error}") from None
    except (ValueError, TypeError, RecursionError) as error:  # not JSON, or JSON of another shape
        raise refused(path, f"is no table of tuned configurations ({error})") from None
    return table


def _entries(kind: type, name: str, found) -> dict[tuple, dict]:
    """A list of a file by shape, then by T; `ValueError` or `TypeError` if it cannot be one."""
    if not isinstance(found, list):
        raise ValueError(f"{name} is {found!r}")
    shapes: dict[tuple, dict] = {}
    for fields in found:
        entry = kind(**fields)
        if not entry.is_sound():
            raise ValueError(f"an entry reads {fields}")
        by_tokens = shapes.setdefault(entry.shape, {})
        if entry.T in by_tokens:
            raise ValueError(f"two entries are of {entry}")
        by_tokens[entry.T] = entry
    return shapes


def refused(path: pathlib.Path, what: str) -> ArgumentError:
    """The error about a file that cannot be used."""
    return ArgumentError(f"tuned configurations: {path} {what}; delete the file, after which 'jax-warp-decode "
                         f"autotune' can write it anew, or let the environment variable {VARIABLE} name another")


def write_entries(path: pathlib.Path, device_kind: str, entries: Sequence[Entry | LayerTime]) -> None:
    """Adds measurements to a file, which is made if need be; those of the same shape and T are replaced.

    The file changes at once or not at all, see `write_table`.

    Raises:
      ArgumentError: the file exists and is corrupt, of another schema or of another kind of GPU; it stays as it is.
      OSError: the folder cannot be written.
    """
    table = read_table(path, device_kind)
    write_table(path, device_kind, [*(table.entries() if table else ()), *entries])


def write_table(path: pathlib.Path, device_kind: str, entries: Sequence[Entry | LayerTime]) -> None:
    """Writes a file with these measurements alone, of several of one shape and T the last.

    It is written beside the old one and then takes its name.
    """
    def lines(kind: type) -> str:
        last = {(*e.shape, e.T): e for e in entries if isinstance(e, kind)}
        return ",\n".join(json.dumps(dataclasses.asdict(last[key])) for key in sorted(last))

    text = (f'{{"schema": {SCHEMA}, "device_kind": {json.dumps(device_kind)}, "configs": [\n{lines(Entry)}\n], '
            f'"layers": [\n{lines(LayerTime)}\n]}}\n')
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def now() -> str:
    """The date of an entry."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
