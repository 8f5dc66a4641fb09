"""The op: every strategy against the oracle, the choice between them, transforms, and what is refused."""

import dataclasses
import functools
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType

from jax_warp_decode import (
    ACTIVATIONS,
    FORMATS,
    STRATEGIES,
    ArgumentError,
    Choice,
    ExpertWeights,
    QuantizedArray,
    Routing,
    UnsupportedError,
    available_strategies,
    choose,
    moe,
    quantize,
)
from jax_warp_decode.choose import TABLE, measured_format, warn_of
from jax_warp_decode.experts import ORDERS
from jax_warp_decode.explain import explain
from jax_warp_decode.layers import MoE
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
from jax_warp_decode.paths import grouped_gemm, warp_decode

choose_module = importlib.import_module("jax_warp_decode.choose")  # the package has a function of this name

SMALL = dict(tokens=2, experts=4, hidden=128, intermediate=64, k=2)
H_DTYPE = {"bf16": "float32", "mxfp8": "bfloat16"}  # the intermediate of warp decode, by weight format


def run(case, **options):
    return moe(*case.args(), **options)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_warp_decode_interpreted(weights):
    case = oracle.make_case(1, **SMALL, weights=weights, pattern="skipped")
    oracle.assert_close(run(case, strategy="warp_decode", interpret=True), case, h_dtype=H_DTYPE[weights])


@pytest.mark.parametrize("strategy", ["expert_centric", "reference", "auto"])
@pytest.mark.parametrize("x_dtype,weights", [("bf16", "bf16"), ("bf16", "mxfp8"), ("f32", "f32"), ("f16", "f16")])
def test_strategies_that_run_anywhere(strategy, x_dtype, weights):
    case = oracle.make_case(2, **SMALL, x_dtype=x_dtype, weights=weights, pattern="skipped")
    h_dtype = "float32" if strategy == "reference" else case.x.dtype.name
    oracle.assert_close(jax.jit(functools.partial(moe, strategy=strategy))(*case.args()), case, h_dtype=h_dtype)


def test_d03_ids_that_mean_not_here():
    """Skipped slots add nothing, whatever their weight holds; the shares of four devices add up to the layer."""
    for nowhere in (-1, 8):
        case = oracle.make_case(3, tokens=4, experts=8, hidden=64, intermediate=64, k=2, poison=False)
        x, _, experts = case.args()
        ids = jnp.array([[0, 5], [7, nowhere], [nowhere, nowhere], [3, 2]], jnp.int32)
        weights = jnp.array([[0.6, 0.4], [0.7, jnp.nan], [jnp.nan, jnp.nan], [0.9, 0.1]], jnp.float32)
        one_device = moe(x.astype(jnp.float32), Routing(ids, weights), experts, strategy="reference")
        assert np.isfinite(one_device).all() and not np.asarray(one_device[2]).any()
        for strategy in ("expert_centric", "reference"):
            parts = [moe(x, Routing(ids - first, weights), jax.tree.map(lambda w, f=first: w[f:f + 2], experts),
                         strategy=strategy).astype(jnp.float32) for first in range(0, 8, 2)]
            np.testing.assert_allclose(sum(parts), one_device, atol=0.02 * float(jnp.abs(one_device).max()))
            assert not np.asarray(sum(parts)[2]).any()


def test_auto_without_a_gpu_says_so():
    x, routing, experts = oracle.make_case(0, **SMALL).args()
    choice = choose(2, experts, experts_per_token=2, x_dtype=x.dtype)
    assert choice.strategy == "expert_centric" and "no NVIDIA GPU" in choice.reason
    reasons = available_strategies()
    assert set(reasons) == {"warp_decode", "shared_decode", "expert_centric", "reference"}
    assert reasons["warp_decode"] and reasons["shared_decode"] and not reasons["expert_centric"]


def test_warp_decode_without_a_gpu_names_the_two_ways_out():
    with pytest.raises(UnsupportedError, match=r"(?s)no NVIDIA GPU.*cuda12.*interpret=True"):
        run(oracle.make_case(0, **SMALL), strategy="warp_decode")


