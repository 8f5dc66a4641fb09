"""All mixture-of-experts blocks of a Hugging Face folder, in the format that it stores, layer by layer."""

import dataclasses
import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_warp_decode.activations import Activation
from jax_warp_decode.checkpoints import reader, slots
from jax_warp_decode.checkpoints.families import find_family
from jax_warp_decode.checkpoints.family import BlockSpec, Encoding, Family
from jax_warp_decode.checkpoints.progress import Report, reporting
from jax_warp_decode.checkpoints.quantization import check_sizes, is_skipped, read_encoding
from jax_warp_decode.errors import ArgumentError, CheckpointError, UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.layers.moe import MoE
from jax_warp_decode.models.settings import Settings
from jax_warp_decode.moe import moe
from jax_warp_decode.route_tokens import route_tokens
from jax_warp_decode.routers import Router
from jax_warp_decode.routing import Routing
from jax_warp_decode.shared_experts import append_shared, with_shared


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("router", "router_bias", "correction_bias", "experts", "shared", "shared_gate"),
    meta_fields=("routing", "activation"))
@dataclasses.dataclass(frozen=True)
class MoEBlock:
    """One mixture-of-experts block of a model, as a pytree; calling it computes the block.

    y[t] = sum_k w_k expert_k(x[t]) + sigmoid(shared_gate x[t]) shared(x[t]), where routing weights w_k carry the
    model's scaling factor and the shared part is left out of models that have none, its gate likewise.

    Attributes:
      router: [E, H] floats.
      router_bias: [E] added to the logits, or None.
      correction_bias: [E] added to the scores for the choice alone, or None.
      experts: `ExpertWeights` of E experts, with biases if the model has them.
      shared: `ExpertWeights` of one expert, all shared experts together, or None.
      shared_gate: [1, H], or None.
      routing: the `Router`, static.
      activation: an `Activation`, static; of the shared expert too.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.demo import bundled_model
      >>> block = load_moe_blocks(bundled_model("mxfp8"))[0]
      >>> block.experts.format, block.routing.k, block(jnp.ones((1, 256), jnp.bfloat16)).shape
      ('mxfp8', 4, (1, 256))
    """

    router: jax.Array
    router_bias: jax.Array | None
    correction_bias: jax.Array | None
    experts: ExpertWeights
    shared: ExpertWeights | None
    shared_gate: jax.Array | None
    routing: Router
    activation: Activation

    def route(self, x: jax.Array) -> Routing:
        """The routing of tokens x [T, H], in float32."""
        return route_tokens(
            x, self.router, self.routing, bias=self.router_bias, correction_bias=self.correction_bias)

    def __call__(self, x: jax.Array, *, strategy: str = "auto") -> jax.Array:
        """The block for tokens x [T, H]; y [T, H] in the dtype of x. `strategy` as in `moe`."""
        float32 = jnp.dtype(jnp.float32)
        run = functools.partial(moe, x, activation=self.activation, strategy=strategy, out_dtype=float32)
        y = run(self.route(x), self.experts)
        if self.shared is not None:
            gate = None
            if self.shared_gate is not None:
                gate = jax.nn.sigmoid(jnp.einsum(
                    "th,gh->tg", x.astype(float32), self.shared_gate.astype(float32), precision="highest"))
            y = y + run(with_shared(None, 0, 1, gate, tokens=x.shape[0]), self.shared)
        return y.astype(x.dtype)

    def layer(self, **options: Any) -> MoE:
        """The block as a `MoE` layer, whose shared experts run in the same launches as the routed ones.

        Args:
          **options: as of `MoE`, for example `strategy` and `dtype`.

        Raises:
          ArgumentError: the shared experts do not fit beside the routed ones, see `append_shared`; call the block.
        """
        experts = self.experts if self.shared is None else append_shared(self.experts, self.shared)
        layer = nnx.eval_shape(lambda: MoE(
            experts.hidden, experts.intermediate, self.experts.num_experts, self.routing.k, router=self.routing,
            router_bias=self.router_bias is not None, correction_bias=self.correction_bias is not None,
            use_bias=bool(experts.biases), shared_gate=self.shared_gate is not None,
            num_shared_experts=experts.num_experts - self.experts.num_experts, activation=self.activation,
            rngs=nnx.Rngs(0), **options))
        layer.set_experts(experts)
        for name in ("router", "router_bias", "correction_bias", "shared_gate"):
            if (value := getattr(self, name)) is not None:
                getattr(layer, name).set_value(value)
        return layer


