"""Generation: tokens, logits, sampling, reuse of memory and of compiled code, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import filled

from jax_warp_decode import ArgumentError
from jax_warp_decode.models import KVCache, Qwen3Moe, Qwen3MoeConfig, sampling
from jax_warp_decode.models import generate as generate_module
from jax_warp_decode.models.generate import generate

CONFIG = Qwen3MoeConfig(
    vocab_size=48, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    max_position_embeddings=40, tie_word_embeddings=True)


class CountingModel(Qwen3Moe):
    """Counts how often the model is traced."""

    traces = 0

    def hidden_states(self, tokens, cache=None):
        CountingModel.traces += 1
        return super().hidden_states(tokens, cache)


MAX_LEN = CONFIG.max_position_embeddings  # of most caches here, so that they share what is compiled


@pytest.fixture(scope="module")
def model():
    return filled(lambda: CountingModel(
        CONFIG, strategy="reference", dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(7)))


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(3).integers(0, CONFIG.vocab_size, (3, 6))


def test_tokens_and_logits_are_those_of_a_full_forward_pass(model, prompts):
    generation, tokens, logits = generate(model, prompts, 9, max_len=MAX_LEN), [], []
    for ids in generation:
        assert ids.shape == (3,) and ids.dtype == np.int32
        tokens.append(ids)
        logits.append(generation.logits)
    tokens = np.stack(tokens, axis=1)
    expected, _ = nnx.jit(lambda m, t: m(t))(model, jnp.asarray(np.concatenate([prompts, tokens], axis=1), jnp.int32))
    expected = np.asarray(expected)[:, 5:-1]
    np.testing.assert_allclose(np.stack(logits, axis=1), expected, atol=1e-5)
    np.testing.assert_array_equal(np.argmax(expected, axis=-1), tokens)


def test_rows_of_a_batch_do_not_influence_each_other(model, prompts):
    together = np.stack(list(generate(model, prompts, 6, max_len=MAX_LEN)), axis=1)
    alone = [np.concatenate(list(generate(model, row[None], 6, max_len=MAX_LEN))) for row in prompts]
    np.testing.assert_array_equal(together, alone)


def test_tokens_stream_and_times_are_counted(model, prompts):
    generation = generate(model, prompts, 30, max_len=MAX_LEN)
    assert generation.prefill_seconds is None and np.isnan(generation.tokens_per_second)
    next(generation)
    assert generation.prefill_seconds > 0 and generation.step_seconds == []
    rest = list(generation)
    assert len(rest) == len(generation.step_seconds) == 29
    assert generation.tokens_per_second == pytest.approx(29 / sum(generation.step_seconds))
    with pytest.raises(StopIteration):
        next(generation)


def test_equal_shapes_compile_once(model, prompts):
    list(generate(model, prompts, 3, max_len=MAX_LEN))
    before = CountingModel.traces
    list(generate(model, prompts[:, ::-1], 8, max_len=MAX_LEN))
    assert CountingModel.traces == before


def test_the_step_updates_the_cache_in_place(model):
    graphdef, state = nnx.split(model)
    leaves, state_def = jax.tree.flatten(state)
    cache = KVCache.create(CONFIG, 1, 32, jnp.float32)
    step = generate_module._make_advance(graphdef, state_def, True)
    compiled = step.lower(leaves, cache, jnp.zeros((1, 1), jnp.int32), None, jnp.float32(0)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.k.nbytes + cache.v.nbytes


def test_sampling_follows_the_softmax_at_the_temperature(model, prompts):
    rows, temperature = 4000, 0.7
    generation = generate(
        model, np.repeat(prompts[:1], rows, axis=0), 1, temperature=temperature, rng=jax.random.key(11))
    ids = next(generation)
    expected = np.asarray(jax.nn.softmax(generation.logits[0] / temperature), np.float64)
    counts = np.bincount(ids, minlength=CONFIG.vocab_size)
    # Five standard deviations of a binomial count, per token.
    bound = 5 * np.sqrt(rows * expected * (1 - expected)) + 1
    assert np.all(np.abs(counts - rows * expected) <= bound)
    assert np.count_nonzero(counts) > 5


def test_sampling_repeats_with_the_same_key_and_draws_anew_each_step(model, prompts):
    def sample(seed):
        return np.stack(list(generate(
            model, prompts, 12, temperature=2.0, rng=jax.random.key(seed), max_len=MAX_LEN)))

    np.testing.assert_array_equal(sample(1), sample(1))
    raw = generate(model, prompts, 12, temperature=2.0, rng=jax.random.PRNGKey(1), max_len=MAX_LEN)
    np.testing.assert_array_equal(sample(1), np.stack(list(raw)))
    assert np.any(sample(1) != sample(2))
    uniform = nnx.clone(model)
    nnx.update(uniform, jax.tree.map(jnp.zeros_like, nnx.state(uniform)))  # equal logits: only the key decides
    generation = generate(uniform, prompts, 20, temperature=1.0, rng=jax.random.key(0), max_len=MAX_LEN)
    assert len({ids[0] for ids in generation}) > 5


def test_the_smallest_temperature_is_the_greedy_limit(model, prompts):
    large = nnx.clone(model)
    large.norm.scale.set_value(large.norm.scale.get_value() * 100)  # logits well apart and above 1
    options = dict(temperature=sampling.SMALLEST, rng=jax.random.key(0))
    cold, greedy = (list(generate(large, prompts, 4, max_len=MAX_LEN, **o)) for o in (options, {}))
    np.testing.assert_array_equal(np.stack(cold), np.stack(greedy))


def test_accepts_a_prompt_on_the_device_and_the_longest_length(model):
    tokens = list(generate(model, jnp.array([[1, 2]], jnp.uint8), CONFIG.max_position_embeddings - 2))
    assert len(tokens) == CONFIG.max_position_embeddings - 2


@pytest.mark.parametrize(("change", "words"), [
    (dict(prompt_tokens=np.array([1, 2])), ["prompt_tokens", "(2,)", "[B, S]"]),
    (dict(prompt_tokens=np.zeros((1, 0), int)), ["prompt_tokens", "(1, 0)", "at least one"]),
    (dict(prompt_tokens=np.array([[1.0]])), ["prompt_tokens", "float64", "integers"]),
    (dict(prompt_tokens=np.array([[1, 48]])), ["prompt_tokens", "id 48", "< 48"]),
    (dict(prompt_tokens=np.array([[-1, 4]])), ["prompt_tokens", "id -1", "0 <="]),
    (dict(max_new_tokens=0), ["max_new_tokens", "0", "at least 1"]),
    (dict(prompt_tokens=[[1], [2, 3]]), ["prompt_tokens", "list", "equal length"]),
    (dict(max_new_tokens=2.0), ["max_new_tokens", "2.0", "a static integer of at least 1"]),
    (dict(max_len=7.0), ["max_len", "7.0", "a static integer"]),
    (dict(max_new_tokens=38), ["max_new_tokens", "38", "at most 37", "max_position_embeddings is 40"]),
    (dict(max_len=5), ["max_len", "5", "7"]),
    (dict(max_len=41), ["max_len", "41", "40"]),
    (dict(temperature=-1.0, rng=jax.random.key(0)), ["temperature", "-1.0", ">= 0"]),
    (dict(temperature=float("nan")), ["temperature", "nan"]),
    (dict(temperature=1e-39, rng=jax.random.key(0)), ["temperature", "1e-39", "1.18e-38"]),
    (dict(temperature=1e39, rng=jax.random.key(0)), ["temperature", "1e+39", "3.4e+38"]),
    (dict(prompt_tokens=np.ones((1, 50), int)), ["prompt_tokens", "50 tokens", "at most 39", "is 40"]),
    (dict(temperature="1"), ["temperature", "'1'", "a number"]),
    (dict(temperature=np.ones(2)), ["temperature", "a number"]),
    (dict(temperature=1.0, rng=0), ["rng", "int", "one key", "jax.random.key(seed)"]),
    (dict(temperature=1.0, rng=jnp.zeros(2)), ["rng", "float32 (2,)", "one key"]),
    (dict(temperature=1.0, rng=jax.random.split(jax.random.key(0))), ["rng", "(2,)", "one key"]),
    (dict(temperature=1.0), ["rng", "None", "jax.random.key"]),
    (dict(rng=jax.random.key(0)), ["rng", "temperature=0.0"]),
])
def test_bad_arguments_raise_before_anything_runs(model, change, words):
    arguments = dict(prompt_tokens=np.array([[1, 2, 3]]), max_new_tokens=4) | change
    with pytest.raises(ArgumentError) as error:
        generate(model, arguments.pop("prompt_tokens"), arguments.pop("max_new_tokens"), **arguments)
    assert all(word in str(error.value) for word in words), error.value
