"""What a family of checkpoints looks like: names of tensors, orientation, order of rows, activation and router.

A family is one row of `families.FAMILIES`. Everything about it is stated there; nothing is guessed from sizes.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping

from jax_warp_decode.activations import Activation
from jax_warp_decode.checkpoints.slots import FLOATS, Slot
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.models.settings import Settings
from jax_warp_decode.routers import Router

DENSE = ""  # stands for a format where weights are plain floats

# How each format stores a matrix [.., rows, columns]: suffix of the name, types, and part of the `QuantizedArray`.
# The suffix of the scales that belong to eight-bit values differs by tool and comes from config.json.
_F8, _BYTES, _SCALES = ("F8_E4M3",), ("U8", "F8_E8M0"), ("F32", "BF16")
ENCODINGS = {
    DENSE: (("", FLOATS, ""),),
    "fp8_block128": (("", _F8, "values"), ("{scale}", _SCALES, "scales")),
    "mxfp8": (("", _F8, "values"), ("{scale}", _BYTES, "scales")),
    "mxfp4": (("_blocks", ("U8",), "values"), ("_scales", _BYTES, "scales")),
}
MXFP4_BLOCK_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How the experts of a folder are stored, from its quantization_config.

    Attributes:
      format: key of `FORMATS`, or `DENSE`.
      scale: what the name of a scale adds to the name of its weight.
      skipped: modules that stay plain, with all that they contain.
      patterns: the same, with `*` for any part of a name.
    """

    format: str = DENSE
    scale: str = ""
    skipped: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    @functools.cached_property
    def pieces(self) -> tuple[tuple[str, list[str]], ...]:
        """The patterns, each with the dot that ends a module, cut at every `*`: the first piece and the others."""
        cut = (f"{pattern}.".split("*") for pattern in self.patterns)
        return tuple((first, [piece for piece in rest if piece]) for first, *rest in cut)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a projection of all experts lies, relative to the block.

    Attributes:
      name: with `{e}` one tensor for each expert; without it one tensor whose leading axis is the experts.
      half: key of `HALVES` where gate and up share the tensor.
      transposed: the tensor is [.., in, out] instead of [.., out, in].
    """

    name: str
    half: str = ""
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Storage:
    """One way in which a family stores its experts.

    Attributes:
      gate, up, down: the matrices.
      formats: formats in which a folder may have them so.
      biases: of gate, up and down; empty where there are none.
      single: there is no axis of experts, and no `{e}`: one shared expert.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    formats: tuple[str, ...]
    biases: tuple[Tensor, ...] = ()
    single: bool = False

    @classmethod
    def separate(cls, template: str, names: tuple[str, str, str], single: bool = False) -> "Storage":
        """One [out, in] tensor a projection, in any format that is stored under the name of the weight."""
        gate, up, down = (Tensor(template.format(e="{e}", name=name)) for name in names)
        return cls(gate, up, down, formats=(DENSE, "fp8_block128", "mxfp8"), single=single)


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """What a config.json says about its mixture-of-experts blocks.

    Attributes:
      hidden: H.
      intermediate: I of a routed expert.
      num_experts: E.
      layers: numbers of the layers that have such a block.
      router: how logits become routing.
      activation: between the projections, of shared experts too.
      shared_intermediate: I of all shared experts together; None without them.
      ignored_layers: layers with experts that are in the folder but no part of the decoder.
    """

    hidden: int
    intermediate: int
    num_experts: int
    layers: tuple[int, ...]
    router: Router
    activation: Activation
    shared_intermediate: int | None = None
    ignored_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of the tensors of a block; those of experts, router and so on are relative to it.

    Attributes:
      name: for messages.
      prefixes: architecture in config.json -> what its layers are called, `{n}` the number.
      model_types: model_type -> architecture, for a config.json without `architectures`.
      block: the block in a layer.
      read: what config.json says; raises `ArgumentError` or `UnsupportedError`.
      storages: ways to store the routed experts; the first that allows the format and whose first tensor is there.
      router: [E, H].
      router_bias, correction_bias: [E], or None.
      shared: shared experts, as one expert.
      shared_gate: [1, H], whose sigmoid weighs the shared experts.
      text_section: where config.json has the language model, or None for the top.
    """

    name: str
    prefixes: Mapping[str, str]
    model_types: Mapping[str, str]
    block: str
    read: Callable[[Settings], BlockSpec]
    storages: tuple[Storage, ...]
    router: str = "gate.weight"
    router_bias: str | None = None
    correction_bias: str | None = None
    shared: Storage | None = None
    shared_gate: str | None = None
    text_section: str | None = None

    def block_name(self, architecture: str, layer: int) -> str:
        """Prefix of all tensors of one block, without the dot at its end."""
        return f"{self.prefixes[architecture].format(n=layer)}.{self.block}"

    def storage(self, encoding: Encoding, block: str, tensors: Container[str]) -> Storage | None:
        """How the routed experts of this block are stored; None if the family never stores that format."""
        fitting = [s for s in self.storages if encoding.format in s.formats]
        suffix = ENCODINGS[encoding.format][0][0]
        there = (s for s in fitting if f"{block}.{s.gate.name.format(e=0)}{suffix}" in tensors)
        return next(there, fitting[0] if fitting else None)

    def slots(self, spec: BlockSpec, block: str, target: str, storage: Storage, encoding: Encoding,
              plain: Callable[[str], bool]) -> Iterator[Slot]:
        """The tensors of one block, lazily; those of one parameter follow each other.

        Args:
          spec: sizes.
          block: `block_name`.
          target: prefix of the parameters, such as "layers.0.moe.".
          storage: of the routed experts.
          encoding: format of the experts.
          plain: whether a module of this full name stays plain although the folder is quantised.
        """
        E, H = spec.num_experts, spec.hidden
        vectors = ((self.router_bias, "router_bias"), (self.correction_bias, "correction_bias"))
        yield Slot(f"{block}.{self.router}", (E, H), f"{target}router")
        for name, param in vectors:
            if name is not None:
                yield Slot(f"{block}.{name}", (E,), f"{target}{param}", exact=param == "correction_bias")
        yield from _expert_slots(storage, block, target, (E, spec.intermediate, H), encoding, plain)
        if self.shared is not None and spec.shared_intermediate is not None:
            yield from _expert_slots(
                self.shared, block, f"{target}shared.", (1, spec.shared_intermediate, H), encoding, plain)
            if self.shared_gate is not None:
                yield Slot(f"{block}.{self.shared_gate}", (1, H), f"{target}shared_gate")


def _expert_slots(storage: Storage, block: str, target: str, sizes: tuple[int, int, int], encoding: Encoding,
                  plain: Callable[[str], bool]) -> Iterator[Slot]:
    E, I, H = sizes
    matrices = (("gate", storage.gate, (I, H)), ("up", storage.up, (I, H)), ("down", storage.down, (H, I)))
    for projection, tensor, shape in matrices:
        stored = (2 * shape[0], shape[1]) if tensor.half else shape
        param = f"{target}w_{projection}"
        parts: dict[str, list[tuple[str, tuple[int, ...], tuple[str, ...], str, bool]]] = {}  # the same for all experts
        for name, leading, expert in _names(f"{block}.{tensor.name}", E, storage.single):
            format = DENSE if plain(name.removesuffix(".weight")) else encoding.format
            if format not in parts:
                parts[format] = [
                    (suffix.format(scale=encoding.scale), (*leading, *_stored_shape(format, part, stored, tensor)),
                     dtypes, part, (format, part) == ("mxfp4", "values")) for suffix, dtypes, part in ENCODINGS[format]]
            for suffix, whole, dtypes, part, blocks in parts[format]:
                yield Slot(name + suffix, whole, param, dtypes, expert, blocks, tensor.transposed, tensor.half,
                           part=part, format=format)
    for (projection, _, shape), tensor in zip(matrices, storage.biases, strict=False):
        stored = (E, 2 * shape[0] if tensor.half else shape[0])
        yield Slot(f"{block}.{tensor.name}", stored, f"{target}b_{projection}", half=tensor.half, half_axis=-1)


def _names(template: str, E: int, single: bool) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int] | None]]:
    """(name, leading axes of the tensor, index in the parameter) of the tensors of one projection."""
    if "{e}" in template:
        yield from ((template.format(e=e), (), (e, E)) for e in range(E))
    elif single:
        yield template, (), (0, 1)
    else:
        yield template, (E,), None


def _stored_shape(format: str, part: str, shape: tuple[int, int], tensor: Tensor) -> tuple[int, ...]:
    if format == DENSE:
        return shape[::-1] if tensor.transposed else shape
    spec = FORMATS[format]
    spec.check_shape("weight", shape)
    if part == "scales":
        return spec.scales_shape(shape)
    values = spec.values_shape(shape)
    if format == "mxfp4":
        return (values[0], values[1] // MXFP4_BLOCK_BYTES, MXFP4_BLOCK_BYTES)
    return values

