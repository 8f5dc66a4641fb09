"""Checks on eight virtual CPU devices, continued: plain jit, biases, shared experts, modules, whole decoders.

test_parallel.py runs them.
"""

import dataclasses
import functools
import pathlib
import re

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

from jax_warp_decode import ArgumentError, ExpertWeights, Routing, UnsupportedError, exchange, moe
from jax_warp_decode.checkpoints import load_model, reader
from jax_warp_decode.experts import MATRICES
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.layers import MoE
from jax_warp_decode.layers.expert_params import part
from jax_warp_decode.module_sharding import module_specs, shard_module
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
from jax_warp_decode.partitioned import moe_partitioned

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
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
    mixed = ExpertWeights(experts.w_gate, args[2].w_up, args[2].w_down)
    struct = FORMATS["mxfp8"].structs  # zeros will do
    blocks = jax.device_put(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), ExpertWeights(
        *(struct(w.shape) for w in (experts.w_gate, experts.w_up, experts.w_down)))), NamedSharding(
            mesh(t=8), P(None, "t")))
    for bad, message in ((wrong, r"experts\.w_down: got P\(None, 'a'.*expected P\('a', None, 'b'\).*ExpertSharding"),
                         (blocks, r"experts\.w_down: got I = 128 in blocks of 32 .*would cut a block.*4 blocks"),
                         (mixed, r"experts\.w_gate: got .*expected all weights on one mesh.*ExpertSharding.shard")):
        with pytest.raises(ArgumentError, match=message):
            moe_partitioned(x, routing, bad, strategy="reference")
        if bad is mixed:
            continue  # under jit, XLA lets the one on no mesh follow the others
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            plain(x, routing, bad, strategy="reference")
        (line,) = [line for line in str(caught.value).splitlines() if line.startswith("ArgumentError: ")]
        assert re.search(message, line)
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


# ---------------------------------------------------------------------------------------------------- shared experts


def with_two_shared(seed, weights="bf16", tokens=8):
    """A case of ten experts, of which all tokens use the last two, with one weight; and what `moe_sharded` takes."""
    case = oracle.make_case(seed, **{**SIZES, "experts": 10, "k": 4, "tokens": tokens}, weights=weights, biases="f32",
                            poison=False)
    ids = np.concatenate([case.ids[:, :2] % 8, np.broadcast_to(np.int32([8, 9]), (tokens, 2))], axis=1)
    ids[0, 0] = -1
    ids[1, 1] = 8  # no routed expert, so it does not count a shared one again
    routing_weights = np.concatenate([case.weights[:, :2], np.repeat(case.weights[:, 2:3], 2, axis=1)], axis=1)
    x, routing, experts = dataclasses.replace(case, ids=ids, weights=routing_weights).args()
    ids = np.where(np.arange(4) < 2, np.where(ids == 8, -1, ids), ids)
    case = dataclasses.replace(case, ids=ids, weights=routing_weights)
    routed, shared = (part(experts, entries) for entries in (slice(8), slice(8, 10)))
    return case, x, Routing(routing.ids[:, :2], routing.weights[:, :2]), routed, shared, routing.weights[:, 2:3]


@pytest.mark.parametrize("layout,weights", [
    ("EP4 x TP2, tokens everywhere", "bf16"), ("DP2 x EP4", "mxfp8"), ("explicit DP2 x EP4", "bf16")])
def test_shared_experts_are_added_once(layout, weights):
    case, x, routing, routed, shared, gate = with_two_shared(20, weights)
    sharding = LAYOUTS[layout]()
    routed, shared = sharding.shard(routed), sharding.of_shared.shard(shared)
    y = sharded(x, routing, routed, sharding, strategy="reference", shared=shared, shared_weight=gate)
    oracle.assert_close(y, case)
    assert y.sharding.is_equivalent_to(NamedSharding(sharding.mesh, P(sharding.token_axis)), 2)