def test_auto_switches_by_load_and_explains_it():
    w = jax.ShapeDtypeStruct((128, 768, 2048), jnp.bfloat16)
    experts = ExpertWeights(w, w, jax.ShapeDtypeStruct((128, 2048, 768), jnp.bfloat16))
    pick = functools.partial(choose, experts=experts, experts_per_token=8, x_dtype=jnp.bfloat16, interpret=True)
    assert pick(1).strategy == "warp_decode" and "pairs per expert" in pick(1).reason
    assert {pick(T).strategy for T in (16, 32, 128)} == {"shared_decode"}
    assert pick(0).strategy == pick(8).strategy == "warp_decode" and pick(256).strategy == "expert_centric"
    stack = ExpertWeights(*(jax.ShapeDtypeStruct((48, *w.shape), w.dtype) for w in (w, w, experts.w_down)))
    assert all(pick(2**n, experts=stack) == pick(2**n) for n in range(11))  # of which a call reads one layer
    assert pick(512, strategy="warp_decode").strategy == "warp_decode"  # a named strategy is never replaced
    odd = ExpertWeights(*(jax.ShapeDtypeStruct((4, 40, 40), jnp.bfloat16),) * 3)
    choice = choose(1, odd, experts_per_token=1, x_dtype=jnp.bfloat16, interpret=True)
    assert choice.strategy == "expert_centric" and "multiples of 32" in choice.reason
    with pytest.raises(UnsupportedError, match="multiples of 32"):
        choose(1, odd, experts_per_token=1, x_dtype=jnp.bfloat16, interpret=True, strategy="warp_decode")
    choice = choose(1, experts, experts_per_token=8, x_dtype=jnp.float32, interpret=True)
    assert choice.strategy == "expert_centric" and "float32" in choice.reason


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_ranked_by_its_bits(format):
    """A format that was not measured changes strategies where the one with the nearest bits per value does."""
    E, I, H = 128, 768, 2048
    up, down = (FORMATS[format].structs(shape) for shape in ((E, I, H), (E, H, I)))
    experts = ExpertWeights(up, up, down)
    assert measured_format(format) == "mxfp8" and measured_format("f16") == "bf16"
    pick = functools.partial(choose, experts=experts, experts_per_token=8, x_dtype=jnp.bfloat16, interpret=True)
    assert pick(1).strategy == pick(2).strategy == "warp_decode"
    # At 0.5 pairs per expert, where decoding a value costs warp_decode more than it does shared_decode.
    early = format in ("nvfp4", "int4_group32", "int8_channel")
    assert pick(8).strategy == ("shared_decode" if early else "warp_decode")
    assert pick(16).strategy == pick(64).strategy == "shared_decode"


def test_auto_reads_an_expert_with_one_slot_by_warps():
    """With as many slots as experts, each has exactly T of them: experts that every token uses."""
    for E, H, I in ((1, 8192, 28672), (8, 4096, 14336)):
        w, w_down = (jax.ShapeDtypeStruct((E, *s), jnp.bfloat16) for s in ((I, H), (H, I)))
        assert choose(1, ExpertWeights(w, w, w_down), experts_per_token=E, x_dtype=jnp.bfloat16,
                      interpret=True).strategy == "warp_decode"


def test_auto_knows_where_expert_centric_widens_all_experts():
    """MXFP8 experts that a mesh has cut to rows of 64 are too narrow for its kernels that read them as they are."""
    up, down = (FORMATS["mxfp8"].structs(shape) for shape in ((512, 64, 2048), (512, 2048, 64)))
    pick = functools.partial(choose, experts=ExpertWeights(up, up, down), experts_per_token=10, x_dtype=jnp.bfloat16)
    assert {pick(T, interpret=True).strategy for T in (64, 128, 256)} <= {"warp_decode", "shared_decode"}


