"""One job of autotune: the candidates of one shape, weight format and number of tokens, timed on this GPU.

Candidates run through `moe`, several layers to a step and all steps in one trace of the profiler; the i-th candidates
of the two kernels run together, and the trace tells their times apart. The layers of a step share one pool of random
experts but no expert, so that nothing is in L2 when it is read, and only experts that some token chose are made: the
traffic is that of the whole layer.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode import tuned_table, tuning
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.explain import KERNELS
from jax_warp_decode.kernels import checks
from jax_warp_decode.measure import inputs, timing
from jax_warp_decode.measure.candidates import MOST, candidates
from jax_warp_decode.measure.variants import compile_reference
from jax_warp_decode.moe import moe
from jax_warp_decode.presets import Preset
from jax_warp_decode.routing import Routing
from jax_warp_decode.tuned_table import Entry, LayerTime

STEP_BYTES = 300e6  # that a step reads at least, five times the L2 cache of an H200
MOST_LAYERS = 16  # in a step; smaller models than this stay in L2, as they do in use
REPEATS = 12
TOLERANCE = 1e-2  # relative L2 error against the float32 reference


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
      preset: the sizes of the layer.
      format: of the weights, one of `inputs.FORMATS`.
      tokens: T.
    """

    preset: Preset
    format: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.preset.name} {self.format} T={self.tokens}"

    def check(self) -> None:
        """Raises `ArgumentError` or `UnsupportedError` unless the kernels can run this."""
        p = self.preset
        if self.format not in inputs.FORMATS:
            raise ArgumentError(f"format: got {self.format!r}, expected one of {list(inputs.FORMATS)}")
        if self.tokens < 1:
            raise ArgumentError(f"batch or switch: got {self.tokens}, expected at least 1 token")
        if min(p.hidden, p.intermediate, p.num_experts, p.experts_per_token) < 1:
            raise ArgumentError(f"shape: got {_sizes(p)}, expected positive sizes H I E K")
        if p.experts_per_token > p.num_experts:
            raise ArgumentError(f"shape: got K = {p.experts_per_token} experts per token, expected at most "
                                f"E = {p.num_experts}")
        if self.format == "mxfp8" and (p.hidden % 32 or p.intermediate % 32):
            raise UnsupportedError(f"shape: got {_sizes(p)}, expected H and I in multiples of 32, the block of MXFP8")
        checks.dimensions("w_gate", p.hidden, p.intermediate)
        checks.dimensions("w_down", p.intermediate, p.hidden)


@dataclasses.dataclass(frozen=True)
class Job(Case):
    """One shape to find configurations for.

    Attributes:
      most: candidates per kernel.
    """

    most: int = MOST

    def candidates(self, kernel: str) -> list:
        p = self.preset
        return candidates(kernel, T=self.tokens, K=p.experts_per_token, H=p.hidden, I=p.intermediate,
                          format=self.format, most=self.most)

    def pairs(self) -> list[tuple]:
        """(gate/up, down): every candidate of both kernels, the shorter list repeated."""
        found = [self.candidates(kernel) for kernel in KERNELS]
        return list(itertools.islice(zip(*map(itertools.cycle, found), strict=False), max(map(len, found))))

    def pool(self, experts: int):
        """Shapes of a pool of experts."""
        return jax.eval_shape(functools.partial(self.make_pool, experts=experts), jax.ShapeDtypeStruct((), jnp.int32))

    def make_pool(self, seed, experts: int):
        """Random weights of a pool of experts."""
        return inputs.make_experts(
            jax.random.key(seed), dataclasses.replace(self.preset, num_experts=experts), self.format)

    @functools.cached_property
    def routing(self) -> tuple[int, list[np.ndarray]]:
        """(experts in the pool, ids [T, K] into it for each layer): uniform routing, no expert in two layers."""
        rng, per_expert = np.random.default_rng(self.tokens), _nbytes(self.pool(1))
        first = 0
        layers: list[np.ndarray] = []
        while not layers or (first * per_expert < STEP_BYTES and len(layers) < MOST_LAYERS):
            ids = inputs.routing_ids(rng, self.tokens, self.preset, "uniform")
            chosen, ids = np.unique(ids, return_inverse=True)
            layers.append((first + ids.reshape(self.tokens, -1)).astype(np.int32))
            first += len(chosen)
        return first, layers

    @property
    def lowerings(self) -> int:
        """Programs that are lowered."""
        return len(self.pairs())

    @property
    def nbytes(self) -> int:
        """Device memory for the weights."""
        return _nbytes(self.pool(self.routing[0]))


@dataclasses.dataclass(frozen=True)
class Result:
    """What a job found: the entries to write, and in words what went wrong."""

    job: Case
    entries: tuple[Entry | LayerTime, ...]
    problems: tuple[str, ...]


