"""Blocks of published models on the GPU, by whatever strategy `auto` takes there, against transformers' outputs."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jax_warp_decode.checkpoints import load_model, load_moe_blocks

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 24])
@pytest.mark.parametrize("name", ["qwen3_next_tiny", "qwen3_5_moe_tiny", "deepseek_v3_tiny", "minimax_m3_tiny"])
def test_blocks(name, tokens):
    """The fixtures' x is exact in bfloat16; what is left is the rounding of bfloat16 activations."""
    expected = np.load(FIXTURES / name / "blocks.npz")
    for n, block in load_moe_blocks(FIXTURES / name).items():
        y = np.asarray(block(jnp.asarray(expected["x"][:tokens], jnp.bfloat16)), np.float32)
        want = expected[f"y{n}"][:tokens]
        assert np.linalg.norm(y - want) / np.linalg.norm(want) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral_tiny", "gpt_oss_tiny", "gpt_oss_mxfp4_tiny"])
def test_decoders(name):
    """As on the CPU: about 16 roundings to bfloat16 a layer, two layers."""
    expected = np.load(FIXTURES / name / "logits.npz")
    logits, _ = load_model(FIXTURES / name)(jnp.asarray(expected["tokens"]))
    error = np.linalg.norm(np.asarray(logits) - expected["float32"]) / np.linalg.norm(expected["float32"])
    assert error < 2.0**-8 * ((16 * 2 + 2) / 3) ** 0.5
