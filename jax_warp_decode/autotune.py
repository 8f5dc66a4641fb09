"""Finds the fastest kernel configurations for given shapes on this GPU, and times the strategies of the layers.

Both go into a file, see `tuned_table`, which the kernels and "auto" then read.

Lowering a kernel is Python, about a second each. Several jobs therefore run in processes side by side, of which one at
a time uses the GPU.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jax_warp_decode import tuned_table, tuning
from jax_warp_decode.choose import no_gpu_reason
from jax_warp_decode.errors import ArgumentError, UnsupportedError, counted
from jax_warp_decode.measure import strategies
from jax_warp_decode.measure.job import Job, Result, measure
from jax_warp_decode.measure.strategies import StrategyJob
from jax_warp_decode.presets import Preset, get_preset, listing
from jax_warp_decode.tuned_table import Entry, LayerTime

MOST_WORKERS = 16
SWITCH = (16, 32, 64, 128, 256, 512, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--model", metavar="NAME", help="a model whose sizes are known; 'list' shows them")
    shape.add_argument("--shape", type=int, nargs=4, metavar=("H", "I", "E", "K"),
                       help="hidden and intermediate size, experts, experts per token")
    parser.add_argument("--format", nargs="+", metavar="NAME",
                        help="of the weights: bf16, mxfp8, mxfp4, .. (default: the model's, bf16 with --shape)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8], metavar="T",
                        help="tokens per step for which configurations are measured, and then the strategies that "
                             "'auto' chooses from (default: 1 2 4 8)")
    parser.add_argument("--switch", nargs="*", type=int, default=list(SWITCH), metavar="T",
                        help="further tokens per step, for which only the strategies are measured; the option alone: "
                             f"none (default: {' '.join(map(str, SWITCH))})")
    parser.add_argument("--out", metavar="FILE",
                        help="file to write or to add to (default: $JAX_WARP_DECODE_TUNED, or the user's cache folder)")


def main(options: argparse.Namespace) -> int:
    """Runs the command; bad input raises the package's errors."""
    if options.model == "list":
        print("\n".join(listing()))
        return 0
    if options.model:
        preset = get_preset(options.model)
    else:
        H, I, E, K = options.shape
        preset = Preset("x".join(map(str, options.shape)), H, I, E, K, format="")
    _keep_memory_free()
    formats = options.format or [preset.format or "bf16"]
    cases = dict.fromkeys(itertools.product(formats, options.batch))  # each once
    layers = dict.fromkeys(itertools.product(formats, options.batch + options.switch))
    autotune([Job(preset, *case) for case in cases] + [StrategyJob(preset, *case) for case in layers],
             pathlib.Path(options.out) if options.out else None, Console(highlight=False))
    return 0


def autotune(jobs: Sequence[Job | StrategyJob], path: pathlib.Path | None = None,
             console: Console | None = None) -> pathlib.Path:
    """Measures every job and writes what it found, after each job, into a file; with progress.

    Args:
      jobs: what to measure: a `Job` finds the fastest configurations, a `StrategyJob` times the strategies, after all
        of the former and with the configurations in the file. Several run in processes of their own, which need GPU
        memory besides this one's: set XLA_PYTHON_CLIENT_PREALLOCATE=false before JAX starts, as the command line does.
      path: file to write, or to add to; None for the one that is read, see `tuned_table.user_file`.
      console: where progress and results are printed.

    Returns:
      The path.

    Raises:
      UnsupportedError: there is no GPU that the kernels run on, or they cannot take a shape. Nothing was made.
      ArgumentError: a wrong size or name, an existing file that is corrupt or another GPU's, weights of a `Job` that
        take more than half of the GPU's memory, or a job that could not be measured (the others have been written).
        Beside a `Job`, a `StrategyJob` that could not, such as one of more bytes than that, is warned of.
    """
    console = console or Console()
    for job in jobs:
        job.check()
    if reason := no_gpu_reason():
        raise UnsupportedError(f"autotune: measures on a GPU: {reason}")
    device = tuning.device_kind()
    assert device is not None
    path = path or tuned_table.user_file(device)
    tuned_table.read_table(path, device)  # an error now rather than after the measurements
    configs = [job for job in jobs if isinstance(job, Job)]
    layers = [job for job in jobs if isinstance(job, StrategyJob)]
    workers = _workers(configs) if configs else 1
    problems: list[str] = []
    timed: dict[StrategyJob, str] = {}
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(counted(len(jobs), "shape"), total=sum(job.lowerings for job in jobs))
        for result in _all_results(configs, workers, layers, path, device, lambda: progress.advance(task)):
            if result.entries:
                tuned_table.write_entries(path, device, result.entries)
            if result.entries and isinstance(result.job, StrategyJob):
                timed[result.job] = _line(result)
            elif result.entries:
                console.print(_line(result), soft_wrap=True, markup=False)
            for problem in result.problems:
                console.print(f"warning: {problem}", soft_wrap=True, markup=False, style="yellow")
            if not result.entries and (isinstance(result.job, Job) or not configs):  # else there are configurations
                problems += result.problems
    for job in layers:  # in their order, not that in which processes finished
        if job in timed:
            console.print(timed[job], soft_wrap=True, markup=False)
    console.print(f"wrote {path} in {time.perf_counter() - start:.0f} s", soft_wrap=True, markup=False)
    if path != tuned_table.user_file(device):
        console.print(f"to use it: export {tuned_table.VARIABLE}={path}", soft_wrap=True, markup=False)
    if problems:
        raise ArgumentError(f"autotune: {problems[-1]}; the other shapes are in {path}")
    return path


