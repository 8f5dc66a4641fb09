"""The examples without the libraries that they run on: stand-ins with those libraries' layouts, against NumPy.

Both examples check themselves against the real libraries when they are run.
"""

import importlib.util
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from flax import linen as nn

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
E, K, H, I = 4, 2, 32, 64


def load(name, monkeypatch, **modules):
    """An example as a module, with modules that stand in for its imports."""
    for path, content in modules.items():
        parts = path.split(".")
        for parent in (".".join(parts[:i]) for i in range(1, len(parts))):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, types.ModuleType(parent)))
        monkeypatch.setitem(sys.modules, path, content)
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], content)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_tunix_block_becomes_a_layer(monkeypatch):
    any_class = type("Any", (), {})
    tunix = load("tunix_qwen3_moe", monkeypatch, **{"tunix.models.qwen3.model": types.SimpleNamespace(
        MoELayer=any_class, Qwen3=any_class, ModelConfig=any_class)})
    rng = np.random.default_rng(0)
    x, router = rng.standard_normal((3, H)), rng.standard_normal((H, E))
    gate, up, down = (rng.standard_normal(shape) / 8 for shape in ((E, H, I), (E, H, I), (E, I, H)))
    param = lambda a: types.SimpleNamespace(get_value=lambda: jnp.asarray(a, jnp.float32))
    block = types.SimpleNamespace(
        gate_proj=param(gate), up_proj=param(up), down_proj=param(down), experts_per_tok=K, dtype=jnp.float32,
        router=types.SimpleNamespace(kernel=param(router)))
    scores = softmax(x @ router)
    chosen = np.argsort(-scores, axis=1)[:, :K]
    weights = np.take_along_axis(scores, chosen, 1)
    weights /= weights.sum(1, keepdims=True)
    silu = lambda a: a * oracle.sigmoid(a)
    want = np.stack([sum(w * ((silu(t @ gate[e]) * (t @ up[e])) @ down[e]) for w, e in zip(ws, es, strict=True))
                     for t, ws, es in zip(x, weights, chosen, strict=True)])
    got = jax.jit(lambda x: tunix.ours(block)(x))(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


class MoERagged(nn.Module):
    """What the example uses of Gemma's block."""

    num_experts: int = E
    features: int = H
    hidden_dim: int = I

    def setup(self):
        self.per_expert_scale = self.param("per_expert_scale", nn.initializers.ones, (self.num_experts,))


def test_a_gemma_block_with_our_experts(monkeypatch):
    names = ("_config", "_modules", "_moe", "_transformer")
    gemma = load("gemma4_moe", monkeypatch, **{f"gemma.gm.nn.gemma4.{name}": types.SimpleNamespace(
        MoERagged=MoERagged) for name in names})
    rng = np.random.default_rng(1)
    x, probabilities = rng.standard_normal((1, 3, H)), softmax(rng.standard_normal((1, 3, E)))
    gate_up, down, scale = rng.standard_normal((E, 2, I, H)) / 8, rng.standard_normal((E, I, H)) / 8, rng.random(E)
    chosen = np.argsort(-probabilities, axis=-1)[..., :K]
    params = gemma.convert({"layer": {"per_expert_scale": jnp.asarray(scale, jnp.float32), "gating_einsum": {
        "w": jnp.asarray(gate_up, jnp.float32)}, "linear": {"w": jnp.asarray(down, jnp.float32)}}})["layer"]
    assert set(params) == {"per_expert_scale", "w_gate", "w_up", "w_down"}
    gelu = lambda a: 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
    want = np.zeros((3, H))
    for t in range(3):
        for e in chosen[0, t]:
            h = gelu(gate_up[e, 0] @ x[0, t]) * (gate_up[e, 1] @ x[0, t])
            want[t] += probabilities[0, t, e] * scale[e] * (h @ down[e])
    run = jax.jit(lambda params, x, chosen, probabilities: gemma.WarpMoE().apply(
        {"params": params}, x, chosen, probabilities, method="_run_ffw_and_routing"))
    got = run(params, jnp.asarray(x, jnp.float32), jnp.asarray(chosen), jnp.asarray(probabilities, jnp.float32))
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)