@pytest.mark.parametrize("format", ["fp8_block128", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("T", [1024, 1100, 2048])
def test_auto_takes_nothing_that_refuses_the_slots_of_a_mesh(format, T):
    """Of the slots that a device gets, most are another's: they cost little, but their number is limited."""
    up, down = (FORMATS[format].structs(shape) for shape in ((32, 2048, 7168), (32, 7168, 2048)))
    experts = ExpertWeights(up, up, down)
    taken = choose(T, experts, experts_per_token=8, x_dtype=jnp.bfloat16, interpret=True, shares=8).strategy
    choose(T, experts, experts_per_token=8, x_dtype=jnp.bfloat16, interpret=True, strategy=taken)


def test_auto_takes_no_scan_over_all_experts_where_decoding_runs():
    w, w_down = (jax.ShapeDtypeStruct((128, *s), jnp.float16) for s in ((768, 2048), (2048, 768)))
    for x_dtype in (jnp.float16, jnp.bfloat16):
        pick = functools.partial(choose, experts=ExpertWeights(w, w, w_down), experts_per_token=8, x_dtype=x_dtype)
        taken = [pick(T, interpret=True).strategy for T in (1, 32, 4096)]  # of 4096, shared_decode takes too few slots
        assert taken == ["warp_decode", "shared_decode", "warp_decode"]
        assert pick(32).strategy == "expert_centric"  # on a CPU


@pytest.mark.parametrize("strategy", ["expert_centric", "reference"])
def test_no_tokens(strategy):
    case = oracle.make_case(4, **{**SMALL, "tokens": 0})
    y = jax.jit(functools.partial(moe, strategy=strategy))(*case.args())
    assert y.shape == (0, 128) and y.dtype == jnp.bfloat16


def test_no_tokens_in_warp_decode():
    y = run(oracle.make_case(4, **{**SMALL, "tokens": 0}), strategy="warp_decode", interpret=True)
    assert y.shape == (0, 128) and y.dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------------------- structure


def stored(strategy, case):
    """What the strategy stores the intermediate in."""
    half = "float32" if isinstance(case.w_up, np.ndarray) else "bfloat16"
    shared = oracle.shared_h_dtype(case)
    return {"warp_decode": half, "shared_decode": shared, "reference": "float32"}.get(strategy, case.x.dtype.name)


TINY = dict(tokens=2, experts=3, hidden=128, intermediate=64, k=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_expert_biases(strategy):
    """Right, or refused by name; "auto" takes one that adds them. The routing weight counts for the bias of down."""
    case = oracle.make_case(31, **TINY, weights="mxfp8", biases="bf16", pattern="skipped")
    options = dict(strategy=strategy, interpret=TABLE[strategy].decode)
    if TABLE[strategy].biases:
        oracle.assert_close(run(case, **options), case, h_dtype=stored(strategy, case))
    else:
        with pytest.raises(UnsupportedError, match=rf"{strategy}.*biases \(b_gate, b_up, b_down\)"):
            run(case, **options)
    assert TABLE[choose(2, case.args()[2], experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True).strategy].biases


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_without_a_gate(strategy):
    case = oracle.make_case(32, **TINY, activation="relu2", biases="f32", pattern="skipped")
    case = case if TABLE[strategy].biases else dataclasses.replace(case, b_up=None, b_down=None)
    options = dict(strategy=strategy, activation="relu2", interpret=TABLE[strategy].decode)
    if TABLE[strategy].gateless:
        oracle.assert_close(run(case, **options), case, h_dtype=stored(strategy, case))
    else:
        with pytest.raises(UnsupportedError, match=f"{strategy}.*no gate projection"):
            run(case, **options)


@pytest.mark.parametrize("strategy", ["reference", "expert_centric", "warp_decode"])
def test_routing_weight_on_the_input(strategy):
    """Llama-4: the expert sees the scaled token. A sum over two slots, skipped ones with NaN weights among them."""
    case = oracle.make_case(33, **TINY, pattern="skipped")
    routed = case.routed()[..., None]
    rows = np.where(routed, case.x.astype(np.float32)[:, None] * np.where(routed, case.weights[..., None], 0), 0)
    rows = rows if strategy == "reference" else rows.astype(case.x.dtype)
    slots = dataclasses.replace(case, x=rows.reshape(-1, TINY["hidden"]), ids=case.ids.reshape(-1, 1),
                                weights=np.ones((case.ids.size, 1), np.float32))
    exact, bound = (a.reshape(*case.ids.shape, -1).sum(1) for a in slots.solve(stored(strategy, case), 2.0**-24))
    y = run(case, strategy=strategy, interpret=TABLE[strategy].decode, weight_on="input", out_dtype=jnp.float32)
    assert (np.abs(np.asarray(y) - exact) <= bound + 2.0**-22 * np.abs(exact)).all()
    assert np.abs(exact - case.exact).max() > 0.1  # another layer than with weights on the output


def test_gradients_with_biases_and_weights_on_the_input():
    case = oracle.make_case(34, **TINY, x_dtype="f32", weights="f32", biases="f32", poison=False)
    x, routing, experts = case.args()

    def loss(x, weights, experts):
        routed = Routing(routing.ids, weights)
        return jnp.sum(jnp.sin(moe(x, routed, experts, strategy="expert_centric", weight_on="input")))

    def direct(x, weights, experts):
        y = jnp.zeros_like(x)
        for k in range(routing.ids.shape[1]):
            pick = jax.tree.map(lambda a, k=k: a[routing.ids[:, k]], experts)
            rows = x * weights[:, k, None]
            gate, up = (jnp.einsum("tih,th->ti", w, rows, precision="highest") + b
                        for w, b in ((pick.w_gate, pick.b_gate), (pick.w_up, pick.b_up)))
            y += jnp.einsum("thi,ti->th", pick.w_down, jax.nn.silu(gate) * up, precision="highest") + pick.b_down
        return jnp.sum(jnp.sin(y))

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(x, routing.weights, experts) for f in (loss, direct))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


# ---------------------------------------------------------------------------------------------------- transforms


def test_vmap_over_tokens_is_one_launch_and_equals_the_batch():
    case = oracle.make_case(5, tokens=4, experts=4, hidden=64, intermediate=32, k=2, pattern="uniform")
    x, routing, experts = case.args()
    layer = functools.partial(moe, strategy="warp_decode", interpret=True)
    want = np.asarray(layer(x, routing, experts))
    pairs = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (x, routing))
    y = jax.vmap(layer, in_axes=(0, 0, None))(*pairs, experts)
    np.testing.assert_array_equal(np.asarray(y).reshape(4, -1), want)
    lowered = jax.jit(jax.vmap(functools.partial(warp_decode.run, activation=ACTIVATIONS["silu"]), (0, 0, None))).trace(
        *pairs, experts).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 2  # gate/up and down, each once for all four tokens
    shared = jax.vmap(layer, in_axes=(0, None, None))(pairs[0], Routing(routing.ids[:2], routing.weights[:2]), experts)
    np.testing.assert_array_equal(np.asarray(shared[0]), want[:2])


def test_vmap_over_weights_is_refused_clearly():
    x, routing, experts = oracle.make_case(5, **SMALL).args()
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), experts)
    layer = functools.partial(moe, strategy="warp_decode", interpret=True)
    with pytest.raises(UnsupportedError, match="vmap over expert weights"):
        jax.vmap(layer, in_axes=(None, None, 0))(x, routing, stacked)


