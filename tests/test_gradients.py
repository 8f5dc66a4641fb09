"""Gradients of biases: float32 sums on every device, however many rows an expert has, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import LAMBDA, UNIT

from jax_warp_decode import moe
from jax_warp_decode.paths import grouped_bias, grouped_gemm


def exact_bias_gradients(case, cotangent):
    """Float64 gradients of sum(cotangent * y) for the biases of a SiLU case, with the error that products may add.

    Those may round their operands and results to bfloat16: the routing weight times the cotangent, the gradient of h,
    gate and up. Rounding errors are random, so that `LAMBDA` times their 2-norm bounds a sum of them, see
    `oracle.LAMBDA`. No product stands between the cotangent and b_down: its bound is that of a float32 sum, of at most
    `grouped_bias.BLOCK` roundings on each of three levels.
    """
    exact, error = ({name: np.zeros(getattr(case, name).shape) for name in ("b_gate", "b_up", "b_down")}
                    for _ in range(2))
    for e in np.unique(case.ids[case.routed()]):
        rows, slots = np.nonzero(case.ids == e)
        part, x = case.expert(e), case.x[rows].astype(np.float64)
        gate, up = x @ part.w_gate.T + part.b_gate, x @ part.w_up.T + part.b_up
        s = oracle.sigmoid(gate)
        f, slope = gate * s, s * (1 + gate * (1 - s))
        d_out = case.weights[rows, slots].astype(np.float64)[:, None] * cotangent[rows]
        d_h = d_out @ part.w_down
        d_h_squares = d_out**2 @ part.w_down**2 + d_h**2  # of errors: of the operand and of the result, in units
        squares = {"b_up": d_h_squares * f**2 + (d_h * 1.1 * gate)**2,
                   "b_gate": d_h_squares * (slope * up)**2 + (d_h * up)**2 * ((0.5 * gate)**2 + 1.1**2)}
        for name, terms in (("b_gate", d_h * slope * up), ("b_up", d_h * f), ("b_down", d_out)):
            exact[name][e] = terms.sum(0)
            error[name][e] = (3 * grouped_bias.BLOCK + 2) * UNIT["float32"] * np.abs(terms).sum(0)
            if name in squares:
                error[name][e] = error[name][e] * 100 + LAMBDA * UNIT["bfloat16"] * np.sqrt(squares[name].sum(0))
    return exact, error


def assert_bias_gradients(case, strategy="expert_centric"):
    """The gradients of a strategy for a given gradient of y, which a bfloat16 y does not disturb."""
    x, routing, experts = case.args()
    cotangent = jnp.asarray(np.random.default_rng(0).random(x.shape) + 0.5, x.dtype)  # positive: nothing cancels

    @jax.jit
    def gradients(biases):
        run = lambda b: moe(x, routing, dataclasses.replace(experts, **b), strategy=strategy)
        return jax.vjp(run, biases)[1](cotangent)[0]

    exact, error = exact_bias_gradients(case, np.asarray(cotangent, np.float64))
    for name, got in gradients(experts.biases).items():
        assert got.dtype == jnp.float32
        worst = np.abs(np.asarray(got, np.float64) - exact[name]) - error[name]
        assert worst.max() <= 0, (name, worst.max(), np.unravel_index(worst.argmax(), worst.shape))


def rounded_products(kernel, scan, n, k):
    """Stands in for the kernels on CUDA: bfloat16 operands, float32 sums, a bfloat16 result."""
    narrow = lambda a: a.astype(jnp.bfloat16)
    return lambda a, b, sizes: narrow(scan(narrow(a), narrow(b), sizes)).astype(jnp.float32)


@pytest.mark.parametrize("pattern", ["same", "skipped"])
def test_biases_get_float32_sums_whatever_the_products_round(pattern, monkeypatch):
    """2,000 tokens on an expert: summed in bfloat16, or rounded to it, gradients lose two digits."""
    monkeypatch.setattr(grouped_gemm, "_on_cuda", rounded_products)
    case = oracle.make_case(1, tokens=2000, experts=4, hidden=64, intermediate=32, k=2, biases="f32", pattern=pattern,
                            poison=False)
    assert_bias_gradients(case)


def test_biases_of_the_reference_have_the_same_gradients():
    assert_bias_gradients(oracle.make_case(2, tokens=40, experts=4, hidden=64, intermediate=32, k=2, biases="f32",
                                           poison=False), "reference")


M, E, N = 1600, 5, 3  # one compiled size for what follows
collect = jax.jit(grouped_bias.collect)


@pytest.mark.parametrize("sizes", [[0, 0, 0, 0, 1], [0, 5, 0, 1, 0], [33, 0, 32, 64, 31], [1025, 1, 1, 1, 1],
                                   [0, 1500, 3, 0, 97], [320] * 5, [0] * 5])
def test_collect_sums_the_rows_of_each_expert(sizes):
    """Rows in no group hold NaN; an infinite row hurts only its expert; a sum does not depend on where its rows lie."""
    sizes = np.array(sizes, np.int32)
    total, ends = sizes.sum(), np.cumsum(sizes)
    rows = np.random.default_rng(total).random((M, N)).astype(np.float32)
    rows[total:] = np.nan
    got = np.asarray(collect(rows, sizes))
    assert got.dtype == np.float32
    groups = [rows[end - size:end] for size, end in zip(sizes, ends, strict=True)]
    exact = np.stack([g.astype(np.float64).sum(0) for g in groups])
    assert (np.abs(got - exact) <= 3 * grouped_bias.BLOCK * UNIT["float32"] * exact).all()
    other = np.concatenate([*groups[::-1], rows[total:]])
    np.testing.assert_array_equal(collect(other, sizes[::-1])[::-1], got)
    if total:
        hurt = int(np.argmax(sizes))
        rows[ends[hurt] - 1] = np.inf
        wild = np.asarray(collect(rows, sizes))
        assert np.isinf(wild[hurt]).all()
        np.testing.assert_array_equal(np.delete(wild, hurt, 0), np.delete(got, hurt, 0))


def test_spread_and_collect_are_the_derivatives_of_each_other():
    sizes, rng = np.array([3, 0, 40, 0, 1000], np.int32), np.random.default_rng(0)
    b, rows = jnp.asarray(rng.random((E, N)), jnp.bfloat16), rng.random((M, N)).astype(np.float32)

    @jax.jit
    def both(b, rows):
        out, back = jax.vjp(lambda b: grouped_bias.spread(M, b, sizes), b)
        totals, forward = jax.vjp(lambda rows: grouped_bias.collect(rows, sizes), rows)
        loss = lambda rows: jnp.sum(grouped_bias.collect(rows, sizes)**2) / 2
        second = jax.grad(lambda rows: jnp.sum(jax.grad(loss)(rows)))(rows)
        return out, back(rows)[0], totals, forward(b.astype(jnp.float32))[0], second

    out, d_b, totals, d_rows, second = both(b, rows)
    np.testing.assert_array_equal(out, np.repeat([*b.astype(np.float32), np.zeros(N)], [*sizes, M - sizes.sum()], 0))
    np.testing.assert_array_equal(d_b, totals.astype(jnp.bfloat16))
    np.testing.assert_array_equal(d_rows, out)
    # The gradient of the loss is the sum of a row's group in every row; its own gradient counts the rows.
    np.testing.assert_array_equal(second[:, 0], np.repeat([*sizes, 0], [*sizes, M - sizes.sum()]))
    batch = jax.vmap(collect)(np.stack([rows, 2 * rows]), np.stack([sizes, sizes]))
    np.testing.assert_array_equal(batch[1], 2 * batch[0])
