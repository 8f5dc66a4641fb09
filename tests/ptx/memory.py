"""Global memory as buffers with bounds, and the shared memory of all CTAs (ISA, chapter 5).

Every operand of a kernel is a buffer of its own, 2^40 bytes from the next, so that an access beyond its end is an
error that names it. A byte that nobody has written reads as 0xff: NaN in every float format.
"""

import numpy as np

APART = 40  # bits: buffer i starts at (i + 1) << APART
SHARED_WINDOW = 1 << 60  # generic addresses of shared memory
PARAMETERS = 1 << 61
UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


class AccessError(Exception):
    """An access that hardware would refuse, or that reaches what it must not."""


class Buffer:
    """Bytes with bounds.

    Args:
      data: uint8; not copied if its length is a multiple of 16.
      written: whether it holds values; if not, `known` says which bytes do.
    """

    def __init__(self, name: str, data: np.ndarray, *, written: bool = True, writable: bool = True):
        self.name, self.size, self.writable = name, data.size, writable
        rest = -data.size % 16
        self.data = np.concatenate([data, np.zeros(rest, np.uint8)]) if rest else data
        self.known = None if written else np.zeros(self.data.size, np.uint8)
        if not written:
            self.data[:] = 0xFF
        self.views = {n: self.data.view(dtype) for n, dtype in UNSIGNED.items()}
        self.known_views = {n: self.known.view(dtype) for n, dtype in UNSIGNED.items()} if not written else {}

    @property
    def values(self) -> np.ndarray:
        return self.data[:self.size]

    def check(self, offset, length: int, what: str) -> None:
        """Of `length` bytes from each offset: bounds, and alignment to the length."""
        if length & (length - 1) == 0 and (offset & np.uint64(length - 1)).any():
            raise AccessError(f"{what} {self.name}: byte {_first(offset, offset % np.uint64(length) != 0)} is not "
                              f"aligned to {length}")
        beyond = offset > np.uint64(max(self.size - length, 0)) if self.size >= length else np.ones(offset.shape, bool)
        if beyond.any():
            raise AccessError(f"{what} {self.name}: bytes {_first(offset, beyond)} to +{length} of {self.size}")


def _first(values, where):
    return np.int64(values[where][0])


class Memory:
    """Buffers, and shared memory [ctas, bytes] as one buffer.

    `unwritten` collects loads of bytes that nobody wrote: {(where, name): lanes}.
    """

    def __init__(self, buffers: list[Buffer], ctas: int, shared_bytes: int):
        self.buffers = buffers
        self.stride = -(-shared_bytes // 1024) * 1024
        self.shared_bytes = shared_bytes
        self.shared = Buffer("shared memory", np.zeros(ctas * self.stride, np.uint8), written=False)
        self.unwritten = {}
        self.races = self.clusters = None  # see there

    def place(self, space: str, address, cta, length: int, what: str):
        """[(buffer, lanes or None for all, byte offsets)] of addresses, checked."""
        if space == "generic" and address[0] < np.uint64(SHARED_WINDOW):
            space = "global"
        if space != "global":
            if space == "generic":
                address = address - np.uint64(SHARED_WINDOW)
            if space in ("generic", "shared::cluster"):
                address, cta = self.clusters.home(address, cta, what)
            beyond = address > np.uint64(max(self.shared_bytes - length, 0))
            if beyond.any():
                raise AccessError(f"{what} shared memory: bytes {_first(address, beyond)} to +{length} of "
                                  f"{self.shared_bytes}")
            offset = address + cta.astype(np.uint64) * np.uint64(self.stride)
            self.shared.check(offset, length, what)
            return [(self.shared, None, offset)]
        number = address >> np.uint64(APART)
        offset = address & np.uint64((1 << APART) - 1)
        first = number[0]
        if (number == first).all():
            groups = [(first, None, offset)]
        else:
            groups = [(n, np.flatnonzero(number == n), offset[number == n]) for n in np.unique(number)]
        found = []
        for n, lanes, offsets in groups:
            if not 1 <= n <= len(self.buffers):
                raise AccessError(f"{what} global memory: address {int(address[0]):#x} is in no operand")
            buffer = self.buffers[int(n) - 1]
            buffer.check(offsets, length, what)
            found.append((buffer, lanes, offsets))
        return found

    def load(self, space: str, address, cta, size: int, count: int, where: str, unused=()) -> list[np.ndarray]:
        """`count` elements of `size` bytes from each address, as unsigned integers; nobody looks at those `unused`."""
        results = [np.empty(len(address), UNSIGNED[size]) for _ in range(count)]
        for buffer, lanes, offset in self.place(space, address, cta, size * count, f"{where}: load from"):
            at = (offset // np.uint64(size)).astype(np.int64)
            if buffer is self.shared and self.races:
                self.races.use("read", _words(at, size, count))
            for i, result in enumerate(results):
                value = buffer.views[size][at + i]
                if buffer.known is not None and i not in unused:
                    whole = UNSIGNED[size].type(256**size - 1)
                    if strange := int(np.count_nonzero(buffer.known_views[size][at + i] != whole)):
                        key = where, buffer.name
                        self.unwritten[key] = self.unwritten.get(key, 0) + strange
                if lanes is None:
                    results[i] = value
                else:
                    result[lanes] = value
        return results

    def store(self, space: str, address, cta, values: list[np.ndarray], where: str) -> None:
        """The values' elements next to each other at each address."""
        size = values[0].dtype.itemsize
        for buffer, lanes, offset in self.place(space, address, cta, size * len(values), f"{where}: store to"):
            if not buffer.writable:
                raise AccessError(f"{where}: store to {buffer.name}, an input")
            at = (offset // np.uint64(size)).astype(np.int64)
            if buffer is self.shared and self.races and not all(
                    (buffer.views[size][at + i] == v).all() and buffer.known_views[size][at + i].all()
                    for i, v in enumerate(values)):
                self.races.use("write", _words(at, size, len(values)))
            for i, value in enumerate(values):
                value = value if lanes is None or value.size == 1 else value[lanes]
                buffer.views[size][at + i] = value
                if buffer.known is not None:
                    buffer.known_views[size][at + i] = UNSIGNED[size].type(256**size - 1)


def _words(at, size: int, count: int) -> np.ndarray:
    """Numbers of the 32-bit words of `count` elements of `size` bytes from element `at` on: [lanes, words]."""
    return (at[:, None] * size + np.arange(0, size * count, min(4, size * count))) // 4