def test_scan_over_layers_with_donated_activations():
    cases = [oracle.make_case(seed, **SMALL) for seed in (6, 7)]
    x, routing, _ = cases[0].args()
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *(case.args()[2] for case in cases))
    stacked = jax.tree.map(lambda w: jnp.nan_to_num(w), stacked)
    routing = Routing(jnp.array([[0, 1], [2, 3]]), jnp.full((2, 2), 0.5))

    @functools.partial(jax.jit, donate_argnums=0)
    def model(x, stacked):
        return jax.lax.scan(lambda x, layer: (x + moe(x, routing, layer, strategy="reference"), None), x, stacked)[0]

    want = x
    for i in range(2):
        layer = jax.tree.map(lambda w, i=i: w[i], stacked)
        want = want + moe(want, routing, layer, strategy="reference")
    np.testing.assert_array_equal(np.asarray(model(x.copy(), stacked)), np.asarray(want))


def test_scan_over_warp_decode_layers():
    case = oracle.make_case(8, tokens=1, experts=2, hidden=64, intermediate=32, k=1)
    x, routing, experts = case.args()
    experts = jax.tree.map(lambda w: jnp.nan_to_num(w), experts)
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), experts)
    layer = functools.partial(moe, strategy="warp_decode", interpret=True)
    ys = jax.lax.scan(lambda c, w: (c, layer(x, routing, w)), 0, stacked)[1]
    want = np.asarray(layer(x, routing, experts))
    np.testing.assert_array_equal(np.asarray(ys), np.stack([want, want]))


def test_gradient_of_warp_decode_is_refused_with_the_way_out():
    x, routing, experts = oracle.make_case(9, **SMALL).args()
    with pytest.raises(UnsupportedError, match="expert_centric"):
        jax.grad(lambda x: moe(x, routing, experts, strategy="warp_decode", interpret=True).sum())(
            x.astype(jnp.bfloat16))


