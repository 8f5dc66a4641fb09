"""Writes the tiny checkpoints and outputs of `transformers` that tests/test_model.py and tests/test_families.py need.

Needs torch, transformers 5 and accelerate (any device; the arithmetic runs on the CPU unless `--device cuda` is given):

    python bench/make_parity_fixture.py tests/fixtures

Each folder holds a random model as `save_pretrained` leaves it, in bfloat16 (or the format that the family publishes).
Decoders (`LOGITS`) come with `logits.npz`: tokens [B, S] int32, and the logits [B, S, V] of the same weights evaluated
by transformers in float32 and in bfloat16. The others (`BLOCKS`) keep only the tensors of their blocks of experts
and come with `blocks.npz`: x [T, H], and for each layer n the block's output `y{n}` [T, H] in float32.

A seed is taken only if the choice of experts is clear-cut (see `MARGIN`), so that no rounding can flip it and a
comparison measures arithmetic, not luck.
"""

import argparse
import json
import pathlib
import shutil

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

ATTENTION = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=128)
QWEN3 = dict(ATTENTION, intermediate_size=128, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
             max_position_embeddings=64)
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=2.0, beta_slow=0.25, truncate=False,
            original_max_position_embeddings=32)
LOGITS = {  # name -> model class, config class, options
    "qwen3_moe_tiny": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(
        QWEN3, moe_intermediate_size=96, norm_topk_prob=True, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen3_moe_tiny_tied": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(
        QWEN3, moe_intermediate_size=64, norm_topk_prob=False, tie_word_embeddings=True, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    "mixtral_tiny": ("MixtralForCausalLM", "MixtralConfig", dict(
        ATTENTION, intermediate_size=96, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=6, max_position_embeddings=64)),
    "gpt_oss_tiny": ("GptOssForCausalLM", "GptOssConfig", dict(
        ATTENTION, intermediate_size=96, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=6, max_position_embeddings=128, rope_parameters=YARN)),
    "gpt_oss_mxfp4_tiny": ("GptOssForCausalLM", "GptOssConfig", dict(
        ATTENTION, intermediate_size=96, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=6, max_position_embeddings=128, rope_parameters=YARN)),
}
BLOCKS = {
    "qwen3_next_tiny": ("Qwen3NextForCausalLM", "Qwen3NextConfig", dict(
        QWEN3, moe_intermediate_size=32, shared_expert_intermediate_size=64, **LINEAR)),
    "qwen3_5_moe_tiny": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", dict(
        ATTENTION, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, **LINEAR)),
    "deepseek_v3_tiny": ("DeepseekV3ForCausalLM", "DeepseekV3Config", dict(
        hidden_size=256, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=128, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8)),
    "minimax_m3_tiny": ("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", dict(
        ATTENTION, intermediate_size=96, dense_intermediate_size=64, shared_intermediate_size=64, num_hidden_layers=2,
        num_local_experts=8, num_experts_per_tok=2, rotary_dim=16, mlp_layer_types=["dense", "sparse"],
        routed_scaling_factor=2.0)),
}
BATCH, LENGTH, TOKENS = 2, 16, 24
MARGIN = 0.02  # least distance between the last chosen and the first rejected score, in float32
FILES = ("config.json", "model.safetensors")
MX_BLOCK, FP8_BLOCK, E4M3_MAX = 32, 128, 448.0


def random_model(kind: str, config: str, options: dict, seed: int) -> torch.nn.Module:
    """A model whose every weight matters: wide random matrices and norm scales away from 1."""
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if not weight.is_floating_point() or "inv_freq" in name:
                continue
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif weight.ndim == 1 or "embed_tokens" in name or name.endswith("_bias"):
                weight.normal_(std=0.1 if "correction" in name else 0.5)
            else:
                transposed = weight.ndim == 3 and "GptOss" in kind
                inputs = weight.shape[-2 if transposed else -1]
                weight.normal_(std=inputs ** -0.5 * (3 if name.endswith(("gate.weight", "router.weight")) else 1))
    return model.to(torch.bfloat16)


def load(kind: str, folder: pathlib.Path, dtype: torch.dtype, device: str) -> torch.nn.Module:
    model = getattr(transformers, kind).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager").to(device).eval()
    for weight in model.parameters():  # dequantised MXFP4 comes as bfloat16 whatever was asked for
        weight.data = weight.data.to(dtype)
    return model


def scores_of(model: torch.nn.Module, run) -> list[torch.Tensor]:
    """What every router of the model chose by, [T, E] for each, while `run()` ran."""
    found, hooks = [], []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            def keep(module, args, out):
                bias = getattr(module, "e_score_correction_bias", None)
                found.append(out[0].float() if bias is None else out[0].float().sigmoid() + bias.float())
            hooks.append(module.register_forward_hook(keep))
    run()
    for hook in hooks:
        hook.remove()
    return found


