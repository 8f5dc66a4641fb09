"""Asynchronous copies and the barriers that announce them (ISA 9.7.9.25 to 9.7.9.27, 9.7.13.15).

A copy through a tensor map is carried out when the schedule says so, or when no thread can go on without it; one of
`cp.async` when its group is waited for. Until then its destination holds poison.
"""

import dataclasses

import numpy as np

from ptx.arithmetic import PRED, U32, U64
from ptx.memory import AccessError
from ptx.races import Order


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that a copy takes of it; axes from the outermost to the innermost.

    Attributes:
      address: of its first element.
      itemsize: in bytes.
      sizes, strides: in elements.
      box: elements.
      swizzle: 16 (none), 32, 64 or 128 bytes.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.box)) * self.itemsize

    def source(self, start) -> tuple[np.ndarray, np.ndarray]:
        """Of every byte of the box at `start`: its address, and whether it is inside the tensor."""
        offset, inside = np.zeros(self.box, np.int64), np.ones(self.box, bool)
        for axis, (first, size, stride, count) in enumerate(
                zip(start, self.sizes, self.strides, self.box, strict=True)):
            at = np.arange(count) + first
            shape = [-1 if i == axis else 1 for i in range(len(self.box))]
            offset = offset + (at * stride).reshape(shape)
            inside = inside & ((at >= 0) & (at < size)).reshape(shape)
        within = np.arange(self.itemsize)
        address = self.address + offset.reshape(-1, 1) * self.itemsize + within
        return address.ravel(), np.repeat(inside.ravel(), self.itemsize)

    def places(self, start: int) -> np.ndarray:
        """Addresses in shared memory of the bytes of a box: 16-byte units are permuted by bits of the address."""
        at = np.arange(self.nbytes) + start
        units = self.swizzle // 16 - 1
        return at ^ ((at >> 7 & units) << 4)


@dataclasses.dataclass
class _Barrier:
    count: int
    missing: int
    order: Order
    bytes: int = 0
    phase: int = 0
    waiting: list = dataclasses.field(default_factory=list)


