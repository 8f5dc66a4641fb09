"""Checks on eight virtual CPU devices, continued: plain jit, biases, modules; test_parallel.py runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_checks import COLLECTIVES, GRID, LAYOUTS, SIZES, mesh, sharded

from jax_warp_decode import ArgumentError, ExpertWeights, UnsupportedError, exchange, moe
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.layers import MoE
from jax_warp_decode.module_sharding import module_specs, shard_module
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
from jax_warp_decode.partitioned import moe_partitioned

plain = jax.jit(moe_partitioned, static_argnames=("strategy", "interpret"))


def collectives(compiled):
    lines = [line for line in compiled.as_text().splitlines() if any(f" {name}(" in line for name in COLLECTIVES)]
    return {name: n for name in COLLECTIVES if (n := sum(f" {name}(" in line for line in lines))}, lines


def place(case_args, sharding):
    x, routing, experts = case_args
    x, routing = jax.device_put((x, routing), NamedSharding(sharding.mesh, P(sharding.token_axis)))
    return x, routing, sharding.shard(experts)


# --------------------------------------------------------------------------------------------------------- plain jit


@pytest.mark.parametrize("layout,expected", [
    ("EP4 x TP2", {"all-reduce": 1}),
    ("DP2 x EP4", {"all-reduce": 1}),
    ("EP8 tokens too", {"all-gather": 3, "reduce-scatter": 1}),  # x, ids and weights; never the experts
])
def test_plain_jit_leaves_the_weights_where_they_are(layout, expected):
    case = oracle.make_case(1, **SIZES, weights="mxfp8", pattern="skipped")
    sharding = LAYOUTS[layout]()
    args = place(case.args(), sharding)
    compiled = plain.lower(*args, strategy="reference").compile()
    found, lines = collectives(compiled)
    assert found == expected and not any("f8e4m3" in line or "u8[" in line for line in lines), lines
    y = compiled(*args)
    oracle.assert_close(y, case)
    assert y.sharding.is_equivalent_to(NamedSharding(sharding.mesh, P(sharding.token_axis)), 2)


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])  # no scales; packed values and two kinds of scales
def test_plain_jit_with_other_formats(weights):
    case = oracle.make_case(2, **SIZES, weights=weights, pattern="skipped")
    args = place(case.args(), LAYOUTS["EP4 x TP2"]())
    compiled = plain.lower(*args, strategy="reference").compile()
    assert collectives(compiled)[0] == {"all-reduce": 1}
    oracle.assert_close(compiled(*args), case)


def test_plain_jit_inside_a_model_with_stacked_layers_and_leading_axes():
    cases = [oracle.make_case(seed, **SIZES, x_dtype="f32", weights="f32", poison=False) for seed in (3, 4)]
    x, routing, _ = cases[0].args()
    stack = jax.tree.map(lambda *w: jnp.stack(w), *(case.args()[2] for case in cases))

    def model(op, x, routing, stack):
        step = lambda x, layer: (x + op(x, routing, stack, layer=layer, strategy="reference"), None)
        return jax.lax.scan(step, x, jnp.arange(2))[0]

    want = np.asarray(jax.jit(functools.partial(model, moe))(x, routing, stack))
    x, routing, stack = place((x, routing, stack), LAYOUTS["DP2 x EP4"]())
    x3, routing3 = jax.tree.map(lambda a: a.reshape(2, 4, -1), (x, routing))
    run = jax.jit(functools.partial(model, moe_partitioned))
    found, _ = collectives(run.lower(x3, routing3, stack).compile())
    assert set(found) == {"all-reduce"}
    np.testing.assert_allclose(np.asarray(run(x3, routing3, stack)).reshape(want.shape), want, rtol=0,
                               atol=1e-5 * np.abs(want).max())


def test_plain_jit_refuses_what_it_cannot_do():
    case = oracle.make_case(7, **SIZES, x_dtype="f32", weights="f32", poison=False)
    x, routing, experts = case.args()
    sharding = LAYOUTS["EP4 x TP2"]()
    args = place((x, routing, experts), sharding)
    with pytest.raises(UnsupportedError, match="moe_partitioned: has no gradient.*moe_sharded"):
        jax.grad(lambda x: jnp.sum(plain(x, *args[1:], strategy="reference")))(args[0])
    with pytest.raises(UnsupportedError, match="vmap is not supported.*leading axes"):
        jax.vmap(plain, (0, None, None))(args[0][None], *args[1:])
    wrong = ExpertWeights(args[2].w_gate, args[2].w_up, jax.device_put(experts.w_down, NamedSharding(
        sharding.mesh, P(None, "a"))))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"experts\.w_down: got .*ExpertSharding.shard"):
        plain(x, routing, wrong, strategy="reference")
    blocks = jax.device_put(experts.quantize("mxfp8"), NamedSharding(mesh(t=8), P(None, "t")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="would cut a block"):
        plain(x, routing, blocks, strategy="reference")
    explicit = ExpertSharding(GRID(AxisType.Explicit), expert_axis="a")
    with pytest.raises(ArgumentError, match="explicit axes.*moe_sharded"):
        plain(*place((x, routing, experts), explicit), strategy="reference")


# ------------------------------------------------------------------------------------------------------------ biases


@pytest.mark.parametrize("layout", ["EP4 x TP2, tokens everywhere", "TP4"])
def test_biases_are_added_once(layout):
    case = oracle.make_case(8, **SIZES, pattern="skipped", biases="f32")
    x, routing, experts = case.args()
    sharding = LAYOUTS[layout]()
    placed = sharding.shard(experts)
    oracle.assert_close(sharded(x, routing, placed, sharding, strategy="reference"), case)
    assert placed.b_up.sharding.spec == P(sharding.expert_axis, sharding.tensor_axis)
    if layout == "TP4":
        oracle.assert_close(plain(*place((x, routing, experts), sharding), strategy="reference"), case)


# ------------------------------------------------------------------------------------------- specs of every format


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_specs_that_keep_its_blocks_whole(format):
    # What a device gets is again an array of the format, with every scale beside its block. Stacked layers likewise.
    sharding, L, E, I, H = LAYOUTS["EP4 x TP2"](), 3, 8, 512, 128
    struct = FORMATS[format].structs
    up, down = struct((L, E, I, H)), struct((L, E, H, I))
    placed = sharding.shardings(ExpertWeights(up, up, down))
    part = lambda a, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(a.shape), a.dtype)
    for name, w, want in (("w_gate", up, (L, E // 4, I // 2, H)), ("w_up", up, (L, E // 4, I // 2, H)),
                          ("w_down", down, (L, E // 4, H, I // 2))):
        assert jax.tree.map(part, w, getattr(placed, name)) == struct(want)


# ----------------------------------------------------------------------------------------------------------- modules


def test_a_module_on_a_mesh():
    layer = MoE(64, 128, num_experts=8, num_experts_per_token=2, strategy="reference", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, 64))
    want = np.asarray(nnx.jit(lambda layer, x: layer(x))(layer, x))
    sharding = LAYOUTS["EP4 x TP2"]()
    specs = module_specs(layer, sharding)
    assert specs["w_down"].get_value() == P("a", None, "b") and specs["router"].get_value() == P()
    shard_module(layer, sharding)
    graph, state = nnx.split(layer)
    step = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile()
    found, lines = collectives(step)
    assert found == {"all-reduce": 1}, lines
    np.testing.assert_allclose(np.asarray(step(state, x)), want, rtol=0, atol=1e-5 * np.abs(want).max())
    with pytest.raises(ArgumentError, match="module: got Linear, expected a module with experts"):
        shard_module(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), sharding)


def test_a_layer_on_a_mesh_can_be_exported():
    pytest.importorskip("flatbuffers")  # jax.export serialises with it
    case = oracle.make_case(11, **SIZES, pattern="skipped")
    sharding = LAYOUTS["DP2 x EP4"]()
    args = place(case.args(), sharding)
    layer = jax.jit(lambda *args: moe_sharded(*args, sharding, strategy="reference"))
    again = jax.export.deserialize(jax.export.export(layer)(*args).serialize())
    oracle.assert_close(jax.jit(again.call)(*args), case)


# ------------------------------------------------------------------------------------- tokens on the experts' devices


def ragged_all_to_all(rows, out, starts, sizes, places, receives, axis):
    """`lax.ragged_all_to_all`, which XLA does not have for CPUs, by its documentation. A wrong size loses the rows."""
    me = lax.axis_index(axis)
    rows, starts, sizes, places = (lax.all_gather(a, axis) for a in (rows, starts, sizes, places))
    r = jnp.arange(out.shape[0])
    for s in range(rows.shape[0]):
        sent = (r >= places[s, me]) & (r < places[s, me] + jnp.where(sizes[s, me] == receives[s], sizes[s, me], 0))
        out = jnp.where(sent[:, None], rows[s][jnp.clip(r - places[s, me] + starts[s, me], 0, len(rows[s]) - 1)], out)
    return out


@pytest.mark.parametrize("devices,pattern", [(4, "skipped")])
def test_all_to_all_brings_every_row_to_its_experts_and_home(devices, pattern, monkeypatch):
    monkeypatch.setattr(exchange, "_ragged", ragged_all_to_all)
    case = oracle.make_case(10, **{**SIZES, "tokens": 12, "k": 3}, pattern=pattern)
    x, routing, experts = case.args()
    sharding = ExpertSharding(mesh(e=devices), expert_axis="e", token_axis="e")
    y = sharded(x, routing, sharding.shard(experts), sharding, strategy="reference", exchange="all_to_all")
    oracle.assert_close(y, case)


def test_which_way_tokens_go():
    sizes = dict(tokens=64, hidden=7168, itemsize=4, experts_per_token=8)
    assert exchange.choose(devices=64, **sizes) == "all_to_all" and exchange.choose(devices=2, **sizes) == "gather"
    assert exchange.resolve("auto", ("e",), ("e",), devices=64, **sizes) == "gather", "the CPU has no other"
    with pytest.raises(UnsupportedError, match="exchange: 'all_to_all' needs tokens and experts to share one axis"):
        exchange.resolve("all_to_all", ("e", "t"), ("e",), devices=64, **sizes)
    with pytest.raises(ArgumentError, match="exchange: got 'broadcast', expected one of"):
        exchange.resolve("broadcast", ("e",), ("e",), devices=64, **sizes)
