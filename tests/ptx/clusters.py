"""Clusters: CTAs that see each other's shared memory (ISA 9.7.9.12 st.async, 9.7.9.23 mapa, 9.7.13.3 barrier.cluster).

An address of shared memory below 2^24 is the thread's own CTA's; CTA r of the cluster has (r + 1) << 24 and on, for
every thread of the cluster. There must be such a CTA, it must have started (a barrier of the cluster says so), and must
not have exited: all that others do to its memory must be known to be over before.
"""

import functools

import numpy as np

from ptx.arithmetic import TYPES, U32, U64
from ptx.memory import SHARED_WINDOW, UNSIGNED, AccessError
from ptx.races import STARTED, largest

WINDOW = 24  # bits
IDLE, ARRIVED, PASSED = range(3)  # of a thread, at the barrier of its cluster


def split(number, sizes):
    """Coordinates x, y, z."""
    return number % sizes[0], number // sizes[0] % sizes[1], number // (sizes[0] * sizes[1])


class Clusters:
    """Of a grid.

    Attributes:
      size: CTAs of a cluster.
      number, rank: of every CTA: its cluster, and its place there.
      members: [clusters, size], CTAs.
      place: x, y, z of every CTA in its cluster.
      position: x, y, z of the cluster of every CTA.
    """

    def __init__(self, machine, shape):
        self.machine, self.shape, self.size = machine, shape, int(np.prod(shape))
        if any(n % c for n, c in zip(machine.grid, shape, strict=True)):
            raise AccessError(f"a grid {machine.grid} of clusters {shape}")
        self.count = tuple(n // c for n, c in zip(machine.grid, shape, strict=True))
        place = split(np.arange(machine.ctas), machine.grid)
        self.place = [p % c for p, c in zip(place, shape, strict=True)]
        self.position = [p // c for p, c in zip(place, shape, strict=True)]
        self.rank, self.number = (x + sizes[0] * (y + sizes[1] * z) for (x, y, z), sizes in (
            (self.place, shape), (self.position, self.count)))
        self.members = np.empty((int(np.prod(self.count)), self.size), np.int64)
        self.members[self.number, self.rank] = np.arange(machine.ctas)
        self.states = np.zeros(machine.threads, np.int8)
        self.exited = np.zeros(machine.ctas, bool)
        self.given, self.waiting, self.known = {}, {}, {}  # {cluster: row}, {cluster: threads}, {cluster: row}

    def home(self, address, cta, what: str):
        """(addresses within a CTA, CTAs) of shared::cluster addresses."""
        rank = (address >> np.uint64(WINDOW)).astype(np.int64) - 1
        if (rank >= self.size).any():
            raise AccessError(f"{what} shared memory of CTA {rank.max()} of a cluster of {self.size}")
        home = np.where(rank < 0, cta, self.members[self.number[cta], rank])
        if (foreign := home != cta).any():
            m = self.machine
            threads = m.numbers[foreign] if len(foreign) == m.active else m.numbers
            if not m.races.clock[threads, STARTED].all():
                raise AccessError(f"{what} shared memory of a CTA that may not have started")
            if (gone := self.exited[home[foreign]]).any():
                raise AccessError(f"{what} shared memory of CTA {home[foreign][gone][0]}, which has exited")
        return address & np.uint64((1 << WINDOW) - 1), home

    def leave(self, threads) -> None:
        """These threads exit."""
        m = self.machine
        for cta in np.unique(m.cta[threads]):
            mine = slice(cta * m.per_cta, (cta + 1) * m.per_cta)
            if m.ended(mine).all():
                self.exited[cta] = True
                words = m.memory.stride // 4
                m.races.leave(mine, slice(cta * words, (cta + 1) * words))
            self._settle(int(self.number[cta]))

    def arrive(self, cluster: int, threads, row) -> None:
        if self.states[threads].any():
            raise AccessError(f"{self.machine.where}: a thread arrives again before it has waited")
        self.states[threads] = ARRIVED
        self.given[cluster] = largest(row, self.given.get(cluster, row))
        self._settle(cluster)

    def wait(self, cluster: int, threads) -> None:
        m, states = self.machine, self.states[threads]
        if (states == IDLE).any():
            raise AccessError(f"{m.where}: a thread waits that has not arrived")
        m.positions[threads] = m.here + 1
        if len(late := threads[states == ARRIVED]):
            m.wait(late, m.here + 1)
            self.waiting.setdefault(cluster, []).append(late)
        if len(passed := threads[states == PASSED]):
            self._pass(cluster, passed)

    def describe(self) -> list[str]:
        """Of the barriers at which threads wait."""
        arrived = np.bincount(self.number[self.machine.cta], self.states == ARRIVED)
        return [f"the barrier of cluster {cluster}, where {int(arrived[cluster])} of "
                f"{self.size * self.machine.per_cta} threads have arrived" for cluster in self.waiting]

    def _settle(self, cluster):
        """Opens the barrier if all threads have arrived or exited."""
        m = self.machine
        threads = np.concatenate([np.arange(m.per_cta) + c * m.per_cta for c in self.members[cluster]])
        threads = threads[~m.ended(threads)]
        if not len(threads) or (self.states[threads] != ARRIVED).any():
            return
        self.states[threads] = PASSED
        self.known[cluster] = self.given.pop(cluster)
        for waiting in self.waiting.pop(cluster, ()):
            self._pass(cluster, waiting)
            m.release(waiting)

    def _pass(self, cluster, threads):
        self.states[threads] = IDLE
        self.machine.races.receive(threads, self.known[cluster])
        self.machine.races.clock[threads, STARTED] = 1


def _by_cluster(m):
    number = m.clusters.number[m.mine(m.cta)]
    return [(int(c), m.numbers[number == c]) for c in np.unique(number)]


def barrier(modifiers):
    """barrier.cluster.arrive and .wait; for .aligned the machine has waited for whole warps."""
    kind, relaxed = modifiers[1], "relaxed" in modifiers

    def run(m):
        if kind == "arrive":
            for cluster, threads in _by_cluster(m):
                m.clusters.arrive(cluster, threads, (m.races.send_relaxed if relaxed else m.races.send)(threads))
            return False
        for cluster, threads in _by_cluster(m):
            m.clusters.wait(cluster, threads)
        return True

    return run


def _fence(modifiers, operands):
    """Matters to relaxed arrivals only: memory here is always consistent."""
    made_only = modifiers[0] == "mbarrier_init"
    if "proxy" in modifiers or not (made_only or {"cluster", "gpu", "gl", "sys"} & set(modifiers)):
        return lambda m: False

    def run(m):
        if m.clusters.size > 1:
            m.races.fence(m.numbers, made_only)
        return False

    return run


def _map(modifiers, operands):
    """mapa: the address of the same place in another CTA."""
    target, place, rank = operands
    dtype = TYPES[modifiers[-1]]
    generic = np.uint64(0 if "shared::cluster" in modifiers else SHARED_WINDOW)

    def run(m):
        ranks, address = m.read(rank, U32), m.read(place, UNSIGNED[dtype.itemsize]).astype(U64) - generic
        if (ranks >= m.clusters.size).any():
            raise AccessError(f"{m.where}: CTA {ranks.max()} of a cluster of {m.clusters.size}")
        own = address & np.uint64((1 << WINDOW) - 1)
        m.write(target, ((ranks.astype(U64) + np.uint64(1) << np.uint64(WINDOW)) + own + generic).astype(
            UNSIGNED[dtype.itemsize]))
        return False

    return run


def store_later(modifiers, operands):
    """st.async: every lane stores at some later time, and takes its bytes off what an mbarrier of that CTA expects."""
    place, source, announced = operands
    dtype = UNSIGNED[TYPES[modifiers[-1]].itemsize]
    sources = source[1] if source[0] == "vector" else (source,)
    size = dtype.itemsize * len(sources)

    def run(m):
        if m.clusters.size == 1:
            raise AccessError(f"{m.where}: no cluster")
        what, cta = f"{m.where}: store to", m.mine(m.cta)
        values = [np.broadcast_to(m.read(o, dtype), (m.active,)) for o in sources]
        data = np.stack(values, 1).view(np.uint8)
        (_, _, offset), = m.memory.place("shared::cluster", m.address(place), cta, size, what)
        address, home = m.clusters.home(m.address(announced), cta, what)
        if (offset // np.uint64(m.memory.stride) != home.astype(U64)).any():
            raise AccessError(f"{m.where}: an mbarrier of another CTA than that of the data")
        barriers = [m.copies.barrier(c, a) for c, a in zip(home, address, strict=True)]
        for thread, found in zip(m.numbers, barriers, strict=True):
            m.races.find_made(np.atleast_1d(thread), found.order)
        words = (offset[:, None] + np.arange(0, size, 4, U64)).astype(np.int64) // 4
        m.copies.check_barriers(words)
        m.races.store_later(m.numbers, words, np.array([b.order.column for b in barriers]))
        places = offset.astype(np.int64)[:, None] + np.arange(size)
        m.copies.spoil(places)

        def land(lane):
            m.copies.put(places[lane], data[lane])
            m.races.landed(barriers[lane].order, words[lane], bool(home[lane] != cta[lane]))
            m.copies.take_off(barriers[lane], size)

        m.copies.flying.extend(functools.partial(land, lane) for lane in range(m.active))
        return False

    return run


OPERATIONS = {"mapa": _map, "fence": _fence, "membar": _fence}
