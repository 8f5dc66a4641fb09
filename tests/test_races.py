"""Race detection over every kernel that jax's GPU interpreter can run; `INTERPRETED` says which test does it.

Here run those that no other test interprets: the grouped products of `expert_centric` that have gradients, the launches
around the experts, and the read that measurements compare with. What cannot run in it, and what stands in for it:

| what | why not | instead |
| --- | --- | --- |
| `attend`, both launches | Triton: the interpreter knows neither masked loads nor blocks of a grid | its programs share nothing: each writes an own part of its outputs, and the second launch reads them |
| `rms_norm` | the same | one program a row |
| `grouped_sort` | all of it is inline code, which the interpreter does not look into | its PTX is executed, with races, and compared with its plain form in `grouped_plan`, tests/test_ptx.py |
| `gate_up_tensor`, `down_tensor` | the same | their PTX is executed, with races, in bench/fuzz.py; racecheck of compute-sanitizer, bench/sanitize.py |
| inline code in `shared_simt`, `shared_half`, `grouped_simt` | the same | plain forms are interpreted in its place; racecheck runs the code itself |
| exchange between CTAs in `router` | neither clusters nor PTX | one global array is interpreted in its place; test_ptx_clusters |
| the marker of `measure.timing` | one program that copies 128 floats | nothing to race with |
"""  # noqa: E501

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jax_warp_decode
from jax_warp_decode.kernels.dense_rows import DenseConfig, dense_rows
from jax_warp_decode.measure import read_kernel
from jax_warp_decode.paths import grouped_kernels

SIZES = np.array([1, 0, 6], np.int32)

# Module with a kernel -> the tests that interpret it, with the fixture `interpreter`.
INTERPRETED = {
    "kernels/gate_up.py": "test_kernels.py", "kernels/down.py": "test_kernels.py",
    "kernels/router.py": "test_router_kernel.py", "kernels/shared_stream.py": "test_shared.py",
    "kernels/shared_down.py": "test_shared.py", "kernels/grouped_matmul.py": "test_grouped.py",
    "kernels/grouped_tcgen05.py": "test_grouped.py",
    "kernels/dense_rows.py": "test_races.py", "paths/grouped_kernels.py": "test_races.py",
    "measure/read_kernel.py": "test_races.py"}
NOT_INTERPRETED = {"kernels/attend.py", "kernels/rms_norm.py", "kernels/grouped_sort.py", "kernels/gate_up_tensor.py",
                   "kernels/down_tensor.py", "measure/timing.py"}


def test_every_kernel_is_interpreted_or_in_the_table():
    root = pathlib.Path(jax_warp_decode.__file__).parent
    launches = {path.relative_to(root).as_posix() for path in root.rglob("*.py")
                if re.search(r"\b(plgpu\.kernel|pallas_call)\(\n", path.read_text())}
    assert INTERPRETED.keys() <= launches <= INTERPRETED.keys() | NOT_INTERPRETED
    for module, test in INTERPRETED.items():
        assert "(interpreter" in (pathlib.Path(__file__).parent / test).read_text(), (module, test)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_times_weights(interpreter, transposed):
    rows, w = draw(0, 8, 64), draw(1, 3, 64, 64)
    w[1] = np.nan
    with plgpu.force_gpu_interpret_mode(interpreter):
        got = np.asarray(grouped_kernels.product(
            jnp.asarray(rows), jnp.asarray(w), jnp.asarray(SIZES), transposed=transposed))
    for e, here in ((0, slice(0, 1)), (2, slice(1, 7))):
        exact = rows[here].astype(np.float64) @ (w[e] if transposed else w[e].T).astype(np.float64)
        np.testing.assert_allclose(got[here], exact, rtol=2.0**-8, atol=1e-4)


def test_outer_products(interpreter):
    a, b = draw(2, 8, 64), draw(3, 8, 64)
    a[7], b[7] = np.nan, np.nan  # in no group
    with plgpu.force_gpu_interpret_mode(interpreter):
        got = np.asarray(grouped_kernels.outer(jnp.asarray(a), jnp.asarray(b), jnp.asarray(SIZES)))
    a, b = a.astype(np.float64), b.astype(np.float64)
    want = [a[:1].T @ b[:1], np.zeros((64, 64)), a[1:7].T @ b[1:7]]
    np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize("config", [DenseConfig(1, unroll=1), DenseConfig(2, unroll=2)], ids=["plain", "unrolled"])
def test_dense_rows(interpreter, config):
    """Two terms, a norm and a residual; T, N and M with more than one tile and step each."""
    x, more, w, gain, residual = (jnp.asarray(draw(4 + n, *shape)) for n, shape in enumerate(
        ((3, 768), (3, 768), (16, 768), (768,), (3, 16))))
    run = functools.partial(dense_rows, (x, more), w, gain=gain, residuals=(residual,), out_dtype=jnp.float32,
                            config=config)
    wide = [np.asarray(a, np.float64) for a in (x, more, w, gain, residual)]
    total = wide[0] + wide[1]
    scaled = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * wide[3]
    # As in test_decode_step.py: 768 products, each added with a relative error of 2^-24.
    bound = 768 * 2.0**-23 * (np.abs(scaled) @ np.abs(wide[2]).T + np.abs(wide[4]))
    assert np.all(np.abs(np.asarray(run(interpret=interpreter)) - (scaled @ wide[2].T + wide[4])) <= bound)


def test_plain_read(interpreter):
    window = read_kernel.window(jax.random.key(0), 2**15)
    with plgpu.force_gpu_interpret_mode(interpreter):
        got = read_kernel.read(window)
    np.testing.assert_allclose(got, np.asarray(window, np.float64).sum(-1), atol=1e-3)
