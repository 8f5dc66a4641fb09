"""Compiles kernels to SASS on a machine without a GPU and reports what the compiler made of them.

    python -m tests.aot --arch sm_90a --arch sm_100a --arch sm_103a [--filter NAME] [module:function ...]

Cases come from `aot_cases:aot_cases` unless named otherwise: an iterable of (name, fn, args, limits) with `args` a
tuple of pytrees of `jax.ShapeDtypeStruct` and `limits` a dict of fields of `Limits`. One line is printed per Mosaic GPU
kernel. Exit code 1: a limit is broken or a case did not compile; 2: the tools are missing.

How it works: XLA compiles for a described device, and the Mosaic GPU custom call is compiled with it; its PTX is caught
and taken through ptxas and nvdisasm once more, with the options that XLA uses. The process of an architecture compiles
all its cases (the compiler keeps the first architecture it saw), the architectures run side by side. Instructions are
counted as they stand in the SASS, not as they are executed. An equal kernel in a later case is compiled once and
reported with the first.
"""

import argparse
import collections
import ctypes
import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from importlib import metadata

ARCHS = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
CASES = "aot_cases:aot_cases"
# Registers and instructions depend on these versions.
PINNED = {"nvidia-cuda-nvcc": "13.0.88", "nvidia-nvvm": "13.0.88", "nvidia-cuda-nvdisasm": "13.5.37"}
PINNED_TO_JAX = ("jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")

# What XLA asks about a device that is not there. Kernels depend on the compute capability alone; what XLA fuses, on
# the rest too.
DEVICE = """
platform_name: "CUDA"
gpu_device_info {{
  cuda_compute_capability {{ major: {} minor: {} }}
  core_count: 132  fpus_per_core: 128  threads_per_warp: 32  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  device_memory_size: 140000000000
}}
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What every kernel of a case must keep to. The defaults are those of warp decode; spills are never allowed."""

    max_registers: int = 255
    max_narrow_loads: int | None = None  # loads from global memory of less than 16 bytes
    min_wide_loads: int = 1  # of 16 bytes or more
    min_shuffles: int = 1
    max_barriers: int = 1  # Mosaic GPU emits one at kernel entry
    max_shared: int = 0  # instructions that touch shared memory
    max_temp_bytes: int | None = None  # device memory that XLA allocates for the whole case


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled kernel: registers per thread, bytes spilled, and instruction counts by kind."""

    name: str
    registers: int
    spill_bytes: int
    wide_loads: int
    narrow_loads: int
    bulk_copies: int
    shuffles: int
    barriers: int
    shared: int

    def problems(self, limits: Limits) -> list[str]:
        at_most = [
            ("bytes spilled", self.spill_bytes, 0),
            ("registers", self.registers, limits.max_registers),
            ("narrow loads", self.narrow_loads, limits.max_narrow_loads),
            ("barriers", self.barriers, limits.max_barriers),
            ("shared-memory instructions", self.shared, limits.max_shared),
        ]
        at_least = [
            ("wide loads", self.wide_loads, limits.min_wide_loads),
            ("shuffles", self.shuffles, limits.min_shuffles),
        ]
        found = [f"{n} {what}, at most {most}" for what, n, most in at_most if most is not None and n > most]
        found += [f"{n} {what}, at least {least}" for what, n, least in at_least if n < least]
        return [f"{self.name}: {problem}" for problem in found]


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of one case on one architecture."""

    arch: str
    case: str
    limits: Limits
    error: str  # empty if it compiled
    calls: int  # Mosaic GPU calls in the lowered module
    temp_bytes: int
    kernels: tuple[Kernel, ...]  # fewer than calls if an earlier case has compiled an equal one

    @property
    def problems(self) -> list[str]:
        if self.error:
            return [self.error]
        if not self.calls:
            return ["no Mosaic GPU kernel in the lowered module"]
        found = [p for kernel in self.kernels for p in kernel.problems(self.limits)]
        if self.limits.max_temp_bytes is not None and self.temp_bytes > self.limits.max_temp_bytes:
            found.append(f"{self.temp_bytes} bytes of temporaries, at most {self.limits.max_temp_bytes}")
        return found


def missing_tools() -> str:
    """Why nothing can be compiled here, or an empty string: each pinned package must be there in its version."""
    pins = PINNED | dict.fromkeys(PINNED_TO_JAX, metadata.version("jax"))
    wrong = []
    for name, version in pins.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "missing"
        if found != version:
            wrong.append(f"{name} is {found}, pinned to {version}")
    return "; ".join(wrong) and "ahead-of-time compile: " + "; ".join(wrong)