def test_x64_mode_changes_nothing():
    case = oracle.make_case(10, tokens=1, experts=4, hidden=128, intermediate=64, k=2, pattern="skipped")
    want = {s: np.asarray(run(case, strategy=s, interpret=True)) for s in STRATEGIES}
    with jax.enable_x64(True):
        for strategy, y in want.items():
            x, routing, experts = case.args()
            wide = Routing(routing.ids.astype(jnp.int64), routing.weights.astype(jnp.float64))
            got = moe(x, wide, experts, strategy=strategy, interpret=True)
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(got), y)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_traced_layer_of_any_integer_type(strategy):
    """Numbers beyond int32 name no layer, whatever their lower half says."""
    x, routing, experts = oracle.make_case(11, **SMALL, poison=False).args()
    stack = jax.tree.map(lambda w: jnp.stack([jnp.zeros_like(w), w]), experts)
    run = jax.jit(lambda layer: moe(x, routing, stack, layer=layer, strategy=strategy, interpret=True))
    want = np.asarray(run(jnp.int32(1)), np.float32)
    with jax.enable_x64(True):
        for number, dtype in ((1, jnp.uint64), (1, jnp.int64), (1, jnp.uint32), (1, jnp.int8)):
            np.testing.assert_array_equal(np.asarray(run(jnp.array(number, dtype)), np.float32), want)
        for number, dtype in ((2**63 + 1, jnp.uint64), (2**32 + 1, jnp.int64), (-1, jnp.int64), (2**31, jnp.uint32)):
            assert not np.asarray(run(jnp.array(number, dtype)), np.float32).any()


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_numpy_weights_are_arrays_too(strategy):
    x, routing, experts = oracle.make_case(12, **SMALL, biases="f32").args()
    run = functools.partial(moe, x, routing, strategy=strategy, interpret=True)
    want, host = np.asarray(run(experts)), jax.tree.map(np.asarray, experts)
    np.testing.assert_array_equal(np.asarray(run(host)), want)
    stack = jax.tree.map(lambda w: np.stack([w, w]), host)
    _, got = jax.lax.scan(lambda none, n: (none, run(stack, layer=n)), None, jnp.arange(2))
    np.testing.assert_array_equal(np.asarray(got[1]), want)


# ------------------------------------------------------------------------------------------------------ bad input


def good():
    x, routing, experts = oracle.make_case(0, **SMALL, poison=False).args()
    return dict(x=x, routing=routing, experts=experts)


def with_weights(**change):
    experts = good()["experts"]
    return ExpertWeights(**{**{n: getattr(experts, n) for n in ("w_gate", "w_up", "w_down")}, **change})


