"""Runs the experts of DeepMind's Gemma 4 (package `gemma`, Flax Linen) with ours; logits and times before and after.

    pip install . gemma
    python examples/gemma4_moe.py

Gemma normalises and scales the router's input, so its own router stays and hands ids and weights to the op `moe`.
The parameters are converted once. A random model of two layers; on a CPU, most of the time are imports.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from gemma.gm.nn.gemma4 import _config, _modules, _moe, _transformer

from jax_warp_decode import ExpertWeights, Routing, moe


class WarpMoE(_moe.MoERagged):
    """Gemma's block: its router, our experts, kept as [E, out, in]."""

    def setup(self):
        super().setup()
        up, down = ((self.num_experts, *shape) for shape in (
            (self.hidden_dim, self.features), (self.features, self.hidden_dim)))
        self.experts = ExpertWeights(*(
            self.param(name, nn.initializers.normal(), shape)
            for name, shape in (("w_gate", up), ("w_up", up), ("w_down", down))))

    def _run_ffw_and_routing(self, x, choices, probabilities):
        """x [B, L, H], choices [B, L, K] and renormalised probabilities [B, L, E] of all experts -> [B, L, H]."""
        weights = jnp.take_along_axis(probabilities, choices, axis=-1) * self.per_expert_scale[choices]
        return moe(x, Routing(choices, weights), self.experts, activation="gelu_tanh")


def convert(params):
    """Gemma's parameters with those of every block as `WarpMoE` keeps them: [E, 2, I, H] and [E, I, H] in Gemma."""
    if not isinstance(params, dict):
        return params
    if "per_expert_scale" in params:
        rest = {name: value for name, value in params.items() if name not in ("gating_einsum", "linear")}
        gate_up, down = params["gating_einsum"]["w"], params["linear"]["w"]
        return rest | dict(w_gate=gate_up[:, 0], w_up=gate_up[:, 1], w_down=down.swapaxes(1, 2))
    return {name: convert(value) for name, value in params.items()}


def make_model():
    local, everywhere = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL
    return _transformer.Transformer(dtype=jnp.float32, config=_config.TransformerConfig(
        num_embed=512, embed_dim=64, hidden_dim=96, num_heads=4, head_dim=16, num_kv_heads=2, final_logit_softcap=30.0,
        local_rope_proportion=1.0, global_rope_proportion=0.25,
        use_post_attn_norm=True, use_post_ffw_norm=True, attention_types=(local, everywhere), sliding_window_size=16,
        enable_moe=True, num_experts=16, expert_dim=32, top_k_experts=4, moe_dense_hidden_dim=96))


def timed(model, params, tokens, repeat=5):
    """The logits and the best time of a call that is compiled, in milliseconds."""
    apply = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens).logits)
    out = jax.block_until_ready(apply(params, tokens))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(apply(params, tokens))
        times.append(time.perf_counter() - start)
    return out, 1e3 * min(times)


def main():
    tokens = jax.random.randint(jax.random.key(1), (4, 2), 1, 512)
    model = make_model()
    # All random, norms and scales too, whose usual zeros and ones would hide mistakes.
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(0.5 if a.ndim == 1 else 0, 0.2, a.shape), a.dtype), shapes)

    before, before_ms = timed(model, params, tokens)
    _moe.MoERagged = WarpMoE  # what Gemma's blocks are built from
    after, after_ms = timed(make_model(), convert(params), tokens)

    difference = float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))
    print(f"{jax.devices()[0].device_kind}, {tokens.size} tokens")
    print(f"gemma: {before_ms:.2f} ms, logits {[round(float(v), 4) for v in before[0, -1, :4]]}")
    print(f"ours:  {after_ms:.2f} ms, logits {[round(float(v), 4) for v in after[0, -1, :4]]}")
    print(f"relative difference {difference:.1e}")
    if difference > 1e-5:
        raise SystemExit("the logits differ by more than rounding")


if __name__ == "__main__":
    main()
