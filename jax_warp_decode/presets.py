"""Sizes of the routed experts in published models, for benchmarks and the command line."""

import dataclasses

from jax_warp_decode.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Preset:
    """One MoE layer of a model: sizes only, from its config.json or its model card.

    Attributes:
      name: key in `PRESETS`.
      hidden: H, the model's width (of the experts' input, where a latent projection narrows it).
      intermediate: I, per routed expert.
      num_experts: E, routed experts; shared experts are not counted.
      experts_per_token: K.
      format: how the experts of the released checkpoint are stored; not every format here is supported.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    experts_per_token: int
    format: str


PRESETS = {p.name: p for p in (
    Preset("tiny-docs", 256, 64, 16, 4, "bf16"),  # the model that ships with this package
    Preset("qwen3-30b-a3b", 2048, 768, 128, 8, "bf16"),
    Preset("qwen3-235b-a22b", 4096, 1536, 128, 8, "bf16"),
    Preset("qwen3-next-80b-a3b", 2048, 512, 512, 10, "bf16"),
    Preset("qwen3.5-35b-a3b", 2048, 512, 256, 8, "bf16"),
    Preset("qwen3.5-122b-a10b", 3072, 1024, 256, 8, "bf16"),
    Preset("qwen3.5-397b-a17b", 4096, 1024, 512, 10, "bf16"),
    Preset("qwen3.8-flash-next", 2560, 640, 512, 10, "bf16"),
    Preset("gpt-oss-20b", 2880, 2880, 32, 4, "mxfp4"),
    Preset("gpt-oss-120b", 2880, 2880, 128, 4, "mxfp4"),
    Preset("deepseek-v3", 7168, 2048, 256, 8, "fp8-128x128"),
    Preset("deepseek-v4-flash", 4096, 2048, 256, 6, "mxfp4"),
    Preset("kimi-k2", 7168, 2048, 384, 8, "fp8-128x128"),
    Preset("kimi-k3", 3584, 3072, 896, 16, "mxfp4"),
    Preset("minimax-m2", 3072, 1536, 256, 8, "fp8-128x128"),
    Preset("minimax-m3", 6144, 3072, 128, 4, "mxfp8"),
    Preset("glm-4.5", 5120, 1536, 160, 8, "bf16"),
    Preset("glm-4.5-air", 4096, 1408, 128, 8, "bf16"),
    Preset("glm-5", 6144, 2048, 256, 8, "fp8-128x128"),
    Preset("gemma4-26b-a4b", 2816, 704, 128, 8, "bf16"),
    Preset("mixtral-8x7b", 4096, 14336, 8, 2, "bf16"),
    Preset("llama4-maverick", 5120, 8192, 128, 1, "bf16"),
)}


def get_preset(name: str) -> Preset:
    """Looks up the sizes of a model's MoE layer.

    Raises:
      ArgumentError: for a name that is not in `PRESETS`.

    Example:
      >>> from jax_warp_decode.presets import get_preset
      >>> get_preset("qwen3-30b-a3b")
      Preset(name='qwen3-30b-a3b', hidden=2048, intermediate=768, num_experts=128, experts_per_token=8, format='bf16')
    """
    if name not in PRESETS:
        raise ArgumentError(f"model: got {name!r}, expected one of {sorted(PRESETS)}")
    return PRESETS[name]
