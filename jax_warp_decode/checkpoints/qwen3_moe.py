"""Qwen3-MoE folders: one table of tensor names that the loader fills from and the writer writes from."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_warp_decode.checkpoints import reader
from jax_warp_decode.errors import ArgumentError, CheckpointError, UnsupportedError
from jax_warp_decode.experts import DENSE_FORMATS
from jax_warp_decode.formats import FORMATS, QuantizedArray
from jax_warp_decode.models.qwen3_moe import Qwen3Moe
from jax_warp_decode.models.qwen3_moe_config import Qwen3MoeConfig

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FLOATS = ("BF16", "F16", "F32")
MAX_MISSING = 1000  # missing tensors that are named before the search stops; a hostile config may promise billions


@dataclasses.dataclass(frozen=True)
class Slot:
    """One tensor of the folder and where its content goes.

    Attributes:
      name: in the folder.
      shape: in the folder.
      param: dotted path of the parameter in `Qwen3Moe`.
      dtypes: safetensors' names of the types that it may have.
      expert: index in the leading axis of the parameter; None if the tensor is the whole parameter.
      transpose: the folder has [out, in], `nnx.Linear` keeps [in, out].
      part: field of the `QuantizedArray` that the tensor belongs to; empty for a plain array.
    """

    name: str
    shape: tuple[int, ...]
    param: str
    dtypes: tuple[str, ...] = FLOATS
    expert: int | None = None
    transpose: bool = False
    part: str = ""


def layout(config: Qwen3MoeConfig, expert_format: str | None) -> Iterator[Slot]:
    """The tensors of a folder, lazily; those of one parameter follow each other.

    Args:
      config: sizes.
      expert_format: None for plain expert weights, or a key of `FORMATS`. Expert M's `gate_proj.weight` then holds the
        narrow values and `gate_proj.weight_scale` the scales [N, in / block]; likewise up_proj and down_proj.

    Source: model cards of Qwen3-30B-A3B and Qwen3-235B-A22B, and OCP Microscaling Formats v1.0 for MXFP8.
    """
    H, I, D = config.hidden_size, config.moe_intermediate_size, config.head_dim
    query_size, key_size = config.num_attention_heads * D, config.num_key_value_heads * D
    yield Slot(EMBEDDING, (config.vocab_size, H), "embed.embedding")
    for n in range(config.num_hidden_layers):
        source, target = f"model.layers.{n}", f"layers.{n}"
        yield Slot(f"{source}.input_layernorm.weight", (H,), f"{target}.input_norm.scale")
        for name, size_out, size_in in (
                ("q_proj", query_size, H), ("k_proj", key_size, H), ("v_proj", key_size, H), ("o_proj", H, query_size)):
            linear = f"{source}.self_attn.{name}", f"{target}.attention.{name}"
            yield Slot(f"{linear[0]}.weight", (size_out, size_in), f"{linear[1]}.kernel", transpose=True)
            if config.attention_bias:
                yield Slot(f"{linear[0]}.bias", (size_out,), f"{linear[1]}.bias")
        for name in ("q_norm", "k_norm"):
            yield Slot(f"{source}.self_attn.{name}.weight", (D,), f"{target}.attention.{name}.scale")
        yield Slot(f"{source}.post_attention_layernorm.weight", (H,), f"{target}.post_norm.scale")
        yield Slot(f"{source}.mlp.gate.weight", (config.num_experts, H), f"{target}.moe.router")
        for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
            for expert in range(config.num_experts):
                slot = functools.partial(Slot, param=f"{target}.moe.w_{name}", expert=expert)
                tensor = f"{source}.mlp.experts.{expert}.{name}_proj.weight"
                if expert_format is None:
                    yield slot(tensor, shape)
                else:
                    scales = (shape[0], shape[1] // FORMATS[expert_format].block)
                    yield slot(tensor, shape, dtypes=("F8_E4M3",), part="values")
                    yield slot(f"{tensor}_scale", scales, dtypes=("U8",), part="scales")
    yield Slot("model.norm.weight", (H,), "norm.scale")
    if not config.tie_word_embeddings:
        yield Slot(LM_HEAD, (config.vocab_size, H), "lm_head.embedding")


def load_qwen3_moe(
    folder: Any,
    *,
    dtype: Any = None,
    strategy: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Qwen3Moe:
    """Loads a Hugging Face `Qwen3MoeForCausalLM` folder, plain or with MXFP8 experts.

    Host memory holds one stacked parameter at a time (for example all gate projections of one layer). Nothing is read
    before every name, shape, type and file size has been checked.

    Args:
      folder: path with config.json and model.safetensors, or shards with an index.
      dtype: dtype of the computation and of all plain weights; None keeps each weight as it is stored and computes in
        the dtype of the embedding. MXFP8 experts stay MXFP8.
      strategy: how the experts run, see `MoE`.
      progress: called with (bytes read, bytes in all), at first with 0 and then after every tensor.

    Returns:
      The model, on JAX's default device.

    Raises:
      CheckpointError: anything wrong with the folder, in one message that names the tensors or fields; also an
        architecture, option or quantisation that this decoder does not have.
      ArgumentError: folder is no path, or dtype or strategy is not one of the allowed ones.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from jax_warp_decode.checkpoints import load_qwen3_moe, save_qwen3_moe
      >>> from jax_warp_decode.models import Qwen3Moe, Qwen3MoeConfig
      >>> config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1,
      ...                         num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4,
      ...                         num_experts_per_tok=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_qwen3_moe(Qwen3Moe(config, rngs=nnx.Rngs(0)), folder, format="mxfp8")
      ...     model = load_qwen3_moe(folder)
      >>> model.layers[0].moe.experts.format
      'mxfp8'
    """
    try:
        dtype = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        raise ArgumentError(f"dtype: got {dtype!r}, expected bfloat16, float16, float32 or None") from None
    if dtype is not None and dtype not in DENSE_FORMATS:
        raise ArgumentError(f"dtype: got {dtype}, expected bfloat16, float16, float32 or None")
    opened = reader.open_folder(folder)
    config, expert_format = _parse_config(opened)
    slots = _check_tensors(opened, config, expert_format, dtype)
    compute_dtype = reader.DTYPES[opened.tensors[EMBEDDING].dtype] if dtype is None else jnp.dtype(dtype)
    model = nnx.eval_shape(lambda: Qwen3Moe(config, strategy=strategy, dtype=compute_dtype, rngs=nnx.Rngs(0)))
    total = sum(opened.tensors[slot.name].nbytes for slot in slots)
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    report(0)
    for path, group in itertools.groupby(slots, key=lambda slot: slot.param):
        parts = _read(opened, list(group), config.num_experts, dtype, report)
        value = parts[""] if "" in parts else QuantizedArray(**parts, format=expert_format)
        find_param(model, path).set_value(value)
    return model


def _read(opened: reader.Folder, slots: list[Slot], num_experts: int, dtype: Any,
          report: Callable[[int], None]) -> dict[str, jax.Array]:
    """Device arrays of one parameter by part, filled tensor by tensor on the host."""
    arrays: dict[str, np.ndarray] = {}
    for slot in slots:
        stored = opened.tensors[slot.name]
        if slot.part not in arrays:
            arrays[slot.part] = _allocate(slot, num_experts, stored, dtype)
        out = arrays[slot.part] if slot.expert is None else arrays[slot.part][slot.expert]
        stored.read_into(out.T if slot.transpose else out)
        report(stored.nbytes)
    # Waiting bounds the host memory: a transfer in flight keeps its source alive.
    return {part: jax.block_until_ready(jax.device_put(array)) for part, array in arrays.items()}


def _parse_config(opened: reader.Folder) -> tuple[Qwen3MoeConfig, str | None]:
    """Sizes and the format of the experts, from config.json."""
    file = opened.path / reader.CONFIG_FILE
    try:
        config = Qwen3MoeConfig.from_hf(opened.config)
    except (ArgumentError, UnsupportedError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    options = opened.config.get("quantization_config")
    if options is None:
        return config, None
    expected = {"quant_method": "mxfp8", "block_size": FORMATS["mxfp8"].block}
    if options != expected:
        raise CheckpointError(f"{file}: quantization_config: got {options!r}, expected {expected} or nothing")
    for name in ("hidden_size", "moe_intermediate_size"):
        size, block = getattr(config, name), expected["block_size"]
        if size % block:
            raise CheckpointError(f"{file}: {name}: got {size}, expected a multiple of block_size {block}")
    return config, "mxfp8"


def _check_tensors(
        opened: reader.Folder, config: Qwen3MoeConfig, expert_format: str | None, dtype: Any) -> list[Slot]:
    """All slots in order, once the folder has exactly their tensors with fitting shapes and types."""
    slots, missing, wrong, mixed = [], [], [], []
    for slot in layout(config, expert_format):
        stored = opened.tensors.get(slot.name)
        if stored is None:
            missing.append(slot.name)
            if len(missing) >= MAX_MISSING:
                break
            continue
        slots.append(slot)
        if stored.shape != slot.shape or stored.dtype not in slot.dtypes:
            wrong.append(f"{slot.name}: got {stored.dtype}{list(stored.shape)}, "
                         f"expected {'/'.join(slot.dtypes)}{list(slot.shape)}")
    unexpected = set(opened.tensors) - {slot.name for slot in slots}
    if config.tie_word_embeddings:
        unexpected.discard(LM_HEAD)
    problems = []
    if missing:
        more = " or more" if len(missing) >= MAX_MISSING else ""
        problems.append(f"{len(missing)}{more} tensors missing: {reader.listing(missing)}")
    if unexpected and len(missing) < MAX_MISSING:
        problems.append(f"{len(unexpected)} tensors unexpected: {reader.listing(sorted(unexpected))}")
    if wrong:
        problems.append(f"{len(wrong)} tensors of the wrong shape or type: {reader.listing(wrong)}")
    if not problems and dtype is None:
        plain = (slot for slot in slots if slot.expert is not None and not slot.part)
        for layer, experts in itertools.groupby(plain, key=lambda slot: slot.param.rpartition(".")[0]):
            dtypes: dict[str, set[str]] = {}
            for slot in experts:
                dtypes.setdefault(slot.param.rpartition(".")[2], set()).add(opened.tensors[slot.name].dtype)
            if len(set.union(*dtypes.values())) > 1:
                mixed.append(f"{layer} ({', '.join(f'{w} {"/".join(sorted(found))}' for w, found in dtypes.items())})")
    if mixed:
        problems.append(f"experts of mixed types in {len(mixed)} layers: {reader.listing(mixed)}, expected one type in "
                        "a layer; choose it with dtype=")
    if problems:
        raise CheckpointError(f"{opened.path}: {'; '.join(problems)}")
    if config.tie_word_embeddings and LM_HEAD in opened.tensors:
        _check_tied(opened)
    return slots


def _check_tied(opened: reader.Folder) -> None:
    """A tied folder may repeat the embedding as head, as long as it is the same."""
    head, embedding = opened.tensors[LM_HEAD], opened.tensors[EMBEDDING]
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if same:
        arrays = [np.empty(head.nbytes, np.uint8) for _ in range(2)]
        for tensor, array in zip((head, embedding), arrays, strict=True):
            dataclasses.replace(tensor, dtype="U8", shape=array.shape).read_into(array)
        same = np.array_equal(*arrays)
    if not same:
        raise CheckpointError(
            f"{opened.path}: {LM_HEAD}: differs from {EMBEDDING}, expected the same or no such tensor; set "
            f"tie_word_embeddings to false in {reader.CONFIG_FILE} to use both")


def _allocate(slot: Slot, num_experts: int, stored: reader.StoredTensor, dtype: Any) -> np.ndarray:
    shape = slot.shape[::-1] if slot.transpose else slot.shape
    kept = slot.part or dtype is None
    return np.empty(shape if slot.expert is None else (num_experts, *shape),
                    reader.DTYPES[stored.dtype] if kept else jnp.dtype(dtype))


def find_param(model: Qwen3Moe, path: str) -> nnx.Param:
    """The parameter at a dotted path such as "layers.0.moe.w_gate"."""
    return functools.reduce(
        lambda node, part: node[int(part)] if part.isdigit() else getattr(node, part), path.split("."), model)
