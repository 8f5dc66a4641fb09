"""How long a decode step of many MoE layers takes to compile: unrolled, and as a scan over stacked weights.

    python -m bench.compile_time --out bench/results

A step runs router and experts of every layer, with the sizes of the model but few experts, whose number does not matter
to the compiler. It is compiled for B = 1, then for B = 2, then called with B = 1 again: equal layers must share their
kernels, and another B must cost its own kernels and nothing else. Every form and weight format has a process of its
own, side by side. Without a GPU the step is only traced and lowered.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import time

MODEL = "qwen3-30b-a3b"
FORMS = ("unrolled", "scanned")
EXPERTS = 16
# Seconds of work by phase, as jax.monitoring reports them; "compile" has LLVM, ptxas and the instantiation of kernels.
PHASES = {"/jax/core/compile/jaxpr_trace_duration": "trace", "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
          "/jax/core/compile/backend_compile_duration": "compile"}


def make_step(form: str, experts_per_token: int):
    """step(x [B, H], routers, experts) -> x; the weights are lists over layers, or stacked for "scanned"."""
    import jax
    import jax.numpy as jnp

    from jax_warp_decode import route
    from jax_warp_decode.activations import get_activation
    from jax_warp_decode.paths import warp_decode

    def run(x, w_router, experts, layer=None):
        logits = jnp.dot(x, w_router.T, preferred_element_type=jnp.float32)
        routing = route(logits, experts_per_token)
        return x + warp_decode.run(x, routing, experts, activation=get_activation("silu"), layer=layer)

    def unrolled(x, layers):
        for w_router, experts in layers:
            x = run(x, w_router, experts)
        return x

    def scanned(x, layers):
        routers, experts = layers
        numbers = jnp.arange(routers.shape[0], dtype=jnp.int32)
        return jax.lax.scan(lambda x, at: (run(x, at[0], experts, at[1]), None), x, (routers, numbers))[0]

    return dict(unrolled=unrolled, scanned=scanned)[form]


def kernels(lowered) -> set[str]:
    """The different Mosaic GPU kernels of a lowered step."""
    return set(re.findall(r"custom_call @mosaic_gpu\w*\(.*?\) (\{.*\}) :", lowered.as_text()))


def measure(form: str, format: str, layers: int, batches: list[int]) -> list[dict]:
    """One result per entry of `batches`, in order, in this process: `seconds` until the first result is there."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from jax_warp_decode.measure import inputs, timing
    from jax_warp_decode.presets import get_preset

    on_gpu = jax.default_backend() == "gpu"
    preset = dataclasses.replace(get_preset(MODEL), num_experts=EXPERTS)
    weights = jax.eval_shape(lambda: (
        jnp.zeros((EXPERTS, preset.hidden), jnp.bfloat16), inputs.make_experts(jax.random.key(0), preset, format)))
    if form == "scanned":
        weights = jax.tree.map(lambda a: jax.ShapeDtypeStruct((layers, *a.shape), a.dtype), weights)
    if on_gpu:  # nothing but zeros: what is computed does not matter here
        weights = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), weights)
    if form == "unrolled":
        weights = [weights] * layers
    step = make_step(form, preset.experts_per_token)
    step = jax.jit(step, compiler_options=timing.GRAPH_OPTIONS if on_gpu else None)

    lower = step.lower if on_gpu else lambda *args: step.trace(*args).lower(lowering_platforms=("cuda",))
    spent = collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: spent.update({PHASES[event]: seconds}) if event in PHASES else None)
    seen, results = set(), []
    for batch in batches:
        x = jax.ShapeDtypeStruct((batch, preset.hidden), jnp.bfloat16)
        x = jnp.zeros(x.shape, x.dtype) if on_gpu else x
        jax.block_until_ready(x)
        spent.clear()
        start, cpu_start = time.perf_counter(), time.process_time()
        if on_gpu:
            jax.block_until_ready(step(x, weights))
        else:
            lower(x, weights)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        phases = {phase: round(spent[phase], 3) for phase in PHASES.values()}
        found = kernels(lower(x, weights))  # from the cache
        results.append(dict(
            model=MODEL, form=form, format=format, layers=layers, batch=batch, seconds=round(seconds, 3),
            cpu_seconds=round(cpu_seconds, 3), phases=phases, compiled=on_gpu, kernels=len(found),
            new_kernels=len(found - seen)))
        seen |= found
    return results


def run(options) -> list[dict]:
    """All children side by side."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "bench.compile_time", "--layers", str(options.layers), "--child"]
    children = [
        subprocess.Popen([*command, form, format], stdout=subprocess.PIPE, text=True, env=env)
        for form in FORMS for format in options.format]
    results = []
    for child in children:
        out, _ = child.communicate()
        if child.returncode:
            raise SystemExit(f"{' '.join(child.args)} failed")
        results += json.loads(out.splitlines()[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"], choices=["bf16", "mxfp8"])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, options.layers, [1, 2, 1])))
        return
    results = run(options)
    for r in results:
        print("{form:9} {format:6} B={batch} {layers} layers: {seconds:6.2f} s ({cpu_seconds:.2f} of CPU time)  "
              "{kernels} kernels, {new_kernels} new  {phases}".format(**r))
    if options.out:
        from bench.report import metadata  # imported late: asking for the device takes the GPU's memory

        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "compile_time.json"
        path.write_text(json.dumps(dict(meta=metadata("compile_time"), results=results), indent=1) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
