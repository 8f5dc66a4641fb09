"""The mixture-of-experts layers of published models: sizes, router, activation and format, for benchmarks."""

import dataclasses
import difflib

from jax_warp_decode.activations import ACTIVATIONS, Activation
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.routers import ROUTERS, Router


@dataclasses.dataclass(frozen=True)
class Preset:
    """One mixture-of-experts layer of a model, from its config.json or its model card.

    Attributes:
      name: key in `PRESETS`.
      hidden: H, the model's width (of the experts' input, where a latent projection narrows it).
      intermediate: I, per routed expert.
      num_experts: E, routed experts.
      experts_per_token: K.
      format: how the experts of the released checkpoint are stored, "bf16" or a key of `FORMATS`.
      router: key of `ROUTERS`; None where it is not published.
      activation: key of `ACTIVATIONS`.
      shared_intermediate: I of all shared experts together, 0 without any.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    experts_per_token: int
    format: str
    router: str | None = None
    activation: str = "silu"
    shared_intermediate: int = 0

    @property
    def routing(self) -> Router:
        """The model's `Router` with its K; a plain softmax where it is not published."""
        router = ROUTERS[self.router] if self.router else Router(self.experts_per_token)
        return dataclasses.replace(router, k=self.experts_per_token)

    @property
    def act(self) -> Activation:
        """The model's `Activation`."""
        return ACTIVATIONS[self.activation]


PRESETS = {p.name: p for p in (
    Preset("tiny-docs", 256, 64, 16, 4, "bf16", "qwen3-moe"),  # the model that ships with this package
    Preset("qwen3-30b-a3b", 2048, 768, 128, 8, "bf16", "qwen3-moe"),
    Preset("qwen3-235b-a22b", 4096, 1536, 128, 8, "bf16", "qwen3-moe"),
    Preset("qwen3-next-80b-a3b", 2048, 512, 512, 10, "bf16", "qwen3-next", "silu", 512),
    Preset("qwen3.5-35b-a3b", 2048, 512, 256, 8, "bf16", "qwen3-next", "silu", 512),
    Preset("qwen3.5-122b-a10b", 3072, 1024, 256, 8, "bf16", "qwen3-next", "silu", 1024),
    Preset("qwen3.5-397b-a17b", 4096, 1024, 512, 10, "bf16", "qwen3-next", "silu", 1024),
    Preset("qwen3.8-flash-next", 2560, 640, 512, 10, "bf16", "qwen3-next", "silu", 640),
    Preset("gpt-oss-20b", 2880, 2880, 32, 4, "mxfp4", "gpt-oss", "clamped_swiglu"),
    Preset("gpt-oss-120b", 2880, 2880, 128, 4, "mxfp4", "gpt-oss", "clamped_swiglu"),
    Preset("deepseek-v3", 7168, 2048, 256, 8, "fp8_block128", "deepseek-v3", "silu", 2048),
    Preset("deepseek-v4-flash", 4096, 2048, 256, 6, "mxfp4", "deepseek-v4", "clamped_silu", 2048),
    Preset("kimi-k2", 7168, 2048, 384, 8, "fp8_block128", "kimi-k2", "silu", 2048),
    Preset("kimi-k3", 3584, 3072, 896, 16, "mxfp4", None, "situ", 6144),
    Preset("minimax-m2", 3072, 1536, 256, 8, "fp8_block128", "minimax-m2"),
    Preset("minimax-m3", 6144, 3072, 128, 4, "mxfp8", "minimax-m3", "clamped_swiglu", 3072),
    Preset("glm-4.5", 5120, 1536, 160, 8, "bf16", "glm-4.5", "silu", 1536),
    Preset("glm-4.5-air", 4096, 1408, 128, 8, "bf16", "minimax-m2", "silu", 1408),
    Preset("glm-5", 6144, 2048, 256, 8, "fp8_block128", "glm-4.5", "silu", 2048),
    Preset("gemma4-26b-a4b", 2816, 704, 128, 8, "bf16", "gemma4", "gelu_tanh", 2112),
    Preset("nemotron3-nano", 2688, 1856, 128, 6, "bf16", "nemotron3-nano", "relu2", 3712),
    Preset("mixtral-8x7b", 4096, 14336, 8, 2, "bf16", "mixtral"),
    Preset("llama4-maverick", 5120, 8192, 128, 1, "bf16", "llama4", "silu", 8192),
)}

# Later models whose layers have the same sizes, router, activation and format.
SAME_LAYER = {
    "deepseek-r1": "deepseek-v3", "qwen3.6-35b-a3b": "qwen3.5-35b-a3b", "minimax-m2.5": "minimax-m2",
    "glm-5.2": "glm-5", "glm-5.3": "glm-5"}


def get_preset(name: str) -> Preset:
    """Looks up a model's mixture-of-experts layer, also by a name in `SAME_LAYER`.

    Raises:
      ArgumentError: for a name that is not in `PRESETS`.

    Example:
      >>> from jax_warp_decode.presets import get_preset
      >>> preset = get_preset("qwen3.5-397b-a17b")
      >>> preset.hidden, preset.intermediate, preset.num_experts, preset.routing
      (4096, 1024, 512, Router(k=10, scoring='softmax', renormalize=True, n_group=1, topk_group=1, group_score='top2', \
scale=1.0))
    """
    found = PRESETS.get(SAME_LAYER.get(name, name))
    if found is None:
        near = difflib.get_close_matches(str(name), [*PRESETS, *SAME_LAYER], 1)
        raise ArgumentError(f"model: got {name!r}, {f'did you mean {near[0]}? ' if near else ''}expected one of those "
                            "that 'jax-warp-decode plan --model list' shows")
    return found


def listing() -> list[str]:
    """A line for every name that `get_preset` takes, as the commands print them for `--model list`.

    Example:
      >>> from jax_warp_decode.presets import listing
      >>> listing()[1], listing()[-1]
      ('qwen3-30b-a3b        H  2048 I   768 E  128 K  8  bf16', 'glm-5.3              as glm-5')
    """
    return [*(f"{p.name:20} H {p.hidden:5} I {p.intermediate:5} E {p.num_experts:4} K {p.experts_per_token:2}  "
              f"{p.format}" for p in PRESETS.values()),
            *(f"{name:20} as {other}" for name, other in SAME_LAYER.items())]