def clear_cut(full: list[torch.Tensor], half: list[torch.Tensor], k: int) -> bool:
    ordered = [torch.sort(scores, dim=-1, descending=True)[0] for scores in full]
    margin = min((scores[:, k - 1] - scores[:, k]).min().item() for scores in ordered)
    chosen = [[set(row.tolist()) for row in scores.topk(k).indices] for scores in (*full, *half)]
    return margin > MARGIN and chosen[:len(full)] == chosen[len(full):]


def write_logits(name: str, out: pathlib.Path, device: str) -> None:
    kind, config, options = LOGITS[name]
    folder = out / name
    for seed in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        random_model(kind, config, options, seed).save_pretrained(folder)
        rewrite(name, folder)
        tokens = np.random.default_rng(seed).integers(0, options["vocab_size"], (BATCH, LENGTH), np.int32)
        logits, scores = {}, {}
        for dtype in ("float32", "bfloat16"):
            model = load(kind, folder, getattr(torch, dtype), device)
            with torch.no_grad():
                scores[dtype] = scores_of(model, lambda: logits.update({dtype: model(  # noqa: B023
                    torch.from_numpy(tokens).long().to(device), use_cache=False).logits.float().cpu().numpy()}))
        if clear_cut(scores["float32"], scores["bfloat16"], options["num_experts_per_tok"]):
            break
    else:
        raise SystemExit(f"{name}: no seed below 1000 has a router margin of {MARGIN}")
    keep_only(folder)
    np.savez_compressed(folder / "logits.npz", tokens=tokens, **logits)
    note(folder, seed, device)
    error = np.linalg.norm(logits["bfloat16"] - logits["float32"]) / np.linalg.norm(logits["float32"])
    print(f"{name}: seed {seed}, std {logits['float32'].std():.3f}, bf16 relative error {error:.2e}, {size(folder)}")


def write_blocks(name: str, out: pathlib.Path, device: str) -> None:
    kind, config, options = BLOCKS[name]
    folder = out / name
    k = options["num_experts_per_tok"]
    for seed in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        random_model(kind, config, options, seed).save_pretrained(folder)
        rewrite(name, folder)
        x = torch.randn(TOKENS, options["hidden_size"]).bfloat16().float()
        outputs = {}
        model = load(kind, folder, torch.float32, device)
        blocks = {n: layer.mlp for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
        with torch.no_grad():
            scores = scores_of(model, lambda: outputs.update({  # noqa: B023
                f"y{n}": block(x[None].to(device))[0].cpu().numpy() for n, block in blocks.items()}))  # noqa: B023
        if "deepseek" in name:  # groups: what is chosen by is masked inside the router; a margin everywhere is enough
            clear = all((torch.sort(s, dim=-1)[0].diff(dim=-1) > MARGIN / 20).all() for s in scores)
        else:
            clear = clear_cut(scores, scores, k)
        if clear:
            break
    else:
        raise SystemExit(f"{name}: no seed below 1000 has a router margin of {MARGIN}")
    keep_only(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if any(f".{n_moe}.mlp." in n for n_moe in blocks)}
    if name == "minimax_m3_tiny":
        tensors, config = publish_minimax(tensors, json.loads((folder / "config.json").read_text()))
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(folder / "blocks.npz", x=x.numpy(), **outputs)
    note(folder, seed, device)
    scale = {n: round(float(y.std()), 3) for n, y in outputs.items()}
    print(f"{name}: seed {seed}, std {scale}, {size(folder)}")


# ------------------------------------------------------------------------------------------------ published formats


def rewrite(name: str, folder: pathlib.Path) -> None:
    """Brings a folder into the form that the family publishes: fused experts, FP8 in blocks, or MXFP8."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if name == "qwen3_5_moe_tiny":
        tensors = fuse(tensors)
    elif name == "deepseek_v3_tiny":
        tensors = {k: v for n, t in tensors.items() for k, v in (
            fp8_blocks(n, t) if ".mlp." in n and n.endswith("_proj.weight") else {n: t}).items()}
        config["quantization_config"] = dict(
            quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[FP8_BLOCK, FP8_BLOCK],
            dequantize=True, modules_to_not_convert=["self_attn", "lm_head", "mlp.gate"])
    elif name == "minimax_m3_tiny":
        rounded = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj", ".mlp.shared_experts.gate_up_proj.weight",
                   ".mlp.shared_experts.down_proj.weight")
        tensors = {n: mxfp8_rounded(t) if n.endswith(rounded) else t for n, t in tensors.items()}
    elif name == "gpt_oss_mxfp4_tiny":
        tensors = {k: v for n, t in tensors.items() for k, v in (
            mxfp4(n, t) if n.endswith(("gate_up_proj", "down_proj")) else {n: t}).items()}
        config["quantization_config"] = dict(
            quant_method="mxfp4", dequantize=True,
            modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"])
    else:
        return
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def mxfp4(name: str, weight: torch.Tensor) -> dict:
    """[E, in, out] to E2M1 nibbles, the low one first, [E, out, in / 32, 16], with an E8M0 byte for 32 elements."""
    blocks = weight.transpose(1, 2).float().reshape(weight.shape[0], weight.shape[2], -1, MX_BLOCK)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = ((blocks / 2.0 ** exponent).abs()[..., None] - grid).abs().argmin(-1) + 8 * (blocks < 0)
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {f"{name}_blocks": packed, f"{name}_scales": (exponent[..., 0] + 127).to(torch.uint8)}


def fuse(tensors: dict) -> dict:
    """One tensor for the gate and up projections of all experts, one for the down projections."""
    out, layers = {}, {n.split(".mlp.experts.")[0] for n in tensors if ".mlp.experts." in n}
    for layer in layers:
        if f"{layer}.mlp.experts.gate_up_proj" in tensors:
            continue
        count = sum(n.startswith(f"{layer}.mlp.experts.") for n in tensors) // 3
        part = {p: torch.stack([tensors[f"{layer}.mlp.experts.{e}.{p}_proj.weight"] for e in range(count)])
                for p in ("gate", "up", "down")}
        out[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat([part["gate"], part["up"]], dim=1)
        out[f"{layer}.mlp.experts.down_proj"] = part["down"]
    kept = {n: t for n, t in tensors.items()
            if ".mlp.experts." not in n or n.endswith(("gate_up_proj", "down_proj"))}
    return kept | out


def fp8_blocks(name: str, weight: torch.Tensor) -> dict:
    """E4M3 with a float32 scale for 128 x 128 elements. transformers takes no partial blocks beside whole ones."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK)
            scales[i, j] = weight[at].float().abs().max() / E4M3_MAX
            values[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scales}


def mxfp8(name: str, weight: torch.Tensor) -> dict:
    """E4M3 with an E8M0 byte for 32 elements of a row."""
    blocks = weight.float().reshape(*weight.shape[:-1], -1, MX_BLOCK)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 8
    values = (blocks / 2.0 ** exponent).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).reshape(weight.shape)
    return {name: values, f"{name}_scale_inv": (exponent[..., 0] + 127).to(torch.uint8)}


