"""The Flax layer: same numbers as the oracle, one strategy per call, ordinary NNX behaviour."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from jax_warp_decode import ArgumentError, ExpertWeights, QuantizedArray, UnsupportedError
from jax_warp_decode.layers import MoE

choose_module = importlib.import_module("jax_warp_decode.choose")  # the package has a function of this name
E, K, H, I = 8, 3, 64, 96
STRATEGIES = ("reference", "expert_centric", "auto")


def make_layer(case, router, *, renormalize=True, strategy="reference"):
    layer = MoE(H, I, E, K, renormalize=renormalize, strategy=strategy, rngs=nnx.Rngs(0))
    layer.router.set_value(jnp.asarray(router))
    layer.set_experts(case.args()[2])
    return layer


def random_router(seed, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((E, H)).astype(dtype) / 8


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("x_dtype, weights", [("bf16", "bf16"), ("bf16", "mxfp8"), ("f32", "f32")])
def test_matches_oracle(x_dtype, weights, renormalize, strategy):
    case = oracle.make_case(1, tokens=6, experts=E, hidden=H, intermediate=I, k=K, x_dtype=x_dtype, weights=weights,
                            poison=False)
    router = random_router(2)
    layer = make_layer(case, router, renormalize=renormalize, strategy=strategy)
    x = jnp.asarray(case.x)
    y = jax.jit(lambda layer, x: layer(x))(layer, x.reshape(2, 3, H))
    assert y.shape == (2, 3, H)

    ids, routing_weights = oracle.route(case.x.astype(np.float64) @ router.T.astype(np.float64), K, renormalize)
    routing = layer.route(x)
    np.testing.assert_array_equal(routing.ids, ids)
    # A logit carries at most about 6 * 2^-24 * sqrt(2 H) times the norm of its terms, a weight twice its logits' error.
    np.testing.assert_allclose(routing.weights, routing_weights, rtol=2e-5)
    case = dataclasses.replace(case, ids=np.asarray(routing.ids), weights=np.asarray(routing.weights))
    stored = "float32" if strategy == "reference" else case.x.dtype.name
    oracle.assert_close(y.reshape(6, H), case, h_dtype=stored)


def test_router_sees_differences_that_bfloat16_cannot():
    """Logits 1 and 1 + 2^-10 are equal in bfloat16; the layer must still prefer the larger."""
    case = oracle.make_case(3, tokens=1, experts=E, hidden=H, intermediate=I, k=K, poison=False)
    router = np.full((E, H), -1, np.float32)
    router[:, 0] = 1 - np.arange(E) * 2.0**-10
    router[5, 0] = 1 + 2.0**-10
    layer = make_layer(case, router)
    x = jnp.zeros((1, H), jnp.bfloat16).at[0, 0].set(1)
    assert layer.route(x).ids.tolist() == [[5, 0, 1]]


@pytest.mark.parametrize("shape", [(H,), (0, H), (2, 0, H), (2, 1, 2, H)])
def test_leading_axes(shape):
    case = oracle.make_case(4, tokens=4, experts=E, hidden=H, intermediate=I, k=K, poison=False)
    layer = make_layer(case, random_router(5))
    x = jnp.asarray(case.x)[: max(1, int(np.prod(shape[:-1])))] if 0 not in shape else jnp.zeros(shape, jnp.bfloat16)
    y = layer(x.reshape(shape))
    assert (y.shape, y.dtype) == (shape, jnp.bfloat16)
    if 0 not in shape:
        np.testing.assert_array_equal(y.reshape(-1, H), layer(x))


def test_strategy_is_chosen_per_call_and_explained():
    layer = MoE(H, I, E, K, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    choice = layer.choice(tokens=1)
    if jax.default_backend() != "gpu":
        assert choice.strategy == "expert_centric"
        assert "GPU" in choice.reason
        layer.set_strategy("warp_decode")
        with pytest.raises(UnsupportedError, match="GPU"):
            layer(jnp.ones((1, H), jnp.bfloat16))
    layer.set_strategy("reference")
    assert layer.choice(tokens=1000).strategy == "reference"


def test_choice_follows_the_dtype_that_x_will_have():
    layer = MoE(H, I, E, K, strategy="warp_decode", rngs=nnx.Rngs(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "no_gpu_reason", lambda: "")  # as on a GPU
        with pytest.raises(UnsupportedError, match="x is float32"):
            layer.choice(1)
        with pytest.raises(UnsupportedError, match="w_gate"):  # x is fine, float32 weights are not
            layer.choice(1, jnp.bfloat16)
        layer.set_experts(jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer.experts))
        assert layer.choice(1, jnp.bfloat16).strategy == "warp_decode"
        layer.dtype = jnp.dtype(jnp.float16)
        assert layer.choice(1, jnp.float32).strategy == "warp_decode", "x is cast to the layer's dtype"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="warp decode runs there")
def test_refusal_names_no_option_that_the_layer_lacks():
    layer = MoE(H, I, E, K, strategy="warp_decode", rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError, match="cuda12") as error:
        layer(jnp.ones((1, H), jnp.bfloat16))
    assert "interpret" not in str(error.value)


def test_dtype_converts_x_only():
    layer = MoE(H, I, E, K, dtype=jnp.bfloat16, strategy="reference", rngs=nnx.Rngs(0))
    assert layer.w_gate.get_value().dtype == jnp.float32
    assert layer(jnp.ones((1, H), jnp.float32)).dtype == jnp.bfloat16


def test_kernel_init_sees_in_out_once_an_expert():
    shapes = []

    def init(key, shape, dtype):
        shapes.append(shape)
        return jnp.broadcast_to(jnp.arange(shape[0], dtype=dtype)[:, None], shape) + jax.random.uniform(key, (), dtype)

    layer = MoE(H, I, E, K, kernel_init=init, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert shapes == [(H, E), (H, I), (H, I), (I, H)]
    for w, shape in ((layer.router, (E, H)), (layer.w_up, (E, I, H)), (layer.w_down, (E, H, I))):
        w = w.get_value()
        assert (w.shape, w.dtype) == (shape, jnp.bfloat16)
        assert (w[..., -1] > w[..., 0]).all()
    assert len(set(np.asarray(layer.w_up.get_value()[:, 0, 0], np.float32))) > 1, "experts must differ"


def test_quantised_layer_is_a_pytree_through_split_jit_and_merge():
    layer = MoE(H, I, E, K, strategy="reference", rngs=nnx.Rngs(0))
    layer.set_experts(layer.experts.quantize("mxfp8"))
    graphdef, state = nnx.split(layer)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "float8_e4m3fn", "uint8"}
    x = jax.random.normal(jax.random.key(1), (3, H))
    merged = nnx.merge(graphdef, jax.jit(lambda s: s)(state))
    assert isinstance(merged.w_down.get_value(), QuantizedArray)
    np.testing.assert_allclose(
        nnx.jit(lambda layer, x: layer(x))(merged, x), jax.jit(lambda layer, x: layer(x))(layer, x), rtol=1e-6)


def test_trains():
    """A few steps of gradient descent on the layer's own parameters lower the loss, router included."""
    layer = MoE(H, 32, E, 2, strategy="expert_centric", rngs=nnx.Rngs(0))
    x, target = jax.random.normal(jax.random.key(1), (2, 16, H))

    @jax.jit
    def step(state):
        def loss(state):
            return jnp.mean((nnx.merge(graphdef, state)(x) - target) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return value, grads, jax.tree.map(lambda p, g: p - g, state, grads)

    graphdef, state = nnx.split(layer)
    first, grads, state = step(state)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    for _ in range(5):
        last, _, state = step(state)
    assert float(last) < float(first)


def test_x64_mode_changes_nothing():
    layer = MoE(H, I, E, K, strategy="expert_centric", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (3, H), jnp.bfloat16)
    y = layer(x)
    with jax.enable_x64(True):
        y64 = layer(x)
    assert y64.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, y64)


