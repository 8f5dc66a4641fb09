"""Do the tests find faults? Plants one after the other in a copy of the package; each must make a test fail.

    python -m bench.mutate --out bench/results [--only NAME ...] [--jobs 2]

A fault is a replacement of one piece of text, which must occur exactly once in its file, and the tests that ought to
notice. Before any fault, all these tests must pass in the copy as it is. Writes mutation.json (with --only, the entries
of these faults in it); exit code 1 if a fault survived, was not found in the source, or if the tests fail without one.
Needs no GPU: the kernels are interpreted, or their PTX is executed.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
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
SHARED = "tests/test_shared.py::test_layer_matches_the_oracle"
PASSES = "tests/test_shared.py::test_several_passes_warpgroups_panels_a_short_ring_stacked_layers_and_biases[bf16-True]"
ROUTER = "tests/test_router_kernel.py::test_matches_the_oracle"
CLUSTERS = "tests/test_ptx_clusters.py::test_the_router"
TENSOR_DOWN = "tests/test_row_products.py::test_down"


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
    fault("gate and up swapped, tensor cores", "kernels/gate_up_tensor.py",
          "return array(totals[::2]), array(totals[1::2])", "return array(totals[1::2]), array(totals[::2])",
          "tests/test_row_products.py::test_gate_up[mxfp8-320-64-config0-False-silu-bfloat16]"),
    fault("weight of the next slot, down on tensor cores", "kernels/down_tensor.py",
          "group, entry(slot, 2).float())", "group, entry((slot + 1).min(count - 1).max(0), 2).float())",
          f"{TENSOR_DOWN}[mxfp8-64-576-config0-float32]"),
    fault("bias of the last slot forgotten, down on tensor cores", "kernels/down_tensor.py",
          "mgpu.fori(count.v, [total])", "mgpu.fori((count - 1).max(0).v, [total])",
          f"{TENSOR_DOWN}[mxfp4-96-320-config2-bfloat16]"),
    fault("last steps of a row lost, dense_rows", "kernels/dense_rows.py",
          "            rows.steps, unroll, jnp.bool_(True)",
          "            rows.steps // unroll * unroll, unroll, jnp.bool_(True)",
          "tests/test_decode_step.py::test_dense_rows_is_the_exact_product_rounded_once"),
    # shared_decode: what the interpreter runs, then what only a GPU does, as PTX
    fault("last pass with one slot lost", "kernels/shared_common.py",
          "(count + jnp.int32(tokens - 1)) // jnp.int32(tokens)",
          "(count + jnp.int32(tokens - 2)) // jnp.int32(tokens)", "tests/test_shared.py::test_groups[full or not-8]"),
    fault("E counts as an expert, shared_decode", "kernels/shared_common.py",
          "    hits = ids[:, None] == e", "    hits = jnp.minimum(ids, jnp.int32(experts - 1))[:, None] == e",
          "tests/test_shared.py::test_groups[skipped-8]"),
    fault("scales of the next item", "kernels/shared_stream.py",
          "ring.at[stage], scales_at(item - begin)[0]", "ring.at[stage], scales_at(item - begin + jnp.int32(1))[0]",
          SHARED),
    fault("sum of the last warpgroup lost", "kernels/shared_stream.py",
          "sum(load(w, m) for w in range(warpgroups))", "sum(load(w, m) for w in range(max(1, warpgroups - 1)))",
          PASSES),
    fault("skipped slot is summed, shared_decode", "kernels/shared_down.py",
          "y = y + jnp.where(lax.broadcast_in_dim(is_routed, (size,), ()), weight * row, jnp.float32(0))",
          "y = y + weight * row", SHARED),
    fault("second factor of large rows forgotten", "kernels/shared_half.py",
          "    for field in (first, factors - first + jnp.int32(127)):", "    for field in (first,):",
          "tests/test_shared.py::test_rows_near_the_largest_float32"),
    fault("second factor of large rows forgotten, PTX", "kernels/shared_half.py",
          "arith.mulf(arith.mulf(value, (first << 23).float()), ((factor - first + 127) << 23).float())",
          "arith.mulf(value, (first << 23).float())",
          "tests/test_ptx.py::test_a_row_of_shared_experts_near_the_largest_float32"),
    fault("E counts as an expert, shared_decode, PTX", "kernels/shared_simt.py",
          "routed = arith.andi(e >= 0, e < experts)", "routed = arith.andi(e >= 0, e < experts + 1)",
          "tests/test_ptx.py::test_shared_experts[bf16-gate_up]"),
    fault("every pass takes the first slots, PTX", "kernels/shared_simt.py",
          "simt.loop(-(-slots // LANES), Int(0) - q * tokens)(search)", "simt.loop(-(-slots // LANES), Int(0))(search)",
          "tests/test_ptx.py::test_passes_of_shared_experts"),
    # The grouped kernels
    fault("last partial tile lost", "paths/grouped_plan.py",
          "(sizes + jnp.int32(widest - 1)) // jnp.int32(widest)", "sizes // jnp.int32(widest)",
          "tests/test_grouped.py::test_every_slot_has_a_row_of_its_own_in_a_tile_of_its_expert[300-128-8-32]"),
    fault("rows of an unaligned expert lie in the tile before", "paths/grouped_plan.py",
          "    start, first = _before(padded), _before(count)", "    start, first = _before(sizes), _before(count)",
          "tests/test_grouped.py::test_layer_matches_the_oracle[bf16-relu2]"),
    fault("last tile of an expert takes rows of the next", "kernels/grouped_matmul.py",
          "rows = jnp.minimum(rows - done, share * jnp.int32(ROW_ALIGNMENT))",
          "rows = jnp.minimum(rows, share * jnp.int32(ROW_ALIGNMENT))",
          "tests/test_grouped.py::test_several_tiles_of_an_expert"),
    fault("slots of later CTAs not counted, plan kernel", "kernels/grouped_sort.py",
          "simt.put(sizes, e, before + simt.at(sizes, e))", "simt.put(sizes, e, before)",
          "tests/test_ptx.py::test_the_plan_kernel_equals_its_plain_form[700]"),
    # The router kernel
    fault("ties go to the higher id, router kernel", "kernels/router.py",
          "ranking.over_own(other) < ranking.over_all(expert)", "ranking.over_own(other) > ranking.over_all(expert)",
          "tests/test_router_kernel.py::test_equal_rows_tie_exactly_and_the_lower_id_wins"),
    fault("padded logits are ranked", "kernels/router.py",
          "key = jnp.where(other < E, order_key(everything), _INT32_MIN)", "key = order_key(everything)",
          f"{ROUTER}[1-24-512-8-config3-False]"),
    fault("padded logits are in the softmax", "kernels/router.py",
          "scores = jnp.where(ranking.over_own(other) < E, scores, zero)", "pass",
          f"{ROUTER}[1-24-512-8-config3-False]"),
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
    fault("barriers of a cluster made without a fence", "kernels/cluster_exchange.py",
          "  @first fence.mbarrier_init.release.cluster;\n", "", f"{CLUSTERS}[2-16-256-3-config0-True-48]"),
    fault("the router waits for the first exchange twice", "kernels/cluster_exchange.py",
          "_ptx(_ARRIVED.format(offset=8 * exchange)", "_ptx(_ARRIVED.format(offset=0)",
          f"{CLUSTERS}[2-16-256-3-config0-True-48]"),
    fault("bfloat16 scales of blocks stay in the lower half", "kernels/row_products.py",
          "(Int(word) << (32 - 8 * self.spec.scale_bytes)).float()", "Int(word).float()",
          "tests/test_row_products.py::test_scales_of_blocks_may_be_bfloat16"),
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
    fault("ids of earlier devices are not -1", "parallel.py",  # out of range all the same: of the docstring alone
          "    here = (ids >= first) & (ids - first < jnp.int32(num_experts))",
          "    here = ids - first < jnp.int32(num_experts)",
          "tests/test_docs.py::test_docstring_examples[jax_warp_decode.parallel]"),
    fault("ids of other devices wrap into one's own", "parallel.py",
          "    return jnp.where(here, ids - first, jnp.int32(-1))", "    return ids % jnp.int32(num_experts)",
          "tests/test_parallel.py::test_two_processes"),
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
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR tests/"))]
    # Says whether the fault could run at all, or by what it was found: a wrong value, a race, a read out of bounds.
    error = [line[1:].strip()[:200] for line in lines if re.match(r"E +(\w+Error: |assert )", line)][-1:]
    outcome = {0: "SURVIVED", 1: "found"}.get(done.returncode, f"pytest ended with code {done.returncode}")
    return dict(fault=fault.name, file=fault.file, outcome=outcome, by=failed[:1], error=error, tests=fault.tests,
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