def _room() -> float:
    """Bytes for the weights of all processes together: half of the GPU's memory."""
    return jax.devices()[0].memory_stats()["bytes_limit"] / 2


def _workers(jobs: Sequence[Job | StrategyJob]) -> int:
    """Processes that run side by side: one per CPU core, as far as `_room` holds their experts."""
    memory, largest = _room(), max(jobs, key=lambda job: job.nbytes)
    if largest.nbytes > memory:
        raise ArgumentError(f"batch: got {largest}, whose experts take {largest.nbytes / 1e9:.1f} GB, expected at most "
                            f"{memory / 1e9:.1f} GB, half of the GPU's memory; use fewer tokens")
    return max(1, min(len(jobs), len(os.sched_getaffinity(0)), MOST_WORKERS, int(memory / largest.nbytes)))


def _all_results(configs: Sequence[Job], workers: int, layers: Sequence[StrategyJob], path: pathlib.Path,
                 device: str, advance: Callable[[], object]) -> Iterator[Result]:
    """One result per job: the configurations, then what strategies take with those that are in the file by then."""
    yield from _results(configs, workers, advance)
    room = _room() if layers else 0.0
    for job in layers:
        if job.nbytes > room:
            yield Result(job, (), (f"{job}: strategies were not timed: the layers of a step take "
                                   f"{job.nbytes / 1e9:.1f} GB, more than half of the GPU's memory",))
    if fitting := [job for job in layers if job.nbytes <= room]:
        tuned_table.write_entries(path, device, [])  # a file that is named must exist
        with _reading(path):
            yield from _results(fitting, _workers(fitting), advance)


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Configurations are looked up in this file, here and in processes that start meanwhile."""
    before = os.environ.get(tuned_table.VARIABLE)
    os.environ[tuned_table.VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[tuned_table.VARIABLE]
        if before is not None:
            os.environ[tuned_table.VARIABLE] = before


def _results(jobs: Sequence[Job | StrategyJob], workers: int,
             advance: Callable[[], object]) -> Iterator[Result]:
    """One result per job, as they finish."""
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    if workers == 1:
        for job in jobs:
            yield _measured(job, None, advance, threads)
        return
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
    with (spawn.Manager() as manager,
          concurrent.futures.ProcessPoolExecutor(workers, spawn, _keep_memory_free) as pool):
        gpu, lowered = manager.Lock(), manager.Queue()
        pending = {pool.submit(_measured, job, gpu, functools.partial(lowered.put, None), threads) for job in jobs}
        while pending:
            done, pending = concurrent.futures.wait(pending, 0.2, concurrent.futures.FIRST_COMPLETED)
            while not lowered.empty():
                lowered.get()
                advance()
            yield from (future.result() for future in done)


def _keep_memory_free() -> None:
    """Before JAX starts its backend: the process shall not reserve memory that others need."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def _measured(job: Job | StrategyJob, gpu, advance, threads: int) -> Result:
    try:
        if isinstance(job, StrategyJob):
            return strategies.measure(job, gpu, advance, threads)
        return measure(job, gpu, advance, threads)
    except Exception as error:  # the other jobs go on
        return Result(job, (), (f"{job}: {type(error).__name__}: {error}".splitlines()[0],))


def _line(result: Result) -> str:
    fastest = "fastest " if isinstance(result.job, StrategyJob) else ""
    return f"{result.job}: {fastest}{'; '.join(map(_words, result.entries))}"


def _words(e: Entry | LayerTime) -> str:
    if isinstance(e, LayerTime):
        return f"{e.strategy} {e.us:.1f} us"
    before = f", heuristic {e.heuristic_us:.2f}" if e.heuristic_us else ""
    return f"{e.kernel} {e.us:.2f} us ({', '.join(f'{k}={v}' for k, v in e.config.items())}{before})"
