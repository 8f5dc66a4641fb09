"""PTX text to a list of instructions (ISA, chapter 4): registers are numbered, labels are positions.

Operands are tuples, by their first element:

    ("reg", slot)                 a register
    ("imm", bits)                 a constant; of floating-point constants the bits
    ("special", name)             %tid.x and the like
    ("symbol", name)              a variable in shared memory, or a kernel parameter
    ("mem", base, offset)         [base + offset]; base is an operand
    ("tensor", base, coordinates) [map, {c0, c1}]
    ("vector", operands)          {a, b}
    ("label", position)
    ("sink",)                     _, a result that nobody wants
"""

import dataclasses
import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"([$A-Za-z_][\w$]*):")
_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_SPECIALS = {f"%{name}{axis}" for name in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid",
                                           "cluster_nctaid") for axis in (".x", ".y", ".z")} | {
    "%cluster_ctarank", "%cluster_nctarank", "%laneid", "%warpid", "%clock", "%clock64", "%smid", "%globaltimer"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`predicate` is None or (slot, whether it is negated); `where` is file:line of the kernel's source."""

    opcode: str
    operands: tuple
    predicate: tuple[int, bool] | None
    text: str
    where: str


@dataclasses.dataclass
class Program:
    """A kernel.

    Attributes:
      parameters: {name: bytes}, in order.
      types: of the registers, by slot: "b32", "pred", ..
      leaders: positions that a jump may lead to.
      shared: {name: (bytes, alignment)}; the one with 0 bytes is the dynamic part.
    """

    name: str
    parameters: dict[str, int]
    instructions: list[Instruction]
    types: list[str]
    leaders: frozenset[int]
    shared: dict[str, tuple[int, int]]


def parse(text: str) -> Program:
    """The first kernel of a module."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE))
    text = _COMMENT.sub("", text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*\{", text, re.DOTALL)
    parameters = {}
    for line in entry[2].split(","):
        if declared := re.search(r"\.(?:\w)(\d+)\b.*?([\w$]+)(?:\[(\d+)\])?\s*$", line.strip()):
            bits, name, count = declared.groups()
            parameters[name] = int(bits) // 8 * int(count or 1)
    shared = {}
    for align, bits, name, count in re.findall(
            r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;", text):
        shared[name] = (int(bits) // 8 * int(count) if count else 0, int(align or 16))
    body = _Body(text[entry.end():], files)
    return Program(entry[1], parameters, body.instructions(), body.types, frozenset(body.labels.values()), shared)


class _Body:
    def __init__(self, text, files):
        self.text, self.files = text, files
        self.types, self.labels, self.declared, self.slots = [], {}, {}, {}
        self.scopes, self.count = [0], 0

    def instructions(self):
        found, where, mask = [], "", None
        for kind, statement in self._statements():
            if kind == "loc":
                number, line = statement.split()[1:3]
                where = f"{self.files.get(number, number).rpartition('/')[2]}:{line}" if line != "0" else where
            elif kind == "label":
                self.labels[self.scopes[-1], statement] = len(found)
            elif statement.startswith(".reg"):
                self._declare(statement)
            elif used := re.match(r'\.pragma "used_bytes_mask (\w+)"', statement):
                mask = int(used[1], 0)
            elif not statement.startswith("."):
                # Registers belong to the scope at hand; labels may come later.
                opcode, operands, *rest = self._instruction(statement)
                if mask is not None:
                    operands, mask = (_used(opcode, operands[0], mask), *operands[1:]), None
                found.append((opcode, operands, *rest, tuple(self.scopes), where))
        return [Instruction(opcode, tuple(self._label(o, scopes) for o in operands), predicate, text, where)
                for opcode, operands, predicate, text, scopes, where in found]

    def _statements(self):
        """("loc" | "label" | "code", text); keeps the stack of scopes."""
        at, text = 0, self.text
        while True:
            at = re.compile(r"\s*").match(text, at).end()
            if at == len(text):
                return
            if text[at] == "{":
                self.count += 1
                self.scopes.append(self.count)
                at += 1
            elif text[at] == "}":
                self.scopes.pop()
                at += 1
                if not self.scopes:
                    return
            elif text.startswith((".loc", ".file"), at):
                end = text.index("\n", at)
                if text.startswith(".loc", at):
                    yield "loc", text[at:end]
                at = end
            elif text[at] == ";":
                at += 1
            elif label := _LABEL.match(text, at):
                yield "label", label[1]
                at = label.end()
            else:
                end = text.index(";", at)
                yield "code", " ".join(text[at:end].split())
                at = end + 1

    def _declare(self, statement):
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement).groups()
        for name in names.split(","):
            name = name.strip().partition("<")[0]
            self.declared[self.scopes[-1], name] = kind

    def _register(self, name):
        prefix = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            for key in ((scope, name), (scope, prefix)):
                if key in self.declared:
                    slot = (scope, name)
                    if slot not in self.slots:
                        self.slots[slot] = len(self.types)
                        self.types.append(self.declared[key])
                    return self.slots[slot]
        return None

    def _instruction(self, text):
        predicate, rest = None, text
        if text.startswith("@"):
            mark, rest = text.split(None, 1)
            predicate = (self._register(mark.lstrip("@!")), mark.startswith("@!"))
        opcode, _, rest = rest.partition(" ")
        return opcode, tuple(self._operand(o) for o in _split(rest)), predicate, text

    def _operand(self, text):
        if text == "_":
            return ("sink",)
        if text.startswith("{"):
            return ("vector", tuple(self._operand(o) for o in _split(text[1:-1])))
        if text.startswith("["):
            base, *rest = _split(text[1:-1])
            if rest:
                return ("tensor", self._operand(base), self._operand(rest[0]))
            base, sign, offset = re.match(r"([^+]+?)\s*(?:([+])\s*(-?\w+))?$", base).groups()
            return ("mem", self._operand(base), int(offset, 0) if sign else 0)
        if text in _SPECIALS:
            return ("special", text[1:])
        if number := _FLOAT.match(text):
            return ("imm", int(number[2], 16))
        if _NUMBER.match(text):
            return ("imm", int(text.rstrip("U"), 0))
        if "|" in text:
            return ("vector", tuple(self._operand(o.strip()) for o in text.split("|")))
        negated = text.startswith("!")
        slot = self._register(text.lstrip("!"))
        if slot is None:
            return ("symbol", text)
        return ("not", slot) if negated else ("reg", slot)

    def _label(self, operand, scopes):
        if operand[0] == "symbol":
            for scope in reversed(scopes):
                if (scope, operand[1]) in self.labels:
                    return ("label", self.labels[scope, operand[1]])
        return operand


def _used(opcode, target, mask):
    """The target of a load, with sinks for those elements of a vector that nobody looks at; mask: of its bytes."""
    if target[0] != "vector":
        return target
    size = int(re.search(r"\d+$", opcode)[0]) // 8
    return ("vector", tuple(e if mask >> size * i & (1 << size) - 1 else ("sink",) for i, e in enumerate(target[1])))


def _split(text):
    """At commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [p for p in (*parts, text[start:].strip()) if p]
