"""Swaps the MoE blocks of google-tunix's Qwen3 model (Flax NNX) for ours; logits and times before and after.

    pip install . google-tunix
    python examples/tunix_qwen3_moe.py

A random model of a few layers; on a CPU it takes seconds, most of them imports. On a GPU, `--dtype bfloat16 --large`
has layers of the size of Qwen3-30B-A3B.
"""

import argparse
import time

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3

from jax_warp_decode import ExpertWeights
from jax_warp_decode.layers import MoE


def ours(block: qwen3.MoELayer) -> MoE:
    """Our layer with the weights of a tunix block, which keeps them as [E, in, out]."""
    w_gate, w_up, w_down = (p.get_value().swapaxes(1, 2) for p in (block.gate_proj, block.up_proj, block.down_proj))
    return MoE.from_weights(block.router.kernel.get_value().T, ExpertWeights(w_gate, w_up, w_down),
                            block.experts_per_tok, dtype=block.dtype)


def make_model(dtype, large: bool) -> qwen3.Qwen3:
    sizes = dict(embed_dim=64, hidden_dim=32, num_heads=4, head_dim=16, num_kv_heads=2, num_experts=16,
                 num_experts_per_tok=4)
    if large:
        sizes = dict(embed_dim=2048, hidden_dim=768, num_heads=32, head_dim=128, num_kv_heads=4, num_experts=128,
                     num_experts_per_tok=8)
    config = qwen3.ModelConfig(num_layers=2, vocab_size=512, rope_theta=1_000_000, norm_eps=1e-6, dtype=dtype,
                               param_dtype=dtype, **sizes)
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    for layer in model.layers:  # initialised with a deviation of 0.01, experts hardly count
        for p in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            p.set_value(p.get_value() * 10)
    return model


@jax.jit
def logits(model, tokens):
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    return model(tokens, positions, None, mask)[0]


def timed(model, tokens, repeat=5):
    """The logits and the best time of a call that is compiled, in milliseconds."""
    out = jax.block_until_ready(logits(model, tokens))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(logits(model, tokens))
        times.append(time.perf_counter() - start)
    return out, 1e3 * min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--large", action="store_true", help="layers of the size of Qwen3-30B-A3B")
    options = parser.parse_args()
    model = make_model(jnp.dtype(options.dtype), options.large)
    tokens = jax.random.randint(jax.random.key(1), (4, 2), 0, 512)

    before, before_ms = timed(model, tokens)
    for layer in model.layers:
        layer.mlp = ours(layer.mlp)
    after, after_ms = timed(model, tokens)

    difference = float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))
    print(f"{jax.devices()[0].device_kind}, {options.dtype}, {tokens.size} tokens")
    print(f"tunix: {before_ms:.2f} ms, logits {[round(float(v), 4) for v in before[0, -1, :4]]}")
    print(f"ours:  {after_ms:.2f} ms, logits {[round(float(v), 4) for v in after[0, -1, :4]]}")
    print(f"relative difference {difference:.1e}")
    print(f"experts ran by {model.layers[0].mlp.explain(tokens.size)}")
    if difference > {"float32": 1e-5, "bfloat16": 3e-2}[options.dtype]:
        raise SystemExit("the logits differ by more than rounding")


if __name__ == "__main__":
    main()
