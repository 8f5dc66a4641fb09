"""Every kernel compiles for Hopper and Blackwell and is what its source says: registers, wide loads, shuffles only.

Needs no GPU, but the pinned compiler packages (dependency group "aot"). Without them these tests are skipped, on CI
they fail. `python -m tests.aot` prints the whole report.
"""

import dataclasses
import functools
import importlib.util
import os

import aot
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode import compat

ARCHS = list(aot.ARCHS)
ONE_ARCH = {"sm_90a": "hopper_cases", "sm_100a": "blackwell_cases", "sm_103a": "blackwell_cases"}


def kernel_names():
    if importlib.util.find_spec("aot_cases") is None:
        return []
    import aot_cases

    return [case[0] for case in aot_cases.aot_cases()]


# ------------------------------------------------------------------------- small kernels, each with one known property


def row_sums(*, vec=8, rows_per_warp=1):
    """y[n] = sum_k w[n, k] with one warp per row at a time and vec values of bf16 per load."""
    rows, cols = 4 * rows_per_warp, 32 * vec
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((4, cols), (vec,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def body(w_ref, y_ref):
        here = pl.ds(lax.axis_index("tile") * rows, rows)

        def step(k, acc):
            w = plgpu.load(w_ref.at[here, pl.ds(k * cols, cols)], layout=layout, optimized=False)
            return acc + w.astype(jnp.float32)

        acc = lax.fori_loop(0, 4, step, plgpu.layout_cast(jnp.zeros((rows, cols), jnp.float32), layout))
        compat.store_unaligned(y_ref.at[here], jnp.sum(acc, axis=1))

    fn = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((8 * rows,), jnp.float32), grid=(8,), grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True))
    return fn, (jax.ShapeDtypeStruct((8 * rows, 4 * cols), jnp.bfloat16),)


def sum_across_warps():
    def body(w_ref, y_ref):
        w = plgpu.load(w_ref.at[:], layout=plgpu.Layout.WG_STRIDED((1024,), 8), optimized=False)
        y_ref[0] = jnp.sum(w.astype(jnp.float32))

    fn = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), jnp.float32))
    return fn, (jax.ShapeDtypeStruct((1024,), jnp.bfloat16),)


def does_not_lower():
    def body(w_ref, y_ref):
        y_ref[...] = jnp.sort(w_ref[...])

    fn = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1024,), jnp.float32))
    return fn, (jax.ShapeDtypeStruct((1024,), jnp.float32),)


def twice():
    """Row sums of repeated row sums: w.size elements of memory between the two kernels."""
    fn, args = row_sums(rows_per_warp=2)

    def chain(w):
        return fn(jnp.broadcast_to(jnp.tile(fn(w).astype(w.dtype), 16), w.shape))

    return chain, args


def checker_cases():
    yield "good", *row_sums(), dict(max_narrow_loads=0, max_registers=64)
    yield "good again", *row_sums(), {}
    yield "narrow", *row_sums(vec=2), {}
    yield "spill", *row_sums(rows_per_warp=48), {}
    yield "across warps", *sum_across_warps(), {}
    yield "temporaries", *twice(), dict(max_temp_bytes=16)
    yield "no kernel", jnp.sum, (jax.ShapeDtypeStruct((8,), jnp.float32),), {}
    yield "error", *does_not_lower(), {}


# ------------------------------------------------------------------------------------------------------------- tests


@functools.cache
def compile_for(arch):
    sources = ["test_aot:checker_cases"] + [aot.CASES] * bool(kernel_names())
    sources += [f"aot_cases:{ONE_ARCH[arch]}"]
    return {r.case: r for r in aot.compile_cases(sources, [arch])}


@pytest.fixture
def reports():
    """arch -> every case of this file and of aot_cases.py, {name: report}, compiled when it is first asked for.

    An architecture that is deselected, as in `-k "not sm_10"`, costs nothing.
    """
    if reason := aot.missing_tools():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return compile_for


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", kernel_names())
def test_kernel_keeps_to_its_limits(reports, case, arch):
    report = reports(arch)[case]
    assert report.problems == [], "\n".join([*report.problems, *map(str, report.kernels)])


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_for_one_architecture_keep_to_their_limits(reports, arch):
    import aot_cases

    for name, *_ in getattr(aot_cases, ONE_ARCH[arch])():
        assert reports(arch)[name].kernels and reports(arch)[name].problems == []


@pytest.mark.parametrize("arch", ARCHS)
def test_good_kernel_has_what_it_shows(reports, arch):
    report = reports(arch)["good"]
    assert report.problems == []
    (kernel,) = report.kernels
    assert (kernel.spill_bytes, kernel.narrow_loads, kernel.shared) == (0, 0, 0)
    assert kernel.wide_loads >= 1 and kernel.shuffles == 5 and 8 < kernel.registers <= 64


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case, problem", [
    ("narrow", "0 wide loads, at least 1"),
    ("spill", "bytes spilled, at most 0"),
    ("across warps", "barriers, at most 1"),
    ("across warps", "shared-memory instructions, at most 0"),
    ("temporaries", "bytes of temporaries, at most 16"),
    ("no kernel", "no Mosaic GPU kernel"),
    ("error", "NotImplementedError"),
])
def test_checker_finds_the_problem(reports, case, problem, arch):
    assert problem in "\n".join(reports(arch)[case].problems)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_of_an_earlier_case_is_no_problem(reports, arch):
    """jax 0.12 compiles an equal kernel once, so that the second case shows none."""
    report = reports(arch)["good again"]
    assert (report.calls, report.problems) == (1, [])


@pytest.mark.parametrize("change, problem", [
    (dict(spill_bytes=8), "8 bytes spilled, at most 0"),
    (dict(registers=65), "65 registers, at most 64"),
    (dict(narrow_loads=2), "2 narrow loads, at most 1"),
    (dict(barriers=2), "2 barriers, at most 1"),
    (dict(shared=1), "1 shared-memory instructions, at most 0"),
    (dict(wide_loads=3), "3 wide loads, at least 4"),
    (dict(shuffles=0), "0 shuffles, at least 1"),
])
def test_each_limit_is_checked(change, problem):
    limits = aot.Limits(max_registers=64, max_narrow_loads=1, min_wide_loads=4)
    good = aot.Kernel("k", registers=64, spill_bytes=0, wide_loads=4, narrow_loads=1, bulk_copies=0, shuffles=5,
                      barriers=1, shared=0)
    assert good.problems(limits) == []
    assert dataclasses.replace(good, **change).problems(limits) == [f"k: {problem}"]


def test_missing_compiler_packages_are_named(monkeypatch):
    monkeypatch.setattr(aot, "PINNED", {"nvidia-cuda-nvcc": "0.1", "no-such-package": "1.0"})
    assert "nvidia-cuda-nvcc is" in aot.missing_tools() and "pinned to 0.1" in aot.missing_tools()
    assert "no-such-package is missing, pinned to 1.0" in aot.missing_tools()


def test_unknown_limit_is_an_error():
    with pytest.raises(TypeError, match="max_register"):
        aot.Limits(**{"max_register": 3})


def test_instructions_are_counted_by_opcode_and_dead_ones_are_not():
    sass = """
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0060*/             @!PT LDS RZ, [RZ] ;
        /*0070*/              @UP1 LD.E.U8 R5, desc[UR4][R2.64+0x10] ;
    .L_x_1:
        /*0080*/                   LDG.E.128 R8, desc[UR4][R2.64+0x20] ;
    """
    assert aot.count_opcodes(sass) == {"BAR.SYNC.DEFER_BLOCKING": 1, "LDG.E.128": 2, "LD.E.U8": 1}