def mxfp8_rounded(weight: torch.Tensor) -> torch.Tensor:
    """What `mxfp8` stores, as bfloat16, which holds it exactly; storing that once more changes nothing."""
    values, scales = mxfp8("", weight).values()
    blocks = values.float().reshape(*scales.shape, MX_BLOCK) * 2.0 ** (scales.float()[..., None] - 127)
    return blocks.reshape(weight.shape).bfloat16()


def publish_minimax(tensors: dict, config: dict) -> tuple[dict, dict]:
    """Names, split and config.json of the published folder, from those of the text model in transformers."""
    out = {}
    for name, t in tensors.items():
        name = f"language_model.{name}".replace(".mlp.", ".block_sparse_moe.")
        name = name.replace(".gate.e_score", ".e_score")
        base = name.rpartition(".experts.")[0]
        if name.endswith(".experts.gate_up_proj"):
            for e, fused in enumerate(t):
                for w, half in zip(("w1", "w3"), fused.chunk(2), strict=True):
                    out |= mxfp8(f"{base}.experts.{e}.{w}.weight", half)
        elif name.endswith(".experts.down_proj"):
            out |= {k: v for e, w2 in enumerate(t) for k, v in mxfp8(f"{base}.experts.{e}.w2.weight", w2).items()}
        elif name.endswith(".shared_experts.gate_up_proj.weight"):
            for w, half in zip(("gate_proj", "up_proj"), t.chunk(2), strict=True):
                out |= mxfp8(name.replace("gate_up_proj", w), half)
        elif name.endswith(".shared_experts.down_proj.weight"):
            out |= mxfp8(name, t)
        elif ".block_sparse_moe." in name:
            out[name] = t.float()  # router and its bias
    layers = [int(kind == "sparse") for kind in config.pop("mlp_layer_types")]
    quantised = dict(quant_method="mxfp8", activation_scheme="dynamic", weight_block_size=[1, MX_BLOCK],
                     ignored_layers=["language_model.lm_head", "language_model.model.embed_tokens"])
    text = config | {"hidden_act": "swigluoai", "moe_layer_freq": layers, "model_type": "minimax_m3"}
    return out, dict(architectures=["MiniMaxM3SparseForConditionalGeneration"], model_type="minimax_m3_vl",
                     text_config=text, quantization_config=quantised)


# ------------------------------------------------------------------------------------------------------------ files


def keep_only(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        if path.name not in FILES:
            path.unlink()


def note(folder: pathlib.Path, seed: int, device: str) -> None:
    source = {"seed": seed, "device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n")


def size(folder: pathlib.Path) -> str:
    return f"{sum(p.stat().st_size for p in folder.iterdir())} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="directory that receives one folder a fixture")
    parser.add_argument("--device", default="cpu", help="torch device for the arithmetic (default: cpu)")
    parser.add_argument("--only", nargs="+", choices=[*LOGITS, *BLOCKS], default=[*LOGITS, *BLOCKS])
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        (write_logits if name in LOGITS else write_blocks)(name, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
