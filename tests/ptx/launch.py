"""Runs functions whose kernels are `plgpu.kernel` on the CPU: each kernel is compiled ahead of time for Hopper, and its
PTX executed.

    with emulated() as machines:
        y = jax.jit(f)(x)

As in tests/aot.py, one process compiles for one architecture only.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import tempfile

import aot
import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

from ptx.host import launch_of
from ptx.machine import Machine
from ptx.memory import APART, Buffer
from ptx.parse import Program, parse

PACKAGE = "jax_warp_decode"
# XLA's threads flush denormals, and threads inherit that: this one is started before them.
_WORKER = concurrent.futures.ThreadPoolExecutor(1)
_WORKER.submit(int).result()
_COMPILED = {}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel and the compiler's log of passes, which has its host side."""

    program: Program
    log: str


@contextlib.contextmanager
def emulated():
    """Inside, kernels that are not interpreted run here. Yields the list of machines that have run."""
    machines, original = [], plgpu.kernel
    with tempfile.TemporaryDirectory(prefix="ptx-") as directory:
        environment = {"MOSAIC_GPU_DUMP_TO": directory, "MOSAIC_GPU_CUDA_ROOT": directory,  # no disassembly
                       "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # no cuDNN needed
        before = {name: os.environ.get(name) for name in environment}

        def kernel(body, **options):
            if options.get("interpret") is not None:
                return original(body, **options)
            return _kernel(original(body, **options), options["out_type"], pathlib.Path(directory), machines)

        plgpu.kernel = kernel
        os.environ.update(environment)
        _forget_kernels()
        try:
            yield machines
        finally:
            plgpu.kernel = original
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            _forget_kernels()


def _forget_kernels():
    """Empties the caches of functions that build kernels."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{PACKAGE}."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _kernel(kernel, out_type, directory, machines):
    results, structure = jax.tree.flatten(out_type)

    def call(*operands):
        compiled = _compile(kernel, operands, directory)

        def run(*operands):
            return _WORKER.submit(_execute, compiled, [np.asarray(o) for o in operands], results, machines).result()

        found = jax.pure_callback(run, [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results], *operands)
        return jax.tree.unflatten(structure, found)

    return call


def _compile(kernel, operands, directory) -> Compiled:
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=aot.DEVICE.format(9, 0))
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = [jax.ShapeDtypeStruct(o.shape, o.dtype, sharding=sharding) for o in operands]
    lowered = jax.jit(kernel).lower(*args)
    key = re.search(r'kernel_hash = "(.*?)"', lowered.as_text())[1]
    if key not in _COMPILED:  # an equal one is compiled and dumped once per process
        before = set(directory.glob("*.ptx"))
        lowered.compile()
        (ptx,) = set(directory.glob("*.ptx")) - before
        _COMPILED[key] = Compiled(parse(ptx.read_text()), ptx.with_suffix(".mlir-passes.log").read_text())
    return _COMPILED[key]


def _execute(compiled: Compiled, operands, results, machines):
    def bytes_of(array):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    buffers = [Buffer(f"operand {i}, {o.dtype} {list(o.shape)}", bytes_of(o), writable=False)
               for i, o in enumerate(operands)]
    outputs = [Buffer(f"result {i}, {r.dtype} {list(r.shape)}", bytes_of(np.zeros(r.shape, r.dtype)), written=False)
               for i, r in enumerate(results)]
    addresses = [(i + 1) << APART for i in range(len(buffers + outputs))]
    launch = launch_of(compiled.log, addresses, len(compiled.program.parameters))
    machine = Machine(compiled.program, launch.parameters, buffers + outputs, launch.grid, launch.block,
                      launch.shared_bytes, launch.cluster)
    machines.append(machine)
    machine.run()
    return [o.values.view(r.dtype).reshape(r.shape) for o, r in zip(outputs, results, strict=True)]
