"""The routers and the routing that users hand in, against the float64 oracle and the public cases."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import quantize
from jax_warp_decode.routers import ROUTERS, SCORING, Router
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
    (jnp.zeros((2, 4)), 5, r"^k: got 5, expected 1 to 4, that is E = 4"),
    (jnp.zeros((2, 4)), 0, r"^k: got 0, expected at least 1"),
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


# --------------------------------------------------------------------------------------------- routers of all families

SCORES = {
    "softmax": lambda z: oracle.route(z, z.shape[1])[1][:, np.argsort(np.argsort(-z, -1, "stable"), -1)[0]],
    "sigmoid": oracle.sigmoid,
    "sqrt_softplus": lambda z: np.sqrt(np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))),
    "topk_softmax": lambda z: z,
}


def best(values, n):
    """Ids of the n largest of a row, ties to the lower id."""
    return np.argsort(-values, kind="stable")[:n]


def exact_route(logits, router, bias=None, correction_bias=None, expert_scale=None):
    """The routers in float64, one token at a time."""
    all_ids, all_weights = [], []
    for z in np.asarray(logits, np.float64):
        z = z + (0 if bias is None else np.asarray(bias, np.float64))
        score = SCORES[router.scoring](z[None])[0]
        choice = score + (0 if correction_bias is None else np.asarray(correction_bias, np.float64))
        groups = choice.reshape(router.n_group, -1)
        counted = {"top2": 2, "max": 1}[router.group_score]
        kept = best(np.sort(groups, -1)[:, -counted:].sum(-1), router.topk_group)
        eligible = np.isin(np.arange(router.n_group), kept).repeat(groups.shape[1])
        ids = best(np.where(eligible, choice, -np.inf), router.k)
        w = score[ids]
        if router.scoring == "topk_softmax":
            w = np.exp(w - w.max())
        if router.scoring == "topk_softmax" or router.renormalize:
            w = w / (w.sum() + 1e-20)
        all_ids.append(ids)
        scale = 1 if expert_scale is None else np.asarray(expert_scale, np.float64)[ids]
        all_weights.append(w * router.scale * scale)
    return np.array(all_ids), np.array(all_weights)


def arrays_of(family, experts, seed=0):
    """The arrays that a family's router has besides its weight."""
    rng = np.random.default_rng(seed)
    if family == "gpt-oss":
        return dict(bias=rng.standard_normal(experts).astype(np.float32))
    if family == "gemma4":
        return dict(expert_scale=rng.uniform(0.5, 2, experts).astype(np.float32))
    if ROUTERS[family].scoring in ("sigmoid", "sqrt_softplus") and family != "llama4":
        return dict(correction_bias=rng.uniform(-1, 1, experts).astype(np.float32))
    return {}


def family_logits(seed):
    """[8, 128]: half of the tokens with logits of order one, half with larger ones."""
    spread = np.where(np.arange(8) % 2, 6, 1)[:, None]
    return (np.random.default_rng(seed).standard_normal((8, 128)) * spread).astype(np.float32)


@pytest.mark.parametrize("family", ROUTERS)
def test_every_family_matches_float64(family):
    logits, arrays = family_logits(0), arrays_of(family, 128)
    got = route(jnp.asarray(logits), ROUTERS[family], **arrays)
    ids, weights = exact_route(logits, ROUTERS[family], **arrays)
    np.testing.assert_array_equal(got.ids, ids)
    # As in assert_matches_oracle; a bias adds one rounding of a logit, which exp turns into a relative error.
    bound = (2 * np.ptp(logits) + 128 + 16) * 2.0**-23
    np.testing.assert_allclose(got.weights, weights, rtol=bound, atol=2.0**-120)


def test_excluded_groups_are_out_of_reach():
    """D06 (a): all biased scores are negative, so a mask of 0 would choose 4, 5, 6; the bias is in no weight."""
    router = Router(3, "sigmoid", n_group=4, topk_group=2, scale=np.float64(2.5))
    got = route(jnp.array([[3, 2, 1.2, 1, 0, 0, -1, -1]], jnp.float32), router, correction_bias=jnp.full(8, -2.0))
    assert got.ids.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(got.weights[0], [0.91527, 0.84630, 0.73843], atol=5e-6)


def test_the_rule_of_group_scores():
    """D06 (b): 0.6 + 0.6 beats 0.9 + 0.1 by the sum of the best two, and loses by the best one."""
    scores = np.array([[0.9, 0.1, 0.6, 0.6]])
    logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)
    for rule, want in (("top2", 2), ("max", 0)):
        router = Router(1, "sigmoid", n_group=2, topk_group=1, group_score=rule)
        assert route(logits, router, correction_bias=jnp.zeros(4)).ids.tolist() == [[want]]
        assert route(logits, router).ids.tolist() == [[want]]
    ones = Router(2, "sigmoid", n_group=4, topk_group=2)  # groups of one expert have no second best
    assert route(logits, ones).ids.tolist() == [[0, 2]]