@pytest.mark.parametrize("change,words", [
    (lambda: dict(x=jnp.ones((1, 2, 128), jnp.bfloat16)), ["routing.ids", "(2, 2)", "(1, 2, K)", "reshape"]),
    (lambda: dict(x=jnp.ones((2, 64), jnp.bfloat16)), ["x", "(2, 64)", "128", "w_up"]),
    (lambda: dict(x=jnp.ones((2, 128), jnp.int32)), ["x", "int32", "floating"]),
    (lambda: dict(routing=(1, 2)), ["routing", "tuple", "Routing"]),
    (lambda: dict(routing=Routing(jnp.ones((2, 2)), jnp.ones((2, 2)))), ["ids", "float32", "integer"]),
    (lambda: dict(routing=Routing(jnp.ones((3, 2), int), jnp.ones((3, 2)))), ["ids", "(3, 2)", "2"]),
    (lambda: dict(routing=Routing(jnp.ones((2, 2), int), jnp.ones((2, 1)))), ["weights", "(2, 1)", "(2, 2)"]),
    (lambda: dict(routing=Routing(jnp.ones((2, 0), int), jnp.ones((2, 0)))), ["ids", "K = 0"]),
    (lambda: dict(routing=Routing(jnp.ones((2, 5), int), jnp.ones((2, 5)))), ["ids", "K = 5", "E = 4", "moe_local"]),
    (lambda: dict(routing=Routing(jnp.ones((2, 2), int), jnp.ones((2, 2), int))), ["weights", "int"]),
    (lambda: dict(experts=jnp.ones(3)), ["experts", "ExpertWeights"]),
    (lambda: dict(experts=with_weights(w_up=jnp.ones((4, 32, 128), jnp.bfloat16))), ["w_up", "(4, 32, 128)"]),
    (lambda: dict(experts=with_weights(w_up=jnp.ones((3, 64, 128), jnp.bfloat16))), ["w_up", "(3, 64, 128)"]),
    (lambda: dict(experts=with_weights(w_down=jnp.ones((4, 64, 128), jnp.bfloat16))), ["w_down", "[E, H, I]"]),
    (lambda: dict(experts=with_weights(w_down=jnp.ones((4, 128), jnp.bfloat16))), ["w_down", "(4, 128)", "[E, H, I]"]),
    (lambda: dict(experts=with_weights(w_gate=jnp.ones((4, 64, 128), jnp.int8))), ["w_gate", "int8"]),
    (lambda: dict(experts=with_weights(w_up=quantize(jnp.ones((4, 64, 128)), "mxfp8"))), ["mixed formats"]),
    (lambda: dict(experts=with_weights(b_down=jnp.ones((4, 64)))), ["b_down", "(4, 64)", "(4, 128)", "[E, H]"]),
    (lambda: dict(experts=with_weights(b_up=jnp.ones((64,)))), ["b_up", "(64,)", "(4, 64)", "[E, I]"]),
    (lambda: dict(experts=with_weights(b_up=jnp.ones((4, 64), int))), ["b_up", "int32", "float32"]),
    (lambda: dict(experts=with_weights(b_up=quantize(jnp.ones((4, 64)), "mxfp8"))),
     ["b_up", "mxfp8 (4, 64)", "biases are never quantised"]),
    (lambda: dict(routing=Routing(jnp.ones((2, 32), int), quantize(jnp.ones((2, 32)), "mxfp8"))), ["weights", "mxfp8"]),
    (lambda: dict(strategy="warp_decode", interpret="yes"), ["interpret: got 'yes'", "True or False"]),
    (lambda: dict(experts=with_weights(w_gate=None, b_gate=jnp.ones((4, 64))), activation="relu2"),
     ["b_gate", "w_gate"]),
    (lambda: dict(experts=with_weights(w_up=None)), ["w_up", "None", "only w_gate"]),
    (lambda: dict(experts=with_weights(w_up=QuantizedArray(None, [1], "mxfp8"))), ["w_up"]),
    (lambda: dict(out_dtype="banana"), ["out_dtype", "banana", "float32"]),
    (lambda: dict(activation=["silu"]), ["activation", "silu", "gelu"]),
    (lambda: dict(strategy=["auto"]), ["strategy", "auto", "warp_decode"]),
    (lambda: dict(weight_on="both"), ["weight_on", "both", "input"]),
    (lambda: dict(strategy="warp"), ["strategy", "warp", "warp_decode", "expert_centric"]),
    (lambda: dict(activation="swish"), ["activation", "swish", "silu"]),
    (lambda: dict(activation_format="fp8"), ["activation_format", "fp8", "mxfp8"]),
    (lambda: dict(activation_format="mxfp8", strategy="reference"), ["activation_format", "expert_centric"]),
])
@pytest.mark.parametrize("jitted", [False, True])
def test_bad_arguments_are_named(change, words, jitted):
    arguments = {**good(), **change()}
    options = {n: arguments.pop(n) for n in list(arguments) if n not in ("x", "routing", "experts")}
    call = functools.partial(moe, **options)
    with pytest.raises(ArgumentError) as caught:
        (jax.jit(call) if jitted and not isinstance(arguments["routing"], tuple) else call)(**arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("x", [None, "abc", [[1.0], [1.0, 2.0]], jax.random.key(0), 1.0])
def test_what_is_no_array_of_tokens_is_named(x):
    with pytest.raises(ArgumentError, match="^x: got .*, expected a floating array"):
        moe(x, good()["routing"], good()["experts"])


def test_a_routing_may_be_nested_lists_and_nothing_else():
    x, _, experts = good().values()
    ids, weights = [[0, 1], [2, -1]], [[0.5, 0.5], [1.0, 9.0]]
    want = moe(x, Routing(jnp.array(ids), jnp.array(weights)), experts)
    np.testing.assert_array_equal(np.asarray(moe(x, Routing(ids, weights), experts)), np.asarray(want))
    for bad in (None, "ab", 3, [[0], [1, 2]]):
        with pytest.raises(ArgumentError, match="^routing.ids: got"):
            moe(x, Routing(bad, weights), experts)


def test_what_is_slow_or_copies_all_experts_is_warned_of_on_a_gpu(monkeypatch):
    slow = Choice("reference", "the GPU has compute capability 8.0", "which is slow")
    with warnings.catch_warnings(action="error"):
        warn_of(slow, "auto")  # no GPU
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        warn_of(Choice("expert_centric", ""), "auto")
    with pytest.warns(match="strategy 'auto' takes 'reference', which is slow: the GPU has"):
        warn_of(slow, "auto")
    with pytest.warns(match="strategy 'expert_centric', which makes a copy: asked for"):
        warn_of(Choice("expert_centric", "asked for", "which makes a copy"), "expert_centric")


@pytest.mark.parametrize("call", ["moe", "MoE", "moe_sharded"])
def test_whoever_resolves_auto_warns(monkeypatch, call):
    monkeypatch.setattr(choose_module, "no_gpu_reason", lambda: "the GPU has compute capability 8.0")
    monkeypatch.setattr(grouped_gemm, "refusal", lambda *sizes: "not on this GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, routing, experts = good().values()
    layer = MoE.from_weights(jnp.ones((experts.num_experts, experts.hidden), x.dtype), experts, 2)
    mesh = ExpertSharding(jax.make_mesh((1,), ("e",), axis_types=(AxisType.Auto,)), expert_axis="e")
    calls = {"moe": lambda: moe(x, routing, experts), "MoE": lambda: layer(x),
             "moe_sharded": lambda: moe_sharded(x, routing, experts, mesh)}
    with pytest.warns(match="strategy 'auto' takes 'reference', which is slow: .*capability 8.0") as caught:
        calls[call]()
    assert len(caught) == 1


def test_scales_of_the_wrong_shape_are_refused():
    experts = good()["experts"].quantize("mxfp8")
    bad = ExpertWeights(experts.w_gate, type(experts.w_up)(experts.w_up.values, experts.w_up.scales[:, :, :1], "mxfp8"),
                        experts.w_down)
    with pytest.raises(ArgumentError, match=r"experts.w_up.*\(4, 64, 1\)"):
        moe(good()["x"], good()["routing"], bad)


def test_weights_in_the_order_of_other_libraries_are_named():
    args = good()
    swapped = args["experts"].map(lambda w: w.swapaxes(-1, -2))
    with pytest.raises(ArgumentError, match=r"^x: got shape .*swap the last two axes"):
        moe(args["x"], args["routing"], swapped)


@pytest.mark.parametrize("call, message", [
    (lambda e: e.astype("bf16"), "^dtype: got 'bf16', expected bfloat16, float16, float32"),
    (lambda e: e.astype(jnp.int8), "^dtype: got .*int8.*, expected bfloat16"),
    (lambda e: e.quantize("mxfp8").quantize("mxfp4"), "^experts: got mxfp8 weights, expected plain ones.*mxfp4"),
])
def test_conversions_that_would_lose_weights_are_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(good()["experts"])


@pytest.mark.parametrize("strategy", ["warp_decode", "expert_centric", "reference"])
def test_a_scan_over_stacked_layers(strategy):
    """The layers one after the other, by a traced index, give what each layer gives alone."""
    cases = [oracle.make_case(seed, **SMALL, poison=False) for seed in (21, 22)]
    x, routing, _ = cases[0].args()
    stack = jax.tree.map(lambda *a: jnp.stack(a), *(case.args()[2] for case in cases))
    options = dict(strategy=strategy, interpret=strategy == "warp_decode")

    def step(x, layer):
        return moe(x, routing, stack, layer=layer, **options), None

    want = x
    for case in cases:
        want = moe(want, routing, case.args()[2], **options)
    got, _ = jax.lax.scan(step, x, jnp.arange(2))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    outside = jax.jit(lambda layer: moe(x, routing, stack, layer=layer, **options))(2)
    assert not np.asarray(outside, np.float32).any()


def test_stacked_layers_need_a_layer_and_only_they():
    x, routing, experts = oracle.make_case(0, **SMALL).args()
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), experts)
    assert (experts.layers, stack.layers, stack.num_experts, stack[1].layers) == (None, 2, 4, None)
    with pytest.raises(ArgumentError, match="layer: got None"):
        moe(x, routing, stack)
    with pytest.raises(ArgumentError, match="layer: got 0"):
        moe(x, routing, experts, layer=0)
    for layer in (2, -1, 2**32, -2**32, 2**70, np.int64(2**32), np.int64(2**31), np.uint64(2**63), np.array(2**32 + 1)):
        with pytest.raises(ArgumentError, match=f"layer: got {layer}, expected 0 <= layer < 2"):  # never cut to 32 bits
            moe(x, routing, stack, layer=layer)
    for layer in ("0", 0.0, True, [0]):
        with pytest.raises(ArgumentError, match="layer: got .*, expected an integer scalar"):
            moe(x, routing, stack, layer=layer)


