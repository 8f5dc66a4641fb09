"""The lean decode step: ragged rows, its kernels, sampling, generation, and the report on where time goes."""

import argparse
import dataclasses
import functools
import io
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from tiny_models import filled

from jax_warp_decode import ArgumentError, CheckpointError, UnsupportedError, generate_command, profile_command
from jax_warp_decode.checkpoints import load_model, save_qwen3_moe
from jax_warp_decode.kernels.attend import attend
from jax_warp_decode.kernels.dense_rows import DenseConfig, dense_rows
from jax_warp_decode.kernels.rms_norm import rms_norm
from jax_warp_decode.measure import parts, timing
from jax_warp_decode.models import Qwen3Moe, Qwen3MoeConfig
from jax_warp_decode.models.cache import RaggedCache
from jax_warp_decode.models.decode_loop import decode_tokens, generate_ragged
from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights, decode_step, prefill
from jax_warp_decode.models.sampling import sample

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
CONFIG = Qwen3MoeConfig(
    vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    max_position_embeddings=64)


STEP = jax.jit(decode_step, static_argnums=0)


@pytest.fixture(scope="module")
def module():
    return filled(lambda: Qwen3Moe(
        CONFIG, strategy="reference", dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def parts_of(module):
    return DecodeModel.of(module), DecoderWeights.from_model(module)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, CONFIG.vocab_size, size).tolist() for size in (3, 11, 1)]


def test_rows_of_different_lengths_decode_as_the_module_does_each_alone(module, parts_of, prompts):
    generation = generate_ragged(*parts_of, prompts, 7, chunk=3)
    together = np.concatenate(list(generation))
    assert together.shape == (7, 3) and [n for n, _ in generation.step_seconds] == [3, 3]
    whole = np.zeros((3, 18), np.int32)  # what follows a sequence does not change it
    for row, prompt in enumerate(prompts):
        whole[row, :len(prompt) + 7] = prompt + together[:, row].tolist()
    forward = np.asarray(nnx.jit(lambda m, t: m(t)[0])(module, whole))
    for row, prompt in enumerate(prompts):
        logits = forward[row, len(prompt) - 1:len(prompt) + 6]
        # Greedy: the chosen token has the largest logit of a full forward pass, up to rounding.
        chosen = np.take_along_axis(logits, together[:, row, None], axis=1)[:, 0]
        assert np.all(chosen >= logits.max(axis=1) - 1e-4)


@pytest.mark.parametrize("name", ["mixtral_tiny", "gpt_oss_mxfp4_tiny"])
def test_rows_of_other_families_have_the_logits_of_transformers(name):
    """Windows, sinks, YaRN and biases; prompts end on both sides of the window, 6 positions, and go on together."""
    module = load_model(FIXTURES / name, dtype=jnp.float32, strategy="reference")
    model, weights = DecodeModel.of(module), DecoderWeights.from_model(module)
    expected = np.load(FIXTURES / name / "logits.npz")
    tokens, want = expected["tokens"].astype(np.int32), expected["float32"]
    lengths = np.array([4, 12], np.int32)
    rows, padded = np.arange(2), np.where(np.arange(12) < lengths[:, None], tokens[:2, :12], 77)
    logits, cache = jax.jit(prefill, static_argnums=0)(
        model, weights, model.new_cache(2, 20), padded, jnp.asarray(lengths))
    for _ in range(4):
        np.testing.assert_allclose(logits, want[rows, lengths - 1], rtol=0, atol=1e-4)
        logits, cache = STEP(model, weights, cache, jnp.asarray(tokens[rows, lengths]))
        lengths = lengths + 1
    if name == "gpt_oss_mxfp4_tiny":
        with pytest.raises(UnsupportedError, match="'cudnn' cannot run: it knows no sliding windows and no sinks"):
            dataclasses.replace(model, attention="cudnn").new_cache(1, 8)


def test_a_full_row_and_an_unknown_token_give_nan_and_leave_the_others_alone(parts_of):
    model, weights = parts_of
    cache = dataclasses.replace(model.new_cache(3, 256), lengths=jnp.array([256, 1, 1], jnp.int32))
    logits, _ = STEP(model, weights, cache, jnp.array([1, 1, CONFIG.vocab_size], jnp.int32))
    assert np.isnan(np.asarray(logits)).all(axis=1).tolist() == [True, False, True]
    assert not np.isnan(np.asarray(logits[1])).any()


