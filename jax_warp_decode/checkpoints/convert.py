"""`jax-warp-decode convert`: a folder with plain experts becomes one with quantised experts, shard by shard."""

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_warp_decode.checkpoints import reader
from jax_warp_decode.checkpoints.blocks import MoEFolder
from jax_warp_decode.checkpoints.family import DENSE, Storage
from jax_warp_decode.checkpoints.files import check_free, write_json, write_tensors
from jax_warp_decode.checkpoints.progress import Report, reporting
from jax_warp_decode.checkpoints.quantization import check_sizes, encoding_of, plain_modules, quantization_config
from jax_warp_decode.checkpoints.slots import Slot
from jax_warp_decode.errors import ArgumentError, CheckpointError
from jax_warp_decode.formats import quantize

TARGETS = ("mxfp8",)
COPIED = (".json", ".jinja", ".model", ".txt")  # tokenizer and the like; never code


def convert(folder: Any, out: Any, weights: str = "mxfp8", progress: Report | None = None) -> None:
    """Writes a copy of a Hugging Face folder whose experts, shared ones too, are quantised; all else stays bit by bit.

    One source shard is in memory at a time. Every projection of every expert becomes a tensor of its own, [out, in],
    with its scales beside it as `weight_scale_inv`; config.json, which is written last, gets a `quantization_config`
    that transformers reads too (for families that it knows in this form, so not for gpt-oss).

    Args:
      folder: with plain experts, of a family in `families.FAMILIES`.
      out: created with its parents if it does not exist; must not hold a checkpoint.
      weights: a name in `TARGETS`.
      progress: called with (bytes read, bytes in all); None shows a bar on a terminal.

    Raises:
      CheckpointError: anything wrong with the source. Nothing has been written then.
      ArgumentError: unknown weights, experts that are quantised already, sizes that the format cannot take, or an `out`
        that is `folder`, holds a checkpoint or is a file.
      OSError: a file of `out` cannot be written.

    Example:
      >>> import tempfile
      >>> from jax_warp_decode.checkpoints import MoEFolder
      >>> from jax_warp_decode.checkpoints.convert import convert
      >>> from jax_warp_decode.demo import bundled_model
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     convert(bundled_model("bf16"), folder + "/mxfp8")
      ...     MoEFolder(folder + "/mxfp8").encoding.format
      'mxfp8'
    """
    if weights not in TARGETS:
        raise ArgumentError(f"weights: got {weights!r}, expected one of {list(TARGETS)}")
    out = reader.as_path(out, "out")
    source = MoEFolder(folder)
    if os.path.realpath(out) == os.path.realpath(source.opened.path):
        raise ArgumentError(f"out: got {out}, the folder of the model itself, expected another one")
    if source.encoding.format != DENSE:
        raise ArgumentError(f"folder: got experts in {source.encoding.format}, which are served as they are; expected "
                            "bf16, f16 or f32 ones")
    target = encoding_of(weights)
    check_sizes(source.spec, target)
    check_free(out)
    opened, converter = source.opened, _Converter(source, weights, target.scale)
    if unknown := sorted({t.dtype for t in opened.tensors.values()} - reader.DTYPES.keys()):
        raise CheckpointError(
            f"{opened.path}: got tensors of type {', '.join(unknown)}, expected {list(reader.DTYPES)}")
    copied = [path for path in sorted(opened.path.iterdir()) if path.suffix in COPIED and path.is_file()
              and path.name not in (reader.CONFIG_FILE, reader.INDEX_FILE)]
    shards: dict[Path, list[str]] = {}
    for name, tensor in opened.tensors.items():
        shards.setdefault(tensor.file, []).append(name)
    total, done, size = sum(t.nbytes for t in opened.tensors.values()), 0, 0
    weight_map: dict[str, str] = {}
    out.mkdir(parents=True, exist_ok=True)
    plain: list[tuple[str, tuple[int, ...]]] = []
    with reporting(f"converting {opened.path.name}", progress) as report:
        report(0, total)
        for file, names in shards.items():
            tensors: dict[str, np.ndarray] = {}
            for name in names:
                stored = opened.tensors[name]
                if name in converter.experts:
                    tensors |= dict(converter.quantised(name))
                else:
                    tensors[name] = np.empty(stored.shape, reader.DTYPES[stored.dtype])
                    stored.read_into(tensors[name])
                    plain.append((name, stored.shape))
                done += stored.nbytes
                report(done, total)
            write_tensors(out / file.name, tensors)
            weight_map |= dict.fromkeys(tensors, file.name)
            size += sum(array.nbytes for array in tensors.values())
    if any(file.name != reader.SINGLE_FILE for file in shards):
        write_json(out / reader.INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
    for path in copied:
        if path.stat().st_size:
            shutil.copyfile(path, out / path.name)
        else:  # not read, see `sources`
            (out / path.name).touch()
    write_json(out / reader.CONFIG_FILE,
               {**opened.config, "quantization_config": quantization_config(weights, plain_modules(plain))})


class _Converter:
    """Knows which tensors of a folder are experts, and makes their quantised tensors."""

    def __init__(self, source: MoEFolder, weights: str, scale: str):
        self._source, self._weights, self._scale = source, weights, scale
        self._storage = next(s for s in source.family.storages if weights in s.formats)
        self.experts: dict[str, list[tuple[int, Slot]]] = {}
        for layer in source.layers:
            for slot in source.slots[layer]:
                if slot.param.rpartition(".")[2].startswith("w_"):
                    self.experts.setdefault(slot.name, []).append((layer, slot))

    def quantised(self, name: str) -> Iterator[tuple[str, np.ndarray]]:
        """Names and arrays of what replaces one tensor of the folder."""
        stored = self._source.opened.tensors[name]
        for layer, slot in self.experts[name]:
            block = self._source.family.block_name(self._source.architecture, layer)
            shared = ".shared." in slot.param
            storage = self._source.family.shared if shared else self._storage
            assert storage is not None  # or there would be no such slot
            for number, part, entry in _matrices(slot, stored):
                matrix = np.empty(part.target_shape, reader.DTYPES[stored.dtype])
                part.read(entry, matrix)
                array = quantize(matrix, self._weights)
                new = f"{block}.{_template(storage, slot).format(e=number)}"
                yield new, np.asarray(array.values)
                yield f"{new}{self._scale}", np.asarray(array.scales)


def _matrices(slot: Slot, stored: reader.StoredTensor) -> Iterator[tuple[int, Slot, reader.StoredTensor]]:
    """Number of the expert, slot and place of every matrix of a tensor."""
    if slot.expert is not None:
        yield slot.expert[0], slot, stored
    else:
        for number, entry in enumerate(stored):
            yield number, slot.one(), entry


def _template(storage: Storage, slot: Slot) -> str:
    return getattr(storage, slot.param.rpartition("w_")[2]).name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a Hugging Face folder with bfloat16, float16 or float32 experts")
    parser.add_argument("out", metavar="OUT", help="folder to write; must not hold a checkpoint yet")
    parser.add_argument("--weights", choices=TARGETS, default="mxfp8",
                        help="format of the experts (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    convert(options.folder, options.out, options.weights)
    print(f"{options.out}: experts in {options.weights}, all other tensors as they were")
    return 0
