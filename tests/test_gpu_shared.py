"""shared_decode on a real Hopper GPU: pytest --gpu."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_shared

from jax_warp_decode.activations import get_activation
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.kernels.shared_down import moe_down_shared
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
from jax_warp_decode.paths import shared_decode
from jax_warp_decode.routing import Routing

pytestmark = pytest.mark.gpu

# (E, H, I, K): real sizes with few experts, and small ones.
SHAPES = {"qwen3-30b": (16, 2048, 768, 8), "gpt-oss": (3, 2880, 2880, 2), "gemma4": (9, 2816, 704, 4),
          "tiny-docs": (40, 256, 64, 4), "odd": (5, 192, 320, 1), "deepseek": (2, 7168, 2048, 1),
          "long": (3, 128, 14336, 2), "blocks": (16, 512, 384, 4)}
run = functools.partial(shared_decode.run, activation=get_activation("silu"))


@functools.cache  # drawing the weights of a real size takes longer than running the layer
def make(shape, tokens, seed=0, **options):
    E, H, I, K = SHAPES[shape]
    return oracle.make_case(seed, tokens=tokens, experts=E, hidden=H, intermediate=I, k=K, **options)


def assert_close(y, case):
    oracle.assert_close(y, case, h_dtype=oracle.shared_h_dtype(case), unit=oracle.TENSOR_CORE_UNIT)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("shape,tokens", [("qwen3-30b", 8), ("qwen3-30b", 33), ("gpt-oss", 8), ("gemma4", 16),
                                          ("tiny-docs", 128), ("odd", 1), ("odd", 20), ("deepseek", 9)])
def test_layer_matches_the_oracle(shape, tokens, weights):
    case = make(shape, tokens, seed=tokens, weights=weights, pattern="skipped")
    assert_close(jax.jit(run)(*case.args()), case)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("pattern", ["same", "repeated", "none"])
def test_routing_patterns(pattern, weights):
    """All tokens on the same experts take many passes over each."""
    case = make("tiny-docs", 100, weights=weights, pattern=pattern)
    assert_close(run(*case.args()), case)


CONFIGS = [SharedConfig(*c) for c in (
    (8, 64, 2, 1, 1), (8, 64, 12, 1, 1), (16, 128, 3, 1, 2), (24, 64, 4, 1, 2), (32, 64, 3, 2, 1), (8, 64, 4, 4, 1),
    (8, 64, 3, 2, 1, 2), (16, 64, 3, 1, 2, 1, 3), (24, 128, 2, 1, 1, 2, 2), (64, 64, 2, 1, 1), (8, 256, 2, 1, 1),
    (40, 128, 2, 2, 1), (16, 256, 3, 1, 1))]


@pytest.mark.parametrize("weights, wgmma", [("bf16", True), ("bf16", False), ("mxfp8", True)])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_gives_the_same_layer(config, weights, wgmma):
    config = dataclasses.replace(config, wgmma=wgmma)
    case = oracle.make_case(5, tokens=50, experts=7, hidden=768, intermediate=256, k=3, weights=weights)
    x, routing, experts = case.args()
    h = moe_gate_up_shared(x, routing.ids, experts.w_gate, experts.w_up, config=config)
    oracle.assert_hidden_close(h, case, unit=oracle.TENSOR_CORE_UNIT)
    assert_close(moe_down_shared(h, routing.ids, routing.weights, experts.w_down, config=config), case)


@pytest.mark.parametrize("shape,weights", [
    ("odd", "bf16"), ("odd", "f16"), ("odd", "mxfp8"), ("odd", "mxfp8_e5m2"), ("blocks", "fp8_block128"),
    ("tiny-docs", "mxfp4"), ("gpt-oss", "mxfp4"), ("odd", "nvfp4"), ("gpt-oss", "nvfp4"), ("odd", "fp8_channel"),
    ("blocks", "fp8_tensor"), ("gemma4", "int8_channel"), ("odd", "int4_group32"), ("deepseek", "int4_group32")])
def test_biases_and_formats(shape, weights):
    """gpt-oss rows of 2880 columns, of which 32-byte swizzle is all that a row of 4-bit values allows."""
    case = make(shape, 20, seed=3, weights=weights, pattern="skipped", biases="bf16")
    assert_close(jax.jit(run)(*case.args()), case)


@pytest.mark.parametrize("weights", ["f16", "mxfp8", "nvfp4", "int8_channel", "int4_group32"])
def test_activations_in_float16(weights):
    case = make("odd", 20, seed=4, weights=weights, x_dtype="f16", pattern="skipped")
    assert_close(jax.jit(run)(*case.args()), case)


@pytest.mark.parametrize("weights, scales", [("int4_group32", jnp.float32), ("fp8_block128", jnp.bfloat16),
                                             ("fp8_channel", jnp.bfloat16)])
def test_scales_of_another_dtype(weights, scales):
    """Exact in both, so that the results are equal."""
    x, routing, experts = make("blocks", 20, seed=5, weights=weights).args()
    experts = experts.map(lambda w: dataclasses.replace(w, scales=w.scales.astype(jnp.bfloat16).astype(jnp.float32)))
    other = experts.map(lambda w: dataclasses.replace(w, scales=w.scales.astype(scales)))
    if scales == jnp.float32:
        experts, other = experts.map(lambda w: dataclasses.replace(w, scales=w.scales.astype(jnp.bfloat16))), experts
    want, got = (np.asarray(jax.jit(run)(x, routing, e)) for e in (experts, other))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_rows_too_long_for_shared_memory(weights):
    case = make("long", 10, weights=weights, pattern="repeated")
    assert_close(jax.jit(run)(*case.args()), case)


@pytest.mark.parametrize("part, column", test_shared.EVERY_BYTE)
def test_every_byte(part, column):
    test_shared.check_every_byte(part, column)


def test_every_scale_byte():
    """Row r has scale byte r: 2**(r - 127) and NaN for 255, which reaches the rows whose block is read and no other."""
    ones = jnp.full((1, 256, 64), 0x38, jnp.uint8).view(jnp.float8_e4m3fn)
    scales = np.stack([np.full(256, 127, np.uint8), np.arange(256, dtype=np.uint8)], -1)[None]
    got = test_shared.read_back(QuantizedArray(ones, jnp.asarray(scales), "mxfp8"), 40)
    assert got[0] in (0, 2.0**-127)  # a subnormal: tensor cores may flush it
    np.testing.assert_array_equal(got[1:], oracle.E8M0.astype(np.float32)[1:])


@pytest.mark.parametrize("column", [5, 8, 30, 63, 127])
def test_every_e4m3_byte(column):
    """Row r holds byte r in one column."""
    values = np.zeros((1, 256, 128), np.uint8)
    values[0, :, column] = np.arange(256)
    w = QuantizedArray(jnp.asarray(values).view(jnp.float8_e4m3fn), jnp.full((1, 256, 4), 127, jnp.uint8), "mxfp8")
    np.testing.assert_array_equal(test_shared.read_back(w, column), oracle.E4M3.astype(np.float32))


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_replays_are_bitwise_equal_and_leave_nothing_unwritten(weights):
    x, routing, experts = make("qwen3-30b", 33, seed=33, weights=weights, pattern="skipped").args()
    layer = jax.jit(run)
    want = np.asarray(layer(x, routing, experts))
    for _ in range(100):
        dirt = [jnp.full((64, 8192), jnp.nan) for _ in range(4)]  # freed again: what an unwritten output would hold
        del dirt
        np.testing.assert_array_equal(np.asarray(layer(x, routing, experts)), want)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_rows_of_any_size(weights):
    """y = w h, with rows of h of any size and of values of very different sizes, next to rows with inf and NaN."""
    case = make("tiny-docs", 100, weights=weights, pattern="same")
    expert = int(case.ids[0, 0])
    w = jax.tree.map(lambda a: a[expert][None], case.args()[2].w_down)
    w64 = case.expert(expert)[2]  # [256, 64]
    rng = np.random.default_rng(7)
    exponent = np.array([-110, -60, -20, 0, 20, 60, 90, 0, 0, 0])
    h = rng.standard_normal((10, 64)) * np.exp2(exponent)[:, None]
    h[7] *= np.exp2(rng.integers(-40, 10, 64))
    h = np.array(jnp.asarray(h, jnp.bfloat16), np.float32)
    h[8, 3], h[9, 5] = np.inf, np.nan
    y = np.asarray(moe_down_shared(jnp.asarray(h)[:, None], jnp.zeros((10, 1), jnp.int32), jnp.ones((10, 1)), w,
                                   out_dtype=jnp.float32), np.float64)
    assert not np.isfinite(y[8:]).any()
    h, y = h[:8].astype(np.float64), y[:8]
    # Sums of float32, and 2^-39 of a row's largest value where it is rounded to float16.
    size = np.abs(h) @ np.abs(w64).T
    bound = 64 * oracle.TENSOR_CORE_UNIT * size + 2.0**-39 * np.max(np.abs(h), 1)[:, None] * np.sum(np.abs(w64), 1)
    assert np.all(np.abs(y - h @ w64.T) <= bound + 2.0**-120)


def test_a_chain_of_layers_keeps_its_order():
    """50 layers in one graph, each on the one before."""
    x, routing, experts = make("qwen3-30b", 8, seed=8, weights="bf16", pattern="uniform").args()

    def step(x):  # clipped, as h grows with the square of x
        return jnp.clip(run(x, routing, experts), -2, 2).astype(x.dtype)

    want = x
    for _ in range(50):
        want = jax.block_until_ready(jax.jit(step)(want))
    got = jax.jit(lambda x: functools.reduce(lambda x, _: step(x), range(50), x))(x)
    assert np.abs(np.asarray(got, np.float32)).max() > 0.1
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_token_does_not_depend_on_its_batch():
    x, routing, experts = make("qwen3-30b", 33, seed=33, weights="bf16", pattern="skipped").args()
    config = SharedConfig(8, 64, 4, 1, 1)

    def layer(x, ids, weights):
        h = moe_gate_up_shared(x, ids, experts.w_gate, experts.w_up, config=config)
        return np.asarray(moe_down_shared(h, ids, weights, experts.w_down, config=config))

    batch = layer(x, *jax.tree.leaves(routing))
    for t in (0, 7, 32):
        alone = layer(x[t:t + 1], routing.ids[t:t + 1], routing.weights[t:t + 1])
        np.testing.assert_array_equal(alone[0], batch[t])


def test_transforms_give_the_same_bits():
    x, routing, experts = make("qwen3-30b", 8, seed=8, weights="bf16", pattern="uniform").args()
    want = np.asarray(run(x, routing, experts))
    pairs = jax.tree.map(lambda a: a.reshape(2, 4, *a.shape[1:]), (x, routing))
    mapped = jax.jit(jax.vmap(run, in_axes=(0, 0, None)))(*pairs, experts)
    np.testing.assert_array_equal(np.asarray(mapped).reshape(want.shape), want)
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), experts)
    ys = jax.jit(lambda ws: jax.lax.scan(lambda c, w: (c, run(x, routing, w)), 0, ws)[1])(stacked)
    np.testing.assert_array_equal(np.asarray(ys), np.stack([want, want]))


@pytest.mark.parametrize("tokens", [8, 128])
def test_temporaries_are_what_is_reported(tokens):
    x, routing, experts = make("tiny-docs", tokens, seed=tokens, weights="bf16", pattern="skipped").args()
    memory = jax.jit(run).lower(x, routing, experts).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= shared_decode.temporary_bytes(tokens, 4, experts) + 1024


def test_ids_of_another_type():
    x, routing, experts = make("tiny-docs", 8, seed=8, weights="bf16", pattern="uniform").args()
    y = run(x, Routing(routing.ids.astype(jnp.uint8), routing.weights), experts)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(run(x, routing, experts)))
