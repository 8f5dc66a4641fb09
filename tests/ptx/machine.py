"""Executes a program for all threads of a launch at once: every register is an array with an element per thread.

Threads that are at the same instruction run together; of several groups the one at the lowest position does, up to the
next label or jump. In structured code that brings lanes together again where their paths meet (as hardware does), and
a group never waits for one behind it. Threads that wait for a barrier are left out until it opens. Copies in flight
land when no thread can go on, which is as late as possible: a read that does not wait for them finds poison. With a
seed, some warps run and others do not, and copies land at any time: see `schedule`.
"""

import numpy as np

from ptx import arithmetic, clusters, copies, data, warp
from ptx.memory import PARAMETERS, UNSIGNED, AccessError, Buffer, Memory
from ptx.parse import Program
from ptx.races import Races
from ptx.schedule import Lockstep, Seeded

LANES = 32
SHARED_BASE = 1024  # the driver keeps the first KiB
_TYPES = {"pred": np.dtype(bool), "b8": UNSIGNED[1], "b16": UNSIGNED[2], "b32": UNSIGNED[4], "b64": UNSIGNED[8],
          "u16": UNSIGNED[2], "u32": UNSIGNED[4], "u64": UNSIGNED[8], "s32": UNSIGNED[4], "s64": UNSIGNED[8],
          "s16": UNSIGNED[2], "f16": UNSIGNED[2], "f32": UNSIGNED[4], "f64": UNSIGNED[8]}
RUNNING, WAITING, APART, DONE = range(4)  # APART: at an instruction of whole warps or more, without the other lanes
OPERATIONS = {**arithmetic.OPERATIONS, **data.OPERATIONS, **warp.OPERATIONS, **copies.OPERATIONS,
              **clusters.OPERATIONS}


class MachineError(Exception):
    """What the machine cannot do, or a program that cannot go on."""


