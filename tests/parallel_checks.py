"""Checks on eight virtual CPU devices; test_parallel.py runs them in a process that has those."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_warp_decode import ArgumentError, ExpertWeights, Routing, UnsupportedError, moe
from jax_warp_decode.layers import MoE
from jax_warp_decode.parallel import ExpertSharding, moe_local, moe_sharded


def mesh(axis_type=AxisType.Auto, **sizes):
    devices = jax.devices()[:int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes), devices=devices)


GRID = functools.partial(mesh, a=4, b=2)
LAYOUTS = {
    "EP8": lambda: ExpertSharding(mesh(e=8), expert_axis="e"),  # one expert a device, fewer than slots
    "EP8 tokens too": lambda: ExpertSharding(mesh(e=8), expert_axis="e", token_axis="e"),
    "TP4": lambda: ExpertSharding(mesh(t=4), tensor_axis="t"),
    "DP8": lambda: ExpertSharding(mesh(d=8), token_axis="d"),
    "EP4 x TP2": lambda: ExpertSharding(GRID(), expert_axis="a", tensor_axis="b"),
    "DP2 x EP4": lambda: ExpertSharding(GRID(), expert_axis="a", token_axis="b"),
    "EP4 x TP2, tokens everywhere": lambda: ExpertSharding(
        GRID(), expert_axis="a", tensor_axis="b", token_axis=("a", "b")),
    "EP8 over two axes": lambda: ExpertSharding(GRID(), expert_axis=("a", "b")),
    "explicit DP2 x EP4": lambda: ExpertSharding(GRID(AxisType.Explicit), expert_axis="a", token_axis="b"),
}
SIZES = dict(tokens=8, experts=8, hidden=64, intermediate=128, k=2)
sharded = jax.jit(moe_sharded, static_argnames=("strategy", "interpret", "reduce_dtype", "exchange"))


def run(case, sharding, **options):
    x, routing, experts = case.args()
    return sharded(x, routing, sharding.shard(experts), sharding, **options)


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_as_exact_as_one_device(layout):
    # Rows, experts and routing weights that nothing refers to hold NaN. One rounding, as on one device.
    case = oracle.make_case(1, **SIZES, pattern="skipped")
    sharding = LAYOUTS[layout]()
    y = run(case, sharding, strategy="reference")
    oracle.assert_close(y, case)
    spec = NamedSharding(sharding.mesh, P(sharding.token_axis))
    assert y.sharding.is_equivalent_to(spec, 2)
    if sharding.token_axis is None:
        first, *others = (np.asarray(shard.data) for shard in y.addressable_shards)
        assert all((first == other).all() for other in others)  # every device has the same bits


@pytest.mark.parametrize("layout", ["EP4 x TP2", "DP2 x EP4"])
def test_expert_centric_on_a_mesh(layout):
    case = oracle.make_case(2, **SIZES, pattern="skipped")
    oracle.assert_close(run(case, LAYOUTS[layout](), strategy="expert_centric"), case, h_dtype="bfloat16")


@pytest.mark.parametrize("layout", [dict(expert_axis="e"), dict(tensor_axis="e")])
def test_warp_decode_kernels_on_a_mesh(layout):
    case = oracle.make_case(3, tokens=2, experts=2, hidden=64, intermediate=128, k=2, pattern="skipped")
    y = run(case, ExpertSharding(mesh(e=2), **layout), strategy="warp_decode", interpret=True)
    oracle.assert_close(y, case)


def test_quantised_weights_on_a_mesh():
    # One scale a row. mxfp8: with the collectives, below; packed values and two kinds of scales: with stacked layers.
    case = oracle.make_case(4, **SIZES, weights="fp8_channel", pattern="skipped")
    oracle.assert_close(run(case, LAYOUTS["EP4 x TP2"](), strategy="reference"), case)


def test_bfloat16_sums_are_an_option_with_its_rounding():
    case = oracle.make_case(5, **SIZES, poison=False)
    exact, halved = (np.asarray(run(case, LAYOUTS["TP4"](), strategy="reference", reduce_dtype=dtype), np.float64)
                     for dtype in (jnp.float32, jnp.bfloat16))
    error = np.linalg.norm(exact - case.exact), np.linalg.norm(halved - case.exact)
    assert error[0] < error[1] < 4 * 2**-8 * np.linalg.norm(case.exact)


def test_d03_ids_of_other_devices_add_nothing():
    case = oracle.make_case(6, **{**SIZES, "tokens": 4}, poison=False)
    x, _, experts = case.args()
    sharding = ExpertSharding(mesh(e=4), expert_axis="e")
    placed = sharding.shard(experts)
    for nowhere in (-1, 8, 2**31 - 1, -2**31):
        ids = np.array([[0, 5], [7, nowhere], [nowhere, nowhere], [3, 2]], np.int32)
        weights = np.array([[0.6, 0.4], [0.7, np.nan], [np.nan, np.nan], [0.9, 0.1]], np.float32)
        this = dataclasses.replace(case, ids=ids, weights=weights)
        routing = Routing(jnp.asarray(ids), jnp.asarray(weights))
        sharded(jnp.full_like(x, 1e4), routing, placed, sharding, strategy="expert_centric")  # dirties the buffers
        y = np.asarray(sharded(x, routing, placed, sharding, strategy="expert_centric"))
        oracle.assert_close(y, this, h_dtype="bfloat16")
        assert not y[2].any() and y[1].any()


def constant_experts():
    """Case D07: expert e returns e + 1 in every element for x[0] = 1, exactly."""
    w_gate, w_up, w_down = np.zeros((4, 32, 32)), np.zeros((4, 32, 32)), np.zeros((4, 32, 32))
    w_gate[:, 0, 0], w_up[:, 0, 0] = 64, 2.0**-6
    w_down[:, :, 0] = np.arange(1, 5)[:, None]
    experts = ExpertWeights(*(jnp.asarray(w, jnp.bfloat16) for w in (w_gate, w_up, w_down)))
    ids = jnp.array([[0, 1], [1, 2], [2, 3], [3, 0]])
    return jnp.zeros((4, 32), jnp.bfloat16).at[:, 0].set(1), Routing(ids, jnp.full((4, 2), 0.5)), experts


D07 = {
    "i": lambda: ExpertSharding(mesh(e=4), expert_axis="e"),
    "ii": lambda: ExpertSharding(mesh(e=2), expert_axis="e", token_axis="e"),
    "iii": lambda: ExpertSharding(mesh(t=2), tensor_axis="t"),
    "iv": lambda: ExpertSharding(mesh(d=4), token_axis="d"),
    "v": lambda: ExpertSharding(mesh(d=2, e=2), expert_axis="e", token_axis="d"),
}


@pytest.mark.parametrize("layout", D07)
def test_d07_every_term_is_summed_once(layout):
    x, routing, experts = constant_experts()
    sharding = D07[layout]()
    experts = sharding.shard(experts)

    def loss(weights):  # a shared expert that returns 10, outside
        y = moe_sharded(x, Routing(routing.ids, weights), experts, sharding, strategy="expert_centric")
        y = y + jnp.bfloat16(10)
        return jnp.sum(y.astype(jnp.float32)), y

    d_weights, y = jax.jit(jax.grad(loss, has_aux=True))(routing.weights)
    want = np.float32([11.5, 12.5, 13.5, 12.5])
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.repeat(want[:, None], 32, 1))
    np.testing.assert_array_equal(np.asarray(d_weights), 32 * (np.asarray(routing.ids) + 1))


@pytest.mark.parametrize("layout,check_vma", [("ii", True), ("iii", False), ("v", False)])
def test_d07_inside_a_shard_map_of_the_user(layout, check_vma):
    x, routing, experts = constant_experts()
    sharding, tokens = D07[layout](), P(D07[layout]().token_axis)
    axes = {name: getattr(sharding, name) for name in ("expert_axis", "tensor_axis", "token_axis")}

    @functools.partial(jax.shard_map, mesh=sharding.mesh, in_specs=(tokens, tokens, sharding.specs(experts)),
                       out_specs=tokens, check_vma=check_vma)
    def block(x, routing, experts):
        return moe_local(x, routing, experts, **axes, strategy="expert_centric") + x  # x[0] = 1: the residual

    def loss(x, weights, experts):
        y = block(x, Routing(routing.ids, weights), experts)
        return jnp.sum(y.astype(jnp.float32)[:, 1:]), y

    grads, y = jax.jit(jax.grad(loss, (1, 2), has_aux=True))(x, routing.weights, experts)
    np.testing.assert_array_equal(np.asarray(y, np.float32)[:, 1:], np.repeat([[1.5], [2.5], [3.5], [2.5]], 31, 1))
    np.testing.assert_array_equal(np.asarray(grads[0]), 31 * (np.asarray(routing.ids) + 1))
    want = np.zeros((4, 32, 32), np.float32)  # every expert meets two tokens with weight 1/2, and its h[0] is 1
    want[:, 1:, 0] = 1
    np.testing.assert_array_equal(np.asarray(grads[1].w_down, np.float32), want)


def test_gradients_do_not_depend_on_the_mesh():
    case = oracle.make_case(7, **SIZES, x_dtype="f32", weights="f32", poison=False)
    x, routing, experts = case.args()
    c = jax.random.normal(jax.random.key(0), x.shape)

    def loss(x, weights, experts, layer):
        return jnp.sum(c * layer(x, Routing(routing.ids, weights), experts, strategy="expert_centric"))

    grad = lambda layer: jax.jit(jax.grad(functools.partial(loss, layer=layer), (0, 1, 2)))
    want = grad(moe)(x, routing.weights, experts)
    sharding = LAYOUTS["EP4 x TP2, tokens everywhere"]()
    got = grad(functools.partial(moe_sharded, sharding=sharding))(x, routing.weights, sharding.shard(experts))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(g) - np.asarray(w)) < 1e-5 * np.linalg.norm(np.asarray(w))


@pytest.mark.parametrize("layout", ["EP8", "EP8 tokens too", "TP4", "DP8", "DP2 x EP4"])
def test_no_tokens_on_a_mesh(layout):
    case = oracle.make_case(8, **{**SIZES, "tokens": 0})
    assert run(case, LAYOUTS[layout](), strategy="expert_centric").shape == (0, 64)


def test_leading_axes_are_split_along_the_first():
    case = oracle.make_case(9, **SIZES, pattern="skipped")
    x, routing, experts = case.args()
    sharding = LAYOUTS["DP2 x EP4"]()
    x3, routing3 = jax.tree.map(lambda a: a.reshape(2, 4, -1), (x, routing))
    y = sharded(x3, routing3, sharding.shard(experts), sharding, strategy="reference")
    oracle.assert_close(y.reshape(x.shape), case)


def test_stacked_layers_by_a_traced_index():
    cases = [oracle.make_case(seed, **SIZES, x_dtype="f32", weights="nvfp4", poison=False) for seed in (12, 13)]
    x, routing, _ = cases[1].args()
    sharding = LAYOUTS["EP4 x TP2"]()
    stack = sharding.shard(jax.tree.map(lambda *w: jnp.stack(w), *(case.args()[2] for case in cases)))
    oracle.assert_close(sharded(x, routing, stack, sharding, strategy="reference", layer=jnp.int32(1)), cases[1])


# ------------------------------------------------------------------------------------------------ what XLA makes of it


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.mark.parametrize("layout,expected", [
    ("EP4 x TP2", {"all-reduce": 1}),
    ("DP2 x EP4", {"all-reduce": 1}),
    ("EP8 tokens too", {"all-gather": 3, "reduce-scatter": 1}),  # x, ids and weights; never the experts
])
def test_weights_stay_where_they_are_under_plain_jit(layout, expected):
    case = oracle.make_case(10, **SIZES, weights="mxfp8", pattern="skipped")
    x, routing, experts = case.args()
    sharding = LAYOUTS[layout]()
    placed = sharding.shard(experts)
    compiled = sharded.lower(x, routing, placed, sharding, strategy="reference").compile()
    oracle.assert_close(compiled(x, routing, placed, sharding), case)
    text = compiled.as_text()
    lines = [line for line in text.splitlines() if any(f" {name}(" in line for name in COLLECTIVES)]
    assert {name: sum(f" {name}(" in line for line in lines) for name in COLLECTIVES} == dict.fromkeys(
        COLLECTIVES, 0) | expected, lines
    assert not any("f8e4m3" in line or "u8[" in line for line in lines)


# -------------------------------------------------------------------------------------------------------- bad input


def small():
    return oracle.make_case(11, **SIZES, poison=False).args()


def test_axes_that_do_not_exist_or_collide():
    for axes in (dict(expert_axis="model"), dict(tensor_axis=("a", "a")), dict(token_axis="x")):
        with pytest.raises(ArgumentError, match=rf"{next(iter(axes))}: got .*expected different axes.*'a', 'b'"):
            ExpertSharding(GRID(), **axes)
    with pytest.raises(ArgumentError, match="tensor_axis.*splits E or I"):
        ExpertSharding(GRID(), expert_axis=("a", "b"), tensor_axis="b")
    x, routing, experts = small()
    with pytest.raises(ArgumentError, match="expert_axis: got 'e'.*moe_sharded"):
        moe_local(x, routing, experts, expert_axis="e")


def test_sizes_that_do_not_divide():
    x, routing, experts = small()
    six = jax.tree.map(lambda w: w[:6], experts)
    with pytest.raises(ArgumentError, match=r"w_gate: got E = 6, expected a multiple of 4"):
        ExpertSharding(GRID(), expert_axis="a").specs(six)
    with pytest.raises(ArgumentError, match=r"w_gate: got I = 128, expected a multiple of 3"):
        ExpertSharding(mesh(t=3), tensor_axis="t").specs(experts)
    sharding = LAYOUTS["DP8"]()
    with pytest.raises(ArgumentError, match=r"x: got shape .* of 8.*token_axis = 'd'; .* leave token_axis out"):
        moe_sharded(x[:4], Routing(routing.ids[:4], routing.weights[:4]), sharding.shard(experts), sharding)


def test_messages_are_about_the_whole_and_not_about_a_device():
    x, routing, experts = small()
    sharding = LAYOUTS["DP8"]()
    placed, (T, K), E = sharding.shard(experts), routing.ids.shape, experts.num_experts
    wide = jax.tree.map(lambda a: jnp.resize(a, (T, E + 1)), routing)
    with pytest.raises(ArgumentError, match=rf"routing.ids: got K = {E + 1} slots per token, expected at most E = {E}"):
        moe_sharded(x, wide, placed, sharding)
    with pytest.raises(ArgumentError, match=rf"routing.ids: got shape \({T - 1}, {K}\), expected \({T}, K\)"):
        moe_sharded(x, jax.tree.map(lambda a: a[1:], routing), placed, sharding)
    for bad in (x[:, 1:], x.astype(jnp.int32), None):
        with pytest.raises(ArgumentError, match=r"^x: got (shape \(\d+, 63\)|int32\[|NoneType)"):
            moe_sharded(bad, routing, placed, sharding)
    for call in (lambda: moe_sharded(x, (1, 2), placed, sharding), lambda: moe_local(x, (1, 2), experts)):
        with pytest.raises(ArgumentError, match="^routing: got tuple, expected Routing"):
            call()
    with pytest.raises(ArgumentError, match="^experts: got NoneType, expected ExpertWeights"):
        sharding.shard(None)


@pytest.mark.parametrize("format,parts", [("mxfp8", 8), ("fp8_block128", 2)])
def test_blocks_that_tensor_parallel_would_cut(format, parts):
    experts = small()[2].quantize(format)
    with pytest.raises(ArgumentError, match=r"got I = 128 in blocks of (32|128) .*cut a block"):
        ExpertSharding(mesh(t=parts), tensor_axis="t").specs(experts)


def test_weights_in_the_wrong_place_are_not_moved_in_secret():
    x, routing, experts = small()
    sharding = LAYOUTS["EP4 x TP2"]()
    other = ExpertSharding(mesh(e=2), expert_axis="e").shard(experts)
    for wrong in (experts, other):
        with pytest.raises(ArgumentError, match=r"experts\.w_gate: got .*expected .*ExpertSharding.shard"):
            moe_sharded(x, routing, wrong, sharding)
    mixed = dataclasses.replace(sharding.shard(experts), w_down=other.w_down)
    with pytest.raises(ArgumentError, match=r"experts\.w_down: got .*'e': 2.*expected .*'a': 4"):
        moe_sharded(x, routing, mixed, sharding)


def test_meshes_that_order_their_devices_otherwise():
    x, routing, experts = small()
    sharding = ExpertSharding(mesh(e=4), expert_axis="e")
    turned = ExpertSharding(jax.sharding.Mesh(np.array(jax.devices()[3::-1]), ("e",)), expert_axis="e")
    message = r"got an array on a mesh of devices \[3, 2, 1, 0\], expected the order \[0, 1, 2, 3\].*make one mesh"
    with pytest.raises(ArgumentError, match=rf"experts\.w_gate: {message}"):
        moe_sharded(x, routing, turned.shard(experts), sharding)
    with pytest.raises(ArgumentError, match=rf"x: {message}"):
        moe_sharded(jax.device_put(x, NamedSharding(turned.mesh, P())), routing, sharding.shard(experts), sharding)


def test_wrong_places_that_types_show_under_jit():
    x, routing, experts = small()
    explicit = ExpertSharding(mesh(AxisType.Explicit, e=8), expert_axis="e")
    elsewhere = jax.device_put(experts, NamedSharding(explicit.mesh, P()))
    with pytest.raises(ArgumentError, match=r"experts\.w_gate: got an array split as .*expected P\('e', None, None\)"):
        sharded(x, routing, elsewhere, explicit, strategy="reference")
    other = LAYOUTS["EP4 x TP2"]().shard(experts)
    for sharding in (explicit, ExpertSharding(mesh(e=8), expert_axis="e")):
        with pytest.raises(ArgumentError, match=r"w_gate: got an array on the mesh .*expected one on .*'e': 8"):
            sharded(x, routing, other, sharding, strategy="reference")


@pytest.mark.parametrize("strategy", ["auto", "expert_centric", "reference"])
def test_the_plain_op_on_explicit_axes(strategy):
    """What `jax.make_mesh` gives unless told otherwise: whole arrays run, split ones are refused with the way out."""
    x, routing, experts = small()
    explicit = mesh(AxisType.Explicit, e=8)
    run = jax.jit(functools.partial(moe, strategy=strategy))
    whole = jax.device_put((x, routing, experts), NamedSharding(explicit, P()))
    want = run(x, routing, experts)
    np.testing.assert_array_equal(run(*whole), want)
    rows = jax.device_put((x, routing), NamedSharding(explicit, P("e")))
    if strategy == "reference":
        np.testing.assert_array_equal(run(*rows, whole[2]), want)
    else:
        with pytest.raises(ArgumentError, match=r"^x: got a split P\('e', None\) .*call moe_sharded"):
            run(*rows, whole[2])
        with pytest.raises(ArgumentError, match=r"^routing\.ids: got a split .*call moe_sharded"):
            run(whole[0], rows[1], whole[2])
    with pytest.raises(ArgumentError, match=r"^experts\.w_gate: got a split .*call moe_sharded"):
        run(*whole[:2], ExpertSharding(explicit, expert_axis="e").shard(experts))


def test_a_mesh_around_the_call():
    x, routing, experts = small()
    sharding = ExpertSharding(mesh(e=4), expert_axis="e")
    placed = sharding.shard(experts)
    inside = jax.shard_map(lambda *args: moe_sharded(*args, sharding, strategy="reference"), mesh=sharding.mesh,
                           in_specs=(P(), P(), P("e")), out_specs=P())
    with pytest.raises(ArgumentError, match=r"^sharding: got a mesh whose axes \['e'\] .*call moe_local"):
        jax.jit(inside)(x, routing, placed)
    two = ExpertSharding(GRID(), expert_axis="a")
    part = jax.shard_map(lambda *args: moe_sharded(*args, two), mesh=two.mesh, in_specs=(P(), P(), P()),
                         out_specs=P(), axis_names={"b"})
    with pytest.raises(ArgumentError, match=r"a mesh whose axes \['b'\] .*make it of jax.sharding.get_abstract_mesh"):
        jax.jit(part)(x, routing, two.shard(experts))

    def there(*args):
        inner = ExpertSharding(jax.sharding.get_abstract_mesh(), expert_axis="a")
        return moe_sharded(*args, inner, strategy="reference")

    part = jax.shard_map(there, mesh=two.mesh, in_specs=(P(), P(), P()), out_specs=P(), axis_names={"b"},
                         check_vma=False)
    y = jax.jit(part)(x, routing, two.shard(experts))
    np.testing.assert_allclose(y, moe(x, routing, experts, strategy="reference"), rtol=0.02, atol=1e-2)
    with jax.set_mesh(mesh(e=8)), pytest.raises(ArgumentError, match=r"^sharding: got the mesh .*'e': 4.*'e': 8"):
        moe_sharded(x, routing, placed, sharding)
    with jax.set_mesh(sharding.mesh):
        moe_sharded(x, routing, placed, sharding, strategy="reference")


def test_tokens_that_differ_where_shares_are_summed():
    x, routing, experts = small()
    sharding = ExpertSharding(mesh(e=8), expert_axis="e")

    def run(token_axis):
        call = functools.partial(moe_local, expert_axis="e", token_axis=token_axis, strategy="reference")
        specs = P("e"), P("e"), P("e")
        return jax.jit(jax.shard_map(call, mesh=sharding.mesh, in_specs=specs, out_specs=P("e")))(
            x, routing, sharding.shard(experts))

    with pytest.raises(ArgumentError, match=r"^x: got one that varies over \['e'\].*add token_axis='e'"):
        run(None)
    np.testing.assert_allclose(run("e"), moe(x, routing, experts, strategy="reference"), rtol=0.02, atol=1e-2)


def test_symbolic_sizes_on_a_mesh():
    x, routing, experts = small()
    sharding = ExpertSharding(mesh(e=8), expert_axis="e")
    (tokens,) = jax.export.symbolic_shape("tokens")
    rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype), (x, routing))
    with pytest.raises(UnsupportedError, match=r"^x: got the symbolic shape .*export once for"):
        jax.export.export(sharded)(*rows, sharding.shard(experts), sharding)


def test_in_shardings_refuse_what_auto_axes_do_not_show():
    # Documented in `moe_sharded`: JAX's own error.
    x, routing, experts = small()
    sharding = ExpertSharding(mesh(e=8), expert_axis="e")
    layer = jax.jit(lambda *args: moe_sharded(*args, sharding), in_shardings=(None, None, sharding.shardings(experts)))
    with pytest.raises(ValueError, match="does not match the sharding on the respective arg"):
        layer(x, routing, jax.device_put(experts, NamedSharding(sharding.mesh, P())))


@pytest.mark.parametrize("dtype", [jnp.int32, "float13"])
def test_a_sum_in_no_dtype_for_it(dtype):
    x, routing, experts = small()
    sharding = ExpertSharding(mesh(e=4), expert_axis="e")
    with pytest.raises(ArgumentError, match=r"^reduce_dtype: got (int32|float13), expected bfloat16, float16, float32"):
        sharded(x, routing, sharding.shard(experts), sharding, reduce_dtype=dtype)


def test_tokens_on_other_devices_and_things_that_are_no_mesh():
    x, routing, experts = small()
    sharding = ExpertSharding(mesh(e=4), expert_axis="e")
    placed = sharding.shard(experts)
    elsewhere = jax.device_put((x, routing), jax.devices()[5])
    with pytest.raises(ArgumentError, match=r"x: got an array put on 1 devices.*the 4 devices of the mesh"):
        moe_sharded(elsewhere[0], routing, placed, sharding)
    with pytest.raises(ArgumentError, match=r"routing\.ids: got an array put on 1 devices"):
        moe_sharded(x, elsewhere[1], placed, sharding)
    with pytest.raises(ArgumentError, match="mesh: got int, expected a jax.sharding.Mesh"):
        ExpertSharding(8)
    with pytest.raises(ArgumentError, match="mesh: got an AbstractMesh, which has no devices"):
        dataclasses.replace(sharding, mesh=sharding.mesh.abstract_mesh).shard(experts)
    with pytest.raises(ArgumentError, match="sharding: got Mesh, expected ExpertSharding"):
        MoE(64, 128, 8, 2, sharding=sharding.mesh, rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError, match="'all_to_all' needs tokens and experts to share one axis alone"):
        moe_sharded(x, routing, placed, sharding, exchange="all_to_all")
    with pytest.raises(ArgumentError, match="exchange: got 'alltoall', expected one of"):
        moe_sharded(x, routing, placed, sharding, exchange="alltoall")
    with pytest.raises(ArgumentError, match="sharding: got Mesh, expected ExpertSharding"):
        moe_sharded(x, routing, placed, mesh(e=4))
    with pytest.raises(ArgumentError, match="routing: got tuple, expected Routing"):
        moe_sharded(x, (routing.ids, routing.weights), placed, sharding)
