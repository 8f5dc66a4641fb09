"""Which part of a decode step a kernel belongs to, from its name and from the named scopes in the compiled program."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax_warp_decode.measure.timing import Event

PARTS = ("router", "gate_up", "down", "experts", "attention", "projections", "norm", "head", "other", "gaps")

# Kernels that say themselves what they are, also where a profiler does not know the operation they come from.
_BY_KERNEL = (
    (re.compile(r"router"), "router"),
    (re.compile(r"gate_up"), "gate_up"),
    (re.compile(r"(moe|shared)\w*_down"), "down"),
    (re.compile(r"head_dense_rows"), "head"),
    (re.compile(r"dense_rows"), "projections"),
    (re.compile(r"rms_norm"), "norm"),
    (re.compile(r"mha_|fmha|flash|sdpa|decode_attention"), "attention"),
    (re.compile(r"memcpy|memset", re.IGNORECASE), "other"),
)
# Named scopes of models.decode_step, the innermost first.
_BY_SCOPE = (
    ("router", "router"), ("gate_up", "gate_up"), ("down", "down"), ("experts", "experts"), ("qkv", "projections"),
    ("output", "projections"), ("attention", "attention"), ("norm", "norm"), ("head", "head"),
)
# Library kernels for which XLA has no name of its own.
_BY_LIBRARY = (
    (re.compile(r"mosaic_gpu|ragged|grouped|triton"), "experts"),
    (re.compile(r"nvjet|gemm|gemv|cublas|cutlass|splitK", re.IGNORECASE), "projections"),
)


def kernel_scopes(hlo: str) -> dict[str, str]:
    """Name of a kernel -> the scopes of its operation, of a compiled program as text (`Compiled.as_text()`).

    Example:
      >>> from jax_warp_decode.measure.parts import kernel_scopes
      >>> kernel_scopes('  %add_fusion.2 = f32[8]{0} fusion(%a), metadata={op_name="jit(f)/norm/add" id=1}')
      {'add_fusion_2': 'jit(f)/norm/add'}
    """
    scopes: dict[str, str] = {}
    for name, rest in re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$", hlo, re.MULTILINE):
        op_name = re.search(r'op_name="([^"]*)"', rest)
        if op_name and re.search(r"\b(fusion|custom-call|copy|sort|scatter|dot|reduce)\(", rest):
            other = re.search(r'deduplicated_name="([^"]*)"', rest)
            for each in (name, *(other.groups() if other else ())):
                scopes.setdefault(re.sub(r"[.-]", "_", each), op_name[1])
    return scopes


def stages(hlo: str, scope: str) -> tuple[int, int]:
    """Operations of a compiled program under a named scope, and the bytes that they write to memory.

    Example:
      >>> from jax_warp_decode.measure.parts import stages
      >>> stages('  %a.1 = (f32[8,4]{1,0}, s32[]) fusion(%x), metadata={op_name="jit(f)/experts/add"}', "experts")
      (1, 132)
    """
    count = total = 0
    inside = False
    for line in hlo.splitlines():
        if line.rstrip().endswith("{") and " = " not in line:
            inside = "fused_" in line or "_computation" in line.split("(")[0]  # what a kernel does, not what it writes
            continue
        found = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) (?:fusion|custom-call|copy|sort|scatter)\(", line)
        op_name = re.search(r'op_name="([^"]*)"', line)
        if found and not inside and op_name and scope in op_name[1].split("/"):
            count += 1
            total += sum(_nbytes(*shape) for shape in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", found[1]))
    return count, total


def _nbytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(n) for n in dims.split(",") if n) * max(bits // 8, 1)


def part_of(kernel: str, scopes: dict[str, str]) -> str:
    """One of `PARTS` for the name of a kernel.

    Example:
      >>> from jax_warp_decode.measure.parts import part_of
      >>> part_of("moe_gate_up_3d_batched_mosaic_gpu_kernel", {}), part_of("add_2", {"add_2": "jit(f)/norm/add"})
      ('gate_up', 'norm')
    """
    for pattern, part in _BY_KERNEL:
        if pattern.search(kernel):
            return part
    scope = scopes.get(kernel) or scopes.get(re.sub(r"_\d+$", "", kernel), "")
    steps = set(scope.split("/"))
    for name, part in _BY_SCOPE:
        if name in steps:
            return part
    if not scope:
        for pattern, part in _BY_LIBRARY:
            if pattern.search(kernel):
                return part
    return "other"


@dataclasses.dataclass(frozen=True)
class Part:
    """What one part of a step costs.

    Attributes:
      us: time in its kernels.
      kernels: how many it launches.
      names: its kernels, name -> us, longest first.
    """

    us: float
    kernels: float
    names: dict[str, float]


def split_parts(events: Sequence[Event], scopes: dict[str, str], steps: int) -> dict[str, Part]:
    """Time and launches of every part, per step, of the events of `steps` steps; "gaps" is when nothing ran."""
    us: dict[str, float] = collections.defaultdict(float)
    count: dict[str, float] = collections.defaultdict(float)
    names: dict[str, Any] = collections.defaultdict(collections.Counter)
    for event in events:
        part, time = part_of(event.name, scopes), (event.end_ns - event.start_ns) / 1e3 / steps
        us[part] += time
        count[part] += 1 / steps
        names[part][event.name] += time
    us["gaps"] = span_us(events) / steps - busy_us(events) / steps
    return {part: Part(us[part], count[part], dict(names[part].most_common()))
            for part in PARTS if part in us}


def step_bytes(weights: Any, *, batch: int, context: int, unique: float, expert_bytes: float,
               row_bytes: int) -> dict[str, float]:
    """Bytes that a decode step must read, by part.

    Args:
      weights: `DecoderWeights`.
      batch, context: rows, and cached positions that each of them sees.
      unique: experts that a layer uses, on average.
      expert_bytes: of one expert of one layer.
      row_bytes: keys and values of one position of one layer.
    """
    layers = weights.layers
    return dict(
        router=sum(layer.w_router.nbytes for layer in layers),
        gate_up=len(layers) * unique * expert_bytes * 2 / 3, down=len(layers) * unique * expert_bytes / 3,
        attention=len(layers) * batch * context * row_bytes,
        projections=sum(layer.w_qkv.nbytes + layer.w_o.nbytes for layer in layers), head=weights.head.nbytes)


def span_us(events: Sequence[Event]) -> float:
    """From the first start to the last end."""
    return (max(e.end_ns for e in events) - min(e.start_ns for e in events)) / 1e3


def busy_us(events: Iterable[Event]) -> float:
    """Time in which at least one kernel ran. Events are in order of their start."""
    busy, until = 0.0, float("-inf")
    for event in events:
        busy += max(0.0, event.end_ns - max(event.start_ns, until))
        until = max(until, event.end_ns)
    return busy / 1e3
