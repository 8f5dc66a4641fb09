"""Finds words of shared memory that two warps use, one of them to write, without a barrier in between.

It may miss some: any barrier that a thread passes counts for it as one with all threads, of several warps that read a
word only the last is known, copies and wgmma do not count. Writing what is there already is no race.
"""

import numpy as np

LANES = 32


class Races:
    """`found`: {(what, instruction, earlier instruction): words}."""

    def __init__(self, machine, words: int):
        self.machine, self.found = machine, {}
        self.passed = np.zeros(machine.threads, np.int64)  # when each thread passed its last barrier
        # Per word, of its last use: the warp, or -1 of none or several at once; when; the instruction.
        self.uses = {kind: np.full((3, words), -1, np.int64) for kind in ("write", "read")}

    def barrier(self, threads) -> None:
        self.passed[threads] = self.machine.executed + 1

    def forget(self, words) -> None:
        for use in self.uses.values():
            use[0, words] = -1

    def use(self, kind: str, words: np.ndarray) -> None:
        """The lanes at hand read or write words [lanes, n]."""
        m = self.machine
        if len(words) != m.active:
            return
        warps = np.broadcast_to((m.numbers // LANES)[:, None], words.shape)
        passed = self.passed[m.numbers][:, None]
        for other in ("write",) if kind == "read" else ("write", "read"):
            warp, time, position = self.uses[other][:, words]
            bad = (warp >= 0) & (warp != warps) & (time >= passed)
            if bad.any():
                key = f"{kind} after {other}", m.where, m.text(int(position[bad][0]))
                self.found[key] = self.found.get(key, 0) + int(bad.sum())
        own = self.uses[kind]
        own[0, words], own[1, words], own[2, words] = warps, m.executed, m.here
        own[0, words[own[0, words] != warps]] = -1
