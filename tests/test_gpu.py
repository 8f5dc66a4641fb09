"""The kernels and the strategies on a real GPU: pytest --gpu."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_model

from jax_warp_decode import ExpertWeights, Routing, choose, moe, moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.kernels import DownConfig, GateUpConfig
from jax_warp_decode.paths import warp_decode

pytestmark = pytest.mark.gpu

# (E, H, I, K): real sizes with few experts, sizes off every tile, and the bundled model.
SHAPES = {"qwen3-30b": (8, 2048, 768, 8), "gpt-oss": (2, 2880, 2880, 2), "gemma4": (4, 2816, 704, 4),
          "tiny-docs": (16, 256, 64, 4), "odd": (3, 96, 64, 3), "small": (3, 704, 768, 2),
          "deepseek": (2, 7168, 2048, 1)}
H_DTYPE = {"bf16": "float32", "f16": "float32", "mxfp8": "bfloat16"}  # the intermediate of warp decode


@functools.cache  # drawing the weights of a real size takes longer than running the layer
def make(shape, tokens, seed=0, **options):
    E, H, I, K = SHAPES[shape]
    return oracle.make_case(seed, tokens=tokens, experts=E, hidden=H, intermediate=I, k=K, **options)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("shape", ["qwen3-30b", "gpt-oss", "gemma4", "tiny-docs", "odd", "deepseek"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_warp_decode_matches_the_oracle(shape, tokens, weights):
    case = make(shape, tokens, seed=tokens, weights=weights, pattern="uniform" if tokens == 1 else "skipped")
    y = jax.jit(functools.partial(moe, strategy="warp_decode"))(*case.args())
    oracle.assert_close(y, case, h_dtype=H_DTYPE[weights])


@pytest.mark.parametrize("pattern", ["same", "repeated", "none"])
@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_routing_patterns(weights, pattern):
    case = make("tiny-docs", 33, weights=weights, pattern=pattern)
    oracle.assert_close(moe(*case.args(), strategy="warp_decode"), case, h_dtype=H_DTYPE[weights])


def test_float16():
    case = make("tiny-docs", 5, x_dtype="f16", weights="f16")
    oracle.assert_close(moe(*case.args(), strategy="warp_decode"), case)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("lanes", [32, 16, 8, 4])
def test_every_config_gives_the_same_layer(lanes, weights):
    case = make("small", 2, weights=weights)
    x, routing, experts = case.args()
    for rows, unroll in ((1, 1), (2, 5), (1, 4)):
        h = moe_gate_up_3d_batched(
            x, routing.ids, experts.w_gate, experts.w_up, config=GateUpConfig(lanes, rows, unroll))
        oracle.assert_hidden_close(h, case)
        y = moe_down_3d_batched(h, routing.ids, routing.weights, experts.w_down, config=DownConfig(lanes, rows, unroll))
        oracle.assert_close(y, case)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("shape,tokens", [("qwen3-30b", 1), ("qwen3-30b", 300), ("gpt-oss", 7), ("tiny-docs", 33)])
def test_expert_centric_matches_the_oracle(shape, tokens, weights):
    case = make(shape, tokens, weights=weights, pattern="skipped")
    y = jax.jit(functools.partial(moe, strategy="expert_centric"))(*case.args())
    oracle.assert_rounded_close(y, case, oracle.Rounded(products="bfloat16", rows="bfloat16"))


def test_reference_is_float32_on_the_gpu():
    case = make("tiny-docs", 9, x_dtype="f32", weights="f32", pattern="skipped")
    oracle.assert_close(moe(*case.args(), strategy="reference"), case)


def test_auto_takes_warp_decode_for_few_tokens():
    x, routing, experts = make("tiny-docs", 1).args()
    choice = choose(1, experts, experts_per_token=4, x_dtype=x.dtype)
    assert choice.strategy == "warp_decode", choice
    y = moe(x, routing, experts)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(moe(x, routing, experts, strategy="warp_decode")))


def test_transforms_give_the_same_bits():
    x, routing, experts = make("qwen3-30b", 4).args()
    layer = functools.partial(moe, strategy="warp_decode")
    want = np.asarray(layer(x, routing, experts))
    np.testing.assert_array_equal(np.asarray(jax.jit(layer)(x, routing, experts)), want)
    pairs = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (x, routing))
    mapped = jax.jit(jax.vmap(layer, in_axes=(0, 0, None)))(*pairs, experts)
    np.testing.assert_array_equal(np.asarray(mapped).reshape(want.shape), want)
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), experts)
    ys = jax.jit(lambda ws: jax.lax.scan(lambda c, w: (c, layer(x, routing, w)), 0, ws)[1])(stacked)
    np.testing.assert_array_equal(np.asarray(ys), np.stack([want, want]))


def test_replays_are_bitwise_equal_and_leave_nothing_unwritten():
    x, routing, experts = make("qwen3-30b", 8, weights="mxfp8", pattern="skipped").args()
    layer = jax.jit(functools.partial(moe, strategy="warp_decode"))
    want = np.asarray(layer(x, routing, experts))
    for _ in range(100):
        dirt = [jnp.full((64, 1024), jnp.nan) for _ in range(4)]  # freed again: what an unwritten output would hold
        del dirt
        np.testing.assert_array_equal(np.asarray(layer(x, routing, experts)), want)


def test_a_token_does_not_depend_on_its_batch():
    """Bitwise, for a fixed config. (The heuristic may sum in another order at another batch size.)"""
    x, routing, experts = make("qwen3-30b", 8, weights="bf16").args()
    gate_up, down = GateUpConfig(32, 1, 4), DownConfig(32, 2, 4)

    def layer(x, ids, weights):
        h = moe_gate_up_3d_batched(x, ids, experts.w_gate, experts.w_up, config=gate_up)
        return moe_down_3d_batched(h, ids, weights, experts.w_down, config=down)

    batch = np.asarray(layer(x, routing.ids, routing.weights))
    for t in range(8):
        alone = layer(x[t:t + 1], routing.ids[t:t + 1], routing.weights[t:t + 1])
        np.testing.assert_array_equal(np.asarray(alone)[0], batch[t])


def test_offsets_beyond_two_to_the_31_elements():
    E, H, I = 1408, 2048, 768  # 2.2e9 elements in each tensor
    key = jax.random.key(0)
    one = ExpertWeights(*(jax.random.normal(k, s, jnp.bfloat16) / 32 for k, s in zip(
        jax.random.split(key, 3), ((1, I, H), (1, I, H), (1, H, I)), strict=True)))

    @jax.jit
    def spread(w):  # the expert at both ends, NaN between them
        full = jnp.full((E, *w.shape[1:]), jnp.nan, w.dtype)
        return full.at[0].set(w[0]).at[E - 1].set(2 * w[0])

    experts = jax.tree.map(spread, one)
    x = jax.random.normal(key, (2, H), jnp.bfloat16)
    ids = jnp.array([[0], [E - 1]], jnp.int32)
    y = moe(x, Routing(ids, jnp.ones((2, 1))), experts, strategy="warp_decode")
    twice = jax.tree.map(lambda w: 2 * w, one)
    zero = Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    np.testing.assert_array_equal(np.asarray(y)[0], np.asarray(moe(x[:1], zero, one, strategy="warp_decode"))[0])
    np.testing.assert_array_equal(np.asarray(y)[1], np.asarray(moe(x[1:], zero, twice, strategy="warp_decode"))[0])


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_no_temporary_but_the_intermediate(tokens, weights):
    x, routing, experts = make("qwen3-30b", tokens, weights=weights).args()
    memory = jax.jit(functools.partial(moe, strategy="warp_decode")).lower(
        x, routing, experts).compile().memory_analysis()
    itemsize = jnp.dtype(warp_decode.intermediate_dtype(experts, tokens, 8)).itemsize
    assert memory.temp_size_in_bytes <= tokens * 8 * 768 * itemsize


@pytest.mark.parametrize("name", test_model.NAMES)
def test_the_model_matches_transformers_through_the_kernels(name):
    """Prefill and single steps of the tiny checkpoints, all experts in warp decode; bound as in test_model."""
    model, tokens, expected = test_model.load(name, strategy="warp_decode")
    bound = 2.0**-8 * ((12 * model.config.num_hidden_layers + 2) / 3) ** 0.5
    for sizes in ((13,), ()):
        logits = test_model.in_chunks(model, tokens, sizes)
        assert test_model.relative(logits, expected["float32"]) < bound


@pytest.mark.parametrize("name", test_model.NAMES)
def test_the_float32_model_matches_transformers(name):
    model, tokens, expected = test_model.load(name, dtype=jnp.float32, strategy="auto")
    logits = test_model.in_chunks(model, tokens, (8, 5))
    np.testing.assert_allclose(logits, expected["float32"], rtol=0, atol=1e-4)
