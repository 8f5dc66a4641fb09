"""The quantization_config of a config.json: in which format the experts of a folder are stored."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from jax_warp_decode.checkpoints.family import DENSE, BlockSpec, Encoding
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.models.settings import Settings, show

BLOCK_FIELDS = ("weight_block_size", "block_size")
SKIP_FIELDS = ("modules_to_not_convert", "ignored_layers", "ignore")
MAX_PATTERN, MAX_STARS = 256, 16  # characters of one pattern, and `*` of all: each is one search in each module's name

# (quant_method, block) -> format and what the name of a scale adds to the name of its weight. transformers, vLLM and
# SGLang say weight_scale_inv for both eight-bit formats, although the scales multiply; block 32 is our own older form.
METHODS: dict[tuple[str, Any], Encoding] = {
    ("fp8", (128, 128)): Encoding("fp8_block128", "_scale_inv"),
    ("mxfp8", (1, 32)): Encoding("mxfp8", "_scale_inv"),
    ("mxfp8", 32): Encoding("mxfp8", "_scale"),
    ("mxfp4", None): Encoding("mxfp4"),
    ("mxfp4", 32): Encoding("mxfp4"),
}


def read_encoding(settings: Settings) -> Encoding:
    """The encoding of the experts; raises `ArgumentError` for a quantisation that is not in `METHODS`."""
    options = settings.section("quantization_config", None)
    if options is None:
        return Encoding()
    block = next((options.values[name] for name in BLOCK_FIELDS if options.values.get(name) is not None), None)
    block = tuple(block) if isinstance(block, list) else block
    method = options.text("quant_method", default=None)
    known = METHODS.get((method, block)) if block is None or isinstance(block, int | tuple) and _plain(block) else None
    if known is None:
        expected = " or ".join(f"{name} with block {'any' if size is None else size}" for name, size in METHODS)
        raise ArgumentError(f"quantization_config: got quant_method {show(method)} with block {show(block)}, expected "
                            f"{expected}")
    skipped = [name for field in SKIP_FIELDS for name in options.items(field, kind=str, default=())]
    patterns = tuple(name for name in skipped if "*" in name)
    _check_patterns(patterns)
    return Encoding(known.format, known.scale, frozenset(skipped) - frozenset(patterns), patterns)


def is_skipped(module: str, encoding: Encoding) -> bool:
    """Whether a module stays plain although the folder is quantised: the config names it or a module that holds it, by
    its path or its own name alone.

    Example:
      >>> from jax_warp_decode.checkpoints.family import Encoding
      >>> from jax_warp_decode.checkpoints.quantization import is_skipped
      >>> encoding = Encoding("mxfp8", skipped=frozenset({"lm_head"}), patterns=("layers.*.mlp.shared",))
      >>> is_skipped("layers.3.mlp.shared.up_proj", encoding), is_skipped("layers.3.mlp.experts.0.up_proj", encoding)
      (True, False)
    """
    names = module.split(".")
    if encoding.skipped and not encoding.skipped.isdisjoint((*names, *itertools.accumulate(names, "{}.{}".format))):
        return True
    text = f"{module}."
    for first, rest in encoding.pieces:
        if text.startswith(first):
            left = text[len(first):]
            for piece in rest:
                if piece not in left:
                    break
                left = left.partition(piece)[2]  # the leftmost place leaves most to the others
            else:
                return True
    return False


def check_sizes(spec: BlockSpec, encoding: Encoding) -> None:
    """Raises `ArgumentError` unless the blocks of the format divide the reduction dimensions."""
    if encoding.format == DENSE:
        return
    block = FORMATS[encoding.format].block
    sizes = {"hidden size": spec.hidden, "intermediate size": spec.intermediate,
             "intermediate size of the shared experts": spec.shared_intermediate}
    for name, size in sizes.items():
        if size is not None and size % block:
            raise ArgumentError(f"{name}: got {size}, expected a multiple of {block}, the block of {encoding.format}")


def encoding_of(format: str) -> Encoding:
    """How experts of this format are written: as transformers reads it where there are several ways."""
    return next((known for known in METHODS.values() if known.format == format), Encoding(format))


def quantization_config(format: str, skipped: list[str]) -> Mapping[str, Any]:
    """What stands in a config.json for experts that are written with `encoding_of(format)`; `skipped` stay plain."""
    method, block = next(key for key, known in METHODS.items() if known == encoding_of(format))
    return {"quant_method": method, "weight_block_size": list(block), "activation_scheme": "dynamic",
            "modules_to_not_convert": skipped}


def plain_modules(weights: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Modules of plain matrices, from names and shapes of tensors: what other readers must not take for quantised."""
    return sorted(name.removesuffix(".weight") for name, shape in weights
                  if name.endswith(".weight") and len(shape) == 2)


def _check_patterns(patterns: tuple[str, ...]) -> None:
    """Raises `ArgumentError` for patterns that would take long to match, or with a wildcard that is none here."""
    stars = sum(pattern.count("*") for pattern in patterns)
    if stars > MAX_STARS:
        raise ArgumentError(f"quantization_config: got {len(patterns)} patterns of modules that stay plain with "
                            f"{stars} '*', expected at most {MAX_STARS} '*' in all; name the modules that contain them")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN or "?" in pattern or "[" in pattern:
            raise ArgumentError(f"quantization_config: got pattern {show(pattern)} of {len(pattern)} characters for "
                                f"modules that stay plain, expected at most {MAX_PATTERN} and no wildcard but '*'; "
                                "name the modules instead")


def _plain(block: Any) -> bool:
    return all(type(size) is int for size in (block if isinstance(block, tuple) else (block,)))