class MoEFolder:
    """A folder whose mixture-of-experts blocks have been found and checked; weights are read layer by layer.

    Args:
      folder: path with config.json and model.safetensors, or shards with an index; of a family in `families.FAMILIES`.
      dtype: dtype of all plain weights but the correction bias; None keeps each as it is stored. Quantised experts stay
        as they are.

    Attributes:
      family: row of `families.FAMILIES`.
      spec: sizes, router and activation of every block.
      encoding: how the experts are stored.
      layers: numbers of the layers that have a block.
      opened, slots: the folder, and by layer where its tensors go.

    Raises:
      CheckpointError: anything wrong with the folder, in one message that names the tensors or fields. Tensors outside
        the blocks do not matter; inside one, a tensor that does not belong is an error.
      ArgumentError: folder is no path, or dtype is none that weights can have.

    Example:
      >>> from jax_warp_decode.checkpoints import MoEFolder
      >>> from jax_warp_decode.demo import bundled_model
      >>> folder = MoEFolder(bundled_model("mxfp8"))
      >>> folder.family.name, folder.layers, folder.encoding.format
      ('Qwen3-MoE', (0, 1, 2, 3), 'mxfp8')
      >>> [(n, block.experts.num_experts) for n, block in folder.load([3, 0])]
      [(3, 16), (0, 16)]
    """

    def __init__(self, folder: Any, *, dtype: Any = None):
        self._dtype = slots.check_dtype(dtype)
        self.opened = reader.open_folder(folder)
        self.family, self.architecture, self.spec, self.encoding = read_config(self.opened)
        self.layers = self.spec.layers
        if not self.layers:
            raise CheckpointError(
                f"checkpoint: {self.opened.path} has no layer with experts by its config.json, expected at least one; "
                "check num_hidden_layers and the fields that say which layers are dense")
        checked = slots.check(
            self.opened, (slot for n in self.layers for slot in self._layout(n)), self._dtype, self._unclaimed())
        self.slots: dict[int, list[slots.Slot]] = {n: [] for n in self.layers}
        for slot in checked:
            self.slots[int(slot.param.split(".", 1)[0])].append(slot)

    def _layout(self, layer: int) -> Iterator[slots.Slot]:
        return block_slots(
            self.opened.tensors, self.family, self.architecture, self.spec, self.encoding, layer, f"{layer}.")

    def _unclaimed(self) -> Callable[[str], bool]:
        """Whether a tensor should have a slot: it lies in a block, or is an expert that is no part of any."""
        prefix = re.escape(self.family.prefixes[self.architecture].format(n="N")).replace("N", r"(\d{1,9})", 1)
        pattern = re.compile(rf"{prefix}\.")
        block, layers, ignored = f"{self.family.block}.", set(self.layers), set(self.spec.ignored_layers)

        def unclaimed(name: str) -> bool:
            found = pattern.match(name)
            if found is None:
                return False
            layer, inside = int(found[1]), name[found.end():]
            return inside.startswith(block) and layer in layers or ".experts." in inside and layer not in ignored

        return unclaimed

    def load(self, layers: Iterable[int], progress: Report | None = None) -> Iterator[tuple[int, MoEBlock]]:
        """(number, block) of each layer in turn, on JAX's default device.

        Host memory holds one parameter of one layer at a time (for example all gate projections).

        Args:
          layers: of `self.layers`, in any order.
          progress: called with (bytes read, bytes in all); None shows a bar on a terminal.

        Raises:
          ArgumentError: a layer without such a block.
          CheckpointError: a file changed since it was checked.
        """
        layers = list(layers)
        if unknown := [n for n in layers if n not in self.slots]:
            raise ArgumentError(f"layers: got {unknown[:8]}, expected layers with experts, {_span(self.layers)}")
        wanted = [slot for n in layers for slot in self.slots[n]]
        with reporting(f"loading {self.opened.path.name}", progress) as report:
            values: dict[str, Any] = {}
            last = {n: self.slots[n][-1].param for n in layers}
            for param, value in slots.fill(self.opened, wanted, self._dtype, report):
                layer, _, name = param.partition(".")
                values[name] = value
                if param == last[int(layer)]:
                    yield int(layer), self._block(values)
                    values = {}

    def _block(self, values: dict[str, Any]) -> MoEBlock:
        owners: dict[str, dict[str, Any]] = {"": {}, "shared.": {}}
        for name in list(values):
            if name.rpartition(".")[2][:2] in ("w_", "b_"):
                owners["shared." if name.startswith("shared.") else ""][name.removeprefix("shared.")] = values.pop(name)
        shared = ExpertWeights(**owners["shared."]) if owners["shared."] else None
        missing: dict[str, Any] = dict.fromkeys(("router_bias", "correction_bias", "shared_gate"))
        return MoEBlock(**missing | values, experts=ExpertWeights(**owners[""]), shared=shared,
                        routing=self.spec.router, activation=self.spec.activation)