class Machine:
    """One launch.

    Args:
      program: see `parse`.
      parameters: value of each parameter: an address, or a list of tensor maps.
      buffers: operands.
      grid, block: CTAs, threads, three numbers each.
      shared_bytes: of dynamic shared memory.
      cluster: CTAs, three numbers.
      seed: of a random schedule; None runs threads side by side.
    """

    def __init__(self, program: Program, parameters, buffers, grid, block, shared_bytes: int, cluster=(1, 1, 1),
                 seed: int | None = None):
        self.launch = program, parameters, buffers, grid, block, shared_bytes, cluster
        self.program, self.grid, self.block = program, grid, block
        self.per_cta, self.ctas = int(np.prod(block)), int(np.prod(grid))
        self.threads = self.per_cta * self.ctas
        self.memory = Memory(buffers, self.ctas, SHARED_BASE + shared_bytes)
        self.registers = [None] * len(program.types)
        self.dtypes = [_TYPES[t] for t in program.types]
        self.positions = np.zeros(self.threads, np.int32)
        self.states = np.zeros(self.threads, np.int8)
        self.held = np.zeros(self.threads, np.int32)  # where a thread that does not run waits
        self.cta = np.arange(self.threads) // self.per_cta
        self.thread = np.arange(self.threads) % self.per_cta
        self.clusters = self.memory.clusters = clusters.Clusters(self, cluster)
        self.symbols, self.maps, self.constants = {}, {}, {}
        self._place(parameters)
        self.specials = self._specials()
        self.code = [_decode(i) for i in program.instructions]
        self.together = [warp.together(i.opcode) for i in program.instructions]
        self.schedule = Lockstep() if seed is None else Seeded(self, seed)
        self.leaders = self.schedule.leaders(program)
        self.waiting = {}  # (cta, barrier): lanes; see _wait
        self.copies = copies.Copies(self)
        self.lanes, self.here = None, 0
        self.executed = 0
        self.races = self.memory.races = Races(self, len(self.memory.shared.data) // 4)

    def _place(self, parameters):
        """Addresses of parameters and shared variables."""
        at = PARAMETERS
        self.parameter_values = {}
        for (name, size), value in zip(self.program.parameters.items(), parameters, strict=True):
            self.symbols[name] = at
            if isinstance(value, list):
                self.maps |= {at + 128 * i: tensor_map for i, tensor_map in enumerate(value)}
            else:
                self.parameter_values[name] = value
            at += -(-size // 128) * 128
        at = SHARED_BASE
        for name, (size, align) in sorted(self.program.shared.items(), key=lambda item: item[1][0] == 0):
            at = -(-at // align) * align
            self.symbols[name] = at
            at += size

    def _specials(self):
        groups, split = self.clusters, clusters.split
        found = {"laneid": self.thread % LANES, "warpid": self.thread // LANES, "clock": np.zeros(1), "smid": self.cta,
                 "globaltimer": np.zeros(1), "clock64": np.zeros(1), "cluster_ctarank": groups.rank[self.cta],
                 "cluster_nctarank": np.array([groups.size])}
        vectors = {"tid": split(self.thread, self.block), "ctaid": split(self.cta, self.grid),
                   "clusterid": [p[self.cta] for p in groups.position],
                   "cluster_ctaid": [p[self.cta] for p in groups.place]}
        vectors |= {name: [np.array([n]) for n in sizes] for name, sizes in (
            ("ntid", self.block), ("nctaid", self.grid), ("nclusterid", groups.count),
            ("cluster_nctaid", groups.shape))}
        for name, values in vectors.items():
            found |= {f"{name}.{axis}": value for axis, value in zip("xyz", values, strict=True)}
        return {name: np.asarray(value).astype(np.uint32) for name, value in found.items()}

    # ------------------------------------------------------------------------------------------------- operands

    def read(self, operand, dtype) -> np.ndarray:
        """Of the lanes at hand; constants have one element."""
        kind, value = operand[:2]
        if kind == "reg":
            array = self.registers[value]
            if array is None:
                raise MachineError(f"register {value} is read before it is written")
            if self.lanes is not None:
                array = array[self.lanes]
            if array.dtype == dtype:
                return array
            if array.dtype.itemsize == dtype.itemsize:
                return array.view(dtype)
            return array.astype(UNSIGNED[dtype.itemsize]).view(dtype)  # the low bits
        if kind == "imm" or kind == "symbol":
            key = value, dtype
            if key not in self.constants:
                if kind == "symbol":
                    value = self.symbols[value]
                bits = value % (1 << (8 * dtype.itemsize))
                self.constants[key] = (np.array([bool(value)]) if dtype.kind == "b" else
                                       np.array([bits], UNSIGNED[dtype.itemsize]).view(dtype))
            return self.constants[key]
        if kind == "not":
            return ~self.read(("reg", value), dtype)
        if kind == "special":
            array = self.specials[value]
            if self.lanes is not None and len(array) > 1:
                array = array[self.lanes]
            return array.astype(UNSIGNED[dtype.itemsize]).view(dtype)
        raise MachineError(f"operand {operand}")

    def write(self, operand, value: np.ndarray) -> None:
        if operand[0] == "sink":
            return
        slot = operand[1]
        dtype = self.dtypes[slot]
        if value.dtype != dtype:
            if value.dtype.itemsize == dtype.itemsize:
                value = value.view(dtype)
            elif value.dtype.kind == "i":  # sign extension
                value = value.astype(f"i{dtype.itemsize}").view(dtype)
            else:
                value = value.view(UNSIGNED[value.dtype.itemsize]).astype(dtype)
        if self.lanes is None:
            if len(value) != self.threads:
                value = np.full(self.threads, value[0])
            self.registers[slot] = value
            return
        old = self.registers[slot]
        # A new array: others may refer to the old one.
        new = np.zeros(self.threads, dtype) if old is None else old.copy()
        new[self.lanes] = value
        self.registers[slot] = new

    def address(self, operand) -> np.ndarray:
        """uint64 of a ("mem", base, offset), an element per lane."""
        base, offset = operand[1:3]
        if base[0] == "reg" and self.dtypes[base[1]].itemsize == 4:
            address = self.read(base, UNSIGNED[4]) + np.uint32(offset % (1 << 32))
            address = address.astype(np.uint64)
        else:
            address = self.read(base, UNSIGNED[8]) + np.uint64(offset % (1 << 64))
        return address if len(address) == self.active else np.full(self.active, address[0])

    @property
    def active(self) -> int:
        return self.threads if self.lanes is None else len(self.lanes)

    def mine(self, array: np.ndarray) -> np.ndarray:
        """What the lanes at hand have of an array with an element per thread."""
        return array if self.lanes is None else array[self.lanes]

    @property
    def numbers(self) -> np.ndarray:
        return np.arange(self.threads) if self.lanes is None else self.lanes

    @property
    def where(self) -> str:
        """The instruction at hand."""
        return self.text(self.here)

    def text(self, position: int) -> str:
        instruction = self.program.instructions[position]
        return f"{instruction.where}: {instruction.text[:100]}"

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        with np.errstate(all="ignore"):
            try:
                while self._step():
                    pass
            except (MachineError, AccessError):
                raise
            except Exception as error:
                raise MachineError(f"{self.where}: {type(error).__name__}: {error}") from error

    def anew(self, seed: int | None) -> "Machine":
        """The same launch by another schedule, to be run; what it writes is new."""
        program, parameters, buffers, *rest = self.launch
        buffers = [Buffer(b.name, np.zeros_like(b.values), written=False) if b.writable else b for b in buffers]
        return Machine(program, parameters, buffers, *rest, seed)

    def _step(self) -> bool:
        self.copies.land(self.schedule.landing(len(self.copies.flying)))
        running = self.states == RUNNING
        if not running.any():
            if self.copies.flying:
                self.copies.land([self.schedule.next_landing(len(self.copies.flying))])
                return True
            if not (self.states == DONE).all():
                stuck = {self.program.instructions[p].text: int(n) for p, n in zip(
                    *np.unique(self.held[self.states != DONE], return_counts=True), strict=True)}
                barriers = "; ".join(self.copies.describe() + self.clusters.describe())
                raise MachineError(f"deadlock: threads wait for ever at {stuck} {barriers}")
            return False
        positions = np.where(self.schedule.turn(running), self.positions, np.iinfo(np.int32).max)
        here = int(positions.min())
        lanes = np.flatnonzero(positions == here)
        group = None if len(lanes) == self.threads else lanes
        leaders, end = self.leaders, len(self.code)
        while True:
            if here >= end:
                raise MachineError("the program ends without ret")
            self.here, self.lanes = here, group
            if self.together[here] and group is not None and not self._meet(here, group, self.together[here]):
                return True
            run, predicate = self.code[here]
            self.executed += 1
            if predicate is not None:
                taken = self.registers[predicate[0]] if group is None else self.registers[predicate[0]][group]
                taken = ~taken if predicate[1] else taken
                if not taken.all():
                    self.lanes = np.flatnonzero(taken) if group is None else group[taken]
                if self.active == 0:
                    here += 1
                    if here in leaders:
                        break
                    continue
            if run(self):  # a jump, or a wait: it has set the positions of its own lanes
                if predicate is not None and self.active < (self.threads if group is None else len(group)):
                    rest = np.ones(self.threads, bool)
                    rest[self.numbers] = False
                    rest = np.flatnonzero(rest) if group is None else group[rest[group]]
                    self.positions[rest] = here + 1
                return True
            here += 1
            if here in leaders:
                break
        self.lanes = group
        self.positions[slice(None) if group is None else group] = here
        return True

    def _meet(self, here: int, lanes, size: int) -> bool:
        """Whether these are whole groups of `size`. If not, those that are not wait for the rest of their group."""
        groups, counts = np.unique(lanes // size, return_counts=True)
        if (counts == size).all():
            return True
        self.positions[lanes] = here
        apart = lanes[np.isin(lanes // size, groups[counts < size])]
        self.states[apart], self.held[apart] = APART, here
        for number in groups[counts < size]:
            mine = slice(number * size, (number + 1) * size)
            if (self.states[mine] == APART).all() and (self.positions[mine] == here).all():
                self.states[mine] = RUNNING
        return False

    def jump(self, position: int) -> bool:
        self.positions[self.numbers] = position
        return True

    def finish(self) -> bool:
        self.states[self.numbers] = DONE
        self.clusters.leave(self.numbers)
        return True

    def ended(self, threads) -> np.ndarray:
        return self.states[threads] == DONE

    def wait(self, lanes, position: int) -> bool:
        """These lanes go on at `position` once `release` names them."""
        self.positions[lanes] = position
        self.states[lanes], self.held[lanes] = WAITING, self.here
        return True

    def release(self, lanes) -> None:
        self.states[lanes] = RUNNING


def _decode(instruction):
    name, *modifiers = instruction.opcode.split(".")
    operation = OPERATIONS.get(name)
    if operation is None:
        raise MachineError(f"{instruction.where}: unknown instruction {instruction.text}")
    return operation(modifiers, instruction.operands), instruction.predicate