class Copies:
    """Copies in flight, and barriers: {(cta, address): _Barrier}."""

    def __init__(self, machine):
        self.machine, self.barriers, self.flying = machine, {}, []
        self.groups, self.committed = [], np.zeros(machine.threads, np.int64)

    def barrier(self, cta, address) -> _Barrier:
        if (key := (int(cta), int(address))) not in self.barriers:
            raise AccessError(f"{self.machine.where}: no barrier was initialised at {int(address)}")
        return self.barriers[key]

    def check_barriers(self, words: np.ndarray) -> None:
        """None of these words of shared memory may be an mbarrier's."""
        pairs = [(cta * self.machine.memory.stride + address) // 8 for cta, address in self.barriers]
        if np.isin(words // 2, pairs).any():
            raise AccessError(f"{self.machine.where}: store to an mbarrier")

    def take_off(self, barrier: _Barrier, size: int) -> None:
        """Bytes that have landed, perhaps before they were announced."""
        barrier.bytes -= size
        self.settle(barrier)

    def settle(self, barrier: _Barrier) -> None:
        if barrier.missing < 0:
            raise AccessError(f"{self.machine.where}: more arrivals at a barrier than the {barrier.count} it expects")
        if abs(barrier.bytes) > MAX_BYTES:
            raise AccessError(f"{self.machine.where}: {barrier.bytes} bytes at a barrier that counts to {MAX_BYTES}")
        if barrier.missing == 0 and barrier.bytes == 0:
            barrier.missing, barrier.phase = barrier.count, barrier.phase + 1
            self.machine.races.complete(barrier.order)
            for lanes in barrier.waiting:
                self.machine.release(lanes)
            barrier.waiting = []

    def land(self, which) -> None:
        """Carries out some of what is in flight."""
        for place in sorted(which, reverse=True):
            self.flying.pop(place)()

    def describe(self) -> list[str]:
        """Of the barriers at which threads wait."""
        return [f"the barrier at {address} of CTA {cta}, whose phase {b.phase} lacks {b.missing} arrivals and "
                f"{b.bytes} bytes" for (cta, address), b in self.barriers.items() if b.waiting]

    def places(self, cta: int, address: np.ndarray) -> np.ndarray:
        """Offsets of bytes in shared memory."""
        memory = self.machine.memory
        if address.min() < 0 or address.max() >= memory.shared_bytes:
            raise AccessError(f"{self.machine.where}: copy to bytes {address.min()} to {address.max()} of "
                              f"{memory.shared_bytes} of shared memory")
        return address + cta * memory.stride

    def spoil(self, offset: np.ndarray) -> None:
        """Leaves nothing there."""
        memory = self.machine.memory
        memory.shared.data[offset], memory.shared.known[offset] = 0xFF, 0

    def put(self, offset: np.ndarray, data: np.ndarray) -> None:
        memory = self.machine.memory
        memory.shared.data[offset], memory.shared.known[offset] = data, 0xFF


# --------------------------------------------------------------------------------------------------------- mbarrier

MAX_BYTES = 2**20 - 1  # either way


def _mbarrier(modifiers, operands):
    return {"init": _initialise, "arrive": _arrive, "try_wait": _try_wait, "test_wait": _try_wait,
            "expect_tx": _arrive, "inval": lambda *_: lambda m: False}[modifiers[0]](modifiers, operands)


def _initialise(modifiers, operands):
    def run(m):
        addresses = m.address(operands[0])
        counts = np.broadcast_to(m.read(operands[1], U32), (m.active,))
        for thread, cta, address, count in zip(m.numbers, m.mine(m.cta), addresses, counts, strict=True):
            if address % 8:
                raise AccessError(f"{m.where}: a barrier at {address}")
            before = m.copies.barriers.get((int(cta), int(address)))
            order = m.races.order(int(thread), before and before.order)
            m.copies.barriers[int(cta), int(address)] = _Barrier(int(count), int(count), order)
        return False

    return run


def _arrive(modifiers, operands):
    """Every lane arrives once, and with expect_tx announces bytes."""
    announces = "expect_tx" in modifiers
    arrives = modifiers[0] == "arrive"
    scope = next((s for s in ("relaxed", "cluster") if s in modifiers), "cta")
    place, *rest = operands[1:] if arrives else operands

    def run(m):
        (addresses, home), cta = m.clusters.home(m.address(place), m.mine(m.cta), m.where), m.mine(m.cta)
        number = np.broadcast_to(m.read(rest[0], U32), (m.active,)) if rest else np.ones(m.active, U32)
        for c, h, address in sorted(set(zip(cta.tolist(), home.tolist(), addresses.tolist(), strict=True))):
            barrier, mine = m.copies.barrier(h, address), (cta == c) & (home == h) & (addresses == address)
            m.races.find_made(m.numbers[mine], barrier.order)
            if c != h:
                m.races.touch(m.numbers[mine], (h * m.memory.stride + address) // 4)
            if announces:
                barrier.bytes += int(number[mine].sum())
            if arrives:
                m.races.arrive(barrier.order, m.numbers[mine], c != h, scope)
                barrier.missing -= int(mine.sum()) if announces else int(number[mine].sum())
            m.copies.settle(barrier)
        return False

    return run


def _try_wait(modifiers, operands):
    """Lanes whose phase is not complete wait at this instruction, instead of in the loop around it."""
    target, place, parity = operands[:3]
    wide = int("cluster" in modifiers)

    def run(m):
        addresses, cta, numbers = m.address(place), m.mine(m.cta), m.numbers
        parities = np.broadcast_to(m.read(parity, U32), (m.active,))
        ready = np.ones(m.active, bool)
        gives_up = m.schedule.gives_up()
        for c, address, p in sorted(set(zip(cta.tolist(), addresses.tolist(), parities.tolist(), strict=True))):
            barrier = m.copies.barrier(c, address)
            mine = (cta == c) & (addresses == address) & (parities == p)
            m.races.find_made(numbers[mine], barrier.order)
            if barrier.phase % 2 == p:
                ready[mine] = False
                if not gives_up:
                    barrier.waiting.append(numbers[mine])
            elif "relaxed" not in modifiers:
                m.races.receive(numbers[mine], barrier.order.known[wide])
        if gives_up or ready.all():
            m.write(target, ready)
            return False
        m.write(target, np.ones(1, PRED))
        m.positions[numbers[ready]] = m.here + 1
        return m.wait(numbers[~ready], m.here)

    return run


# --------------------------------------------------------------------------------------------------------------- cp


def _copy(modifiers, operands):
    if modifiers[0] != "async":
        raise NotImplementedError(".".join(modifiers))
    if "bulk" in modifiers:
        if "tensor" in modifiers:
            return (_tensor_store if modifiers[4] == "global" else _tensor_load)(modifiers, operands)
        if modifiers[2] in ("commit_group", "wait_group"):  # stores are carried out at once
            return lambda m: False
        raise NotImplementedError(".".join(modifiers))
    if modifiers[1] == "commit_group":
        return _commit
    if modifiers[1] == "wait_all":
        return lambda m: _wait_group(m, None)
    if modifiers[1] == "wait_group":
        return lambda m: _wait_group(m, operands[0][1])
    return _copy_bytes(modifiers, operands)


def _copy_bytes(modifiers, operands):
    """cp.async of 4, 8 or 16 bytes per lane; fewer are read where a source size is given, and zeros follow."""
    size = operands[2][1]

    def run(m):
        to, cta = m.address(operands[0]), m.mine(m.cta)
        words = m.memory.load("global", m.address(operands[1]), cta, 4, size // 4, m.where)
        data = np.stack(words, 1).view(np.uint8)
        if len(operands) > 3:
            data[np.arange(size) >= np.broadcast_to(m.read(operands[3], U32), (m.active,))[:, None]] = 0
        m.memory.place("shared", to, cta, size, f"{m.where}: copy to")
        offset = np.stack([m.copies.places(int(c), np.arange(size) + int(a)) for c, a in zip(cta, to, strict=True)])
        m.copies.spoil(offset)
        m.races.forget(offset // 4)
        m.copies.groups.append((m.numbers, m.copies.committed[m.numbers], offset, data))
        return False

    return run


def _commit(m):
    m.copies.committed[m.numbers] += 1
    return False


def _wait_group(m, pending):
    """Lands the copies of the lanes at hand but those of their last groups; None: all, committed or not."""
    copies, left = m.copies, []
    last = np.full(m.threads, -1)
    last[m.numbers] = np.iinfo(np.int64).max if pending is None else copies.committed[m.numbers] - pending - 1
    for numbers, group, offset, data in copies.groups:
        ready = group <= last[numbers]
        copies.put(offset[ready], data[ready])
        if not ready.all():
            left.append((numbers[~ready], group[~ready], offset[~ready], data[~ready]))
    copies.groups = left
    return False


def _tensor(m, operand):
    """Per lane: (tensor map, coordinates from the outermost axis)."""
    places = np.broadcast_to(m.read(operand[1], U64), (m.active,))
    coordinates = [np.broadcast_to(m.read(o, U32), (m.active,)).view(np.int32) for o in operand[2][1]][::-1]
    for lane, place in enumerate(places):
        if int(place) not in m.maps:
            raise AccessError(f"{m.where}: no tensor map at {int(place):#x}")
        yield m.maps[int(place)], [int(c[lane]) for c in coordinates]


def _tensor_load(modifiers, operands):
    if "multicast::cluster" in modifiers:
        raise NotImplementedError("copies to several CTAs")

    def run(m):
        to, announced = m.address(operands[0]), m.address(operands[2])
        for lane, (tensor, start) in enumerate(_tensor(m, operands[1])):
            address, inside = tensor.source(start)
            data = np.zeros(tensor.nbytes, np.uint8)
            zero = np.zeros(int(inside.sum()), np.int64)
            data[inside] = m.memory.load("global", address[inside].astype(U64), zero, 1, 1, m.where)[0]
            if to[lane] % 128:
                raise AccessError(f"{m.where}: copy to {to[lane]}, which is not a multiple of 128")
            cta = int(m.mine(m.cta)[lane])
            barrier = m.copies.barrier(cta, announced[lane])
            offset = m.copies.places(cta, tensor.places(int(to[lane])))
            words = np.unique(offset // 4)
            m.races.store_later(m.numbers[lane:lane + 1], words[None], np.array([barrier.order.column]))
            m.copies.spoil(offset)

            def land(offset=offset, data=data, barrier=barrier, words=words):
                m.copies.put(offset, data)
                m.races.landed(barrier.order, words, False)
                m.copies.take_off(barrier, len(data))

            m.copies.flying.append(land)
        return False

    return run


def _tensor_store(modifiers, operands):
    def run(m):
        for lane, ((tensor, start), at) in enumerate(zip(_tensor(m, operands[0]), m.address(operands[1]), strict=True)):
            cta = np.full(tensor.nbytes, int(m.mine(m.cta)[lane]))
            data = m.memory.load("shared", tensor.places(int(at)).astype(U64), cta, 1, 1, m.where)[0]
            address, inside = tensor.source(start)
            m.memory.store("global", address[inside].astype(U64), cta[inside], [data[inside]], m.where)
        return False

    return run


OPERATIONS = {"mbarrier": _mbarrier, "cp": _copy}
