"""Finds words of shared memory that two warps use, one of them to write, without an order between the two.

What a thread knows is a row of times: for every warp of its cluster, until when that warp's uses are ordered before the
thread; for every mbarrier, until when its making and the stores that it announces are; in front, whether the cluster
has started. An arrival at a barrier gives its row away, who passes the barrier takes it (vector clocks), if the scopes
of both reach that far. A time is the number of instructions that the machine had executed.

An asynchronous store, or copy through a tensor map, is no use of a warp's: it happens at some time from its instruction
until the phase of its mbarrier completes. Only who has waited for that phase knows it, and learns nothing else of the
thread that started it.

It may miss some: what lanes of one warp do to each other; what several warps do in one instruction, unless they store
asynchronously; `cp.async`, atomic operations and wgmma, which do not count. Writing what is there already is no race.
"""

import dataclasses

import numpy as np

LANES = 32
NEVER = np.iinfo(np.int32).max
STARTED = 0  # the column that says so


@dataclasses.dataclass
class Order:
    """What an mbarrier orders.

    Attributes:
      column: of the rows.
      made, position: when and where the mbarrier was initialised.
      words: of stores that have landed in the phase at hand.
      foreign: whether anything of another CTA has come in the phase at hand.
      given: rows that arrivals of the phase at hand gave away: of its own CTA, of all.
      known: rows that waiting gives: in the scope of the CTA, of the cluster.
    """

    column: int
    made: int
    position: int
    words: list = dataclasses.field(default_factory=list)
    foreign: bool = False
    given: list = dataclasses.field(default_factory=lambda: [np.zeros(1, np.int32)] * 2)
    known: list = dataclasses.field(default_factory=lambda: [np.zeros(1, np.int32)] * 2)


