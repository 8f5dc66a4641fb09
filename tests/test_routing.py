"""The router and the routing that users hand in, against the float64 oracle and the public cases."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.routing import Routing, route

F32_MAX = float(np.finfo(np.float32).max)


def assert_matches_oracle(logits, k, renormalize):
    got = route(jnp.asarray(logits), k, renormalize=renormalize)
    ids, weights = oracle.route(logits, k, renormalize)
    np.testing.assert_array_equal(got.ids, ids)
    # z - max rounds to |z - max| 2^-24 absolute, which exp turns into a relative error; exp itself, the sum of E terms
    # and the division add a few roundings more. Below 2^-126 float32 flushes to zero.
    spread = logits.astype(np.float64).max(-1) - np.take_along_axis(logits.astype(np.float64), ids, -1).min(-1)
    bound = ((2 * spread + logits.shape[1] + 8) * 2.0**-23)[:, None] * weights + 2.0**-126
    assert (np.abs(np.asarray(got.weights, np.float64) - weights) <= bound).all()


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens, experts, k", [(1, 4, 1), (5, 60, 4), (32, 128, 8), (3, 8, 8), (2, 512, 10)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_matches_the_oracle(tokens, experts, k, renormalize, spread):
    logits = np.random.default_rng(0).standard_normal((tokens, experts)).astype(np.float32) * np.float32(spread)
    assert_matches_oracle(logits, k, renormalize)


@pytest.mark.parametrize("k, renormalize, want", [
    (2, False, [0.64391, 0.23688]), (2, True, [0.73106, 0.26894]), (1, True, [1.0]), (1, False, [0.64391])])
def test_renormalisation_of_the_public_case(k, renormalize, want):
    """D11, the softmax rows."""
    got = route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), k, renormalize=renormalize)
    assert got.ids.tolist() == [list(range(k))]
    np.testing.assert_allclose(got.weights[0], want, atol=5e-6)


def test_ties_go_to_the_lower_id():
    assert route(jnp.zeros((1, 9)), 4).ids.tolist() == [[0, 1, 2, 3]]
    assert route(jnp.array([[1.0, 3.0, 2.0, 3.0, 2.0]]), 4).ids.tolist() == [[1, 3, 2, 4]]
    assert route(jnp.array([[-0.0, 0.0, -0.0]]), 3).ids.tolist() == [[0, 1, 2]]


def test_order_survives_scores_that_underflow():
    got = route(jnp.array([[0.0, -300.0, -200.0, -F32_MAX, F32_MAX]]), 5, renormalize=False)
    assert got.ids.tolist() == [[4, 0, 2, 1, 3]]
    assert got.weights.tolist() == [[1, 0, 0, 0, 0]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 1 << 31]),
                min_size=6, max_size=6))
def test_any_input_bits_give_distinct_ids_in_range(words):
    """General requirement 1. NaN ranks below every number; weights are NaN only where a NaN or +inf came in."""
    logits = np.array([words], np.uint32).view(np.float32)
    got = route(jnp.asarray(logits), 4, renormalize=False)
    ids, row = np.asarray(got.ids[0]), logits[0]
    assert len(set(ids)) == 4 and (ids >= 0).all() and (ids < 6).all()
    key = [(np.isnan(v), -v if not np.isnan(v) else 0, i) for i, v in enumerate(row)]
    assert list(ids) == sorted(range(6), key=key.__getitem__)[:4]
    if not (np.isnan(row) | np.isposinf(row)).any():
        assert np.isfinite(np.asarray(got.weights)).all()


@pytest.mark.parametrize("renormalize", [True, False])
def test_rows_of_special_values(renormalize):
    nan, inf = np.nan, np.inf
    got = route(jnp.array([[-inf] * 4, [-inf, 1.0, -inf, -inf], [nan] * 4, [0.0, nan, 0.0, 0.0], [0.0, inf, 0.0, 0.0]]),
                2, renormalize=renormalize)
    assert got.ids.tolist() == [[0, 1], [1, 0], [0, 1], [0, 2], [1, 0]]
    assert got.weights[:2].tolist() == [[0, 0], [1, 0]]
    assert np.isnan(np.asarray(got.weights[2:])).any(-1).all()


def test_bad_rows_do_not_reach_their_neighbours():
    logits = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    want = route(jnp.asarray(logits), 4)
    logits[1] = np.nan
    got = route(jnp.asarray(logits), 4)
    for row in (0, 2):
        np.testing.assert_array_equal(got.ids[row], want.ids[row])
        np.testing.assert_array_equal(got.weights[row], want.weights[row])


def test_narrow_logits_are_routed_in_float32():
    logits = np.random.default_rng(2).standard_normal((4, 32)).astype(ml_dtypes.bfloat16)
    got, want = route(jnp.asarray(logits), 4), route(jnp.asarray(logits.astype(np.float32)), 4)
    assert got.weights.dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_no_tokens():
    """D10: ids and weights of shape (0, K)."""
    for fn in (route, jax.jit(route, static_argnums=1)):
        got = fn(jnp.zeros((0, 8)), 3)
        assert (got.ids.shape, got.weights.shape, got.ids.dtype) == ((0, 3), (0, 3), jnp.int32)


def test_jit_vmap_and_x64_give_the_same():
    logits = np.random.default_rng(3).standard_normal((3, 4, 16)).astype(np.float32)
    rows = route(jnp.asarray(logits.reshape(12, 16)), 4)
    mapped = jax.jit(jax.vmap(lambda z: route(z, 4)))(logits)
    np.testing.assert_array_equal(mapped.ids.reshape(12, 4), rows.ids)
    np.testing.assert_allclose(mapped.weights.reshape(12, 4), rows.weights, rtol=2.0**-21)  # fusion may reorder the sum
    with jax.enable_x64(True):
        wide = route(jnp.asarray(logits.reshape(12, 16), jnp.float64), np.int64(4))
        assert (wide.ids.dtype, wide.weights.dtype) == (jnp.int32, jnp.float32)
        np.testing.assert_array_equal(wide.ids, rows.ids)


def test_gradient_reaches_the_chosen_logit():
    """D02, router at K = 1: p (1 - p) without renormalisation, 0 with it."""
    grad = jax.grad(lambda z, r: route(z, 1, renormalize=r).weights.sum())
    np.testing.assert_allclose(grad(jnp.array([[2.0, 1.0, 0.0]]), False)[0, 0], 0.2227, atol=5e-5)
    np.testing.assert_allclose(grad(jnp.array([[2.0, 1.0, 0.0]]), True), 0, atol=1e-7)
    assert np.isfinite(grad(jnp.array([[-np.inf, -np.inf], [-np.inf, 0.0]]), True)).all()  # masked experts and rows


@pytest.mark.parametrize("logits, k, message", [
    (jnp.zeros((2, 4)), 5, r"^k: got 5, expected 1 to E = 4"),
    (jnp.zeros((2, 4)), 0, r"^k: got 0, expected 1 to E = 4"),
    (jnp.zeros((2, 4)), 1.5, r"^k: got 1.5, expected a static integer"),
    (jnp.zeros(4), 1, r"^logits: got float32 \(4,\), expected a floating array \[T, E\]"),
    (jnp.zeros((1, 2, 4)), 1, r"^logits: got float32 \(1, 2, 4\).*vmap"),
    (jnp.zeros((2, 4), jnp.int32), 1, r"^logits: got int32"),
    (jnp.zeros((2, 0)), 1, r"^logits: got float32 \(2, 0\)"),
    ([[1.0, 2.0]], 1, r"^logits: got list"),
])
def test_bad_router_arguments_are_named(logits, k, message):
    with pytest.raises(ArgumentError, match=message):
        route(logits, k)


# ------------------------------------------------------------------------------------------- routing from the user


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_any_integer_type_is_taken_for_ids(dtype, make, x64):
    with jax.enable_x64(x64):
        got = Routing(make(np.array([[0, 5], [7, 1]], dtype)), make(np.full((2, 2), 0.5, np.float32))).check(2, 8)
    assert (got.ids.tolist(), got.ids.dtype, got.weights.dtype) == ([[0, 5], [7, 1]], jnp.int32, jnp.float32)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("ids", [
    np.array([[2**32 + 3, 1]], np.int64), np.array([[-(2**32) + 3, 1]], np.int64), np.array([[-1, 1]], np.int8),
    np.array([[2**31 + 3, 1]], np.uint32), np.array([[2**64 - 1, 1]], np.uint64), [[2**40, 1]]])
def test_ids_beyond_int32_stay_out_of_range(ids, x64):
    with jax.enable_x64(x64):
        got = Routing(ids, [[0.5, 0.5]]).check(tokens=1, num_experts=8).ids
        if x64 and isinstance(ids, np.ndarray):
            on_device = Routing(jnp.asarray(ids), [[0.5, 0.5]]).check(tokens=1, num_experts=8).ids
            np.testing.assert_array_equal(on_device, got)
    assert got[0, 1] == 1 and not 0 <= int(got[0, 0]) < 8


def test_weights_are_used_as_float32():
    """D09: float64, lists and narrow floats."""
    ids = jnp.zeros((1, 2), jnp.int32)
    for weights in (np.array([[0.1, 0.9]]), [[0.1, 0.9]], np.array([[0.1, 0.9]], np.float16)):
        got = Routing(ids, weights).check(1, 4).weights
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, np.asarray(weights, np.float32))


def test_repeated_ids_and_skipped_slots_are_allowed():
    routing = Routing(jnp.array([[3, 3], [-1, 9]]), jnp.array([[0.5, 0.5], [jnp.nan, jnp.nan]]))
    assert routing.check(tokens=2, num_experts=4).ids.tolist() == [[3, 3], [-1, 9]]


def test_check_works_under_jit():
    checked = jax.jit(lambda r: r.check(2, 8))(Routing(jnp.zeros((2, 2), jnp.uint8), jnp.ones((2, 2), jnp.bfloat16)))
    assert (checked.ids.dtype, checked.weights.dtype) == (jnp.int32, jnp.float32)


@pytest.mark.parametrize("ids, weights, message", [
    (np.zeros((2, 2), np.float32), np.ones((2, 2)), r"^routing.ids: got dtype float32, expected an integer"),
    (np.zeros((2, 2), bool), np.ones((2, 2)), r"^routing.ids: got dtype bool"),
    (np.zeros(4, int), np.ones(4), r"^routing.ids: got shape \(4,\), expected \[T, K\] with T = 2"),
    (np.zeros((3, 2), int), np.ones((3, 2)), r"^routing.ids: got shape \(3, 2\), expected \[T, K\] with T = 2"),
    (np.zeros((2, 2), int), np.ones((2, 3)), r"^routing.weights: got shape \(2, 3\), expected \(2, 2\)"),
    (np.zeros((2, 2), int), np.ones((2, 2), int), r"^routing.weights: got dtype int"),
    (np.zeros((2, 2), int), np.ones((2, 2), complex), r"^routing.weights: got dtype complex"),
    (np.zeros((2, 2), int), [["a", "b"]] * 2, r"^routing.weights: got list"),
    (np.zeros((2, 9), int), np.ones((2, 9)), r"^routing.ids: got K = 9 .* expected 1 to E = 8"),
    (np.zeros((2, 0), int), np.ones((2, 0)), r"^routing.ids: got K = 0"),
])
def test_bad_routing_is_named(ids, weights, message):
    with pytest.raises(ArgumentError, match=message):
        Routing(ids, weights).check(tokens=2, num_experts=8)
