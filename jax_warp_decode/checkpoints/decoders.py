"""Whole decoders from Hugging Face folders: Qwen3-MoE, Mixtral and gpt-oss."""

import dataclasses
import functools
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import AxisType

from jax_warp_decode.checkpoints import reader, slots
from jax_warp_decode.checkpoints.blocks import block_slots, read_config
from jax_warp_decode.checkpoints.families import find_family
from jax_warp_decode.checkpoints.family import BlockSpec, Encoding, Family
from jax_warp_decode.checkpoints.mesh_fill import mesh_fill
from jax_warp_decode.checkpoints.progress import Report, reporting
from jax_warp_decode.checkpoints.slots import Slot
from jax_warp_decode.errors import ArgumentError, CheckpointError, UnsupportedError
from jax_warp_decode.models.decoder import Decoder
from jax_warp_decode.models.decoder_config import DecoderConfig
from jax_warp_decode.models.gpt_oss_config import GptOssConfig
from jax_warp_decode.models.mixtral_config import MixtralConfig
from jax_warp_decode.models.qwen3_moe_config import Qwen3MoeConfig
from jax_warp_decode.models.settings import Settings, show
from jax_warp_decode.parallel import ExpertSharding, check_sharding

CONFIGS = {config.ARCHITECTURE: config for config in (Qwen3MoeConfig, MixtralConfig, GptOssConfig)}
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def load_model(
    folder: Any,
    *,
    dtype: Any = None,
    strategy: str = "auto",
    sharding: ExpertSharding | None = None,
    progress: Report | None = None,
    architecture: str | None = None,
) -> Decoder:
    """Loads a Hugging Face folder of Qwen3-MoE, Mixtral or gpt-oss as a decoder that generates text.

    Host memory holds one stacked parameter at a time (for example all gate projections of one layer). Nothing is read
    before every name, shape, type and file size has been checked.

    Args:
      folder: path with config.json and model.safetensors, or shards with an index.
      dtype: dtype of the computation and of all plain weights; None keeps each weight as it is stored and computes in
        the dtype of the embedding. Quantised experts stay as they are.
      strategy: how the experts run, see `MoE`.
      sharding: puts the experts on a mesh, split over E and I as it says, and all other weights on every device. Each
        host reads only the experts that its own devices keep. With several hosts, all call this alike.
      progress: called with (bytes read, bytes in all), at first with 0 and then after every tensor; None shows a bar on
        a terminal.
      architecture: refuse any other one, such as "Qwen3MoeForCausalLM".

    Returns:
      The model, on JAX's default device or the mesh. On a mesh, call it under `jit` (as `generate` does) with tokens
      and cache that are not bound to one device.

    Raises:
      CheckpointError: anything wrong with the folder, in one message that names the tensors or fields; also an
        architecture, option or quantisation that the decoder does not have.
      ArgumentError: folder is no path, dtype or strategy is not one of the allowed ones, or the sizes or the blocks of
        the format cannot be split so; nothing has been read.

    Example:
      >>> from jax_warp_decode.checkpoints import load_model
      >>> from jax_warp_decode.demo import bundled_model
      >>> model = load_model(bundled_model("mxfp8"), strategy="reference")
      >>> model.config.ARCHITECTURE, model.layers[0].moe.experts.format
      ('Qwen3MoeForCausalLM', 'mxfp8')
    """
    dtype = slots.check_dtype(dtype)
    if sharding is not None:
        check_sharding(sharding)
        if AxisType.Explicit in sharding.mesh.axis_types:
            raise ArgumentError("sharding: got a mesh with axes of type AxisType.Explicit, which the decoder's cache "
                                "cannot follow; make it with axis_types=(AxisType.Auto,) for every axis")
    opened = reader.open_folder(folder)
    config = _read_decoder(opened, [architecture] if architecture else list(CONFIGS))
    checked = slots.check(
        opened, layout(config, *read_config(opened), opened.tensors), dtype,
        unclaimed=lambda name: not (config.tie_word_embeddings and name == LM_HEAD))
    if config.tie_word_embeddings and LM_HEAD in opened.tensors:
        _check_tied(opened)
    compute_dtype = reader.DTYPES[opened.tensors[EMBEDDING].dtype] if dtype is None else dtype
    model = nnx.eval_shape(lambda: Decoder(config, strategy=strategy, dtype=compute_dtype, rngs=nnx.Rngs(0)))
    fill = slots.fill if sharding is None else mesh_fill(sharding)
    for layer in model.layers:
        layer.moe.set_sharding(sharding)
    with reporting(f"loading {opened.path.name}", progress) as report:
        for path, value in fill(opened, checked, dtype, report):
            find_param(model, path).set_value(value)
    return model