class Races:
    """`found`: {(what, instruction, earlier instruction): words}."""

    def __init__(self, machine, words: int):
        self.machine, self.found = machine, {}
        warps = -(-machine.per_cta // LANES)
        self.columns = 1 + warps * machine.clusters.size
        self.own = 1 + machine.clusters.rank[machine.cta] * warps + machine.thread // LANES
        self.clock = np.zeros((machine.threads, self.columns), np.int32)
        self.clock[np.arange(machine.threads), self.own] = NEVER  # of itself a warp knows everything
        self.made = {}  # {cluster: mbarriers}
        self.makers = {}  # {thread: columns of the mbarriers that it has made}
        self.fenced = np.zeros_like(self.clock[:, :1])
        # Per word: the last write's column, time and position; the last read of every warp, and a position of those.
        self.writes = np.zeros((3, words), np.int32)
        self.reads, self.read_at = np.zeros((words, self.columns - 1), np.int32), np.zeros(words, np.int32)

    # ------------------------------------------------------------------------------------------------------ rows

    def send(self, threads) -> np.ndarray:
        """What these threads know together."""
        rows = self.clock[threads]
        return np.where(rows == NEVER, self.machine.executed, rows).max(0)

    def receive(self, threads, row) -> None:
        self.clock[threads, :len(row)] = np.maximum(self.clock[threads, :len(row)], row)

    def fence(self, threads, made_only: bool) -> None:
        """Later relaxed arrivals of these threads give away what they know now, or the mbarriers they have made."""
        self.fenced = _padded(self.fenced, self.clock.shape)
        if made_only:
            for thread in threads:
                self.fenced[thread, self.makers.get(thread, [])] = self.machine.executed
        else:
            rows = self.clock[threads]
            self.fenced[threads] = np.where(rows == NEVER, self.machine.executed, rows)

    def send_relaxed(self, threads) -> np.ndarray:
        """What they knew at their last fence."""
        return self.fenced[threads].max(0)

    # ------------------------------------------------------------------------------------------------ mbarriers

    def order(self, thread: int, before: Order | None) -> Order:
        """Of an mbarrier that the thread initialises."""
        m = self.machine
        cluster = int(m.clusters.number[m.cta[thread]])
        column = before.column if before else self.columns + self.made.setdefault(cluster, 0)
        self.made[cluster] = self.made.get(cluster, 0) + (before is None)
        if column >= self.clock.shape[1]:
            self.clock = _padded(self.clock, (m.threads, column + 16))
        self.clock[thread, column] = m.executed
        self.makers.setdefault(thread, []).append(column)
        return Order(column, m.executed, m.here)

    def find_made(self, threads, order: Order) -> None:
        """An mbarrier must be known to have been initialised."""
        if (self.clock[threads, order.column] < order.made).any():
            self._note("use of a barrier before it is known to be initialised", 1, order.position)

    def arrive(self, order: Order, threads, foreign: bool, scope: str) -> None:
        """Gives away what the threads know; with a scope that is too small, nothing."""
        order.foreign |= foreign
        if scope != "relaxed":
            row = self.send(threads)
            for i in range(foreign, 2) if scope == "cluster" or not foreign else ():
                order.given[i] = largest(order.given[i], row)

    def landed(self, order: Order, words, foreign: bool) -> None:
        """A store that the mbarrier announces."""
        order.words.append(words)
        order.foreign |= foreign

    def complete(self, order: Order) -> None:
        """The phase at hand: its stores are known from now on."""
        now = self.machine.executed
        for words in order.words:
            own = words[(self.writes[0, words] == order.column) & (self.writes[1, words] == NEVER)]
            self.writes[1, own] = now
        for i in range(2):
            if i or not order.foreign:
                row = largest(order.given[i], np.zeros(order.column + 1, np.int32))
                row[order.column] = now
                order.known[i] = largest(order.known[i], row)
        order.words, order.foreign, order.given = [], False, [np.zeros(1, np.int32)] * 2

    # ---------------------------------------------------------------------------------------------------- words

    def forget(self, words) -> None:
        self.writes[:, words] = 0
        self.reads[words] = 0

    def use(self, kind: str, words: np.ndarray) -> None:
        """The lanes at hand read or write words [lanes, n]."""
        m = self.machine
        if len(words) != m.active:
            return
        column = self.own[m.numbers][:, None]
        self._check(kind, m.numbers, words)
        if kind == "write":
            self._wrote(words, column, m.executed)
        else:
            self.reads[words, column - 1], self.read_at[words] = m.executed, m.here

    def store_later(self, threads, words: np.ndarray, columns) -> None:
        """Threads start stores to words [threads, n] that mbarriers of these columns announce."""
        self._check("asynchronous write", threads, words)
        if twice := words.size - np.unique(words).size:
            self._note("asynchronous write after write", twice, self.machine.here)
        self._wrote(words, columns[:, None], NEVER)

    def touch(self, threads, word: int) -> None:
        """The threads arrive at an mbarrier in this word of another CTA."""
        self.reads[word, self.own[threads] - 1], self.read_at[word] = self.machine.executed, self.machine.here

    def leave(self, threads, words: slice) -> None:
        """A CTA exits: what others do to its words, and what is in flight to them, must be known to be over."""
        known = self.clock[threads].max(0)
        column, time, position = self.writes[:, words]
        self._flag("exit before a write is over", time > known[column], position)
        bad = (self.reads[words] > known[1:self.columns]).any(1)
        self._flag("exit before another CTA's use is over", bad, self.read_at[words])

    def _check(self, kind, threads, words):
        column, time, position = self.writes[:, words]
        self._flag(f"{kind} after write", time > self.clock[threads[:, None], column], position)
        if kind != "read":
            late = self.reads[words] > self.clock[threads, None, 1:self.columns]
            self._flag(f"{kind} after read", late.any(-1), self.read_at[words])

    def _wrote(self, words, column, time):
        self.writes[0, words], self.writes[1, words], self.writes[2, words] = column, time, self.machine.here

    def _flag(self, what, bad, position):
        if bad.any():
            self._note(what, int(bad.sum()), int(position[bad][0]))

    def _note(self, what, count, position):
        key = what, self.machine.where, self.machine.text(position)
        self.found[key] = self.found.get(key, 0) + count


def _padded(array, shape):
    return np.pad(array, [(0, n - old) for old, n in zip(array.shape, shape, strict=True)])


def largest(a, b):
    """Of two rows, which may be of different length: mbarriers come up on the way."""
    n = max(len(a), len(b))
    return np.maximum(_padded(a, (n,)), _padded(b, (n,)))
