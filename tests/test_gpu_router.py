"""The one-launch router on a real GPU: pytest --gpu tests/test_gpu_router.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_router_kernel

from jax_warp_decode.kernels.router import RouterConfig, moe_router, normed_moe_router
from jax_warp_decode.route_tokens import route_tokens
from jax_warp_decode.routers import Router
from jax_warp_decode.routing import route

pytestmark = pytest.mark.gpu

# (E, H, K) of Qwen3-30B-A3B, Qwen3.5, DeepSeek-sized, Qwen3-Next, Kimi-K2, gpt-oss-20b, DeepSeek-V2-Lite, Mixtral.
SHAPES = [(128, 2048, 8), (256, 2048, 8), (256, 7168, 8), (512, 2048, 10), (384, 7168, 8), (32, 2880, 4), (64, 2048, 6),
          (8, 4096, 2), (16, 256, 4), (320, 352, 32)]


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("experts, hidden, k", SHAPES)
def test_matches_the_oracle(experts, hidden, k, renormalize, tokens):
    for seed in range(50):  # a draw may hold two logits too close to tell apart
        x, w, logits = test_router_kernel.make(seed, tokens, experts, hidden)
        try:
            got = jax.jit(functools.partial(moe_router, k=k, renormalize=renormalize))(x, w)
            return test_router_kernel.assert_routed(got, x, w, logits, k, renormalize)
        except AssertionError as error:
            if "too close to tell" not in str(error):
                raise
    pytest.fail("no draw could be told apart")


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("experts, hidden, k", SHAPES)
def test_the_norm_comes_along(experts, hidden, k, tokens):
    """Choices are bit for bit those on the normalised values as they are stored."""
    x, w, _ = test_router_kernel.make(experts, tokens, experts, hidden)
    gain = jnp.asarray(np.random.default_rng(0).standard_normal(hidden), jnp.bfloat16)
    normed = jax.jit(functools.partial(normed_moe_router, k=k, eps=1e-6))
    *routing, h = normed(3 * x, gain, w)
    test_router_kernel.assert_normed(h, 3 * x, gain)
    jax.tree.map(np.testing.assert_array_equal, tuple(routing), moe_router(h, w, k))
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, normed(3 * x, gain, w), (*routing, h))


@pytest.mark.parametrize("x_dtype, w_dtype", [("bf16", "f32"), ("f16", "f16"), ("f16", "bf16")])
def test_dtypes(x_dtype, w_dtype):
    x, w, logits = test_router_kernel.make(1, 2, 64, 2048, x_dtype, w_dtype)
    test_router_kernel.assert_routed(moe_router(x, w, 4), x, w, logits, 4, True)


@pytest.mark.parametrize("experts, hidden, k", SHAPES)
def test_equal_rows_tie_exactly_and_the_lower_id_wins(experts, hidden, k):
    x, w, _ = test_router_kernel.make(2, 8, experts, hidden)
    order = np.random.default_rng(3).permutation(experts)
    copies = order % max(1, experts // 4)  # four copies of every row, scattered over CTAs and warps
    ids, weights = map(np.asarray, moe_router(x, w[copies], k))
    for token in range(8):
        assert len(set(ids[token])) == k
        for a, b in zip(range(k - 1), range(1, k), strict=True):
            if copies[ids[token, a]] == copies[ids[token, b]]:
                assert ids[token, a] < ids[token, b] and weights[token, a] == weights[token, b]
        for e in ids[token]:  # a copy with a lower id comes first, so it is chosen as well
            assert set(np.flatnonzero(copies[:e] == copies[e])) <= set(ids[token])


@pytest.mark.parametrize("cluster, warpgroups", [(16, 2), (16, 4), (16, 8), (8, 4), (8, 8), (4, 8)])
def test_every_config_gives_the_same_bits(cluster, warpgroups):
    """An expert's logit does not depend on who computes it."""
    x, w, _ = test_router_kernel.make(4, 3, 512, 2048)
    want = moe_router(x, w, 8)
    for unroll in (1, 3, 8):
        got = moe_router(x, w, 8, config=RouterConfig(cluster, warpgroups, unroll))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("renormalize", [True, False])
def test_special_values(renormalize):
    rows = np.random.default_rng(5).standard_normal((64, 128)).astype(np.float32)
    rows[0], rows[1], rows[2, 5], rows[3, 7], rows[4, ::2] = np.nan, -np.inf, np.nan, np.inf, -np.inf
    rows[5], rows[6, ::2] = 0, -0.0
    want = route(jnp.asarray(rows), 8, renormalize=renormalize)
    fn = jax.jit(functools.partial(moe_router, k=8, renormalize=renormalize))
    for t, row in enumerate(rows):
        w = jnp.zeros((128, 256), jnp.float32).at[:, 0].set(row)
        ids, weights = fn(jnp.zeros((1, 256), jnp.bfloat16).at[0, 0].set(1), w)
        np.testing.assert_array_equal(ids[0], want.ids[t])
        np.testing.assert_allclose(weights[0], want.weights[t], rtol=1e-5)


def test_replays_are_bitwise_equal_and_tokens_independent():
    x, w, _ = test_router_kernel.make(6, 8, 256, 2048)
    fn = jax.jit(functools.partial(moe_router, k=8))
    want = jax.tree.map(np.asarray, fn(x, w))
    for _ in range(200):
        jax.tree.map(np.testing.assert_array_equal, fn(x, w), want)
    for t in range(8):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[t]), fn(x[t:t + 1], w), want)
    bad = fn(x.at[3].set(jnp.nan), w)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.delete(a, 3, 0), np.delete(b, 3, 0)), bad, want)


def test_many_launches_in_a_row():
    """Each finds its barriers new: layers of a scan, in one program."""
    x, w, _ = test_router_kernel.make(7, 4, 128, 2048)
    layers = jnp.stack([jnp.roll(w, i, axis=0) for i in range(32)])
    fn = functools.partial(moe_router, k=8)
    ids, weights = jax.jit(lambda ws: jax.lax.scan(lambda c, w: (c, fn(x, w)), 0, ws)[1])(layers)
    for i in range(32):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), (ids, weights), fn(x, layers[i]))


def test_vmap_and_auto():
    x, w, _ = test_router_kernel.make(8, 6, 128, 2048)
    want = moe_router(x, w, 8)
    mapped = jax.jit(jax.vmap(lambda x: moe_router(x, w, 8)))(x.reshape(3, 2, -1))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.reshape(6, 8), b), mapped, want)
    auto = route_tokens(x, w, Router(8))
    np.testing.assert_array_equal(auto.ids, want[0])
    np.testing.assert_array_equal(auto.weights, want[1])