def test_experts_without_a_gate_need_an_activation_without_one():
    x, routing, experts = oracle.make_case(0, **SMALL, poison=False).args()
    with pytest.raises(ArgumentError, match="w_gate: got None, expected a gate projection for activation 'silu'"):
        moe(x, routing, ExpertWeights(None, experts.w_up, experts.w_down))
    with pytest.raises(ArgumentError, match="experts.w_gate: got an array, expected None for activation 'relu2'"):
        moe(x, routing, experts, activation="relu2")


@pytest.mark.parametrize("change, message", [
    (dict(tokens="3"), "tokens: got '3', expected a static integer"),
    (dict(tokens=-1), "tokens: got -1, expected at least 0"),
    (dict(tokens=True), "tokens: got True, expected a static integer"),
    (dict(experts_per_token=2.5), "experts_per_token: got 2.5, expected a static integer"),
    (dict(x_dtype="banana"), "x_dtype: got 'banana', expected a floating dtype"),
    (dict(x_dtype=jnp.int32), "x_dtype: got .*int32.*, expected a floating dtype"),
    (dict(experts=None), "experts: got NoneType, expected ExpertWeights"),
])
@pytest.mark.parametrize("ask", [choose, explain])
def test_questions_about_a_call_are_checked(ask, change, message):
    good_question = dict(tokens=1, experts=good()["experts"], experts_per_token=2, x_dtype=jnp.bfloat16)
    with pytest.raises(ArgumentError, match=message):
        ask(**good_question | change)


