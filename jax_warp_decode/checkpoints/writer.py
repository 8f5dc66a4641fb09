"""Writes a Qwen3-MoE model as a Hugging Face folder, from the same table of names that the loader reads by."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import split_state_dict_into_shards_factory

from jax_warp_decode.checkpoints import reader
from jax_warp_decode.checkpoints.decoders import find_param, layout
from jax_warp_decode.checkpoints.families import qwen3_moe
from jax_warp_decode.checkpoints.files import check_free, write_json, write_tensors
from jax_warp_decode.checkpoints.quantization import encoding_of, plain_modules, quantization_config
from jax_warp_decode.checkpoints.slots import Slot
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import DENSE_FORMATS
from jax_warp_decode.formats import FORMATS, QuantizedArray, quantize
from jax_warp_decode.models.decoder import Decoder
from jax_warp_decode.models.qwen3_moe_config import Qwen3MoeConfig
from jax_warp_decode.models.settings import Settings

SAVED_FORMATS = ("mxfp8",)  # what the reader takes


def save_qwen3_moe(
        model: Decoder, folder: Any, *, format: str | None = None, max_shard_size: int | str = "5GB") -> None:
    """Writes config.json and safetensors files that `load_qwen3_moe` reads back exactly, and so does transformers.

    Equal models give equal bytes. config.json is written last, so an interrupted folder is never taken for a model.

    Args:
      model: saved in the dtypes that its parameters have.
      folder: created with its parents if it does not exist; must not hold a checkpoint.
      format: None keeps the experts as they are; "mxfp8" quantises plain experts, one parameter at a time.
      max_shard_size: bytes, or a string such as "5GB"; a larger model is split into shards with an index.

    Raises:
      ArgumentError: an unknown format, sizes that it cannot take, layers of different formats, parameters that are not
        those of `model.config`, a folder that holds a checkpoint already, or a path on which a file lies. Nothing has
        been written then.
      OSError: a file cannot be written.

    Example:
      >>> import os, tempfile
      >>> from jax_warp_decode.checkpoints import load_qwen3_moe, save_qwen3_moe
      >>> from jax_warp_decode.demo import bundled_model
      >>> model = load_qwen3_moe(bundled_model("bf16"))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_qwen3_moe(model, folder, format="mxfp8")
      ...     sorted(os.listdir(folder))
      ['config.json', 'model.safetensors']
    """
    folder = reader.as_path(folder)
    if not isinstance(model.config, Qwen3MoeConfig):
        raise ArgumentError(f"model: got a {model.config.ARCHITECTURE}, expected a {Qwen3MoeConfig.ARCHITECTURE}")
    expert_format = _target_format(model, format)
    check_free(folder)
    config = model.config.to_hf()
    encoding = encoding_of(expert_format or "")
    slots = {slot.name: slot for slot in layout(
        model.config, qwen3_moe.FAMILY, Qwen3MoeConfig.ARCHITECTURE, qwen3_moe.read(Settings(config)), encoding, ())}
    _check_params(model, slots.values())
    split = split_state_dict_into_shards_factory(
        slots, get_storage_size=lambda slot: _nbytes(model, slot), filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    source = _Source(model, expert_format)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: source.read(slots[name]) for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / reader.INDEX_FILE, index)
    config["torch_dtype"] = str(model.embed.embedding.get_value().dtype)
    if expert_format is not None:
        config["quantization_config"] = quantization_config(
            expert_format, plain_modules((slot.name, slot.shape) for slot in slots.values() if not slot.part))
    write_json(folder / reader.CONFIG_FILE, config)


class _Source:
    """Brings parameters to the host, quantised if asked; holds one at a time, as the slots of one follow each other."""

    def __init__(self, model: Decoder, expert_format: str | None):
        self._model, self._format = model, expert_format
        self._param = ""
        self._parts: dict[str, np.ndarray] = {}

    def read(self, slot: Slot) -> np.ndarray:
        if slot.param != self._param:
            value = find_param(self._model, slot.param).get_value()
            if slot.part and not isinstance(value, QuantizedArray):
                assert self._format is not None  # else no slot has parts
                value = quantize(value, self._format)
            parts = {"values": value.values, "scales": value.scales} if slot.part else {"": value}
            self._param, self._parts = slot.param, {part: np.asarray(array) for part, array in parts.items()}
        whole = self._parts[slot.part]
        array = whole if slot.expert is None else whole[slot.expert[0]]
        return np.ascontiguousarray(array.T if slot.transpose else array)


def _target_format(model: Decoder, format: str | None) -> str | None:
    """Format of the experts in the folder; None for plain ones."""
    if format is not None and format not in SAVED_FORMATS:
        raise ArgumentError(f"format: got {format!r}, expected None or one of {sorted(SAVED_FORMATS)}")
    formats = {layer.moe.experts.format for layer in model.layers}
    if len(formats) > 1:
        raise ArgumentError(f"model: got layers with experts in {sorted(formats)}, expected one format in all layers")
    held = formats.pop()
    if held in FORMATS and held not in SAVED_FORMATS:
        raise ArgumentError(f"model: got {held} experts, expected one of {sorted(SAVED_FORMATS)} or plain ones; "
                            "dequantise them")
    if held in FORMATS and format not in (None, held):
        raise ArgumentError(f"format: got {format!r} for a model with {held} experts, expected None or {held!r}")
    target = held if held in FORMATS else format
    if target is not None:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(model.config, name) % FORMATS[target].block:
                raise ArgumentError(f"format: got {target!r}, which needs a {name} that is a multiple of "
                                    f"{FORMATS[target].block}, not {getattr(model.config, name)}")
    return target


def _check_params(model: Decoder, slots: Iterable[Slot]) -> None:
    """Raises `ArgumentError` unless the model has exactly the parameters of the slots, in their shapes."""
    expected = {}
    for slot in slots:
        if slot.part != "scales":
            expected[slot.param] = slot.param_shape
    held = {".".join(map(str, path)): param.get_value()
            for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for word, names in (("without", expected.keys() - held.keys()), ("with also", held.keys() - expected.keys())):
        if names:
            raise ArgumentError(f"model: got one {word} {reader.listing(sorted(names))}, expected the parameters of "
                                "its config; build it with a config that fits")
    for path, shape in expected.items():
        value = held[path]
        if value.shape != shape:
            raise ArgumentError(f"{path}: got shape {value.shape}, expected {shape} by the model's config")
        if not isinstance(value, QuantizedArray) and jnp.dtype(value.dtype) not in DENSE_FORMATS:
            raise ArgumentError(f"{path}: got dtype {value.dtype}, expected bfloat16, float16 or float32")
    for number, layer in enumerate(model.layers):
        try:
            layer.moe.experts.check()
        except ArgumentError as error:
            raise ArgumentError(f"layers.{number}.moe.{error}") from None


def _nbytes(model: Decoder, slot: Slot) -> int:
    itemsize = 1 if slot.part else jnp.dtype(find_param(model, slot.param).get_value().dtype).itemsize
    return int(np.prod(slot.shape)) * itemsize