def test_steps_update_the_cache_in_place_and_say_where_every_operation_belongs(parts_of):
    model, weights = parts_of
    cache = model.new_cache(2, 64)
    step = jax.jit(decode_tokens, static_argnums=(0, 4), donate_argnums=2)
    compiled = step.lower(model, weights, cache, jnp.zeros((2,), jnp.int32), 3).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(a.nbytes for a in (*cache.k, *cache.v))
    names = set(re.findall(r'op_name="(jit[^"]*)"', compiled.as_text()))
    scopes = {"embed", "norm", "attention", "router", "experts", "head", "sample"}
    assert scopes <= {part for name in names for part in name.split("/")}
    # What else there is: the loop over steps, and constants of a layer.
    other = re.compile(r"/while(/body|/cond)?(/(jit\(dynamic_\w+\)/)?\w+)?$|jit\(_decode_layer\)$")
    assert not {name for name in names if not scopes & set(name.split("/")) and not other.search(name)}


def test_the_fused_form_of_a_step_agrees_with_xla(parts_of):
    plain, weights = parts_of  # in float32, and too narrow for `dense_rows`
    fused = dataclasses.replace(plain, attention="fused", interpret=True)
    normal = np.random.default_rng(0).normal
    lengths = np.array([3, 200, 0], np.int32)  # 200 positions lie in several splits
    first, second = (normal(size=(3, 256, 2, 32)).astype(np.float32) for _ in range(2))
    cache = RaggedCache((jnp.asarray(first),), (jnp.asarray(second),), jnp.asarray(lengths), heads_first=False)
    poisoned = [jnp.asarray(np.where((np.arange(256) < lengths[:, None])[..., None, None], a, np.nan).swapaxes(1, 2))
                for a in (first, second)]
    turned = RaggedCache((poisoned[0],), (poisoned[1],), cache.lengths, heads_first=True)
    assert fused.new_cache(3, 256).k[0].shape == turned.k[0].shape
    tokens = jnp.array([4, 9, 30], jnp.int32)
    want, stored = STEP(plain, weights, cache, tokens)
    got, written = STEP(fused, weights, turned, tokens)
    np.testing.assert_allclose(got, want, atol=1e-4)
    for a, b in ((written.k, stored.k), (written.v, stored.v)):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(a[0][row].swapaxes(0, 1)[:length + 1], b[0][row, :length + 1], atol=1e-5)
            assert np.isnan(np.asarray(a[0][row, :, length + 1:])).all(), "nothing else was written"


