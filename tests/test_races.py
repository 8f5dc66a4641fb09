"""Race detection over the kernels that no other test interprets with it: the grouped products of `expert_centric`.

The decode kernels and the router run under it in test_kernels.py, test_shared.py and test_router_kernel.py, by the
fixture `interpreter`.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.paths import grouped_kernels

SIZES = np.array([1, 0, 6], np.int32)


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
