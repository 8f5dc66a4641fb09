"""Every weight format in warp decode: one MoE layer at small batches, next to reading as many bytes; and a sweep.

    python -m bench.formats --out bench/results

For every format and batch size: the result is compared with the float32 reference, then a chain of layers that share no
expert is timed next to a plain read of as many unique bytes, all in one trace per format (jax_warp_decode/measure/
timing.py). The formats of --sweep are measured again with other configurations of the two kernels. Prints a line per
measurement and writes one JSON after each format; what is left when --seconds are over is named, and --fill measures it
in a later run.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report, need_gpu
from jax_warp_decode import Routing, tuning
from jax_warp_decode.activations import get_activation
from jax_warp_decode.explain import KERNELS
from jax_warp_decode.measure import inputs, read_kernel, timing
from jax_warp_decode.measure.candidates import candidates
from jax_warp_decode.measure.job import Job
from jax_warp_decode.measure.variants import attempt, compare, compile_reference, describe
from jax_warp_decode.paths import warp_decode
from jax_warp_decode.presets import PRESETS, get_preset

TOLERANCE = 1e-2  # relative L2 error against the float32 reference
THREADS = 16
FOUR_LANES = [(4, 2, 1), (4, 2, 2), (4, 4, 1), (4, 1, 2), (4, 4, 2), (4, 2, 3), (4, 1, 4)]
LAYER = functools.partial(warp_decode.run, activation=get_activation("silu"))


@dataclasses.dataclass(frozen=True)
class Chain:
    """The layers of one batch size, over one pool of experts."""

    batch: int
    calls: list  # (x [T, H], Routing) of each layer
    experts: int  # of the pool that it uses
    unique: float  # experts per layer, on average

    @classmethod
    def of(cls, preset, format: str, batch: int) -> "Chain":
        experts, ids = Job(preset, format, batch).routing
        rng, calls = np.random.default_rng(batch), []
        for i in ids:
            weights = rng.random(i.shape, np.float32) + np.float32(0.1)
            x = rng.standard_normal((batch, preset.hidden), np.float32).astype(jnp.bfloat16)
            calls.append((x, Routing(i, weights / weights.sum(1, keepdims=True))))
        return cls(batch, calls, experts, experts / len(ids))


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def compile_layer(chain: Chain, pool, configs=()) -> jax.stages.Compiled:
    with tuning.override(*configs):
        return timing.compile_step(timing.lower_step(LAYER, abstract([(*call, pool) for call in chain.calls]), "layer"))


def compile_read(chain: Chain, windows) -> jax.stages.Compiled:
    return timing.compile_step(timing.lower_step(read_kernel.read, abstract(windows), "read"))


class Task:
    """One format: chains of layers, each with the configurations to measure; `pool` and executables on their way."""

    def __init__(self, executor, preset, format: str, batches, swept: bool):
        self.format, self.swept, self.preset = format, swept, preset
        self.chains = [Chain.of(preset, format, b) for b in batches]
        experts = max(chain.experts for chain in self.chains)
        make = functools.partial(Job(preset, format, 1).make_pool, experts=experts)
        self.pool = jax.eval_shape(make, jax.ShapeDtypeStruct((), jnp.int32))
        self.per_expert = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.pool)) / experts
        self.make = executor.submit(lambda: jax.jit(make).lower(np.int32(0)).compile())
        # All chains share one pool, so one call of the reference gives the results of all of them.
        x, routing = zip(*(call for chain in self.chains for call in chain.calls), strict=True)
        self.tokens = np.concatenate(x).astype(np.float32), jax.tree.map(lambda *a: np.concatenate(a), *routing)
        self.reference = executor.submit(compile_reference, *self.tokens, self.pool)
        self.read, self.layer = {}, {}
        for chain in self.chains:
            nbytes = chain.unique * self.per_expert
            window = jax.eval_shape(functools.partial(read_kernel.window, nbytes=nbytes), jax.random.key(0))
            self.read[chain.batch] = executor.submit(compile_read, chain, [(window,)] * len(chain.calls))
            for pair in self.pairs(chain.batch) if swept else [()]:
                self.layer[chain.batch, pair] = executor.submit(compile_layer, chain, self.pool, pair)

    def pairs(self, batch: int):
        p = self.preset
        found = [candidates(kernel, T=batch, K=p.experts_per_token, H=p.hidden, I=p.intermediate, format=self.format,
                            most=8) for kernel in KERNELS]
        found = [[*configs, *itertools.starmap(type(configs[0]), FOUR_LANES)] for configs in found]
        return dict.fromkeys(itertools.islice(zip(*map(itertools.cycle, found), strict=False), max(map(len, found))))

    def cancel(self):
        for future in (self.make, self.reference, *self.read.values(), *self.layer.values()):
            future.cancel()

    def measure(self, steps: int):
        """Yields one result per chain and pair."""
        pool, chains = self.make.result()(np.int32(1)), {chain.batch: chain for chain in self.chains}
        calls, names = [], []
        for batch, read in self.read.items():
            keys = jax.random.split(jax.random.key(batch), len(chains[batch].calls))
            windows = [(read_kernel.window(key, chains[batch].unique * self.per_expert),) for key in keys]
            calls.append((read.result(), windows))
            names.append((batch, None))
        outcomes = {}
        y = iter(np.asarray(self.reference.result()(*self.tokens, pool), np.float64))
        want = {batch: [np.stack([next(y) for _ in range(batch)]) for _ in chain.calls]
                for batch, chain in chains.items()}
        for (batch, pair), future in self.layer.items():
            outcome = outcomes[batch, pair] = {}
            try:
                step, args = future.result(), jax.device_put([(*call, pool) for call in chains[batch].calls])
                outcome.update(compare(want[batch], TOLERANCE)(step(args)))
                calls.append((step, args))
                names.append((batch, pair))
            except Exception as error:  # one configuration that fails must not end the run
                outcome["error"] = describe(error)
        timings = dict(zip(names, timing.time_steps(calls, steps), strict=True))
        for (batch, pair), outcome in outcomes.items():
            read, timed = timings[batch, None], timings.get((batch, pair))
            result = dict(format=self.format, batch=batch, unique_bytes=chains[batch].unique * self.per_expert,
                          config={k: dataclasses.asdict(c) for k, c in zip(KERNELS, pair, strict=False)}, **outcome)
            if timed:
                result.update(dataclasses.asdict(timed), read_us=read.us, of_read=timed.us / read.us)
            yield result


def describe_row(result) -> str:
    config = " ".join(f"{k.removeprefix('moe_')}={'/'.join(map(str, c.values()))}" for k, c in result["config"].items())
    row = f"{result['format']:13} B={result['batch']:<3}"
    if "us" in result:
        parts = {k: sum(us for name, us in result["kernels"].items() if name.startswith(k)) for k in KERNELS}
        shares = {"moe_gate_up": 2 / 3, "moe_down": 1 / 3}
        row += (f"{result['us']:7.2f} us  read {result['read_us']:7.2f}  x{result['of_read']:.3f}  " + "  ".join(
            f"{k.removeprefix('moe_')} {us:.2f} x{us / result['read_us'] / shares[k]:.2f}" for k, us in parts.items())
            + f"  L2 {result['relative_l2']:.1e}  ")
    return row + config + result.get("error", "")


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(PRESETS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--format", nargs="+", choices=inputs.FORMATS, default=[
        "mxfp4", "fp8_block128", "mxfp8", "int4_group32", "nvfp4", "int8_channel", "fp8_channel", "bf16", "fp8_tensor",
        "mxfp8_e5m2"])
    parser.add_argument("--sweep", nargs="*", choices=inputs.FORMATS, default=["mxfp4", "mxfp8", "fp8_block128"])
    parser.add_argument("--sweep-batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=20, help="timed repetitions of a chain of layers")
    parser.add_argument("--seconds", type=float, default=140, help="no format is begun after this")
    parser.add_argument("--fill", action="store_true", help="keep what an earlier run wrote, measure what it lacks")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the JSON")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    options, start = parse(argv), time.monotonic()
    need_gpu("formats")
    report = Report(options.out / f"formats-{options.model}.json", "formats", fill=options.fill)
    preset = get_preset(options.model)
    plan = [(f, options.batch, False) for f in options.format] + [(f, options.sweep_batch, True) for f in options.sweep]
    ahead = iter([each for each in plan if not report.has(format=each[0], swept=each[2])])
    with concurrent.futures.ThreadPoolExecutor(THREADS) as executor:

        def begin(count):
            return [(format, swept, attempt(Task, executor, preset, format, batches, swept))
                    for format, batches, swept in itertools.islice(ahead, count)]

        tasks = begin(2)
        while tasks:
            if time.monotonic() - start > options.seconds:
                for *_, task in tasks:
                    if isinstance(task, Task):
                        task.cancel()
                report.cut(*(f"{format}{' sweep' * swept}" for format, swept, _ in tasks),
                           *(f"{format}{' sweep' * swept}" for format, _, swept in ahead))
                break
            tasks += begin(1)  # the next two compile while one is measured
            (format, swept, task), *tasks = tasks
            found = []
            try:
                if isinstance(task, Exception):
                    raise task
                for result in task.measure(options.steps):
                    print(describe_row(result), flush=True)
                    found.append(dict(result, swept=swept))
            except Exception as error:
                found.append(dict(format=format, swept=swept, error=describe(error)))
                print(f"{format}: {describe(error)}", flush=True)
            report.add(*found)
            print(f"-- {time.monotonic() - start:.0f} s", flush=True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