def layout(config: DecoderConfig, family: Family, architecture: str, spec: BlockSpec, encoding: Encoding,
           tensors: Container[str]) -> Iterator[Slot]:
    """The tensors of a decoder's folder, lazily; those of one parameter follow each other.

    Args:
      config: sizes of the decoder.
      family, architecture, spec, encoding: of its experts, see `read_config`.
      tensors: names in the folder, for families with several ways to store experts.
    """
    H, D = config.hidden_size, config.head_dim
    query_size, key_size = config.num_attention_heads * D, config.num_key_value_heads * D
    yield Slot(EMBEDDING, (config.vocab_size, H), "embed.embedding")
    for n in range(config.num_hidden_layers):
        source, target = family.prefixes[architecture].format(n=n), f"layers.{n}"
        yield Slot(f"{source}.input_layernorm.weight", (H,), f"{target}.input_norm.scale")
        for name, size_out, size_in in (
                ("q_proj", query_size, H), ("k_proj", key_size, H), ("v_proj", key_size, H), ("o_proj", H, query_size)):
            linear = f"{source}.self_attn.{name}", f"{target}.attention.{name}"
            yield Slot(f"{linear[0]}.weight", (size_out, size_in), f"{linear[1]}.kernel", transpose=True)
            if config.attention_bias:
                yield Slot(f"{linear[0]}.bias", (size_out,), f"{linear[1]}.bias")
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            yield Slot(f"{source}.self_attn.{name}.weight", (D,), f"{target}.attention.{name}.scale")
        if config.attention_sinks:
            yield Slot(f"{source}.self_attn.sinks", (config.num_attention_heads,), f"{target}.attention.sinks")
        yield Slot(f"{source}.post_attention_layernorm.weight", (H,), f"{target}.post_norm.scale")
        yield from block_slots(tensors, family, architecture, spec, encoding, n, f"{target}.moe.")
    yield Slot("model.norm.weight", (H,), "norm.scale")
    if not config.tie_word_embeddings:
        yield Slot(LM_HEAD, (config.vocab_size, H), "lm_head.embedding")


def find_param(model: Any, path: str) -> nnx.Param:
    """The parameter at a dotted path such as "layers.0.moe.w_gate"."""
    step: Callable[[Any, str], Any] = lambda node, part: node[int(part)] if part.isdigit() else getattr(node, part)
    return functools.reduce(step, path.split("."), model)


def _read_decoder(opened: reader.Folder, allowed: list[str]) -> DecoderConfig:
    names, model_type = opened.config.get("architectures"), opened.config.get("model_type")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if names is None:
        name = next((a for a, config in CONFIGS.items() if config.MODEL_TYPE == model_type), None)
    try:
        if not isinstance(name, str) or name not in allowed:
            expected = " or ".join(f"['{a}']" for a in allowed)
            raise UnsupportedError(f"architectures: got {show(names)}, expected {expected}{_way_out(opened, name)}")
        return CONFIGS[name].from_hf(opened.config)
    except (ArgumentError, UnsupportedError) as error:
        raise CheckpointError(f"{opened.path / reader.CONFIG_FILE}: {error}") from error


def _way_out(opened: reader.Folder, name: Any) -> str:
    """What takes a folder that is refused, if anything does."""
    if isinstance(name, str) and name in CONFIGS:
        return "; `load_model` and `jax-warp-decode generate --checkpoint` take it"
    try:
        find_family(Settings(opened.config))
    except UnsupportedError:
        return ""
    return "; `load_moe_blocks` takes its experts"


def _check_tied(opened: reader.Folder) -> None:
    """A tied folder may repeat the embedding as head, as long as it is the same."""
    head, embedding = opened.tensors[LM_HEAD], opened.tensors[EMBEDDING]
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if same:
        arrays = [np.empty(head.nbytes, np.uint8) for _ in range(2)]
        for tensor, array in zip((head, embedding), arrays, strict=True):
            dataclasses.replace(tensor, dtype="U8", shape=array.shape).read_into(array)
        same = np.array_equal(arrays[0], arrays[1])
    if not same:
        raise CheckpointError(
            f"{opened.path}: {LM_HEAD}: differs from {EMBEDDING}, expected the same or no such tensor; set "
            f"tie_word_embeddings to false in {reader.CONFIG_FILE} to use both")