def test_one_group_is_no_limit():
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((6, 32)), jnp.float32)
    bias = jnp.asarray(np.random.default_rng(6).standard_normal(32), jnp.float32)
    want = route(logits, Router(4, "sigmoid"), correction_bias=bias)
    got = route(logits, Router(4, "sigmoid", n_group=8, topk_group=8), correction_bias=bias)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("router, bias, ids, weights", [
    (Router(2, "topk_softmax"), None, [0, 1], [0.73106, 0.26894]),
    (Router(2, "topk_softmax", renormalize=False), None, [0, 1], [0.73106, 0.26894]),
    (Router(2, "topk_softmax"), [0.0, 0, 3, 0], [2, 0], [0.73106, 0.26894]),
    (Router(1, "topk_softmax"), None, [0], [1.0]),
    (Router(2, "softmax", renormalize=False, scale=2.5), None, [0, 1], [2.5 * 0.64391, 2.5 * 0.23688]),
    (Router(2, "softmax", scale=2.5), None, [0, 1], [2.5 * 0.73106, 2.5 * 0.26894]),
    (Router(1, "sigmoid", renormalize=False), None, [0], [0.88080]),
])
def test_settings_of_the_public_cases(router, bias, ids, weights):
    """D11 and D12: order of softmax and choice, router bias, and the scaling factor once, renormalised or not."""
    bias = None if bias is None else jnp.array(bias)
    got = route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), router, bias=bias)
    assert got.ids.tolist() == [ids]
    np.testing.assert_allclose(got.weights[0], weights, atol=2e-5)


@pytest.mark.parametrize("scoring", SCORING)
def test_scores_that_vanish_give_zero_weights(scoring):
    """General requirement 7. Scores of finite logits may all be zero in float32; the weights are then zero, not NaN."""
    logits = jnp.array([[-3e38] * 6, [-300.0] * 6, [-80.0] * 6])
    for renormalize in (True, False):
        weights = np.asarray(route(logits, Router(2, scoring, renormalize)).weights)
        assert np.isfinite(weights).all()
        if scoring in ("sigmoid", "sqrt_softplus"):
            assert not weights[:2].any()


def test_sqrt_softplus_far_below_zero():
    """Its score there is exp(z / 2), long after exp(z) has gone to zero in float32."""
    got = route(jnp.array([[-150.0, -140.0, -160.0]]), Router(2, "sqrt_softplus", renormalize=False))
    assert got.ids.tolist() == [[1, 0]]
    np.testing.assert_allclose(got.weights[0], np.exp([-70.0, -75.0]), rtol=1e-5)


SPECIAL = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 1 << 31, 0x7F7FFFFF, 0xFF7FFFFF, 0]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(SPECIAL), min_size=16, max_size=16))
def test_every_router_is_safe_for_any_bits(words):
    """Distinct ids in range for any logits and biases; finite logits never give NaN; groups stay closed."""
    row = np.array(words, np.uint32).view(np.float32)
    logits, bias = jnp.asarray(row[None, :8]), jnp.asarray(row[8:])
    groups = dict(n_group=4, topk_group=2)
    for scoring in SCORING:
        for limits, arrays in ((dict(), dict(correction_bias=bias)), (dict(), dict(bias=bias)),
                               (groups, dict(correction_bias=bias)), (dict(group_score="max", **groups), dict())):
            got = route(logits, Router(3, scoring, **limits), **arrays)
            ids = np.asarray(got.ids[0])
            assert len(set(ids)) == 3 and (ids >= 0).all() and (ids < 8).all()
            assert len(set(ids // 2)) <= 2 or not limits
            if np.isfinite(row[:8]).all() and "bias" not in arrays:
                assert np.isfinite(np.asarray(got.weights)).all(), (scoring, limits, arrays)


@pytest.mark.parametrize("family", ROUTERS)
def test_bad_rows_stay_alone_in_every_family(family):
    logits, arrays = family_logits(7), arrays_of(family, 128)
    want = route(jnp.asarray(logits), ROUTERS[family], **arrays)
    logits[1], logits[2], logits[4, ::3] = np.nan, -np.inf, np.inf
    got = route(jnp.asarray(logits), ROUTERS[family], **arrays)
    for row in (0, 3, 5, 6, 7):
        np.testing.assert_array_equal(got.ids[row], want.ids[row])
        np.testing.assert_array_equal(got.weights[row], want.weights[row])
    assert not np.asarray(got.weights[2]).any()


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3"])
def test_families_under_jit_vmap_scan_and_x64(family):
    """Any float dtype of the arrays, and no tokens at all, included."""
    router, arrays = ROUTERS[family], arrays_of(family, 64)
    logits = np.random.default_rng(8).standard_normal((2, 3, 64)).astype(np.float32)
    rows = route(jnp.asarray(logits.reshape(6, 64)), router, **arrays)
    want = jax.tree.map(lambda a: a.reshape(2, 3, router.k), rows)

    def same(got):
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_allclose(got.weights, want.weights, rtol=2.0**-21)
        assert (got.ids.dtype, got.weights.dtype) == (jnp.int32, jnp.float32)

    one = lambda z, arrays=arrays: route(z, router, **arrays)
    same(jax.jit(jax.vmap(one))(logits))
    same(jax.lax.scan(lambda carry, z: (carry, one(z)), 0, jnp.asarray(logits))[1])
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), arrays)
        same(jax.vmap(lambda z: one(z, wide))(jnp.asarray(logits, jnp.float64)))
    assert one(jnp.zeros((0, 64))).weights.shape == (0, router.k)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3", "deepseek-v4", "gemma4"])