@pytest.mark.parametrize("options, message", [
    (dict(num_experts_per_token=E + 1), f"num_experts_per_token: got {E + 1}, expected at most num_experts {E}"),
    (dict(num_experts=0), "num_experts: got 0"),
    (dict(activation="gelu"), "activation: got 'gelu'"),
    (dict(strategy="fastest"), "strategy: got 'fastest'"),
])
def test_bad_options(options, message):
    sizes = dict(hidden_size=H, intermediate_size=I, num_experts=E, num_experts_per_token=K)
    with pytest.raises(ArgumentError, match=message):
        MoE(**{**sizes, **options}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("x", [jnp.ones((2, H + 1)), jnp.ones((2, H), jnp.int32), jnp.float32(1)])
def test_bad_input(x):
    layer = MoE(H, I, E, K, strategy="reference", rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=rf"x: got .*expected a floating array \[\.\.\., H\] with H = {H}"):
        layer(x)


def test_experts_of_another_size_are_refused():
    layer = MoE(H, I, E, K, strategy="reference", rngs=nnx.Rngs(0))
    w = jnp.ones((E, H, H))
    with pytest.raises(ArgumentError, match=r"experts.w_gate: got shape .* expected \(8, 96, 64\)"):
        layer.set_experts(ExpertWeights(w, w, w))