# -------------------------------------------------------------------------------------------- gate and up in one array


def together(a, order):
    """[2, E, I, ..], gate and up, in one array."""
    a = np.asarray(a)
    return jnp.asarray(np.concatenate(a, 1) if order == "concatenated" else
                       np.stack(a, 2).reshape(a.shape[1], -1, *a.shape[3:]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("format", ["f32", *FORMATS])
def test_gate_and_up_in_one_array(format, order):
    rng = np.random.default_rng(0)
    gate_up, b_gate_up = rng.standard_normal((2, 3, 128, 256)), jnp.asarray(rng.standard_normal((2, 3, 128)))
    w_down, b_down = jnp.asarray(rng.standard_normal((3, 256, 128)), jnp.float32), jnp.ones((3, 256))
    w = together(gate_up.astype(np.float32), order)
    if format != "f32":
        w, w_down = quantize(w, format), quantize(w_down, format)
    options = dict(order=order, b_gate_up=together(b_gate_up, order), b_down=b_down)
    if format == "fp8_block128" and order == "interleaved":
        with pytest.raises(ArgumentError, match="w_gate_up: got interleaved rows in format 'fp8_block128', which has"):
            ExpertWeights.from_gate_up(w, w_down, **options)
        return
    experts = ExpertWeights.from_gate_up(w, w_down, **options)
    assert experts.format == format
    whole = w if format == "f32" else w.dequantize()
    parts = [a if format == "f32" else a.dequantize() for a in (experts.w_gate, experts.w_up)]
    np.testing.assert_array_equal(together(parts, order), whole)
    np.testing.assert_array_equal((experts.b_gate, experts.b_up), b_gate_up)


@pytest.mark.parametrize("change, message", [
    (dict(order="alternating"), "order: got 'alternating', expected one of"),
    (dict(w_gate_up=jnp.ones((3, 63, 64))), r"w_gate_up: got shape \(3, 63, 64\), expected \[E, 2 I, H\]"),
    (dict(w_gate_up=None), "w_gate_up: got NoneType, expected"),
    (dict(b_gate_up=[[0.0] * 32] * 3), r"b_gate_up: got shape \(3, 32\), expected \(3, 64\)"),
    (dict(order=["concatenated"]), "order: got .'concatenated'., expected one of"),
    (dict(b_gate_up=quantize(jnp.ones((3, 64)), "mxfp8")), r"b_gate_up: got mxfp8 .*; biases are never quantised"),
    (dict(b_gate_up=jnp.ones((3, 32))), r"b_gate_up: got shape \(3, 32\), expected \(3, 64\)"),
    (dict(w_down=jnp.ones((3, 64, 64))), r"experts.w_down: got shape \(3, 64, 64\), expected \(3, 64, 32\)"),
    (dict(w_gate_up=quantize(jnp.ones((3, 64, 64)), "fp8_block128")), "got concatenated rows in .* scale for 128 rows"),
])
def test_gate_and_up_that_do_not_fit(change, message):
    good = dict(w_gate_up=jnp.ones((3, 64, 64)), w_down=jnp.ones((3, 64, 32)), order="concatenated")
    with pytest.raises(ArgumentError, match=message):
        ExpertWeights.from_gate_up(**good | change)