def attention_operands(seed, lengths, query_heads, key_heads, size, positions, dtype):
    """What `attend` takes, NaN in the cache beyond the lengths; and the attended values in float64 [B, N, D]."""
    rng, B = np.random.default_rng(seed), len(lengths)
    draw = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))
    heads, q_gain, k_gain = draw(B, query_heads + 2 * key_heads, size), draw(size), draw(size)
    angles = rng.uniform(0, 7, (B, size // 2)).astype(np.float32)
    k_cache, v_cache = (draw(B, key_heads, positions, size) for _ in range(2))
    known = (np.arange(positions) < np.array(lengths)[:, None])[:, None, :, None]
    operands = (heads, q_gain, k_gain, (np.cos(angles), np.sin(angles)), *(np.where(known, a, np.nan) for a in (
        k_cache, v_cache)), np.array(lengths, np.int32))

    def turned(a, gain):
        a = a.astype(np.float64)
        a = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * gain.astype(np.float64)
        first, second = np.split(a, 2, -1)
        cos, sin = (f(angles.astype(np.float64))[:, None] for f in (np.cos, np.sin))
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    want = np.zeros((B, query_heads, size))
    q, k_new = turned(heads[:, :query_heads], q_gain), turned(heads[:, query_heads:-key_heads], k_gain)
    for b, length in enumerate(lengths):
        for n in range(query_heads):
            head = n * key_heads // query_heads
            k = np.concatenate([k_cache[b, head, :length].astype(np.float64), k_new[b, head][None]])
            v = np.concatenate([v_cache[b, head, :length], heads[b, query_heads + key_heads + head][None]])
            scores = k @ q[b, n] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            want[b, n] = weights @ v.astype(np.float64) / weights.sum()
    return jax.tree.map(jnp.asarray, operands), want


@pytest.mark.parametrize("query_heads, key_heads, lengths, positions", [
    (12, 1, [0, 17, 900, 1024], 1024),  # 64 splits, of which rows use 1, 2, 57 and 64
    (6, 2, [7, 16], 16),  # one split; the last row is full
])
def test_attention_adds_the_parts_of_every_split(query_heads, key_heads, lengths, positions):
    operands, want = attention_operands(0, lengths, query_heads, key_heads, 32, positions, jnp.float32)
    run = jax.jit(functools.partial(attend, eps=1e-6, block=16, interpret=True))
    y, k, v = run(*operands)
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-5)
    for row, length in enumerate(lengths):  # the new value, and nothing else
        np.testing.assert_array_equal(v[row, :, :length], operands[5][row, :, :length])
        np.testing.assert_array_equal(v[row, :, length:length + 1].ravel(),
                                      operands[0][row, -key_heads:].ravel() if length < positions else [])
        assert np.isnan(np.asarray(k[row, :, length + 1:])).all()


@pytest.mark.parametrize("query_heads, size, words", [(17, 32, "17 queries per key head"), (4, 48, "head_dim 48")])
def test_attention_refuses_heads_that_its_kernel_cannot_take(query_heads, size, words):
    operands, _ = attention_operands(0, [3], query_heads, 1, size, 16, jnp.float32)
    with pytest.raises(UnsupportedError, match=f"^heads: got {words}, expected"):
        attend(*operands, eps=1e-6, block=16, interpret=True)


@pytest.mark.parametrize("tokens, size, config", [
    (1, 512, None), (3, 512, None),
    (2, 768, DenseConfig(rows=2, unroll=2)),  # three steps: one is left over
])
def test_dense_rows_is_the_exact_product_rounded_once(tokens, size, config):
    rng = np.random.default_rng(tokens)
    x, delta, w, gain = (jnp.asarray(rng.normal(size=s), jnp.bfloat16)
                         for s in ((tokens, size), (tokens, size), (16, size), (size,)))
    residual = jnp.asarray(rng.normal(size=(tokens, 16)), jnp.bfloat16)
    wide = [np.asarray(a, np.float64) for a in (x, delta, w, gain, residual)]
    total = wide[0] + wide[1]
    scaled = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * wide[3]
    got = dense_rows((x, delta), w, gain=gain, residuals=(residual,), out_dtype=jnp.float32, config=config,
                     interpret=True)
    # float32 sums: each addition rounds by 2^-24 of a partial sum of at most the sum of magnitudes.
    bound = size * 2.0**-23 * (np.abs(scaled) @ np.abs(wide[2]).T + np.abs(wide[4]))
    assert np.all(np.abs(np.asarray(got) - (scaled @ wide[2].T + wide[4])) <= bound)


def test_rms_norm_of_an_odd_size():
    x, delta, gain = np.random.default_rng(0).normal(size=(3, 2, 48)).astype(np.float32)
    total = x.astype(np.float64) + delta
    want = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * gain[0]
    got = rms_norm((jnp.asarray(x), jnp.asarray(delta)), jnp.asarray(gain[0]), eps=1e-6, interpret=True)
    # A sum of two that cancels keeps the rounding of its terms.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probabilities = np.array([0.05, 0.4, 0.25, 0.2, 0.1])
    logits = jnp.asarray(np.log(probabilities), jnp.float32)[None]

    @jax.jit
    def draw(top_p):
        return sample(jnp.broadcast_to(logits, (4000, 5)), jax.random.key(5), jnp.float32(1), top_p)

    for top_p, kept in ((0.3, [1]), (0.6, [1, 2]), (0.7, [1, 2, 3]), (1.0, [0, 1, 2, 3, 4])):
        want = np.zeros(5)
        want[kept] = probabilities[kept] / probabilities[kept].sum()
        # Five standard deviations of a share of 4000 draws.
        seen = np.bincount(draw(jnp.float32(top_p)), minlength=5) / 4000
        assert np.all(np.abs(seen - want) <= 5 * np.sqrt(want * (1 - want) / 4000) + 1e-9)
    assert sample(jnp.array([[1.0, 3.0, 3.0]])).tolist() == [1]


@pytest.mark.parametrize(("change", "words"), [
    (dict(prompts=[]), ["prompts", "none"]),
    (dict(prompts=[[1], []]), ["prompts[1]", "at least one"]),
    (dict(prompts=None), ["prompts", "NoneType", "sequence"]),
    (dict(prompts=[[1, [2]]]), ["prompts", "list", "sequence"]),
    (dict(prompts=[[256]]), ["prompts[0]", "id 256", "< 256"]),
    (dict(max_new_tokens=0), ["max_new_tokens", "0", "at least 1"]),
    (dict(max_new_tokens=63), ["max_new_tokens", "at most 62", "is 64"]),
    (dict(max_len=4), ["max_len", "4", "11"]),
    (dict(top_p=0.5), ["top_p", "temperature 0"]),
    (dict(top_p=1.5, temperature=1.0, rng=jax.random.key(0)), ["top_p", "1.5"]),
    (dict(top_p="0.5", temperature=1.0, rng=jax.random.key(0)), ["top_p", "'0.5'", "a number"]),
    # Which float32 does not have: as 0 it would keep no token, and the first would be drawn every time.
    (dict(top_p=1e-50, temperature=1.0, rng=jax.random.key(0)), ["top_p", "1e-50", "1.18e-38"]),
    (dict(temperature=1.0), ["rng", "None"]),
    (dict(chunk=0), ["chunk", "0"]),
    (dict(chunk=2.5), ["chunk", "2.5", "a static integer"]),
    (dict(max_len="64"), ["max_len", "'64'", "a static integer"]),
    (dict(temperature="warm"), ["temperature", "'warm'", "a number"]),
    (dict(temperature=1e39, rng=jax.random.key(0)), ["temperature", "1e+39", "3.4e+38"]),
    (dict(temperature=1.0, rng=0), ["rng", "int", "jax.random.key"]),
    (dict(rng=jax.random.key(0)), ["rng", "a key", "temperature 0"]),
])
def test_bad_arguments_raise_before_anything_runs(parts_of, change, words):
    arguments = dict(prompts=[[1, 2], [3]], max_new_tokens=9) | change
    with pytest.raises(ArgumentError) as error:
        generate_ragged(*parts_of, arguments.pop("prompts"), arguments.pop("max_new_tokens"), **arguments)
    assert all(word in str(error.value) for word in words), error.value


def test_the_generate_command_continues_several_prompts_at_once(module, tmp_path):
    save_qwen3_moe(module, tmp_path)  # a vocabulary of 256 is bytes
    parser = argparse.ArgumentParser()
    generate_command.add_arguments(parser)
    console = Console(file=io.StringIO(), width=200)
    words = ["--prompt", "The with", "--prompt", "Return a new list of", "--max-new-tokens", "6"]
    options = parser.parse_args([*words, "--checkpoint", str(tmp_path), "--strategy", "reference"])
    generate_command.run(options, console)
    both = console.file.getvalue()
    assert both.startswith("[1] The with") and "tokens/s per prompt" in both
    assert "2 prompts of 8 tokens, 20 tokens: first token after" in both
    added = re.search(r"^\[2\] Return a new list of(.+)$", both, re.MULTILINE)[1]
    assert len(added) == 6

    # The same again, with a byte of the second text as the end of every text.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord(added[3])]}))
    console = Console(file=io.StringIO(), width=200)
    generate_command.run(options, console)
    kept = added[:added.index(added[3])]
    assert re.search(rf"^\[2\] Return a new list of{re.escape(kept)}$", console.file.getvalue(), re.MULTILINE)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match="generation_config.json: got eos_token_id '</s>'"):
        generate_command.run(options, console)