def load_moe_blocks(
    folder: Any,
    layers: Iterable[int] | None = None,
    *,
    dtype: Any = None,
    progress: Report | None = None,
) -> dict[int, MoEBlock]:
    """Loads mixture-of-experts blocks of a published model, in the format that the folder stores.

    Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, Mixtral, gpt-oss (bfloat16 and MXFP4), DeepSeek-V3 (FP8 in blocks of 128 x 128)
    and MiniMax-M3 (MXFP8); Qwen folders also in FP8. The architecture in config.json and the names of the tensors
    decide on orientation and order of rows. Every name, shape, type and file size is checked before anything is read.

    Args:
      folder: path with config.json and model.safetensors, or shards with an index.
      layers: numbers of layers; None loads all that have such a block.
      dtype, progress: as in `MoEFolder`.

    Returns:
      `MoEBlock` by layer.

    Raises:
      CheckpointError, ArgumentError: as `MoEFolder`. Nothing is returned unless everything could be read.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.checkpoints import load_moe_blocks
      >>> from jax_warp_decode.demo import bundled_model
      >>> block = load_moe_blocks(bundled_model("mxfp8"), layers=[2])[2]
      >>> block.experts.format, block.routing.k, block(jnp.ones((3, 256), jnp.bfloat16)).shape
      ('mxfp8', 4, (3, 256))
    """
    opened = MoEFolder(folder, dtype=dtype)
    return dict(opened.load(opened.layers if layers is None else layers, progress))


def read_config(opened: reader.Folder) -> tuple[Family, str, BlockSpec, Encoding]:
    """Family, architecture, sizes and encoding of a folder, from its config.json."""
    try:
        settings = Settings(opened.config)
        family, architecture = find_family(settings)
        encoding = read_encoding(settings)
        if family.text_section and family.text_section in settings.values:
            settings = settings.section(family.text_section)
        spec = family.read(dataclasses.replace(settings, owner=architecture))
        check_sizes(spec, encoding)
        if not any(encoding.format in storage.formats for storage in family.storages):
            known = sorted({format or "plain floats" for storage in family.storages for format in storage.formats})
            raise UnsupportedError(f"quantization_config: got {encoding.format or 'none'}, expected "
                                   f"{' or '.join(known)} for {family.name}")
    except (ArgumentError, UnsupportedError) as error:
        raise CheckpointError(f"{opened.path / reader.CONFIG_FILE}: {error}") from error
    return family, architecture, spec, encoding


def block_slots(tensors: Container[str], family: Family, architecture: str, spec: BlockSpec, encoding: Encoding,
                layer: int, target: str) -> Iterator[slots.Slot]:
    """The slots of one block, into parameters whose paths begin with `target`; `tensors` are those of the folder."""
    block = family.block_name(architecture, layer)
    storage = family.storage(encoding, block, tensors)
    assert storage is not None  # `read_config` refused formats that the family never stores
    return family.slots(
        spec, block, target, storage, encoding, plain=lambda module: is_skipped(module, encoding))


def _span(layers: tuple[int, ...]) -> str:
    whole = layers and layers == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else str(list(layers))
