"""The decode step on the GPU: its kernels against XLA, in place, and generation from ragged prompts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode_step

from bench.decode_model import make_layer
from jax_warp_decode.kernels.attend import attend
from jax_warp_decode.kernels.dense_rows import DenseConfig, dense_rows
from jax_warp_decode.models import Qwen3MoeConfig
from jax_warp_decode.models.cache import RaggedCache
from jax_warp_decode.models.decode_loop import decode_tokens, generate_ragged
from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights, MoeOptions, decode_step

pytestmark = pytest.mark.gpu
CONFIG = Qwen3MoeConfig(
    vocab_size=1000, hidden_size=512, moe_intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=128, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
    max_position_embeddings=512)
POSITIONS = 512


@pytest.fixture(scope="module")
def weights():
    normal = jax.random.normal
    return DecoderWeights(
        normal(jax.random.key(1), (CONFIG.vocab_size, CONFIG.hidden_size), jnp.bfloat16),
        tuple(make_layer(CONFIG, number, "bf16") for number in range(2)),
        jnp.ones((CONFIG.hidden_size,), jnp.bfloat16),
        normal(jax.random.key(2), (CONFIG.vocab_size, CONFIG.hidden_size), jnp.bfloat16) / 16)


def caches(rows: int, lengths) -> tuple[RaggedCache, RaggedCache]:
    """The same content for XLA, and with NaN beyond the lengths in the order of the fused form."""
    keys = jax.random.split(jax.random.key(rows), 4)
    shape = (rows, POSITIONS, CONFIG.num_key_value_heads, CONFIG.head_dim)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    known = (jnp.arange(POSITIONS) < lengths[:, None])[..., None, None]
    turned = [jnp.where(known, a, jnp.nan).swapaxes(1, 2) for a in arrays]
    return (RaggedCache(tuple(arrays[:2]), tuple(arrays[2:]), lengths, heads_first=False),
            RaggedCache(tuple(turned[:2]), tuple(turned[2:]), lengths, heads_first=True))


@pytest.mark.parametrize("rows", [1, 3, 8, 20])
def test_the_fused_form_agrees_with_xla(weights, rows):
    lengths = jnp.asarray(np.random.default_rng(rows).integers(0, POSITIONS - 2, rows), jnp.int32)
    plain = DecodeModel(CONFIG, MoeOptions((("strategy", "reference"),)), attention="xla")
    fused = dataclasses.replace(plain, attention="fused")
    assert DecodeModel(CONFIG).resolved_attention == "fused"
    step = jax.jit(decode_step, static_argnums=0)
    other, own = caches(rows, lengths)
    tokens = jnp.arange(rows, dtype=jnp.int32) * 7
    for _ in range(2):
        want, other = step(plain, weights, other, tokens)
        got, own = step(fused, weights, own, tokens)
    # A residual stream in bf16 over two layers; the median, as rounding may move a near tie of the router in a row.
    distance = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(distance) < 0.02, distance
    assert own.lengths.tolist() == (np.asarray(lengths) + 2).tolist()


@pytest.mark.parametrize("rows, query_heads, key_heads", [(1, 32, 4), (3, 12, 4), (8, 32, 4), (16, 64, 8), (1, 16, 1)])
def test_attention_is_exact_and_the_same_every_time(rows, query_heads, key_heads):
    positions = 2048
    lengths = np.random.default_rng(rows).integers(0, positions + 1, rows)
    lengths[0] = positions - 3
    operands, want = test_decode_step.attention_operands(
        rows, lengths.tolist(), query_heads, key_heads, 128, positions, jnp.bfloat16)

    @jax.jit
    def chain(heads, q_gain, k_gain, rotation, k, v, lengths):
        def one(_, heads):
            y, new_k, new_v = attend(heads, q_gain, k_gain, rotation, k, v, lengths, eps=1e-6)
            return None, (y, jnp.nansum(new_k.astype(jnp.float32)), jnp.nansum(new_v.astype(jnp.float32)))

        return jax.lax.scan(one, None, jnp.stack([heads] * 8))[1]

    first = chain(*operands)
    error = np.linalg.norm(np.asarray(first[0][0], np.float64) - want) / np.linalg.norm(want)
    assert error < 5e-3, error  # bf16 keys and values, as stored; probabilities in bf16, half a unit is 2^-9
    for _ in range(50):
        jax.tree.map(np.testing.assert_array_equal, chain(*operands), first)


def test_a_layer_takes_seven_launches(weights):
    """qkv, attention in two, output, router with the norm before it, and the experts' two; no glue of XLA's."""
    step, tokens = jax.jit(decode_step, static_argnums=0, donate_argnums=2), jnp.zeros((1,), jnp.int32)
    counts = []
    for layers in (1, 2):
        model = DecodeModel(dataclasses.replace(CONFIG, num_hidden_layers=layers))
        some = dataclasses.replace(weights, layers=weights.layers[:layers])
        text = step.lower(model, some, model.new_cache(1, POSITIONS), tokens).compile().as_text()
        counts.append(len(re.findall(r"^ .* = .* (?:custom-call|fusion)\(", text, re.MULTILINE)))
    assert counts[1] - counts[0] <= 7, counts


def test_a_call_of_many_steps_copies_no_cache(weights):
    model = DecodeModel(CONFIG)
    cache = model.new_cache(2, POSITIONS)
    step = jax.jit(decode_tokens, static_argnums=(0, 4), donate_argnums=2)
    memory = step.lower(model, weights, cache, jnp.zeros((2,), jnp.int32), 4).compile().memory_analysis()
    nbytes = sum(a.nbytes for a in (*cache.k, *cache.v))
    assert memory.alias_size_in_bytes >= nbytes and memory.temp_size_in_bytes < nbytes


def test_ragged_prompts_decode_as_each_alone(weights):
    model, prompts = DecodeModel(CONFIG), [[5, 6, 7], [9] * 100, [1]]
    together = np.concatenate(list(generate_ragged(model, weights, prompts, 5, max_len=256)))
    alone = [np.concatenate(list(generate_ragged(model, weights, [p], 5, max_len=256)))[:, 0] for p in prompts]
    # Other batch sizes take other kernels, so that near ties may fall differently; the first token rarely is one.
    assert np.mean(together[0] == [a[0] for a in alone]) > 0.6
    assert together.shape == (5, 3)


@pytest.mark.parametrize("top_p", [None, 0.5])
def test_sampling_runs_on_the_device(weights, top_p):
    ids = np.concatenate(list(generate_ragged(
        DecodeModel(CONFIG), weights, [[1, 2], [3]], 20, temperature=1.5, top_p=top_p, rng=jax.random.key(0))))
    assert ids.shape == (20, 2) and ids.min() >= 0 and ids.max() < CONFIG.vocab_size and len(set(ids[:, 0])) > 5


@pytest.mark.parametrize("tokens, rows, columns", [(1, 5120, 2048), (1, 2048, 4096), (3, 72, 768), (8, 1000, 512)])
def test_no_configuration_changes_a_bit_of_a_projection(tokens, rows, columns):
    keys = jax.random.split(jax.random.key(rows), 3)
    x, w = (jax.random.normal(key, (n, columns), jnp.bfloat16) for key, n in zip(keys, (tokens, rows)))
    gain = jnp.linspace(1, 2, columns, dtype=jnp.bfloat16)
    residual = jax.random.normal(keys[2], (tokens, rows), jnp.bfloat16)
    run = functools.partial(dense_rows, (x,), w, gain=gain, residuals=(residual,), out_dtype=jnp.float32)
    want = run(config=DenseConfig(1, 1))
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(gain, np.float64)
    np.testing.assert_allclose(
        want, exact @ np.asarray(w, np.float64).T + np.asarray(residual, np.float64), rtol=1e-4, atol=5e-3)
    for config in (DenseConfig(1, 2), DenseConfig(2, 2), DenseConfig(2, 4)):
        np.testing.assert_array_equal(run(config=config), want)
