"""Writes the tiny Qwen3-MoE checkpoints and logits that tests/test_model.py compares with.

Needs torch and transformers 5 (any device; the arithmetic runs on the CPU unless `--device cuda` is given):

    python bench/make_parity_fixture.py tests/fixtures

Each folder holds a random `Qwen3MoeForCausalLM` as `save_pretrained` leaves it, in bfloat16, and `logits.npz`:
tokens [B, S] int32, and the logits [B, S, V] of the same weights evaluated by transformers in float32 and in bfloat16.
A seed is taken only if the choice of experts is clear-cut (see `MARGIN`), so that no rounding can flip it and a
comparison of logits measures arithmetic, not luck.
"""

import argparse
import json
import pathlib
import shutil

import numpy as np
import torch
import transformers

COMMON = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, max_position_embeddings=64)
FIXTURES = {
    "qwen3_moe_tiny": dict(moe_intermediate_size=96, norm_topk_prob=True, tie_word_embeddings=False,
                           rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3_moe_tiny_tied": dict(moe_intermediate_size=64, norm_topk_prob=False, tie_word_embeddings=True,
                                attention_bias=True,
                                rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}
BATCH, LENGTH = 2, 16
MARGIN = 0.05  # least distance between the last chosen and the first rejected router logit, in float32
FILES = ("config.json", "model.safetensors")


def random_model(options: dict, seed: int) -> torch.nn.Module:
    """A model whose every weight matters: wide random matrices and norm scales away from 1."""
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**COMMON, **options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif weight.ndim == 1 or "embed_tokens" in name:
                weight.normal_(std=0.5)
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5 * (3 if name.endswith("mlp.gate.weight") else 1))
    return model.to(torch.bfloat16)


def evaluate(folder: pathlib.Path, tokens: np.ndarray, dtype: torch.dtype, device: str):
    """Logits [B, S, V] and router logits [L][B*S, E] of the saved folder, as float32 numpy arrays."""
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager").to(device).eval()
    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long().to(device), output_router_logits=True, use_cache=False)
    return out.logits.float().cpu().numpy(), [r.float().cpu().numpy() for r in out.router_logits]


def clear_cut(full: list[np.ndarray], half: list[np.ndarray], k: int) -> bool:
    ordered = [np.sort(r, axis=-1)[:, ::-1] for r in full]
    margin = min((r[:, k - 1] - r[:, k]).min() for r in ordered)
    chosen = [[set(row) for row in np.argsort(-r, axis=-1)[:, :k]] for layers in (full, half) for r in layers]
    return margin > MARGIN and chosen[:len(full)] == chosen[len(full):]


def write_fixture(name: str, out: pathlib.Path, device: str) -> None:
    folder = out / name
    for seed in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        random_model(FIXTURES[name], seed).save_pretrained(folder)
        tokens = np.random.default_rng(seed).integers(0, COMMON["vocab_size"], (BATCH, LENGTH), np.int32)
        float32, routers32 = evaluate(folder, tokens, torch.float32, device)
        bfloat16, routers16 = evaluate(folder, tokens, torch.bfloat16, device)
        if clear_cut(routers32, routers16, COMMON["num_experts_per_tok"]):
            break
    else:
        raise SystemExit(f"{name}: no seed below 1000 has a router margin of {MARGIN}")
    for path in folder.iterdir():
        if path.name not in FILES:
            path.unlink()
    np.savez_compressed(folder / "logits.npz", tokens=tokens, float32=float32, bfloat16=bfloat16)
    source = {"seed": seed, "device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n")
    error = np.linalg.norm(bfloat16 - float32) / np.linalg.norm(float32)
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{name}: {source}, logits std {float32.std():.3f}, bf16 relative error {error:.2e}, {size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="directory that receives one folder a fixture")
    parser.add_argument("--device", default="cpu", help="torch device for the arithmetic (default: cpu)")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in FIXTURES:
        write_fixture(name, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
