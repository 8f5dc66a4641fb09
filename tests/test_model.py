"""The decoder against transformers: logits of tiny random models of each family, see bench/make_parity_fixture.py."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import filled

from jax_warp_decode import ArgumentError, UnsupportedError
from jax_warp_decode.checkpoints import load_model
from jax_warp_decode.models import GptOssConfig, KVCache, MixtralConfig, Qwen3Moe, Qwen3MoeConfig
from jax_warp_decode.models.rope import Yarn, frequencies

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = ("qwen3_moe_tiny", "qwen3_moe_tiny_tied")
CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2)
TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, CONFIG.vocab_size, jnp.int32)

run = jax.jit(lambda model, tokens, cache: model(tokens, cache))


def load(name, **options):
    expected = np.load(FIXTURES / name / "logits.npz")
    return load_model(FIXTURES / name, **options), jnp.asarray(expected["tokens"]), expected


def in_chunks(model, tokens, sizes):
    """Logits [B, S, V] of tokens fed in pieces, the rest one by one, through a cache longer than needed."""
    cache = KVCache.create(model.config, tokens.shape[0], tokens.shape[1] + 3, model.dtype)
    logits, start = [], 0
    for size in (*sizes, *[1] * (tokens.shape[1] - sum(sizes))):
        part, cache = run(model, tokens[:, start:start + size], cache)
        logits.append(part)
        start += size
    assert int(cache.length) == tokens.shape[1]
    return np.concatenate(logits, axis=1)


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.fixture(scope="module")
def model():
    return filled(lambda: Qwen3Moe(
        CONFIG, strategy="reference", dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name, strategy", list(zip(NAMES, ("reference", "auto"), strict=True)))
def test_float32_parity(name, strategy):
    model, tokens, expected = load(name, dtype=jnp.float32, strategy=strategy)
    for sizes in ((6, 6), ()):  # prefill in two pieces, then steps; steps only
        np.testing.assert_allclose(in_chunks(model, tokens, sizes), expected["float32"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name, pieces", [
    ("mixtral_tiny", (16,)), ("gpt_oss_tiny", (16,)), ("gpt_oss_mxfp4_tiny", (13,))])
def test_float32_parity_of_other_families(name, pieces):
    """Windows, sinks, YaRN and biases, across the edge of the window; once with steps after the prefill."""
    model, tokens, expected = load(name, dtype=jnp.float32, strategy="reference")
    assert model.config.window(0) == 6 < tokens.shape[1]
    np.testing.assert_allclose(in_chunks(model, tokens, pieces), expected["float32"], rtol=0, atol=1e-4)


def test_bfloat16_of_another_family():
    """As below; sinks and biases add four roundings a layer."""
    model, tokens, expected = load("gpt_oss_mxfp4_tiny", strategy="reference")
    assert (model.dtype, model.layers[0].moe.experts.format) == (jnp.bfloat16, "mxfp4")
    logits, _ = run(model, tokens, None)
    assert relative(np.asarray(logits), expected["float32"]) < 2.0**-8 * ((16 * 2 + 2) / 3) ** 0.5


def test_bfloat16_parity():
    """bfloat16 logits lie as close to the float32 ones as the number of roundings explains.

    On the way to a logit about 12 results a layer are rounded to bfloat16 (norm, q and its norm and rotation, scores,
    attention, o, residual; norm, intermediate, y, residual), plus the embedding's norm and the head's input. Each adds
    an independent relative error of at most u / sqrt(3) root mean square, u = 2^-8.
    """
    model, tokens, expected = load(NAMES[0])
    assert model.dtype == jnp.bfloat16
    roundings = 12 * model.config.num_hidden_layers + 2
    bound = 2.0**-8 * (roundings / 3) ** 0.5
    logits = in_chunks(model, tokens, (13,))
    assert logits.dtype == np.float32
    assert relative(logits, expected["float32"]) < bound
    # transformers rounds more often, so the two bfloat16 results may differ by both errors.
    assert relative(logits, expected["bfloat16"]) < bound + relative(expected["bfloat16"], expected["float32"])
    np.testing.assert_allclose(logits, in_chunks(model, tokens, ()), rtol=0, atol=bound * np.abs(logits).max())


def test_mxfp8_weights_are_within_their_own_error(tmp_path):
    """E4M3 has 4 significand bits: weights move by at most 2^-4, and logits of a 2-layer model stay near.

    Not of every token: two of 32 choose another expert in the second layer, and are 0.14 and 0.2 away.
    """
    from jax_warp_decode.checkpoints import save_qwen3_moe

    model, tokens, expected = load(NAMES[0])
    save_qwen3_moe(model, tmp_path / "mx", format="mxfp8")
    quantised = load_model(tmp_path / "mx", dtype=jnp.float32, strategy="reference")
    assert quantised.layers[1].moe.experts.format == "mxfp8"
    logits, _ = run(quantised, tokens, KVCache.create(model.config, 2, 16, jnp.float32))
    error, want = np.asarray(logits) - expected["float32"], expected["float32"]
    of_token = np.linalg.norm(error, axis=-1) / np.linalg.norm(want, axis=-1)
    assert 1e-4 < np.median(of_token) < 2.0**-4 and np.sum(of_token > 2.0**-3) <= 2


def test_rows_of_a_batch_are_independent(model):
    logits, _ = run(model, TOKENS, None)
    changed, _ = run(model, TOKENS.at[1].add(1), None)
    np.testing.assert_array_equal(logits[0], changed[0])
    assert not np.allclose(logits[1], changed[1])


def test_later_tokens_do_not_change_earlier_logits(model):
    logits, _ = run(model, TOKENS, None)
    changed, _ = run(model, TOKENS.at[:, 4].add(1), None)
    np.testing.assert_array_equal(logits[:, :4], changed[:, :4])
    assert not np.allclose(logits[:, 4:], changed[:, 4:])


def test_head_on_a_slice_of_hidden_states(model):
    logits, cache = run(model, TOKENS, None)
    last = jax.jit(lambda model, tokens: model.logits(model.hidden_states(tokens)[0][:, -1]))(model, TOKENS)
    assert int(cache.length) == TOKENS.shape[1]
    np.testing.assert_allclose(last, logits[:, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [-1, 64, 2**31 - 1])
def test_unknown_token_is_nan_in_its_row_only(model, bad):
    logits, _ = run(model, TOKENS.at[1, 1].set(bad), None)
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1, 1:]).all()


def test_any_integer_type_holds_tokens(model):
    model = nnx.clone(model)
    model.layers = nnx.List([])  # outside jit every operation compiles by itself, and none in a layer sees an id
    logits, _ = model(TOKENS)
    for tokens in (TOKENS.astype(jnp.uint8), TOKENS.astype(jnp.uint32), np.asarray(TOKENS, np.int64)):
        np.testing.assert_array_equal(model(tokens)[0], logits)
    # With only 32 bits these would look like known ids.
    assert np.isnan(model(np.asarray(TOKENS, np.int64) + 2**32)[0]).all()
    assert np.isnan(model(jnp.full_like(TOKENS, 2**32 - 1, jnp.uint32))[0]).all()


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_no_tokens_give_no_logits(model, shape):
    logits, cache = model(jnp.zeros(shape, jnp.int32))
    assert logits.shape == (*shape, CONFIG.vocab_size) and int(cache.length) == shape[1]


def test_full_cache(model):
    token = jnp.ones((1, 1), jnp.int32)
    cache = KVCache.create(CONFIG, 1, 2, jnp.float32)
    _, cache = run(model, token, cache)
    with pytest.raises(ArgumentError, match="room for 2 positions of which 1 are filled, expected room for 2 more"):
        model(jnp.ones((1, 2), jnp.int32), cache)
    logits, full = run(model, token, cache)
    assert np.isfinite(logits).all()
    logits, _ = run(model, token, full)
    assert np.isnan(logits).all(), "under jit a full cache must not pass unnoticed"


@pytest.mark.parametrize("tokens, cache, message", [
    (jnp.ones(3, jnp.int32), None, r"tokens: got int32\[3\], expected integers \[B, S\]"),
    (jnp.ones((1, 3)), None, "tokens: got float32"),
    (jnp.ones((2, 3), jnp.int32), KVCache.create(CONFIG, 1, 8, jnp.float32), r"cache: got \(2, 1, 8, 2, 16\)"),
    (jnp.ones((1, 3), jnp.int32), KVCache.create(dataclasses.replace(CONFIG, head_dim=32), 1, 8, jnp.float32),
     r"expected \(2, 1, 8, 2, 16\)"),
])
def test_bad_arguments(model, tokens, cache, message):
    with pytest.raises(ArgumentError, match=message):
        model(tokens, cache)


def test_bad_cache_size():
    with pytest.raises(ArgumentError, match="batch, max_len: got 1, 0"):
        KVCache.create(CONFIG, 1, 0, jnp.float32)


def test_strategy_reaches_every_layer():
    model = nnx.eval_shape(lambda: Qwen3Moe(CONFIG, rngs=nnx.Rngs(0)))
    assert model.strategy == "auto"
    model.set_strategy("reference")
    assert [layer.moe.choice(1).strategy for layer in model.layers] == ["reference"] * 2
    assert model.choice(1).strategy == "reference"
    with pytest.raises(ArgumentError, match="strategy: got 'warp'"):
        model.set_strategy("warp")


def test_x64_mode_changes_nothing(model):
    logits, _ = run(model, TOKENS, None)
    with jax.enable_x64(True):
        logits64, cache = run(model, TOKENS, None)
    assert (logits64.dtype, cache.k.dtype, cache.length.dtype) == (jnp.float32, jnp.float32, jnp.int32)
    np.testing.assert_array_equal(logits, logits64)


# ----------------------------------------------------------------------------------------------------- config.json

PUBLISHED = {  # config.json of Qwen3-30B-A3B, written by transformers 4
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936}


def test_both_spellings_of_a_config():
    config = Qwen3MoeConfig.from_hf(PUBLISHED)
    assert (config.rope_theta, config.num_experts, config.norm_topk_prob) == (1e6, 128, True)
    new = {k: v for k, v in PUBLISHED.items() if k not in ("rope_theta", "rope_scaling", "num_experts")}
    new |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "num_local_experts": 128}
    assert Qwen3MoeConfig.from_hf(new) == config
    assert Qwen3MoeConfig.from_hf(config.to_hf()) == config
    new["rope_parameters"] |= {"partial_rotary_factor": 1.0}  # of a whole head, as without
    assert Qwen3MoeConfig.from_hf(new) == config
    assert "num_local_experts" in json.loads((FIXTURES / NAMES[0] / "config.json").read_text())


def test_defaults_of_a_config():
    optional = ("rope_theta", "rope_scaling", "head_dim", "norm_topk_prob", "rms_norm_eps", "hidden_act",
                "tie_word_embeddings", "attention_bias", "max_position_embeddings", "decoder_sparse_step")
    config = Qwen3MoeConfig.from_hf({k: v for k, v in PUBLISHED.items() if k not in optional})
    assert (config.head_dim, config.rope_theta, config.norm_topk_prob) == (64, 10000.0, False)


@pytest.mark.parametrize("change, error, message", [
    ({"architectures": ["MixtralForCausalLM"]}, UnsupportedError, "architectures: got .'MixtralForCausalLM'"),
    ({"model_type": "qwen3_next"}, UnsupportedError, "model_type: got 'qwen3_next'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedError, "rope_scaling: got rope_type 'yarn'"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, UnsupportedError,
     "rope_parameters: got .'partial_rotary_factor'"),
    ({"rope_parameters": {"rope_theta": 5.0}}, ArgumentError, "rope_theta, rope_parameters.rope_theta: got"),
    ({"rope_parameters": 3}, ArgumentError, "rope_parameters: got 3"),
    ({"use_sliding_window": True}, UnsupportedError, "use_sliding_window"),
    ({"mlp_only_layers": [0]}, UnsupportedError, "mlp_only_layers"),
    ({"decoder_sparse_step": 2}, UnsupportedError, "decoder_sparse_step"),
    ({"hidden_act": "mish"}, ArgumentError, "hidden_act: got 'mish', expected one of"),
    ({"hidden_act": "relu2"}, ArgumentError, "hidden_act: got 'relu2', expected one of"),  # gated there, not here
    ({"num_experts": None}, ArgumentError, "num_experts: missing"),
    ({"num_local_experts": 64}, ArgumentError, "num_experts, num_local_experts: got"),
    ({"num_experts_per_tok": 129}, ArgumentError, "num_experts_per_tok: got 129, expected at most num_experts 128"),
    ({"num_key_value_heads": 5}, ArgumentError, "num_key_value_heads: got 5"),
    ({"head_dim": 127}, ArgumentError, "head_dim: got 127, expected an even number"),
    ({"hidden_size": 0}, ArgumentError, "hidden_size: got 0"),
    ({"hidden_size": "2048"}, ArgumentError, "hidden_size: got '2048'"),
    ({"hidden_size": True}, ArgumentError, "hidden_size: got True"),
    ({"norm_topk_prob": 1}, ArgumentError, "norm_topk_prob: got 1"),
    ({"rms_norm_eps": float("nan")}, ArgumentError, "rms_norm_eps: got nan"),
    ({"rope_theta": 10**400}, ArgumentError, "rope_theta: got 1000"),
])
def test_bad_config(change, error, message):
    with pytest.raises(error, match=message):
        Qwen3MoeConfig.from_hf(PUBLISHED | change)


GPT_OSS = {  # config.json of gpt-oss-20b
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088}
MIXTRAL = {  # config.json of Mixtral-8x7B-v0.1
    "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000}


def test_published_configs_of_other_families():
    config = GptOssConfig.from_hf(GPT_OSS)
    assert config.yarn == Yarn(32.0, 4096, 32.0, 1.0, truncate=False)
    assert [config.window(n) for n in (0, 1, 22, 23)] == [128, None, 128, None]
    assert (config.num_experts, config.moe_intermediate_size, config.activation.limit) == (32, 2880, 7.0)
    mixtral = MixtralConfig.from_hf(MIXTRAL)
    assert (mixtral.head_dim, mixtral.num_experts, mixtral.window(0), mixtral.yarn) == (128, 8, None, None)


@pytest.mark.parametrize("change, error, message", [
    ({"layer_types": ["full_attention"]}, ArgumentError, "layer_types: got .*expected one of .* for each of 24 layers"),
    ({"layer_types": ["chunked"] * 24}, ArgumentError, "layer_types: got"),
    ({"sliding_window": 0}, ArgumentError, "sliding_window: got 0"),
    ({"rope_scaling": {"rope_type": "llama3"}}, UnsupportedError, "rope_scaling: got rope_type 'llama3', expected"),
    ({"rope_scaling": {"rope_type": "yarn"}}, ArgumentError, "factor: missing"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1}}, UnsupportedError, "got .'mscale'., exp"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, ArgumentError, "rope factor: got 0.5"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1e38}}, ArgumentError, "beta_slow, beta_fast:"),
    ({"rope_theta": 1}, ArgumentError, "rope_theta: got 1.0, expected more than 1 with YaRN"),
    ({"rope_parameters": {"rope_theta": 150000}}, ArgumentError, "rope_parameters, rope_scaling: got two different"),
    ({"num_experts": 64}, ArgumentError, "num_local_experts, num_experts: got"),
    ({"swiglu_limit": "7"}, ArgumentError, "swiglu_limit: got '7'"),
])
def test_bad_config_of_gpt_oss(change, error, message):
    with pytest.raises(error, match=message):
        GptOssConfig.from_hf(GPT_OSS | change)


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones():
    plain, one = frequencies(1e4, 64)
    scaled, factor = frequencies(1e4, 64, Yarn(8.0, 4096))
    assert one == 1 and factor == pytest.approx(0.1 * np.log(8) + 1)
    np.testing.assert_allclose(scaled[:5], plain[:5])
    np.testing.assert_allclose(scaled[-5:], plain[-5:] / 8)
    assert (np.diff(plain / scaled) >= -1e-12).all()


def test_config_without_a_model_type():
    with pytest.raises(UnsupportedError, match="model_type: got None"):
        Qwen3MoeConfig.from_hf({})