def test_shared_experts_that_do_not_fit():
    _, x, routing, routed, shared, gate = with_two_shared(21)
    sharding = LAYOUTS["EP4 x TP2"]()
    routed, placed = sharding.shard(routed), sharding.of_shared.shard(shared)
    with pytest.raises(ArgumentError, match=r"shared\.w_gate: got .*expected .*ExpertSharding.shard"):
        moe_sharded(x, routing, routed, sharding, shared=shared)
    with pytest.raises(ArgumentError, match=r"shared_weight: got .*\(8, 2\), expected floats \(8, 1\)"):
        moe_sharded(x, routing, routed, sharding, shared=placed, shared_weight=jnp.ones((8, 2)))
    with pytest.raises(ArgumentError, match="shared_weight: got an array without shared experts"):
        moe_sharded(x, routing, routed, sharding, shared_weight=gate)
    with pytest.raises(ArgumentError, match="shared_weight: got an array with weight_on='input'"):
        moe_sharded(x, routing, routed, sharding, shared=placed, shared_weight=gate, weight_on="input")
    with pytest.raises(ArgumentError, match="shared: got tuple, expected ExpertWeights"):
        moe_sharded(x, routing, routed, sharding, shared=(shared,))


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


def cheap_init(key, shape, dtype):
    """Another matrix for another key, without random bits to compile."""
    bits = (jax.random.key_data(key)[-1] >> 8).astype(dtype) * dtype(2.0**-24)
    return (jnp.sin(bits * 9 + jnp.arange(np.prod(shape))) / 4).astype(dtype).reshape(shape)


def make_layer(sharding=None):
    return MoE(64, 128, num_experts=8, num_experts_per_token=2, num_shared_experts=1, shared_gate=True,
               kernel_init=cheap_init, strategy="reference", sharding=sharding, rngs=nnx.Rngs(0))


def test_a_module_on_a_mesh():
    # 8 + 1 experts, which no mesh divides: where E is split, the shared one has parameters of its own.
    layer = jax.jit(make_layer)()
    x = jax.random.normal(jax.random.key(1), (4, 64))
    want = np.asarray(jax.jit(lambda layer, x: layer(x))(layer, x))
    sharding = LAYOUTS["EP4 x TP2"]()
    before = jax.tree.map(np.asarray, layer.experts)
    shard_module(layer, sharding)
    specs = module_specs(layer, sharding)
    assert specs["w_down"].get_value() == P("a", None, "b") and specs["router"].get_value() == P()
    assert specs["shared"]["w_down"].get_value() == P(None, None, "b")
    step = jax.jit(lambda layer, x: layer(x)).lower(layer, x).compile()
    found, lines = collectives(step)
    assert found == {"all-reduce": 1}, lines
    np.testing.assert_allclose(np.asarray(step(layer, x)), want, rtol=0, atol=1e-5 * np.abs(want).max())

    made = jax.jit(lambda: make_layer(sharding))()  # in place, from the same random numbers
    values = lambda layer: jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    jax.tree.map(np.testing.assert_array_equal, values(made), values(layer))
    assert made.shared.w_up.get_value().sharding.shard_shape((1, 128, 64)) == (1, 64, 64)
    made.set_sharding(None)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, made.experts), before)
    three = ExpertSharding(mesh(e=3), expert_axis="e")
    with pytest.raises(ArgumentError, match="experts.w_gate: got E = 8, expected a multiple of 3"):
        shard_module(made, three)
    assert made.shared is None and made.sharding is None, "as it was"
    with pytest.raises(ArgumentError, match="module: got Linear, expected a module with experts"):
        shard_module(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), sharding)


def test_experts_of_a_layer_whose_shared_ones_stand_apart():
    layer = nnx.eval_shape(lambda: make_layer(LAYOUTS["EP4 x TP2"]()))
    number = lambda *shape: np.broadcast_to(np.arange(9, dtype=np.float32)[(...,) + (None,) * len(shape)], (9, *shape))
    joined = ExpertWeights(number(128, 64), number(128, 64), number(64, 128))
    layer.set_experts(joined)  # as `append_shared` makes them
    first = lambda experts: [np.asarray(a).reshape(len(a), -1)[:, 0].tolist() for a in (
        experts.w_up, experts.w_down)]
    assert first(layer.experts) == [list(range(8))] * 2 and first(layer.shared_experts) == [[8]] * 2
    assert layer.shared_experts.w_up.sharding.spec == P(None, "b", None)
    routed, shared = (part(joined, entries).map(lambda w: w.astype(jnp.bfloat16), *MATRICES) for entries in (
        slice(8), slice(8, 9)))
    layer.set_experts(routed)
    assert layer.experts.format == "bf16" and layer.shared_experts.format == "f32"
    layer.set_experts(routed, shared)
    assert layer.shared_experts.format == "bf16"
    with pytest.raises(ArgumentError, match=r"shared\.w_gate: got shape \(8, 128, 64\), expected \(1, 128, 64\)"):
        layer.set_experts(routed, routed)
    with pytest.raises(ArgumentError, match="shared: got ExpertWeights, expected None"):
        nnx.eval_shape(make_layer).set_experts(joined, shared)


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
    monkeypatch.setattr(exchange, "has_ragged", lambda: True)
    case = oracle.make_case(10, **{**SIZES, "tokens": 12, "k": 3}, pattern=pattern)
    x, routing, experts = case.args()
    sharding = ExpertSharding(mesh(e=devices), expert_axis="e", token_axis="e")
    y = sharded(x, routing, sharding.shard(experts), sharding, strategy="reference", exchange="all_to_all")
    oracle.assert_close(y, case)


