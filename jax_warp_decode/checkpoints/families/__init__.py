"""The families of checkpoints, one module each, and how a config.json names its own."""

from jax_warp_decode.checkpoints.families import deepseek_v3, gpt_oss, minimax_m3, mixtral, qwen3_moe, qwen3_next
from jax_warp_decode.checkpoints.family import Family
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.models.settings import Settings, show

FAMILIES = (qwen3_moe.FAMILY, qwen3_next.NEXT, qwen3_next.QWEN35, mixtral.FAMILY, gpt_oss.FAMILY, deepseek_v3.FAMILY,
            minimax_m3.FAMILY)


def find_family(settings: Settings) -> tuple[Family, str]:
    """The family of a config.json and its architecture; raises `UnsupportedError` for another one.

    Example:
      >>> from jax_warp_decode.checkpoints.families import find_family
      >>> from jax_warp_decode.models.settings import Settings
      >>> find_family(Settings({"architectures": ["MixtralForCausalLM"]}))[0].name
      'Mixtral'
    """
    architectures = settings.get("architectures", default=None)
    known = {architecture: family for family in FAMILIES for architecture in family.prefixes}
    if architectures is None:
        model_type = settings.get("model_type", default=None)
        types = {name: architecture for family in FAMILIES for name, architecture in family.model_types.items()}
        if not isinstance(model_type, str) or model_type not in types:
            raise UnsupportedError(f"model_type: got {show(model_type)}, expected one of {sorted(types)}")
        architectures = [types[model_type]]
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in list(known):
        raise UnsupportedError(f"architectures: got {show(architectures)}, expected one of {sorted(known)}")
    return known[architectures[0]], architectures[0]
