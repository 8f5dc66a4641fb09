"""Whose turn it is, and when stores and copies in flight land."""

import numpy as np

LANES = 32


class Lockstep:
    """All threads together, those at the lowest instruction first; what is in flight lands when no thread can go on."""

    def leaders(self, program) -> frozenset[int]:
        """Positions before which a turn ends, beside jumps and waits."""
        return program.leaders

    def turn(self, running: np.ndarray) -> np.ndarray:
        """Those of the running threads that go on."""
        return running

    def landing(self, count: int) -> np.ndarray:
        """Which of what is in flight lands now, while threads can go on."""
        return np.arange(0)

    def next_landing(self, count: int) -> int:
        """What lands when no thread can go on."""
        return 0

    def gives_up(self) -> bool:
        """Whether a try_wait returns before its phase has completed."""
        return False


class Seeded(Lockstep):
    """Warps (warpgroups, where there is wgmma) or whole CTAs, by priorities that change now and then; what is in flight
    lands at any time, in any order.

    A thread may get far ahead of the others, up to where it has to wait.
    """

    def __init__(self, machine, seed: int):
        self.rng = np.random.default_rng(seed)
        size = self.rng.choice([max(LANES, *machine.together), machine.per_cta])
        self.unit = np.arange(machine.threads) // size
        self.priority = self.rng.permutation(self.unit[-1] + 1).astype(float)[self.unit]
        self.change = self.rng.choice([0.02, 0.3])
        self.haste = self.rng.choice([0, 0.02, 0.3, 1])

    def leaders(self, program):
        meeting = [i for i, instruction in enumerate(program.instructions)
                   if any(word in instruction.opcode for word in ("shared", "cluster", "bar.", "barrier"))]
        return program.leaders | frozenset(meeting)

    def turn(self, running):
        first = np.where(running, self.priority, -np.inf).argmax()
        mine = self.unit == self.unit[first]
        if self.rng.random() < self.change:
            self.priority[mine] = self.priority.min() - 1
        return running & mine

    def landing(self, count):
        return np.flatnonzero(self.rng.random(count) < self.haste)

    def next_landing(self, count):
        return int(self.rng.integers(count))

    def gives_up(self):
        return self.rng.random() < 0.5
