"""The host side of a Mosaic GPU kernel, from the last module that `MOSAIC_GPU_DUMP_TO` leaves in its log of passes.

That function, straight-line code in MLIR's LLVM dialect, loads the operands' addresses, fills tensor maps and passes
the grid, the block, the size of shared memory and the kernel's parameters on; jax 0.11 to a launch, 0.12 to a
description of one, with the same arguments in front.
"""

import dataclasses
import re

from ptx.copies import TensorMap

_BITS = {0: 4, 1: 8, 2: 16, 3: 32, 4: 64, 5: 16, 6: 32, 7: 16, 9: 32, 10: 64}  # by the codes of jax's launch_context
_SIZES = {"ptr": 8, "i64": 8, "i32": 4, "i8": 1}
_FIELD = 1 << 20  # apart, of a struct: larger than any of them
_LAUNCHES = ("mosaic_gpu_build_kernel_spec", "mosaic_gpu_launch_kernel")


@dataclasses.dataclass(frozen=True)
class Launch:
    """`parameters`: an address, or a list of tensor maps, each."""

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: list


def launch_of(log: str, addresses: list[int], parameters: int) -> Launch:
    """Runs the host function of a log of passes.

    Args:
      addresses: of the kernel's operands, then of its results.
      parameters: how many the kernel has.
    """
    module = log[log.rindex("IR Dump Before ReconcileUnrealizedCastsPass"):]
    function = re.search(r"llvm\.func @\w+_mosaic_gpu\((.*?)\) (?:-> i32 )?attributes.*?\{(?: loc.*)?\n(.*?)\n  \}",
                         module, re.DOTALL)
    buffers = re.findall(r"(%[\w.#-]+): !llvm\.ptr", function[1])[-1]
    return _Host(buffers, addresses).run(function[2], parameters)


class _Host:
    """Values are integers, pointers ("object", offset) or, of structs, {path: value}."""

    def __init__(self, buffers, addresses):
        self.values = {buffers: ("operands", 0)}
        self.memory = {("operands", 8 * i): ("address", a) for i, a in enumerate(addresses)}

    def run(self, body, parameters):
        for line in body.splitlines():
            line = re.sub(r" loc\(.*", "", line).strip()
            target, code = re.fullmatch(r"(?:(%[\w.#-]+) = )?(.*)", line).groups()
            name = re.match(r"[\w.]*", code)[0]
            rest = code[len(name):]
            used = re.findall(r"%[\w.#-]+", rest.partition(" : ")[0])
            if name == "llvm.call":
                callee = re.search(r"@(\w+)", rest)[1]
                arguments = [self.values.get(v) for v in used]
                if callee in _LAUNCHES:
                    numbers = arguments[1:11]
                    return Launch(tuple(numbers[:3]), tuple(n or 1 for n in numbers[3:6]), tuple(numbers[6:9]),
                                  numbers[9], self._parameters(arguments, callee, parameters))
                if callee == "mosaic_gpu_init_tma_desc":
                    self._tensor_map(*arguments)
                continue
            value = self._evaluate(name, rest, used, target)
            if target:
                self.values[target] = value
        raise ValueError("the host function launches nothing")

    def _evaluate(self, name, rest, used, target):
        values = [self.values.get(v) for v in used]
        match name.removeprefix("llvm."):
            case "mlir.constant":
                return int(re.search(r"\((-?\d+)", rest)[1])
            case "mlir.undef" | "mlir.poison" | "mlir.zero":
                return {}
            case "alloca":
                return (target, 0)
            case "load":
                return self.memory.get(values[0], ("whole", values[0]))
            case "store":
                self.memory[values[1]] = values[0]
            case "getelementptr":
                indices = re.search(r"\[([^\]]*)\]", rest)[1].split(",")
                steps = [self.values[i.strip()] if "%" in i else int(i) for i in indices]
                kind = rest.rpartition(", ")[2] if "struct" not in rest else "struct"
                step = _FIELD * steps[1] if kind == "struct" else steps[0] * _SIZES[kind.strip().removeprefix("!llvm.")]
                return (values[0][0], values[0][1] + step)
            case "insertvalue":
                return values[1] | {_path(rest): values[0]}
            case "extractvalue":
                return values[0][_path(rest)]
            case "add" | "mul" | "sub":
                a, b = values
                pointer = next((v for v in values if isinstance(v, tuple)), None)
                if pointer is not None:
                    return (pointer[0], pointer[1] + next(v for v in values if not isinstance(v, tuple)))
                return {"add": a + b, "mul": a * b, "sub": a - b}[name.removeprefix("llvm.")]
            case "ptrtoint" | "inttoptr" | "trunc" | "builtin.unrealized_conversion_cast" | "sext" | "zext":
                return values[0]
            case "return":
                return None
            case _:
                raise ValueError(f"unknown operation of the host: {name} {rest}")
        return None

    def _tensor_map(self, place, base, code, rank, sizes, strides, swizzle, box):
        def array(pointer):
            return tuple(self.memory[pointer[0], pointer[1] + 8 * i] for i in range(rank))

        assert base[0] == "address", base
        self.memory["map", place] = TensorMap(base[1], _BITS[code] // 8, array(sizes), array(strides), array(box),
                                              swizzle)

    def _parameters(self, arguments, callee, count):
        table = arguments[-1] if callee == "mosaic_gpu_launch_kernel" else arguments[13]
        found = []
        for i in range(count):
            place = self.memory[table[0], table[1] + 8 * i]
            value = self.memory.get(place)
            if isinstance(value, tuple) and value[0] == "address":
                found.append(value[1])
                continue
            if isinstance(value, tuple) and value[0] == "whole":
                place = value[1]
            maps = []
            while (tensor_map := self.memory.get(("map", (place[0], place[1] + 128 * len(maps))))) is not None:
                maps.append(tensor_map)
            found.append(maps)
        return found


def _path(rest):
    return re.search(r"\[([\d, ]+)\]", rest.partition(" : ")[0])[1].replace(" ", "")
