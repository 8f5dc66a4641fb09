"""Many decode steps of the bundled model: no growth, no recompilation, the same logits at the end as at the start.

    python -m bench.long_run --steps 100000 --seconds 50 --out bench/results

One sequence after the other, each from the same prompt through a fresh KV cache, until `--steps` decode steps or
`--seconds` have passed, whichever is first. Memory is looked at between sequences, compilations are counted by
jax.monitoring, and the logits of every sequence's last step are compared bit by bit with those of the first.

Writes long_run.json. Exit code 1: memory grew, something compiled after the first sequences, or a result changed.
"""

import argparse
import gc
import hashlib
import json
import pathlib
import sys
import time

import jax
import numpy as np

from bench.report import metadata, replace_text
from jax_warp_decode.checkpoints import load_qwen3_moe
from jax_warp_decode.demo import bundled_model
from jax_warp_decode.models.generate import generate

PROMPT = b'The "for" statement is used to iterate over'
WARM_UP = 3  # sequences before anything is compared: they compile, and fill the allocator's pools
HOST_GROWTH = 32 * 2**20  # of the resident set, which the allocator of the C library rounds up


def host_bytes() -> int:
    """Resident memory of this process."""
    fields = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def snapshot() -> dict:
    """Memory in use, on the host and the device, with garbage collected."""
    gc.collect()
    stats = jax.devices()[0].memory_stats() or {}
    return dict(host=host_bytes(), live_arrays=sum(a.nbytes for a in jax.live_arrays()),
                live_count=len(jax.live_arrays()), device=stats.get("bytes_in_use"),
                device_peak=stats.get("peak_bytes_in_use"))


def sequence(model, length: int):
    """Tokens of one greedy completion, and the logits of its last step."""
    generation = generate(model, np.frombuffer(PROMPT, np.uint8)[None], length)
    tokens = [int(ids[0]) for ids in generation]
    return tokens, np.array(generation.logits)  # a copy: a view would keep the device array alive


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="decode steps, all sequences together")
    parser.add_argument("--seconds", type=float, default=1800.0, help="stop after so long")
    parser.add_argument("--length", type=int, default=400, help="tokens of a sequence")
    parser.add_argument("--weights", choices=("bf16", "mxfp8"), default="mxfp8")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for long_run.json")
    options = parser.parse_args(arguments)

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None)
    model = load_qwen3_moe(bundled_model(options.weights), strategy=options.strategy)
    choice = str(model.choice(1))
    wanted, logits = sequence(model, options.length)
    for _ in range(WARM_UP - 1):
        sequence(model, options.length)
    first, warm_up_compiles = snapshot(), len(compiled)

    begin, steps, sequences, changed = time.monotonic(), 0, 0, 0
    half = None
    while steps < options.steps and time.monotonic() - begin < options.seconds:
        tokens, last = sequence(model, options.length)
        changed += tokens != wanted or not np.array_equal(last, logits)
        steps += options.length - 1
        sequences += 1
        if half is None and (steps >= options.steps / 2 or time.monotonic() - begin >= options.seconds / 2):
            half = snapshot()
    seconds, last = time.monotonic() - begin, snapshot()

    problems = []
    if changed:
        problems.append(f"{changed} of {sequences} sequences gave other tokens or other bits of their last logits")
    if len(compiled) > warm_up_compiles:
        problems.append(f"{len(compiled) - warm_up_compiles} compilations after the warm-up")
    for name in ("live_arrays", "live_count", "device", "device_peak"):
        if first[name] is not None and last[name] > first[name]:
            problems.append(f"{name} grew from {first[name]} to {last[name]}")
    if last["host"] - first["host"] > HOST_GROWTH and half and last["host"] - half["host"] > HOST_GROWTH / 4:
        problems.append(f"host memory grew from {first['host']} over {half['host']} to {last['host']}")
    report = dict(
        meta=metadata("long_run"), choice=choice, weights=options.weights, steps=steps,
        sequences=sequences, seconds=seconds, steps_per_second=steps / seconds if seconds else None,
        compilations_in_warm_up=warm_up_compiles,
        compilations_after=len(compiled) - warm_up_compiles,
        memory=dict(start=first, half=half, end=last),
        logits_sha256=hashlib.sha256(logits.tobytes()).hexdigest(), changed=changed, problems=problems)
    print(f"{steps} decode steps in {sequences} sequences, {seconds:.1f} s, {steps / max(seconds, 1e-9):.0f} steps/s, "
          f"{choice.split(' (')[0]}; compilations after warm-up {report['compilations_after']}; changed {changed}; "
          f"device {first['device']} -> {last['device']} bytes, host {first['host'] / 2**20:.0f} -> "
          f"{last['host'] / 2**20:.0f} MiB")
    for problem in problems:
        print("   <-", problem)
    if options.out:
        replace_text(options.out / "long_run.json", json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