def test_the_profile_command_needs_a_gpu():
    parser = argparse.ArgumentParser()
    profile_command.add_arguments(parser)
    with pytest.raises(UnsupportedError, match="no NVIDIA GPU"):
        profile_command.run(parser.parse_args([]), Console(file=io.StringIO()))


def test_time_goes_to_the_part_that_a_kernel_belongs_to():
    hlo = """
      %loop_add_fusion.3 = bf16[1,64]{1,0} fusion(%a), kind=kLoop, metadata={op_name="jit(f)/jit(g)/norm/add"}
      ROOT %gemm_fusion_dot.7 = f32[1,48]{1,0} fusion(%b), metadata={op_name="jit(f)/head/dot_general" id=3}
    """
    scopes = parts.kernel_scopes(hlo)
    names = ["moe_router_mosaic_gpu_kernel", "moe_gate_up_3d_batched_x", "moe_down_3d_batched_x", "loop_add_fusion_3",
             "gemm_fusion_dot_7", "head_dense_rows_mosaic_gpu_kernel", "dense_rows_mosaic_gpu_kernel", "mystery"]
    events = [timing.Event(name, 10_000 * i, 10_000 * i + 8_000) for i, name in enumerate(names)]
    found = parts.split_parts(events, scopes, steps=2)
    assert {name: part.us for name, part in found.items()} == pytest.approx(dict(
        router=4, gate_up=4, down=4, norm=4, head=8, projections=4, other=4, gaps=7))
    assert found["head"].kernels == 1 and list(found["norm"].names) == ["loop_add_fusion_3"]
    rendered = Console(file=io.StringIO(), width=150)
    rendered.print(profile_command.table(found, dict(head=8e6), ceiling=4e6, layers=1))
    assert "25%" in rendered.file.getvalue(), "8 MB in 8 us is a quarter of 4 TB/s"
