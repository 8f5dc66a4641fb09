"""What `auto` takes for small layers, warns of, and refuses. How well it orders measured times: tests/test_bench.py."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest

from jax_warp_decode import ArgumentError, ExpertWeights, UnsupportedError, choose, demo, explain, quantize
from jax_warp_decode.checkpoints import load_moe_blocks
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared

explain_module = importlib.import_module("jax_warp_decode.explain")  # its function has the same name
W = jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16)
EXPERTS = ExpertWeights(W, W, W)
DENSE = {"f16": jnp.float16, "f32": jnp.float32}


def as_on_a_gpu(experts, tokens, k):
    return choose(tokens, experts, experts_per_token=k, x_dtype=jnp.bfloat16, interpret=True).strategy


@pytest.mark.parametrize("format", ["bf16", *FORMATS])
def test_small_layers_decode_with_the_kernels(format):
    """What widens all experts takes launches too, so that little weight is no reason for it."""
    w = jax.ShapeDtypeStruct((16, 256, 256), jnp.bfloat16)
    experts = ExpertWeights(w, w, w)
    if format != "bf16":
        experts = jax.eval_shape(lambda e: e.quantize(format), experts)
    assert {as_on_a_gpu(experts, tokens, 4) for tokens in (1, 2, 4, 8, 16, 32)} <= {"warp_decode", "shared_decode"}


def test_the_bundled_model_decodes_with_the_kernels():
    blocks = load_moe_blocks(demo.bundled_model("mxfp8"))
    assert {as_on_a_gpu(block.experts, 1, 4) for block in blocks.values()} == {"warp_decode"}


@pytest.mark.parametrize("changed,message", [
    (dict(tokens=-1), "tokens: got -1, expected at least 0"),
    (dict(tokens=1.5), "tokens: got 1.5"),
    (dict(experts_per_token=0), "experts_per_token: got 0, expected at least 1"),
    (dict(x_dtype="float64"), "x_dtype: got 'float64', expected a floating dtype, bfloat16, float16 or float32"),
    (dict(x_dtype="float8_e4m3fn"), "x_dtype: got 'float8_e4m3fn'"),
    (dict(x_dtype=None), "x_dtype: got None"),
    (dict(experts=W), "experts: got ShapeDtypeStruct, expected ExpertWeights"),
    (dict(experts=dataclasses.replace(EXPERTS, w_up=None)), "experts.w_up: got None"),
    (dict(experts=dataclasses.replace(EXPERTS, w_down=jax.ShapeDtypeStruct((3, 128, 64), jnp.bfloat16))),
     "experts.w_down: got shape"),
    (dict(experts=dataclasses.replace(EXPERTS, w_gate=jax.ShapeDtypeStruct((8, 64, 64), jnp.float32))),
     "experts: got mixed formats"),
    (dict(experts=EXPERTS.map(lambda w: jax.ShapeDtypeStruct((0, 64, 64), w.dtype))), "expected at least one expert"),
    (dict(experts=EXPERTS.map(lambda w: jax.ShapeDtypeStruct((64, 64), w.dtype))), r"experts.w_gate: got shape \(64"),
    (dict(experts=EXPERTS.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.int8))), "experts.w_gate: got dtype int8"),
    (dict(strategy="fast"), "strategy: got 'fast'")])
def test_what_moe_refuses_has_no_choice(changed, message):
    arguments = dict(tokens=1, experts=EXPERTS, experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True) | changed
    with pytest.raises(ArgumentError, match=message):
        choose(arguments.pop("tokens"), arguments.pop("experts"), **arguments)


def stored(E, H, I, format):
    up, down = (jax.ShapeDtypeStruct((E, *s), DENSE.get(format, jnp.bfloat16)) for s in ((I, H), (H, I)))
    experts = ExpertWeights(up, up, down)
    return jax.eval_shape(lambda e: e.quantize(format), experts) if format in FORMATS else experts


@pytest.mark.parametrize("format,T,x_dtype,strategy,warning", [
    ("bf16", 1, "bfloat16", "warp_decode", ""),
    ("bf16", 4096, "bfloat16", "expert_centric", ""),
    ("mxfp8", 4096, "bfloat16", "expert_centric", ""),  # widened in registers
    ("mxfp4", 8192, "bfloat16", "expert_centric", "bfloat16 copy of all experts in every call, 1,207,959,552 bytes"),
    ("bf16", 1, "float32", "expert_centric", "in float32 over all experts, slowly"),
    ("f32", 1, "bfloat16", "expert_centric", "bfloat16 copy of all experts"),
    ("f16", 4096, "bfloat16", "warp_decode", "the weights of an expert for each of its slots, here some 256")])
def test_auto_says_what_is_slow_or_takes_memory(format, T, x_dtype, strategy, warning):
    choice = choose(T, stored(128, 2048, 768, format), experts_per_token=8, x_dtype=x_dtype, interpret=True)
    assert choice.strategy == strategy and warning in choice.warning and bool(warning) == bool(choice.warning)
    assert choice.warning.removeprefix("which ") in str(choice)


def test_a_reason_of_auto_names_no_way_out_to_auto():
    """What to do about it stays."""
    found = choose(4096, stored(8, 96, 128, "bf16"), experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True)
    assert "shared_decode cannot run: w_gate: got [.., 128, 96]" in found.reason and "pad with zeros" in found.reason
    assert "'auto'" not in found.reason
    with pytest.raises(UnsupportedError, match="strategy='auto'"):
        choose(4096, stored(8, 96, 128, "bf16"), experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True,
               strategy="shared_decode")


@pytest.mark.parametrize("format,strategy,copies", [
    ("mxfp4", "expert_centric", True), ("mxfp4", "shared_decode", False), ("mxfp8", "expert_centric", False),
    ("bf16", "expert_centric", False), ("bf16", "reference", False)])
def test_a_copy_of_all_experts_is_told_of_a_strategy_that_was_asked_for_too(format, strategy, copies):
    choice = choose(16, stored(128, 2048, 768, format), experts_per_token=8, x_dtype=jnp.bfloat16, strategy=strategy,
                    interpret=True)
    assert choice.reason == "asked for"
    assert ("bfloat16 copy of all experts in every call, 1,207,959,552 bytes" in choice.warning) == copies
    assert bool(choice.warning) == copies and choice.copied_bytes == copies * 1_207_959_552


def test_a_symbolic_number_of_tokens_has_no_kernels():
    (tokens,) = jax.export.symbolic_shape("b")
    ask = dict(experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True)
    assert choose(tokens, EXPERTS, strategy="reference", **ask).strategy == "reference"
    for strategy in ("auto", "warp_decode", "expert_centric"):
        with pytest.raises(UnsupportedError, match="tokens: got the symbolic b, expected a number"):
            choose(tokens, EXPERTS, strategy=strategy, **ask)


def test_shared_decode_looks_at_the_scales_of_every_matrix():
    """bfloat16 scales of FP8 blocks are half as many bytes; a kernel reads one kind of them."""
    w = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16)
    experts = jax.eval_shape(lambda e: e.quantize("fp8_block128"), ExpertWeights(w, w, w))
    narrow = experts.map(lambda w: dataclasses.replace(w, scales=jax.ShapeDtypeStruct(w.scales.shape, jnp.bfloat16)))
    ask = dict(experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True)
    for same in (experts, narrow, dataclasses.replace(experts, w_down=narrow.w_down)):
        assert choose(16, same, strategy="shared_decode", **ask).strategy == "shared_decode"
    for name in ("w_gate", "w_up"):
        mixed = dataclasses.replace(experts, **{name: getattr(narrow, name)})
        assert choose(16, mixed, **ask).strategy != "shared_decode"
        with pytest.raises(UnsupportedError, match="w_up: got fp8_block128.* need fp8_block128.* as w_gate"):
            choose(16, mixed, strategy="shared_decode", **ask)


def test_the_gate_up_kernel_of_shared_decode_looks_at_both_its_matrices():
    w = quantize(jnp.ones((4, 512, 512), jnp.bfloat16), "fp8_block128")
    narrow = dataclasses.replace(w, scales=w.scales.astype(jnp.bfloat16))
    for pair in ((narrow, w), (w, narrow)):
        with pytest.raises(UnsupportedError, match="w_up: got fp8_block128.* needs fp8_block128.* as w_gate"):
            moe_gate_up_shared(jnp.ones((1, 512), jnp.bfloat16), jnp.array([[0, 1]]), *pair, interpret=True)


@pytest.mark.parametrize("format,tokens,strategy,kernels,temporary", [
    ("bf16", 1, "warp_decode", ["moe_gate_up", "moe_down"], 8 * 768 * 4),
    ("bf16", 32, "shared_decode", ["moe_gate_up_shared", "moe_down_shared"], 256 * (768 * 2 + 2048 * 4)),
    ("mxfp8", 32, "shared_decode", ["moe_gate_up_shared", "moe_down_shared"], 256 * (768 * 4 + 2048 * 4)),
    ("fp8_channel", 8192, "expert_centric", [], None)])
def test_explain_tells_configurations_and_temporaries(format, tokens, strategy, kernels, temporary):
    ask = dict(tokens=tokens, experts_per_token=8, x_dtype="bfloat16", interpret=True)
    told = explain(stored(128, 2048, 768, format), **ask)
    assert (told.choice.strategy, list(told.configs), told.temporary_bytes) == (strategy, kernels, temporary)
    assert all(name in str(told) for name in kernels) and ("temporaries: " in str(told)) == bool(temporary)


def test_explain_tells_what_the_grouped_kernels_allocate(monkeypatch):
    monkeypatch.setattr(explain_module, "capability", lambda: "9.0")
    ask = dict(tokens=4096, experts_per_token=8, x_dtype="bfloat16", interpret=True)
    told = explain(stored(128, 2048, 768, "mxfp8"), **ask)
    assert told.choice.strategy == "expert_centric"
    assert 4096 * 8 < told.temporary_bytes / 2 / (2048 + 768) < 40_000  # rows, some of them to fill up tiles