def test_gradients_of_every_kind(family):
    """Against central differences in float64; the correction bias decides the choice alone, so its gradient is zero."""
    router, arrays = ROUTERS[family], arrays_of(family, 32)
    router = dataclasses.replace(router, k=min(router.k, 4))
    rng = np.random.default_rng(9)
    logits, c = rng.standard_normal((2, 32)).astype(np.float32), rng.standard_normal((2, router.k))
    loss = lambda z, a: (route(z, router, **a).weights * jnp.asarray(c, jnp.float32)).sum()
    of_logits, of_arrays = jax.grad(loss, (0, 1))(jnp.asarray(logits), jax.tree.map(jnp.asarray, arrays))
    step = 1e-5
    for direction in rng.standard_normal((3, 2, 32)):
        change = [(exact_route(logits + s * step * direction, router, **arrays)[1] * c).sum() for s in (1, -1)]
        np.testing.assert_allclose((of_logits * direction).sum(), np.subtract(*change) / (2 * step), atol=2e-4)
    if "correction_bias" in arrays:
        assert not np.asarray(of_arrays["correction_bias"]).any()
    for name in set(arrays) - {"correction_bias"}:
        assert np.asarray(of_arrays[name]).any()


def test_gradients_are_finite_at_the_ends():
    logits = jnp.array([[-jnp.inf] * 4, [-jnp.inf, 0.0, -300.0, 1e30], [-200.0, -100.0, -50.0, 90.0]])
    for scoring in ("sigmoid", "sqrt_softplus"):
        grad = jax.grad(lambda z, s=scoring: route(z, Router(2, s)).weights.sum())(logits)
        assert np.isfinite(grad).all(), scoring


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("level", [-44.0, -50.0, -70.0, -86.0, -100.0, -170.0])
def test_gradients_of_small_scores(scoring, level):
    """Where squares of the scores underflow; their quotients are still those of exp(z), or of its root."""
    z = np.array([level, level - 0.5, level - 1.0, level - 60.0])
    grad = jax.grad(lambda z: (route(z[None], Router(2, scoring)).weights * jnp.array([1.0, 2.0])).sum())(
        jnp.asarray(z, jnp.float32))
    share = 1.0 if scoring == "sigmoid" else 0.5
    scores = np.exp(share * z[:2])
    total = scores.sum() + 1e-20
    # Of w0 + 2 w1 with w = s / (s0 + s1 + e): ds_i = share s_i.
    want = share * scores * (np.array([1.0, 2.0]) / total - (scores * [1.0, 2.0]).sum() / total**2)
    np.testing.assert_allclose(np.asarray(grad)[:2], want, rtol=1e-3, atol=1e-5)
    assert not np.asarray(grad)[2:].any()


def test_a_router_is_a_static_argument():
    assert hash(Router(np.int64(2), scale=np.float64(2.5))) == hash(Router(2, scale=2.5))
    got = jax.jit(route, static_argnums=1)(jnp.array([[0.0, 1.0]]), Router(1))
    assert got.ids.tolist() == [[1]]


