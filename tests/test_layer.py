"""The Flax layer: same numbers as the oracle, one strategy per call, ordinary NNX behaviour."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

from jax_warp_decode import (
    ROUTERS,
    ArgumentError,
    ExpertSharding,
    ExpertWeights,
    QuantizedArray,
    Router,
    Routing,
    UnsupportedError,
    dequantize,
    moe,
    route,
)
from jax_warp_decode.choose import TABLE
from jax_warp_decode.layers import MoE, RouterState, linen_moe
from jax_warp_decode.shared_experts import append_shared, with_shared

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


# ------------------------------------------------------------------------------------------- structure of the model

# Every option at once, but for those that exclude each other.
FULL = dict(router=Router(2, "sigmoid", n_group=4, topk_group=2, scale=2.5), router_bias=True, correction_bias=True,
            expert_scale=True, use_bias=True, num_shared_experts=2, shared_gate=True, strategy="expert_centric",
            bias_init=nnx.initializers.normal(1.0))


@functools.cache
def full_parts():
    graphdef, state = nnx.split(jax.jit(lambda: MoE(H, 32, E, 2, **FULL, rngs=nnx.Rngs(0)))())
    rng = np.random.default_rng(3)
    for name in ("correction_bias", "expert_scale"):
        state[name].set_value(state[name].get_value() + rng.normal(0, 0.3, E).astype(np.float32))
    return graphdef, state


def make_full(strategy="expert_centric"):
    graphdef, state = full_parts()
    layer = nnx.merge(graphdef, jax.tree.map(lambda a: a, state))
    layer.set_strategy(strategy)
    return layer


run_layer = jax.jit(lambda layer, x: layer(x))


def expected(layer, x):
    """The layer written out in float64 for each token: every factor in its one place."""
    p = {n: np.asarray(getattr(layer, n).get_value(), np.float64) for n in (
        "router", "router_bias", "correction_bias", "expert_scale", "shared_gate", "w_gate", "w_up", "w_down", "b_gate",
        "b_up", "b_down")}

    def expert(e, t):
        gate, up = (p[f"w_{n}"][e] @ t + p[f"b_{n}"][e] for n in ("gate", "up"))
        return p["w_down"][e] @ oracle.silu(gate, up) + p["b_down"][e]

    out = []
    for t in np.asarray(x, np.float64):
        scores = oracle.sigmoid(p["router"] @ t + p["router_bias"])
        choice = (scores + p["correction_bias"]).reshape(4, 2)
        groups = np.argsort(-choice.sum(1), kind="stable")[:2]
        ids = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -choice.reshape(-1)[e])[:2]
        weights = 2.5 * scores[ids] / scores[ids].sum() * p["expert_scale"][ids]
        shared = oracle.sigmoid(p["shared_gate"][0] @ t) * sum(expert(e, t) for e in (E, E + 1))
        out.append(sum(w * expert(e, t) for w, e in zip(weights, ids, strict=True)) + shared)
    return np.stack(out)


@pytest.mark.parametrize("strategy", [name for name, s in TABLE.items() if s.biases and not s.decode])
def test_every_option_of_the_layer(strategy):
    layer, x = make_full(strategy=strategy), jax.random.normal(jax.random.key(1), (5, H))
    np.testing.assert_allclose(run_layer(layer, x), expected(layer, x), rtol=1e-4, atol=1e-4)


def test_d12_scaling_gate_and_shared_expert_once_each():
    """Constant experts: 2.5 * 1 + 0.5 * 10 = 7.5; without renormalisation 7.2020; without a gate 12.5."""
    def constant(value, experts=1):
        w = np.zeros((experts, 1, 32), np.float32)
        w_gate, w_up, w_down = w.copy(), w.copy(), np.full((experts, 32, 1), value, np.float32)
        w_gate[:, 0, 0], w_up[:, 0, 0] = 64, 2**-6
        return ExpertWeights(*map(jnp.asarray, (w_gate, w_up, w_down)))

    x = jnp.zeros((1, 32)).at[0, 0].set(1)
    router = jnp.zeros((4, 32)).at[:, 0].set(jnp.array([2.0, 1.0, 0.0, -1.0]))
    experts = append_shared(constant(1, 4), constant(10))
    for renormalize, shared_gate, want in ((True, True, 7.5), (False, True, 7.2020), (True, False, 12.5)):
        layer = MoE.from_weights(router, experts, 2, router=Router(2, renormalize=renormalize, scale=2.5),
                                 num_shared_experts=1, shared_gate=shared_gate, strategy="reference")
        np.testing.assert_allclose(run_layer(layer, x), want, rtol=1e-4)


def routed_and_wide(format, **options):
    """Four experts of 128 neurons, and shared ones of 256."""
    size = dict(tokens=3, hidden=128, k=1, weights=format, biases="f32", poison=False, **options)
    return [oracle.make_case(seed, experts=e, intermediate=i, **size).args() for seed, e, i in (
        (1, 4, 128), (2, 2, 256))]


def test_a_wide_shared_expert_is_the_sum_of_its_parts():
    (x, routing, experts), (_, _, shared) = routed_and_wide("f32", x_dtype="f32", activation="relu2")
    gate = jnp.array([[0.5], [1.0], [2.0]])

    @jax.jit
    def both(x, routing, experts, shared):
        run = functools.partial(moe, x, strategy="reference", activation="relu2")
        return (run(with_shared(routing, 4, 8, gate), append_shared(experts, shared)),
                run(routing, experts) + run(with_shared(None, 0, 2, gate, tokens=3), shared))

    y, want = both(x, routing, experts, shared)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("format", ["f32", "mxfp8", "nvfp4", "fp8_block128", "fp8_channel", "fp8_tensor"])
def test_the_parts_of_a_shared_expert_are_bitwise_its_neurons(format):
    (_, _, experts), (_, _, shared) = routed_and_wide(format)
    joined = append_shared(experts, shared)
    joined.check()
    assert (joined.num_experts, joined.intermediate, joined.format) == (8, 128, format)
    for name, w in joined.weights.items():
        w, routed, wide = (np.asarray(dequantize(a)) for a in (w, experts.weights[name], shared.weights[name]))
        np.testing.assert_array_equal(w[:4], routed)
        np.testing.assert_array_equal(np.concatenate([w[[4, 6]], w[[5, 7]]], axis=2 if name == "w_down" else 1), wide)
    np.testing.assert_array_equal(joined.b_up[4:].reshape(2, 256), shared.b_up)
    np.testing.assert_array_equal(joined.b_down[4::2], shared.b_down)
    assert not np.asarray(joined.b_down[5::2]).any()
    if format == "mxfp8":
        stacked = append_shared(*(jax.tree.map(lambda a: jnp.stack([a, a]), e) for e in (experts, shared)))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a: a[1], stacked), joined)


def test_ids_that_mean_not_here_do_not_reach_the_shared_expert():
    routing = with_shared(Routing(jnp.array([[0, 4], [5, -1]]), jnp.ones((2, 2))), 4, 6)
    assert routing.ids.tolist() == [[0, -1, 4, 5], [-1, -1, 4, 5]]


@pytest.mark.parametrize("change, message", [
    (dict(intermediate=96), "shared: got I = 96, expected a multiple of I = 64"),
    (dict(hidden=128), "shared: got hidden 128, expected 64"),
    (dict(weights="mxfp8"), "shared: got format mxfp8, expected f32"),
    (dict(activation="relu2"), "shared.w_gate"),
])
def test_shared_experts_that_do_not_fit(change, message):
    size = dict(tokens=1, experts=2, hidden=64, intermediate=64, k=1, weights="f32")
    experts, shared = (oracle.make_case(0, **{**size, **c}).args()[2] for c in ({}, change))
    with pytest.raises(ArgumentError, match=message):
        append_shared(experts, shared)


def test_shared_experts_of_another_type_are_named():
    experts = oracle.make_case(0, tokens=1, experts=2, hidden=64, intermediate=64, k=1).args()[2]
    with pytest.raises(ArgumentError, match="^experts: got list, expected ExpertWeights"):
        append_shared([experts.w_up], experts)
    with pytest.raises(ArgumentError, match="^shared: got .*, expected ExpertWeights"):
        append_shared(experts, experts.w_up)
    with pytest.raises(ArgumentError, match=r"^shared.w_down: got shape \(2, 64, 64, 64\)"):
        append_shared(experts, dataclasses.replace(experts, w_down=jnp.ones((2, 64, 64, 64))))


@pytest.mark.parametrize("arguments, message", [
    (dict(gate=[[0.5]]), r"^gate: got list, expected floats \(1, 1\), one for each token"),
    (dict(gate=jnp.ones((1, 1), jnp.int32)), r"^gate: got int32 \(1, 1\), expected floats"),
    (dict(gate=jnp.ones((2, 1))), r"^gate: got float32 \(2, 1\), expected floats \(1, 1\)"),
    (dict(routing=None), "^tokens: got None without a routing, expected T"),
])
def test_a_bad_routing_of_shared_experts_is_named(arguments, message):
    routing = Routing(jnp.array([[0]]), jnp.array([[1.0]]))
    with pytest.raises(ArgumentError, match=message):
        with_shared(**dict(routing=routing, first=4, end=5) | arguments)


def test_a_shared_expert_whose_blocks_would_be_cut():
    size = dict(tokens=1, hidden=128, k=1, weights="fp8_block128")
    experts, shared = (oracle.make_case(0, experts=1, intermediate=i, **size).args()[2] for i in (64, 128))
    with pytest.raises(ArgumentError, match="128 neurons in blocks of 128.*2 parts of 64 would cut"):
        append_shared(experts, shared)


def test_one_set_of_parameters_trains_and_serves():
    """Gradients reach every parameter but the correction bias, which no optimiser of `nnx.Param` sees."""
    layer, x = make_full(), jax.random.normal(jax.random.key(1), (5, H))
    assert isinstance(layer.correction_bias, RouterState)
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p, rest)(x) ** 2)))(params)
    assert set(grads) == {"router", "router_bias", "expert_scale", "shared_gate", "w_gate", "w_up", "w_down", "b_gate",
                          "b_up", "b_down"}
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    layer.set_experts(layer.experts.astype(jnp.bfloat16))
    layer.set_strategy("auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "no_gpu_reason", lambda: "")  # as on a GPU
        assert layer.choice(1, jnp.bfloat16).strategy == "warp_decode"
    assert layer.experts.biases["b_up"].dtype == jnp.float32


@pytest.mark.parametrize("format", [None, "mxfp8"])
def test_state_round_trips_through_orbax(format, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    layer = make_full()
    if format:
        layer.set_experts(layer.experts.quantize(format))
    graphdef, state = nnx.split(layer)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
        restored = checkpointer.restore(tmp_path / "layer", abstract)
    again = nnx.merge(graphdef, restored)
    assert again.experts.format == layer.experts.format
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*(np.asarray(v).view(np.uint8) for v in (a, b))),
                 again.experts, layer.experts)


def test_linen_has_the_same_options_and_parameters():
    module = linen_moe(H, 32, E, 2, **FULL | dict(strategy="reference"))
    x = jax.random.normal(jax.random.key(1), (2, 3, H))
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    layer = make_full(strategy="reference")
    state = nnx.to_pure_dict(nnx.state(layer))
    assert variables["params"].keys() | variables["RouterState"].keys() == state.keys()
    correction = {"correction_bias": state.pop("correction_bias")}
    layer.set_experts(layer.experts.quantize("mxfp8"))
    y = jax.jit(module.apply)({"params": state | layer.experts.weights, "RouterState": correction}, x)
    np.testing.assert_allclose(y, run_layer(layer, x), rtol=1e-5, atol=1e-5)


def test_on_a_mesh_parameters_carry_their_places():
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = ExpertSharding(mesh, expert_axis="expert")
    options = dict(num_experts=E - 1, num_shared_experts=1, num_experts_per_token=2, strategy="expert_centric")
    one, layer = jax.jit(lambda: [MoE(H, 32, **options, sharding=s, rngs=nnx.Rngs(0)) for s in (None, sharding)])()
    specs = nnx.get_partition_spec(nnx.state(layer, nnx.Param))
    assert tuple(specs["w_down"].get_value()) == ("expert", None, None)
    assert layer.w_up.get_value().sharding.shard_shape((E, 32, H)) == (E // devices, 32, H)
    x = jax.random.normal(jax.random.key(1), (2, 3, H))
    np.testing.assert_allclose(run_layer(layer, x), run_layer(one, x), rtol=1e-5, atol=1e-5)
    layer.set_experts(layer.experts.astype(jnp.bfloat16))
    assert layer.w_up.get_value().sharding.mesh == mesh


def test_from_weights_draws_and_copies_nothing():
    case = oracle.make_case(5, tokens=2, experts=E, hidden=H, intermediate=32, k=2, weights="mxfp8", biases="f32",
                            poison=False)
    x, _, experts = case.args()
    router = jnp.asarray(random_router(6))
    layer = MoE.from_weights(router, experts, 2, router=Router(2, "sigmoid"), correction_bias=True,
                             strategy="reference")
    assert layer.experts.w_up.values is experts.w_up.values and layer.router.get_value() is router
    routing = route(jnp.einsum("th,eh->te", x.astype(jnp.float32), router, precision="highest"), Router(2, "sigmoid"))
    want = jax.jit(functools.partial(moe, strategy="reference"))(x, routing, experts)
    np.testing.assert_array_equal(run_layer(layer, x), want)
    with pytest.raises(ArgumentError, match=r"w_router: got shape \(8, 64\), expected \(7, 64\)"):
        MoE.from_weights(router, experts, 2, num_shared_experts=1)


def test_explain_names_strategy_reason_and_configurations():
    layer = MoE(H, 64, E, 2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_module, "no_gpu_reason", lambda: "")  # as on a GPU
        layer.set_strategy("warp_decode")
        text = str(layer.explain(1))
    assert text.startswith("warp_decode (asked for)") and "GateUpConfig(" in text and "heuristic" in text
    layer.set_strategy("reference")
    assert layer.explain(1).configs == {}


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
    (dict(router=ROUTERS["mixtral"]), "router: got k=2, expected num_experts_per_token 3; use dataclasses.replace"),
    (dict(router=Router(3, n_group=3)), "n_group: got 3"),
    (dict(router=Router(3), renormalize=False), "renormalize: got False beside a Router"),
    (dict(shared_gate=True), "num_shared_experts: got 0 with shared_gate=True, expected at least 1"),
    (dict(weight_on="both"), "weight_on: got 'both'"),
    (dict(weight_on="input", shared_gate=True, num_shared_experts=1), "shared_gate: got True with weight_on='input'"),
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


@pytest.mark.parametrize("change, words", [
    (dict(hidden_size=64.0), "hidden_size: got 64.0, expected an integer"),
    (dict(num_experts_per_token=True), "num_experts_per_token: got True, expected an integer"),
    (dict(dtype=jnp.int8), "dtype: got .*int8.*, expected a floating dtype"),
    (dict(param_dtype="banana"), "param_dtype: got 'banana', expected a floating dtype"),
    (dict(rngs=None), "rngs: got NoneType, expected nnx.Rngs"),
    (dict(kernel_init=None), "kernel_init: got None, expected an initialiser"),
    (dict(bias_init=0.0), "bias_init: got 0.0, expected an initialiser"),
    (dict(strategy=["auto"]), "strategy: got .*'auto'"),
    (dict(router="sigmoid"), "router: got 'sigmoid', expected a Router")])
def test_arguments_of_the_wrong_kind_are_named(change, words):
    arguments = dict(hidden_size=H, intermediate_size=I, num_experts=E, num_experts_per_token=K, rngs=nnx.Rngs(0))
    with pytest.raises(ArgumentError, match=f"^{words}"):
        MoE(**arguments | change)


def test_experts_of_another_size_are_refused():
    layer = MoE(H, I, E, K, strategy="reference", rngs=nnx.Rngs(0))
    w = jnp.ones((E, H, H))
    with pytest.raises(ArgumentError, match=r"experts.w_gate: got shape .* expected \(8, 96, 64\) = \[E, I, H\]"):
        layer.set_experts(ExpertWeights(w, w, w))
    with pytest.raises(ArgumentError, match="experts: got w_up, w_down, expected w_gate, w_up, w_down"):
        layer.set_experts(ExpertWeights(None, w, w))
