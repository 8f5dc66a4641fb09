"""Whole decode steps of a Qwen3-30B-A3B-shaped model at full size: tokens/s, and where each microsecond goes.

    python -m bench.decode --out bench/results

48 layers, random weights made on the device in bf16 or MXFP8, KV cache in bf16 with random content, greedy sampling on
the device. Only what runs the routed experts differs between the columns. Several steps are one call; time is the
device's timeline, CUDA graphs on. The ceiling is a kernel that reads memory and nothing else, in the same process;
bytes are the weights that a step uses (experts counted from the ids of a real step) and the cached keys and values.
Writes decode_steps.json and decode_steps.png after every group. When --budget is used up no new group starts; --fill
measures what an earlier run at --out left out.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode_model import (
    AS_IT_IS,
    FORMS,
    MODEL,
    Case,
    default_cases,
    layout,
    make_cache,
    make_weights,
    missing,
    model_of,
    prepared,
    take_memory,
)
from bench.decode_report import OURS, describe_row, details, plot, speedups
from bench.report import Report, draw, need_gpu
from jax_warp_decode.measure import inputs, parts, read_kernel, timing
from jax_warp_decode.measure.variants import WRONG, attempt, describe
from jax_warp_decode.models.decode_loop import decode_tokens
from jax_warp_decode.models.decode_step import decode_step_with_routing

STEPS, CALLS = 4, 4  # steps per call; calls, of which the first is dropped


def lower(case: Case, weights):
    model = model_of(case, weights)
    cache = jax.eval_shape(lambda: model.new_cache(case.batch, case.max_len))
    tokens = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    step = jax.jit(decode_tokens, static_argnums=(0, 4), donate_argnums=2)
    return step.lower(model, weights, cache, tokens, STEPS)


def first_tokens(case: Case) -> jax.Array:
    return jnp.asarray(np.random.default_rng(case.batch).integers(0, MODEL.vocab_size, case.batch), jnp.int32)


def unique_experts(weights, batch: int, attention: str) -> float:
    """Mean number of experts that a layer uses in a step of `batch` rows."""
    case = Case("", OURS, batch, 1024, attention)
    model = model_of(case, weights)
    cache = make_cache(model, case, 1)
    # Not jitted as a whole: a layer compiles once, which is quicker.
    ids = np.asarray(decode_step_with_routing(model, weights, cache, first_tokens(case))[2])
    return statistics.mean(len(np.unique(layer)) for layer in ids)


def check_forms(weights, forms) -> dict:
    """Per form of the step: how far its logits are from those through XLA alone, or what went wrong.

    Relative L2, the median over rows: rounding moves a near tie of the router in some row now and then.
    """
    two = dataclasses.replace(weights, layers=weights.layers[:2])
    found, want = {}, None
    for name in ("xla", *(form for form in forms if form != "xla")):
        case = Case("", OURS, 8, 256, name)  # more rows than share a program: a short cache
        try:
            model = model_of(case, two)
            cache = make_cache(model_of(dataclasses.replace(case, attention="xla"), two), case, 100)
            if model.new_cache(1, 1).heads_first:
                turned = [tuple(a.swapaxes(1, 2) for a in arrays) for arrays in (cache.k, cache.v)]
                cache = dataclasses.replace(cache, k=turned[0], v=turned[1], heads_first=True)
            logits, cache, _ = decode_step_with_routing(model, two, cache, first_tokens(case))
            logits = np.asarray(decode_step_with_routing(model, two, cache, first_tokens(case))[0], np.float64)
            want = logits if want is None else want
            norm = functools.partial(np.linalg.norm, axis=1)
            found[name] = float(np.median(norm(logits - want) / norm(want)))
            if not found[name] < 0.02:
                raise ArithmeticError(f"{WRONG}: relative L2 {found[name]}")
        except Exception as error:
            found[name] = describe(error)
        print(f"form {name}: {found[name]}", flush=True)
    return {name: found[name] for name in (*forms, "xla") if name in found}


def run_group(cases: list[Case], weights, options, facts: dict) -> list[dict]:
    """Compiles all cases side by side, then runs each, then all of them in one trace."""
    rows = {case: dict(dataclasses.asdict(case), max_len=case.max_len) for case in cases}

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        pending = {}
        for case in cases:
            if case.program not in pending:
                lowered = attempt(lower, case, weights)
                failed = isinstance(lowered, Exception)
                pending[case.program] = lowered if failed else pool.submit(attempt, timing.compile_step, lowered)
        lowered_after = time.perf_counter() - start
        pending = {program: p if isinstance(p, Exception) else p.result() for program, p in pending.items()}
    print(f"  {len(pending)} programs: lowered in {lowered_after:.0f} s, compiled after "
          f"{time.perf_counter() - start:.0f} s", flush=True)
    steps = {case: pending[case.program] for case in cases}
    spent = STEPS * (CALLS + 3)
    runnable = []
    for case, step in steps.items():
        try:
            if isinstance(step, Exception):
                raise step
            rows[case].update(_wall(case, step, weights, spent))
            runnable.append(case)
        except Exception as error:
            rows[case]["error"] = describe(error)
    jobs = [(functools.partial(_prepare, case, weights, spent),
             functools.partial(_calls, steps[case], weights)) for case in runnable]
    try:
        traced = timing.record_runs(jobs) if jobs else []
    except Exception as error:
        traced = []
        print(f"  trace failed: {describe(error)}", flush=True)
    for case, events in zip(runnable, traced or [[]] * len(runnable), strict=True):
        rows[case].update(_summary(case, steps[case], events, weights, facts))
    return list(rows.values())


def _prepare(case, weights, spent):
    return first_tokens(case), make_cache(model_of(case, weights), case, spent)


def _calls(step, weights, state, calls=CALLS):
    tokens, cache = state
    for _ in range(calls):
        _, tokens, cache = step(weights, cache, tokens)
    return tokens


def _wall(case, step, weights, spent) -> dict:
    """Host clock over queued calls, after one call that warms up; and what the compiled step needs."""
    tokens, cache = _prepare(case, weights, spent)
    memory = step.memory_analysis()
    cache_bytes = sum(a.nbytes for a in jax.tree.leaves(cache))
    ids, tokens, cache = step(weights, cache, tokens)
    jax.block_until_ready(ids)
    start = time.perf_counter()
    for _ in range(2):
        ids, tokens, cache = step(weights, cache, tokens)
    ids = np.asarray(ids)
    wall = (time.perf_counter() - start) / (2 * STEPS) * 1e6
    if ids.min() < 0 or ids.max() >= MODEL.vocab_size:
        raise ArithmeticError(WRONG)
    return dict(wall_us=wall, temp_bytes=memory.temp_size_in_bytes, aliased_bytes=memory.alias_size_in_bytes,
                cache_bytes=cache_bytes, last_ids=ids[-1].tolist()[:8])


def _summary(case, step, events, weights, facts) -> dict:
    unique = facts["unique"].get(case.batch, float("nan"))
    by_part = parts.step_bytes(weights, batch=case.batch, context=case.context, unique=unique,
                               expert_bytes=facts["expert_bytes"][case.format],
                               row_bytes=2 * MODEL.num_key_value_heads * MODEL.head_dim * 2)
    total = sum(by_part.values())
    hlo, layers = step.as_text(), len(weights.layers)
    count, written = parts.stages(hlo, "experts")
    found = dict(unique_experts=unique, bytes=by_part, read_us=total / facts["bytes_per_us"],
                 expert_stages=count / layers, expert_bytes_written=written / layers)
    runs = timing.split_runs(events, CALLS)[1:]
    clock = "device"
    if runs:
        us = statistics.median(parts.span_us(run) for run in runs) / STEPS
        # From the start of the first kept call to the end of the last: also what lies between calls.
        kept = [event for run in runs for event in run]
        with_calls = parts.span_us(kept) / (STEPS * len(runs))
        scopes = parts.kernel_scopes(hlo)
        split = parts.split_parts(kept, scopes, STEPS * len(runs))
        found.update(parts={name: dataclasses.asdict(part) for name, part in split.items()}, with_calls_us=with_calls,
                     launches=sum(part.kernels for part in split.values()))
    elif events:  # calls cannot be told apart: all of them
        us, clock = parts.span_us(events) / (STEPS * CALLS), "device, first call included"
    else:
        return dict(found, error="the trace does not show the step")
    return dict(found, us=us, clock=clock, tokens_per_s=case.batch / us * 1e6,
                fraction_of_read=found["read_us"] / us)


# ------------------------------------------------------------------------------------------------------ command line


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, help="only these of the grid")
    parser.add_argument("--context", nargs="+", type=int, help="only these of the grid")
    parser.add_argument("--format", nargs="+", default=["mxfp8", "bf16"], choices=inputs.FORMATS)
    parser.add_argument("--strategies", nargs="+", help="only these of the grid")
    parser.add_argument("--layers", type=int, default=MODEL.num_hidden_layers)
    parser.add_argument("--form", nargs="+", default=FORMS, choices=FORMS,
                        help="of the step around the experts: the first that works is used, the others at B = 1 only")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no new group starts")
    parser.add_argument("--group", type=int, default=8, help="cases compiled side by side and traced together")
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--fill", action="store_true", help="keep what an earlier run wrote, measure what it lacks")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    return parser.parse_args(argv)


def working_forms(facts: dict) -> list[str]:
    found = [name for name, outcome in facts["forms"].items() if isinstance(outcome, float)]
    if not found:
        raise SystemExit(f"no form of the step works: {facts['forms']}")
    return found


def chosen_cases(options, report: Report, format: str, working: list[str]) -> list[Case]:
    """Of the grid: what the options name, some form can run, and the report lacks."""
    return [c for c in default_cases(working[0]) if c.format == format and c.attention in working
            and (not options.batch or c.batch in options.batch)
            and (not options.context or c.context in options.context)
            and (not options.strategies or c.strategy in options.strategies)
            and not report.has(**dataclasses.asdict(c))]


def run_format(options, report: Report, format: str, start: float) -> None:
    """Adds the cases of one weight format to the report; the weights go when it returns."""
    facts = report.facts["facts"]
    if facts["forms"] and time.perf_counter() - start > options.budget:
        report.cut(*chosen_cases(options, report, format, working_forms(facts)))
        return
    weights = make_weights(format, options.layers)
    if not facts["forms"]:
        facts["forms"] = check_forms(weights, options.form)
    working = working_forms(facts)
    one = weights.layers[0].experts
    facts["expert_bytes"][format] = sum(a.nbytes for a in jax.tree.leaves(one)) // MODEL.num_experts
    print(f"{format}: weights after {time.perf_counter() - start:.0f} s", flush=True)
    cases = chosen_cases(options, report, format, working)
    refused = [c for c in cases if missing(c)]
    report.add(*(dict(dataclasses.asdict(c), error=f"skipped: {missing(c)}") for c in refused))
    cases = [c for c in cases if c not in refused]
    new = [batch for batch in dict.fromkeys(c.batch for c in cases) if batch not in facts["unique"]]
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        count = functools.partial(unique_experts, weights, attention=working[0])
        facts["unique"].update(zip(new, pool.map(count, new), strict=True))
    print(f"experts used per layer {facts['unique']}", flush=True)
    cases.sort(key=lambda c: layout(c) is not AS_IT_IS)
    for prepare, alike in itertools.groupby(cases, key=layout):
        if time.perf_counter() - start > options.budget:
            report.cut(*alike)
            continue
        if prepare is not AS_IT_IS:
            weights = prepared(weights, prepare)
        for group in itertools.batched(alike, options.group):
            if time.perf_counter() - start > options.budget:
                report.cut(*group)
                continue
            found = run_group(list(group), weights, options, facts)
            for row in found:
                show = row["batch"] == 1 and row["context"] <= 1024
                print(details(row) if show else describe_row(row), flush=True)
            report.facts["speedups"] = speedups(report.rows + found)
            report.add(*found)


def main(argv=None) -> int:
    options = parse(argv)
    take_memory()
    need_gpu("decode")
    start = time.perf_counter()
    facts = dict(bytes_per_us=read_kernel.bytes_per_us(), unique={}, expert_bytes={}, forms={})
    report = Report(options.out / "decode_steps.json", "decode", fill=options.fill, facts=facts, speedups=[])
    print(f"read ceiling {facts['bytes_per_us'] / 1e6:.2f} TB/s", flush=True)
    for format in options.format:
        try:
            run_format(options, report, format, start)
        except Exception as error:  # such as too little memory for the weights of one format
            print(f"{format}: {describe(error)}", flush=True)
            report.add(dict(format=format, strategy=OURS, batch=0, context=0, attention="", error=describe(error)))
    for row in report.facts["speedups"]:
        print(f"B={row['batch']} {row['context']:6} {row['format']:6} over {row['peer']} in {row['peer_format']}, "
              f"{row['form']} around it: step "
              f"{row['tokens_per_s']:.2f} x, experts {row['experts']:.2f} x")
    print(f"after {time.perf_counter() - start:.0f} s")
    wrong = report.finish()
    if any("parts" in r for r in report.rows):
        draw(plot, report.path.with_suffix(".png"), report.rows)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