@pytest.mark.parametrize("make, message", [
    (lambda: Router(0), r"^k: got 0, expected at least 1"),
    (lambda: Router(1.5), r"^k: got 1.5, expected a static integer"),
    (lambda: Router(1, "cosine"), r"^scoring: got 'cosine', expected one of \['softmax'"),
    (lambda: Router(1, n_group=2, topk_group=3), r"^topk_group: got 3, expected at most n_group = 2"),
    (lambda: Router(1, n_group=0), r"^n_group: got 0"),
    (lambda: Router(1, group_score="sum"), r"^group_score: got 'sum', expected one of \['top2', 'max'\]"),
    (lambda: Router(1, scale=float("nan")), r"^scale: got nan, expected a finite number"),
    (lambda: Router(1, scale=1e39), r"^scale: got 1e\+39, expected a finite number, which float32 can hold"),
    (lambda: Router(1, scale=[2.5]), r"^scale: got list, expected a static number"),
    (lambda: Router(1, scale="2.5"), r"^scale: got str, expected a static number"),
    (lambda: Router(1, scoring=["softmax"]), r"^scoring: got \['softmax'\], expected one of"),
    (lambda: Router(1, renormalize="no"), r"^renormalize: got 'no', expected True or False"),
    (lambda: route(jnp.zeros((1, 8)), Router(5, n_group=4, topk_group=2)), r"^k: got 5, expected 1 to 4.*topk_group"),
    (lambda: route(jnp.zeros((1, 8)), Router(2, n_group=3, topk_group=2)), r"^n_group: got 3, expected a divisor.* 8"),
    (lambda: route(jnp.zeros((1, 8)), Router(2), renormalize=False), r"^renormalize: got False beside a Router"),
    (lambda: route(jnp.zeros((1, 8)), 2, bias=jnp.zeros(7)), r"^bias: got float32 \(7,\), expected .*\(8,\) = \[E\]"),
    (lambda: route(quantize(jnp.zeros((1, 64)), "mxfp8"), 2), r"^logits: got mxfp8 \(1, 64\), .*; dequantise it"),
    (lambda: route(jnp.zeros((1, 32)), 2, bias=quantize(jnp.zeros(32), "mxfp8")), r"^bias: got mxfp8 \(32,\), expec"),
    (lambda: route(jnp.zeros((1, 8)), 2, correction_bias=[0.0] * 8), r"^correction_bias: got list"),
    (lambda: route(jnp.zeros((1, 8)), 2, expert_scale=jnp.zeros(8, int)), r"^expert_scale: got int32"),
])
def test_bad_settings_are_named(make, message):
    with pytest.raises(ArgumentError, match=message):
        jax.eval_shape(make)  # at trace time


# ------------------------------------------------------------------------------------------- routing from the user


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_any_integer_type_is_taken_for_ids(dtype, make, x64):
    with jax.enable_x64(x64):
        got = Routing(make(np.array([[0, 5], [7, 1]], dtype)), make(np.full((2, 2), 0.5, np.float32))).check(2)
    assert (got.ids.tolist(), got.ids.dtype, got.weights.dtype) == ([[0, 5], [7, 1]], jnp.int32, jnp.float32)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("ids", [
    np.array([[2**32 + 3, 1]], np.int64), np.array([[-(2**32) + 3, 1]], np.int64), np.array([[-1, 1]], np.int8),
    np.array([[2**31 + 3, 1]], np.uint32), np.array([[2**64 - 1, 1]], np.uint64), [[2**40, 1]]])
def test_ids_beyond_int32_stay_out_of_range(ids, x64):
    with jax.enable_x64(x64):
        got = Routing(ids, [[0.5, 0.5]]).check(tokens=1).ids
        if x64 and isinstance(ids, np.ndarray):
            on_device = Routing(jnp.asarray(ids), [[0.5, 0.5]]).check(tokens=1).ids
            np.testing.assert_array_equal(on_device, got)
    assert got[0, 1] == 1 and not 0 <= int(got[0, 0]) < 8


def test_weights_are_used_as_float32():
    """D09: float64, lists and narrow floats."""
    ids = jnp.zeros((1, 2), jnp.int32)
    for weights in (np.array([[0.1, 0.9]]), [[0.1, 0.9]], np.array([[0.1, 0.9]], np.float16)):
        got = Routing(ids, weights).check(1).weights
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, np.asarray(weights, np.float32))


def test_repeated_ids_and_skipped_slots_are_allowed():
    routing = Routing(jnp.array([[3, 3], [-1, 9]]), jnp.array([[0.5, 0.5], [jnp.nan, jnp.nan]]))
    assert routing.check(tokens=2).ids.tolist() == [[3, 3], [-1, 9]]


def test_check_works_under_jit():
    checked = jax.jit(lambda r: r.check(2))(Routing(jnp.zeros((2, 2), jnp.uint8), jnp.ones((2, 2), jnp.bfloat16)))
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
    (np.zeros((2, 0), int), np.ones((2, 0)), r"^routing.ids: got K = 0"),
    ([[0], [1, 2]], np.ones((2, 2)), r"^routing.ids: got list, expected an integer array or nested list \[T, K\]"),
    (np.zeros((2, 32), int), quantize(jnp.ones((2, 32)), "mxfp8"), r"^routing.weights: got mxfp8 \(2, 32\), expected"),
])
def test_bad_routing_is_named(ids, weights, message):
    with pytest.raises(ArgumentError, match=message):
        Routing(ids, weights).check(tokens=2)
