"""Training and sharding on real GPUs: pytest --gpu. The sharded tests want two of them.

`python -m bench.two_gpus` runs those, by their names, and writes their outcomes.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import AxisType

from jax_warp_decode import Routing, moe
from jax_warp_decode.checkpoints import load_model
from jax_warp_decode.layers.expert_params import part
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
from jax_warp_decode.partitioned import moe_partitioned
from jax_warp_decode.paths import grouped_kernels

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif("jax.device_count() < 2", reason="needs two GPUs")

# Sizes with tiles of 128 and of 64 columns; few and many rows per expert; row counts off every tile.
CASES = {"wide": dict(tokens=301, experts=8, hidden=512, intermediate=384, k=4),
         "narrow": dict(tokens=33, experts=16, hidden=256, intermediate=64, k=4),
         "one token": dict(tokens=1, experts=4, hidden=128, intermediate=128, k=2)}


@functools.cache
def gradients(name, strategy, dtype=jnp.bfloat16):
    case = oracle.make_case(1, **CASES[name], pattern="skipped", poison=False)
    x, routing, experts = case.args()
    c = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    x, experts = jax.tree.map(lambda a: a.astype(dtype), (x, experts))

    def loss(x, weights, experts):
        return jnp.sum(c * moe(x, Routing(routing.ids, weights), experts, strategy=strategy).astype(jnp.float32))

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    first, second = (jax.tree.map(np.asarray, step(x, routing.weights, experts)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)  # no sum depends on the order in which threads arrive
    return case, first


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_float32_reference(name):
    case, got = gradients(name, "expert_centric")
    _, want = gradients(name, "reference", jnp.float32)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.linalg.norm(g - w) <= 2e-2 * np.linalg.norm(w)
    idle = np.setdiff1d(np.arange(case.num_experts), case.ids)
    for d in jax.tree.leaves(got[2]):
        assert not d[idle].any()
    assert not got[0][~case.routed().any(1)].any() and not got[1][~case.routed()].any()


@pytest.mark.parametrize("sizes", [[64, 0, 1, 63, 130], [0, 0, 3], [512]])
@pytest.mark.parametrize("n,k", [(128, 384), (64, 192)])
def test_outer_products_of_groups(sizes, n, k):
    rng, sizes = np.random.default_rng(3), np.array(sizes, np.int32)
    total = sizes.sum()
    a, b = (jnp.asarray(rng.standard_normal((total + 9, width)), jnp.bfloat16).at[total:].set(jnp.nan)
            for width in (n, k))
    got = np.asarray(jax.jit(grouped_kernels.outer)(a, b, jnp.asarray(sizes)))
    a, b = (np.asarray(m, np.float64) for m in (a, b))
    groups = [slice(end - size, end) for end, size in zip(np.cumsum(sizes), sizes, strict=True)]
    want = np.stack([a[g].T @ b[g] for g in groups])
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=2**-8 * np.sqrt(max(sizes)))


@two_gpus
@pytest.mark.parametrize("layout", [dict(expert_axis="gpu"), dict(tensor_axis="gpu"), dict(token_axis="gpu"),
                                    dict(expert_axis="gpu", token_axis="gpu")])
@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_warp_decode_on_two_gpus(layout, weights):
    case = oracle.make_case(4, tokens=8, experts=8, hidden=512, intermediate=384, k=4, weights=weights,
                            pattern="skipped")
    x, routing, experts = case.args()
    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = ExpertSharding(mesh, **layout)
    layer = jax.jit(moe_sharded, static_argnames="strategy")
    y = layer(x, routing, sharding.shard(experts), sharding, strategy="warp_decode")
    oracle.assert_close(y, case, h_dtype="float32" if weights == "bf16" else "bfloat16")


@two_gpus
@pytest.mark.parametrize("strategy", ["warp_decode", "shared_decode"])
@pytest.mark.parametrize("layout", [dict(expert_axis="gpu"), dict(tensor_axis="gpu")])
def test_plain_jit_on_two_gpus(layout, strategy):
    case = oracle.make_case(5, tokens=16, experts=8, hidden=512, intermediate=384, k=4, pattern="skipped")
    x, routing, experts = case.args()
    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = ExpertSharding(mesh, **layout)
    x, routing = jax.device_put((x, routing), jax.NamedSharding(mesh, jax.P()))
    layer = jax.jit(moe_partitioned, static_argnames="strategy").lower(
        x, routing, sharding.shard(experts), strategy=strategy).compile()
    assert "all-gather" not in layer.as_text()
    oracle.assert_close(layer(x, routing, sharding.shard(experts)), case, h_dtype="bfloat16",
                        unit=oracle.TENSOR_CORE_UNIT)


@two_gpus
@pytest.mark.parametrize("pattern", ["uniform", "skipped"])
def test_all_to_all_on_two_gpus(pattern):
    case = oracle.make_case(6, tokens=16, experts=8, hidden=512, intermediate=384, k=3, pattern=pattern)
    x, routing, experts = case.args()
    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = ExpertSharding(mesh, expert_axis="gpu", token_axis="gpu")
    layer = jax.jit(moe_sharded, static_argnames=("strategy", "exchange"))
    y = layer(x, routing, sharding.shard(experts), sharding, strategy="warp_decode", exchange="all_to_all")
    oracle.assert_close(y, case)


@two_gpus
@pytest.mark.parametrize("layout", [dict(expert_axis="gpu"), dict(tensor_axis="gpu"),
                                    dict(expert_axis="gpu", token_axis="gpu")])
@pytest.mark.parametrize("strategy", ["warp_decode", "auto"])
def test_shared_experts_on_two_gpus(layout, strategy):
    # Eight routed experts, of which a token uses two, and one that all use.
    case = oracle.make_case(7, tokens=8, experts=9, hidden=512, intermediate=384, k=3, poison=False)
    case.ids[:, :2], case.ids[:, 2] = case.ids[:, :2] % 8, 8
    x, routing, experts = case.args()
    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = ExpertSharding(mesh, **layout)
    routed, shared = (part(experts, entries) for entries in (slice(8), slice(8, 9)))
    y = jax.jit(moe_sharded, static_argnames="strategy")(
        x, Routing(routing.ids[:, :2], routing.weights[:, :2]), sharding.shard(routed), sharding, strategy=strategy,
        shared=sharding.of_shared.shard(shared), shared_weight=routing.weights[:, 2:])
    oracle.assert_close(y, case, h_dtype="bfloat16", unit=oracle.TENSOR_CORE_UNIT)


@two_gpus
def test_a_decoder_on_two_gpus():
    folder = pathlib.Path(__file__).parent / "fixtures" / "mixtral_tiny"
    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tokens = np.arange(5, dtype=np.int32)[None]
    forward = jax.jit(lambda graph, state: nnx.merge(graph, state)(tokens)[0], static_argnums=0)
    want, got = (np.asarray(forward(*nnx.split(load_model(folder, sharding=sharding))), np.float64)
                 for sharding in (None, ExpertSharding(mesh, expert_axis="gpu")))
    assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want)