def compile_cases(sources=(CASES,), archs=tuple(ARCHS), filter="") -> list[Report]:
    """Compiles every case whose name contains `filter` for every architecture. See the module docstring."""
    with tempfile.TemporaryDirectory(prefix="aot-") as work:
        work = pathlib.Path(work)
        # XLA takes ptxas and libdevice from here before it looks anywhere else.
        toolkit = pathlib.Path(str(metadata.distribution("nvidia-cuda-nvcc").locate_file("nvidia/cu13"))).resolve()
        running = [(arch, _start(work / arch, toolkit, arch, sources, filter)) for arch in archs]
        return [report for arch, process in running for report in _collect(work / arch, toolkit, arch, process)]


# ------------------------------------------------------------------------------------------------ parent: run, read


def _start(work, toolkit, arch, sources, filter):
    work.mkdir()
    (work / "cuda_sdk_lib").symlink_to(toolkit)
    tests = pathlib.Path(__file__).resolve().parent
    env = {k: v for k, v in os.environ.items() if not k.startswith("MOSAIC_GPU_") and k != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",  # also where a GPU is present
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no cuDNN needed
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--child", "--arch", arch, "--filter", filter, *sources]
    with open(work / "log", "w") as log:
        return subprocess.Popen(command, cwd=work, env=env, stdout=log, stderr=log)


def _collect(work, toolkit, arch, process):
    code = process.wait()
    results = work / "results.jsonl"
    records = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    modules = [re.split(r"^(?=\.version)", (work / record.pop("ptx")).read_text(), flags=re.MULTILINE)[1:]
               for record in records]
    kernels = iter(_assemble(work, toolkit, arch, [m for of_case in modules for m in of_case]))
    for record, of_case in zip(records, modules, strict=True):
        yield Report(arch, record["case"], Limits(**record["limits"]), record["error"], record["calls"],
                     record["temp_bytes"], tuple(next(kernels) for _ in of_case))
    if code:
        logs = sorted(work.glob("*.err"), key=os.path.getmtime)[-1:] + [work / "log"]
        tail = [line for log in logs for line in log.read_text(errors="replace").splitlines()[-15:]]
        raise RuntimeError(f"{arch}: the compiling process ended with code {code}:\n" + "\n".join(tail))


def _assemble(work, toolkit, arch, modules):
    """One `Kernel` per PTX module. All go through the tools at once: nvdisasm alone takes a second to start."""
    if not modules:
        return []
    # One module of all: entries and shared memory get a number, and what debuggers want is left out.
    header = re.match(r"(?:\.(?:version|target|address_size).*\s+)+", modules[0]).group()
    merged = [header]
    for n, ptx in enumerate(modules):
        body = re.sub(r"^\s*\.(?:version|target|address_size|file|loc)\b.*\n", "", ptx, flags=re.MULTILINE)
        body = re.sub(r"^\s*\.section\b[^{]*\{[^}]*\}", "", body, flags=re.MULTILINE)
        declared = re.findall(r"^\s*(?:\.\w+ )*\.entry (\w+)|^\.?\s*(?:\.\w+ )*\.shared .*?(\w+)(?:\[\d*\])?;", body,
                              flags=re.MULTILINE)
        for name in {name for names in declared for name in names if name}:
            body = re.sub(rf"\b{re.escape(name)}\b", f"{name}__{n}", body)
        merged.append(body)
    (work / "kernels.ptx").write_text("\n".join(merged))

    def tool(name, *args):
        done = subprocess.run([toolkit / "bin" / name, *args], cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(args)}: {done.stderr or done.stdout}")
        return done.stdout + done.stderr

    log = tool("ptxas", "-v", "-O3", "-arch", arch, "kernels.ptx", "-o", "kernels.cubin")
    logs = dict(re.findall(r"Compiling entry function '(\w+)'((?:.*\n)*?.*Used \d+ registers.*)", log))
    sass = dict(re.findall(r"^//-+ \.text\.(\w+) -+\n((?:(?!//--).*\n)*)", tool("nvdisasm", "-c", "kernels.cubin"),
                           flags=re.MULTILINE))
    by_number = {int(name.rpartition("__")[2]): name for name in sass}
    return [_kernel(by_number[n].rpartition("__")[0], logs[by_number[n]], sass[by_number[n]])
            for n in range(len(modules))]


def _kernel(entry, log, sass):
    counts = count_opcodes(sass)

    def count(pattern):
        return sum(n for opcode, n in counts.items() if re.match(pattern, opcode))

    wide = count(r"LDG?\..*\b(128|256)\b")  # loads by generic addresses (LD) are global loads too
    return Kernel(
        name=entry.removesuffix("_mosaic_gpu_kernel"),
        registers=int(re.search(r"Used (\d+) registers", log).group(1)),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log))),
        wide_loads=wide, narrow_loads=count(r"LDG?(\.|$)") - wide, bulk_copies=count(r"UBLKCP|UTMALDG|LDGSTS"),
        shuffles=count("SHFL"), barriers=count(r"BAR\b"), shared=count("LDS|STS|ATOMS|REDS|LDGSTS"))