def test_rows_that_travel_have_their_shared_term_at_home(monkeypatch):
    monkeypatch.setattr(exchange, "_ragged", ragged_all_to_all)
    monkeypatch.setattr(exchange, "has_ragged", lambda: True)
    case, x, routing, routed, shared, gate = with_two_shared(22)
    sharding = ExpertSharding(GRID(), expert_axis="a", token_axis="a", tensor_axis="b")
    y = sharded(x, routing, sharding.shard(routed), sharding, strategy="reference", exchange="all_to_all",
                shared=sharding.of_shared.shard(shared), shared_weight=gate)
    oracle.assert_close(y, case)


def test_which_way_tokens_go():
    sizes = dict(tokens=64, hidden=7168, itemsize=4, experts_per_token=8)
    assert exchange.choose(devices=64, **sizes) == "all_to_all" and exchange.choose(devices=2, **sizes) == "gather"
    assert exchange.resolve("auto", ("e",), ("e",), devices=64, **sizes) == "gather", "the CPU has no other"
    with pytest.raises(UnsupportedError, match="exchange: 'all_to_all' needs tokens and experts to share one axis"):
        exchange.resolve("all_to_all", ("e", "t"), ("e",), devices=64, **sizes)
    with pytest.raises(UnsupportedError, match="^exchange: 'all_to_all' needs GPUs, .*backend 'cpu'; use 'gather'"):
        exchange.resolve("all_to_all", ("e",), ("e",), devices=64, **sizes)
    with pytest.raises(ArgumentError, match="exchange: got 'broadcast', expected one of"):
        exchange.resolve("broadcast", ("e",), ("e",), devices=64, **sizes)


# ------------------------------------------------------------------------------------------------------ whole decoders


@pytest.mark.parametrize("name,axes", [
    ("qwen3_moe_tiny", dict(expert_axis="a", tensor_axis="b")), ("mixtral_tiny", dict(tensor_axis=("a", "b"))),
    ("gpt_oss_mxfp4_tiny", dict(expert_axis=("a", "b")))])
def test_a_decoder_straight_onto_four_devices(name, axes, monkeypatch):
    folder = FIXTURES / name
    sharding = ExpertSharding(mesh(a=2, b=2), **axes)
    tokens = np.arange(5, dtype=np.int32)[None]
    forward = jax.jit(lambda graph, state: nnx.merge(graph, state)(tokens)[0], static_argnums=0)
    want = np.asarray(forward(*nnx.split(load_model(folder, strategy="reference"))))
    model = load_model(folder, strategy="reference", sharding=sharding)
    for layer in model.layers:
        w, whole = layer.moe.experts.w_up, layer.moe.router.get_value()
        assert all(a.sharding.is_equivalent_to(place, a.ndim) for a, place in zip(
            jax.tree.leaves(w), jax.tree.leaves(sharding.shardings(layer.moe.experts).w_up), strict=True))
        assert whole.sharding.is_fully_replicated and len(whole.sharding.device_set) == 4
    got = np.asarray(forward(*nnx.split(model)))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())  # bf16 rounds after the sum

    if name == "gpt_oss_mxfp4_tiny":  # I = 96 is three blocks
        monkeypatch.setattr(reader.StoredTensor, "read_into", lambda *_: pytest.fail("read before it was refused"))
        with pytest.raises(ArgumentError, match="got I = 96 in blocks of 32 .*would cut a block"):
            load_model(folder, sharding=dataclasses.replace(sharding, expert_axis=None, tensor_axis="a"))
        with pytest.raises(ArgumentError, match="sharding: got Mesh, expected ExpertSharding"):
            load_model(folder, sharding=sharding.mesh)
