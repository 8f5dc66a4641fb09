"""Do the tests find faults? Plants one after the other in a copy of the package; each must make a test fail.

    python -m bench.mutate --out bench/results [--only NAME ...] [--jobs 2]

A fault is a replacement of one piece of text, which must occur exactly once in its file, and the tests that ought to
notice. Before any fault, all these tests must pass in the copy as it is. Writes mutation.json (with --only, the entries
of these faults in it); exit code 1 if a fault survived, was not found in the source, or if the tests fail without one.
Needs no GPU: the kernels are interpreted.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from bench.report import metadata, replace_text

ROOT = pathlib.Path(__file__).resolve().parents[1]
FUZZ = "tests/test_fuzz.py::test_random_layers"
REFERENCE = f"{FUZZ}[reference-bf16-bf16-silu-T5]"
EXPERT_CENTRIC = f"{FUZZ}[expert_centric-bf16-bf16-gelu_tanh-T9-f32 biases]"
KERNELS = "tests/test_kernels.py::test_gate_up_and_layer_match_the_oracle"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: in `file`, `old` becomes `new`; at least one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def fault(name, file, old, new, *tests):
    return Fault(name, f"jax_warp_decode/{file}", old, new, tests)


FAULTS = [
    # The XLA strategies
    fault("gate and up swapped, expert_centric", "paths/expert_centric.py",
          "return activation.apply(gate, up)", "return activation.apply(up, gate)", EXPERT_CENTRIC),
    fault("routing weight dropped, reference", "paths/reference.py",
          "weights.b_down)) * share, None", "weights.b_down)), None", REFERENCE),
    fault("-1 counts as an expert, expert_centric", "paths/expert_centric.py",
          "return (ids >= 0) & (ids < jnp.int32(num_experts))", "return ids < jnp.int32(num_experts)", EXPERT_CENTRIC),
    fault("E counts as an expert, expert_centric", "paths/expert_centric.py",
          "(ids < jnp.int32(num_experts))", "(ids <= jnp.int32(num_experts))", EXPERT_CENTRIC),
    fault("stale rows of skipped slots are summed", "paths/expert_centric.py",
          "return jnp.where(routed[:, k, None], _slot(rows, alignment, k), jnp.float32(0))",
          "return _slot(rows, alignment, k)",
          "tests/test_cases.py::test_d03_rows_that_nobody_wrote_are_not_summed"),
    fault("weight of a skipped slot is read", "paths/expert_centric.py",
          "return jnp.where(routed, weights, jnp.float32(0))", "return weights", EXPERT_CENTRIC),
    fault("last row of every expert lost", "paths/grouped_gemm.py",
          "        mine = (row >= start) & (row < end)", "        mine = (row >= start) & (row < end - 1)",
          EXPERT_CENTRIC),
    fault("mask by multiplication lets NaN through", "paths/reference.py",
          "    return jnp.where(keep, a, jnp.float32(0))", "    return keep * a", REFERENCE),
    fault("repeated ids count once", "paths/reference.py",
          "share = jnp.sum(_select(chosen, routing.weights), axis=1, keepdims=True)",
          "share = jnp.max(_select(chosen, routing.weights), axis=1, keepdims=True)", REFERENCE),
    # The kernels
    fault("-1 reads a weight, kernels", "kernels/expert_index.py",
          "routed = (expert >= 0) & (expert < self.num_experts)", "routed = expert < self.num_experts",
          "tests/test_kernels.py::test_routing_patterns[none]"),
    fault("layers outside a stack are read", "kernels/expert_index.py",
          "routed & (layer >= 0) & (layer < self.layers)", "routed",
          "tests/test_kernels.py::test_stacked_layers_give_the_bits_of_each_layer[bf16]"),
    fault("columns of an overlapping last step count twice", "kernels/tile.py",
          "            partial = jnp.where(group >= seen, partial, jnp.float32(0))\n", "            pass\n",
          f"{KERNELS}[bf16-2-4-256-96-2]"),
    fault("first column of a last step lost", "kernels/tile.py",
          "jnp.where(group >= seen, partial", "jnp.where(group > seen, partial", f"{KERNELS}[bf16-2-4-256-96-2]"),
    fault("routing weight dropped, down kernel", "kernels/down.py",
          "partial = weight * rows.dot(", "partial = rows.dot(", f"{KERNELS}[bf16-2-4-256-96-2]"),
    fault("skipped slot adds the stand-in's row", "kernels/down.py",
          "acc = acc + jnp.where(lax.broadcast_in_dim(routed, partial.shape, ()), partial, jnp.float32(0))",
          "acc = acc + partial", f"{KERNELS}[bf16-2-4-256-96-2]"),
    fault("another token's activations, gate and up kernel", "kernels/gate_up.py",
          "token = lax.div(pair, jnp.int32(K))", "token = lax.rem(pair, jnp.int32(K))",
          f"{KERNELS}[bf16-2-4-256-96-2]"),
    # Formats
    fault("scale of the neighbouring block", "formats/scaling.py",
          "            scales = jax.lax.slice_in_dim(scales, 0, shape[axis], axis=axis % scales.ndim)",
          "            scales = jax.lax.slice_in_dim("
          "jnp.roll(scales, 1, axis), 0, shape[axis], axis=axis % scales.ndim)",
          f"{FUZZ}[expert_centric-int4_group32-bf16-clamped_silu-T6]"),
    fault("nibbles in the other order", "formats/elements.py",
          "jnp.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)",
          "jnp.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=-1)",
          f"{FUZZ}[reference-mxfp4-bf16-clamped_swiglu-T4-bf16 biases]"),
    fault("scale byte 255 is a number", "formats/elements.py",
          "    bad = (scale == NAN_SCALE) | (magnitude > INFINITY)", "    bad = magnitude > INFINITY",
          "tests/test_format_rows.py::test_mxfp4_of_the_public_case"),
    fault("scale off by one power of two", "formats/elements.py",
          "    normal = magnitude + ((scale - np.int32(127)) << 23)",
          "    normal = magnitude + ((scale - np.int32(126)) << 23)", f"{FUZZ}[expert_centric-mxfp8-bf16-silu-T33-L2]"),
    # Activations and routers
    fault("gate clamped from below too", "activations.py",
          "gate, up = jnp.minimum(gate, limit), ", "gate, up = jnp.clip(gate, -limit, limit), ",
          "tests/test_activations.py::test_clamped_swiglu_of_the_public_case"),
    fault("up not clamped from below", "activations.py",
          "jnp.maximum(jnp.minimum(up, limit), -limit)", "jnp.minimum(up, limit)",
          f"{FUZZ}[reference-mxfp4-bf16-clamped_swiglu-T4-bf16 biases]",
          "tests/test_activations.py::test_clamped_swiglu_of_the_public_case"),
    fault("correction bias in the weights", "routers.py",
          "    weights = jnp.take_along_axis(scores, ids, axis=-1)",
          "    weights = jnp.take_along_axis(choice, ids, axis=-1)",
          "tests/test_routing.py::test_excluded_groups_are_out_of_reach"),
    fault("excluded groups get zero", "routers.py",
          "return jnp.where(kept[:, :, None], grouped, _INT32_MIN).reshape",
          "return jnp.where(kept[:, :, None], grouped, np.int32(0)).reshape",
          "tests/test_routing.py::test_excluded_groups_are_out_of_reach"),
    fault("scaling factor applied twice", "routers.py",
          "        weights = weights * np.float32(router.scale)",
          "        weights = weights * np.float32(router.scale**2)",
          "tests/test_routing.py::test_settings_of_the_public_cases"),
    fault("ids beyond int32 wrap around", "routing.py",
          "ids = xp.where((ids >= 0) & (ids <= 2**31 - 1), ids.astype(jnp.int32), np.int32(-1))",
          "ids = ids.astype(jnp.int32)", "tests/test_routing.py::test_ids_beyond_int32_stay_out_of_range"),
    # Gradients and the mesh
    fault("gradient of a skipped slot's weight", "paths/expert_centric.py",
          "jnp.sum(_routed_slot(out, alignment, routed, k) * cotangent, axis=1)",
          "jnp.sum(_slot(out, alignment, k) * cotangent, axis=1)",
          "tests/test_cases.py::test_d03_rows_that_nobody_wrote_are_not_summed"),
    fault("gradients of biases summed in bfloat16", "paths/grouped_bias.py",
          "rows, most = rows.astype(jnp.float32), rows.shape[0]",
          "rows, most = rows.astype(jnp.bfloat16), rows.shape[0]",
          "tests/test_gradients.py::test_biases_get_float32_sums_whatever_the_products_round"),
    fault("ids of other devices wrap into one's own", "parallel.py",
          "    here = (ids >= first) & (ids - first < jnp.int32(num_experts))",
          "    here = ids - first < jnp.int32(num_experts)",
          "tests/test_docs.py::test_docstring_examples[jax_warp_decode.parallel]"),
]


def copy_to(folder: pathlib.Path) -> None:
    for name in ("jax_warp_decode", "tests", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)


def run_tests(folder: pathlib.Path, tests, *options) -> subprocess.CompletedProcess:
    env = dict(os.environ, PYTHONPATH=".", PYTHONDONTWRITEBYTECODE="1", JAX_PLATFORMS="cpu")
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *tests],
                          cwd=folder, env=env, capture_output=True, text=True)


def attempt(fault: Fault) -> dict:
    """Plants one fault in a fresh copy and runs its tests."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        folder = pathlib.Path(folder)
        copy_to(folder)
        source = (folder / fault.file).read_text()
        if source.count(fault.old) != 1:
            return dict(fault=fault.name, outcome=f"its text occurs {source.count(fault.old)} times in {fault.file}")
        (folder / fault.file).write_text(source.replace(fault.old, fault.new))
        done = run_tests(folder, fault.tests, "--fuzz-examples", "80")  # of the 200 of CI, the first in the same order
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    outcome = {0: "SURVIVED", 1: "found"}.get(done.returncode, f"pytest ended with code {done.returncode}")
    return dict(fault=fault.name, file=fault.file, outcome=outcome, by=failed[:1], tests=fault.tests,
                seconds=round(time.monotonic() - begin, 1), tail=lines[-3:] if outcome != "found" else [])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for mutation.json")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="faults whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    faults = [f for f in FAULTS if not options.only or any(part in f.name for part in options.only)]
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_to(pathlib.Path(folder))
        tests = sorted({test for f in faults for test in f.tests})
        clean = run_tests(pathlib.Path(folder), tests, "--fuzz-examples", "80")
    print(f"without a fault: {clean.stdout.splitlines()[-1:]}", flush=True)
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(attempt, faults):
            results.append(result)
            print(f"{result['outcome']:10} {result['fault']}  {result.get('seconds', '')} s", flush=True)
    about, path = metadata("mutate"), options.out and options.out / "mutation.json"
    results = {r["fault"]: dict(r, commit=about["commit"], date=about["date"]) for r in results}
    if options.only and path and path.exists():
        results = {r["fault"]: r for r in json.loads(path.read_text())["results"]} | results
    survived = [name for name, r in results.items() if r["outcome"] != "found"]
    report = dict(about, faults=len(results), found=len(results) - len(survived), clean=clean.stdout.splitlines()[-1:],
                  not_found=survived, results=list(results.values()))
    if path:
        replace_text(path, json.dumps(report, indent=1) + "\n")
    print(f"{report['found']} of {report['faults']} faults found")
    return 1 if survived or clean.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