def count_opcodes(sass: str) -> collections.Counter:
    """Instructions of a disassembly by opcode with modifiers, such as LDG.E.128. Those that never run do not count."""
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", sass, re.MULTILINE)
    return collections.Counter(opcode for predicate, opcode in found if predicate.strip() not in ("@!PT", "@!UPT"))


# ------------------------------------------------------------------------------------- child: one architecture, jax


def _child(arch, sources, filter):
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils

    if not hasattr(utils, "_infer_arch"):
        raise RuntimeError(f"jax {jax.__version__} has no mosaic.gpu.utils._infer_arch: tests/aot.py needs an update")
    utils._infer_arch = lambda: ARCHS[arch]  # it answers (9, 0) for a device that is not there
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=DEVICE.format(*ARCHS[arch]))
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    with open("results.jsonl", "w", buffering=1) as results:
        for source in sources:
            module, function = source.split(":")
            for number, (name, fn, args, limits) in enumerate(getattr(importlib.import_module(module), function)()):
                if filter not in name:
                    continue
                Limits(**limits)  # an unknown limit stops the run
                ptx, err = f"{module}-{function}-{number}.ptx", f"{module}-{function}-{number}.err"
                record = {"case": name, "limits": limits, "ptx": ptx, "error": "", "calls": 0, "temp_bytes": 0}
                with _output_to(ptx, err):
                    try:
                        args = jax.tree.map(
                            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
                        lowered = jax.jit(fn).lower(*args)
                        record["calls"] = len(re.findall(r"custom_call\W+mosaic_gpu", lowered.as_text()))
                        record["temp_bytes"] = lowered.compile().memory_analysis().temp_size_in_bytes
                    except Exception as e:  # the other cases may still compile
                        record["error"] = f"{type(e).__name__}: {str(e)[:2000]}"
                if record["error"]:  # jax 0.11 prints the reason instead of raising it
                    printed = pathlib.Path(err).read_text(errors="replace").splitlines()
                    record["error"] += "".join(f"\n  {s}" for s in printed if re.search("ptxas|error:", s))[:2000]
                results.write(json.dumps(record) + "\n")


class _output_to:
    """Sends the output of the whole process, compiler included, to two files."""

    def __init__(self, *files):
        self.files = files

    def __enter__(self):
        self.saved = [os.dup(fd) for fd in (1, 2)]
        for fd, file in enumerate(self.files, start=1):
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, fd)
            os.close(opened)

    def __exit__(self, *_):
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
        for fd, saved in enumerate(self.saved, start=1):
            os.dup2(saved, fd)
            os.close(saved)


# ------------------------------------------------------------------------------------------------------ command line


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels without a GPU and check what came out.")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="repeatable; default: all")
    parser.add_argument("--filter", default="", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("sources", nargs="*", default=[CASES], metavar="module:function")
    options = parser.parse_args()
    if options.child:
        _child(options.arch[0], options.sources, options.filter)
        return 0
    if reason := missing_tools():
        print(reason, file=sys.stderr)
        return 2
    bad = total = 0
    for report in compile_cases(options.sources, options.arch or list(ARCHS), options.filter):
        total += len(report.kernels)
        bad += bool(report.problems)
        print(f"{'FAIL' if report.problems else 'ok  '} {report.arch} {report.case}  temporaries={report.temp_bytes}")
        for kernel in report.kernels:
            print("    ", *(f"{k}={v}" for k, v in dataclasses.asdict(kernel).items()))
        if report.calls and not report.kernels and not report.error:
            print("     compiled with an earlier case")
        for problem in report.problems:
            print("     <-", problem)
    print(f"{total} kernels, {bad} cases with problems")
    return 1 if bad or not total else 0


if __name__ == "__main__":
    sys.exit(main())