def _nbytes(tree) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _sizes(p: Preset) -> str:
    return f"H={p.hidden} I={p.intermediate} E={p.num_experts} K={p.experts_per_token}"


def measure(job: Job, gpu=None, advance: Callable[[], object] = lambda: None, threads: int = 4) -> Result:
    """Runs a job in this process; needs a GPU that the kernels run on.

    Args:
      job: what to measure.
      gpu: a lock, held while the GPU is used.
      advance: called once for every pair of candidates that has been lowered.
      threads: that compile.
    """
    experts, ids = job.routing
    layers, rng = len(ids), np.random.default_rng(0)
    x = rng.standard_normal((layers, job.tokens, job.preset.hidden), np.float32).astype(jnp.bfloat16)
    weights = rng.random((layers, *ids[0].shape), np.float32) + np.float32(0.1)
    routing: Any = Routing  # of numpy arrays, which `device_put` takes below
    calls = [(x, routing(i, w)) for x, i, w in zip(x, ids, weights, strict=True)]
    # All layers share one pool, so one call of the reference gives the results of all of them.
    all_tokens = np.concatenate(x).astype(np.float32), routing(np.concatenate(ids), np.concatenate(weights))
    pool = job.pool(experts)
    with concurrent.futures.ThreadPoolExecutor(threads) as executor:
        compiling, problems = _lower(job, [(*call, pool) for call in calls], executor, advance)
        if not compiling:
            return Result(job, (), (*problems, f"{job}: no candidate could be lowered"))
        making = executor.submit(jax.jit(functools.partial(job.make_pool, experts=experts)).lower(np.int32(0)).compile)
        reference = compile_reference(*all_tokens, pool, activation=job.preset.activation)
        make = making.result()
        steps = {}
        for pair, step in compiling.items():
            try:
                steps[pair] = step.result()
            except Exception as error:  # one candidate that ptxas refuses must not end the run
                problems.append(f"{job}: {_names(pair)} did not compile: {error}".splitlines()[0])
    with gpu or contextlib.nullcontext():
        pool = make(np.int32(1))
        want = np.asarray(reference(*all_tokens, pool), np.float64)
        args = jax.device_put([(*call, pool) for call in calls])
        for pair, step in list(steps.items()):
            got = np.concatenate([np.asarray(y, np.float64) for y in step(args)])
            off = np.linalg.norm(got - want) / np.linalg.norm(want)
            if not off < TOLERANCE:
                problems.append(f"{job}: {_names(pair)} is wrong (relative error {off:.1e}) and was dropped")
                del steps[pair]
        recording = timing.record_steps([(step, args) for step in steps.values()], REPEATS) if steps else None
    timings = recording.timings() if recording else []  # the GPU is another's by now
    entries, problem = _fastest(job, dict(zip(steps, timings, strict=True)))
    return Result(job, entries, (*problems, *problem))


def _lower(job: Job, args: list[tuple], executor, advance) -> tuple[dict[tuple, concurrent.futures.Future], list[str]]:
    """The executables to be, by pair of candidates, and what is wrong with those that cannot be lowered."""
    layer = functools.partial(moe, strategy="warp_decode", activation=job.preset.activation)
    compiling, problems = {}, []
    for pair in job.pairs():
        try:
            with tuning.override(*pair):
                lowered = timing.lower_step(layer, args, "candidate")
            compiling[pair] = executor.submit(timing.compile_step, lowered)
        except Exception as error:  # one candidate that Mosaic refuses must not end the run
            problems.append(f"{job}: {_names(pair)} was refused: {error}".splitlines()[0])
        advance()
    return compiling, problems


def _fastest(job: Job, timed: dict[tuple, timing.Timing]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The entries of a job from the timings of its pairs, and what is wrong with them."""
    if not timed:
        return (), (f"{job}: no candidate could be measured",)
    p, entries = job.preset, []
    for i, kernel in enumerate(KERNELS):
        times: dict[Any, float] = {}
        for pair, found in timed.items():
            us = sum(us for name, us in found.kernels.items() if name.startswith(kernel))
            if not us:
                return (), (f"{job}: the profiler's trace does not show the kernels; is another profiler running?",)
            times[pair[i]] = min(us, times.get(pair[i], us))
        (best, us), *others = sorted(times.items(), key=lambda item: item[1])
        runner_up, runner_up_us = others[0] if others else (None, None)
        entries.append(Entry(
            kernel=kernel, format=job.format, H=p.hidden, I=p.intermediate, K=p.experts_per_token, T=job.tokens,
            config=dataclasses.asdict(best), us=round(us, 3),
            heuristic_us=_rounded(times.get(job.candidates(kernel)[0])),
            runner_up=runner_up and dataclasses.asdict(runner_up), runner_up_us=_rounded(runner_up_us),
            jax=jax.__version__, date=tuned_table.now()))
    return tuple(entries), ()


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


def _names(pair: tuple) -> str:
    return " with ".join(map(str, pair))
