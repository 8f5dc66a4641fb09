"""What the collectives of a mesh of GPUs cost: microseconds each, by bytes.

    python -m bench.collectives --out bench/results

A program is a chain of equal collectives, each on the result of the one before, as between the layers of a model. `us`
is the time of one with the launch that it costs and a multiplication of the data; `kernel_us` that of its kernel alone.
`jax-warp-decode plan` reads these figures.
"""

import argparse
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from bench import two_devices
from bench.report import metadata
from jax_warp_decode.measure.variants import describe

LENGTH = 8
BYTES = (8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)


def all_reduce(x, half):
    return lax.psum(x, "gpu") * half


def scatter_and_gather(x, half):
    return lax.all_gather(lax.psum_scatter(x, "gpu", tiled=True) * half, "gpu", tiled=True)


def all_to_all(x, half):
    return lax.all_to_all(x, "gpu", 0, 0, tiled=True) * half


OPERATIONS = {f.__name__: f for f in (all_reduce, scatter_and_gather, all_to_all)}


def program(operation, mesh, bytes):
    """The chain, lowered, and its arguments: float32 of so many bytes on each device, different ones."""
    half = jnp.float32(0.5)

    def chain(x):
        for _ in range(LENGTH):
            x = operation(x, half)
        return x

    n = mesh.size
    x = jax.random.normal(jax.random.key(0), (n * bytes // 4,), jnp.float32)
    x = jax.device_put(x, jax.NamedSharding(mesh, P("gpu")))
    run = jax.shard_map(chain, mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu"), check_vma=False)
    return jax.jit(run).lower(x), (x,)


def measure(options):
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("gpu",), axis_types=(AxisType.Auto,), devices=devices)
    for way in options.collectives:
        for name, operation in OPERATIONS.items():
            rows = [dict(operation=name, collectives=way, bytes=b, devices=len(devices)) for b in options.bytes]
            try:
                lowered = [program(operation, mesh, row["bytes"]) for row in rows]
                programs = [(two_devices.compile(low, way), args) for low, args in lowered]
                for run, args in programs:
                    jax.block_until_ready(run(*args))
                if jax.default_backend() == "gpu":
                    for row, span in zip(rows, two_devices.time_programs(programs, options.steps), strict=True):
                        kernel = span.collective_us and span.collective_us / LENGTH
                        row |= dict(us=span.us / LENGTH, kernel_us=kernel, wall_us=span.wall_us / LENGTH,
                                    clock=span.clock, kernels=span.kernels)
            except Exception as error:  # one operation that fails must not end the run
                rows = [row | dict(error=describe(error)) for row in rows]
            yield from rows


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", nargs="+", type=int, default=list(BYTES))
    parser.add_argument("--collectives", nargs="+", default=["nccl", "graph"], choices=list(two_devices.COLLECTIVES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON")
    options = parser.parse_args(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast: not every host can
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "collectives.json"
    meta, results = metadata("collectives"), []
    for row in measure(options):
        results.append(row)
        times = f"{row['us']:9.1f} us, kernel {row['kernel_us'] or 0:7.1f} ({row['clock']})" if "us" in row else ""
        print(f"{row['operation']:20}{row['collectives']:7}{row['bytes']:10} {times}{row.get('error', '')}", flush=True)
        path.write_text(json.dumps(dict(meta=meta, results=results), indent=1) + "\n")
    return int(any("error" in row for row in results))


if __name__ == "__main__":
    sys.exit(main())
