"""What all that write checkpoint folders do: never overwrite one, and write files that are always the same."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jax_warp_decode.checkpoints import reader
from jax_warp_decode.errors import ArgumentError


def check_free(folder: Path) -> None:
    """Raises `ArgumentError` if the folder holds a checkpoint, or a file lies where it or a parent of it would be."""
    existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), None)
    if existing is not None and not existing.is_dir():
        raise ArgumentError(f"folder: got {folder}, expected a folder or a free name, but {existing} is a file; "
                            "choose another")
    if old := sorted(p.name for pattern in ("*.safetensors*", reader.CONFIG_FILE) for p in folder.glob(pattern)):
        raise ArgumentError(f"folder: got {folder}, which holds {reader.listing(old)}; remove them or choose another")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file that whoever may read its folder may read.

    Raises:
      OSError: it cannot be written; safetensors has an error of its own, and files for their owner alone.
    """
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    with contextlib.suppress(OSError):  # some file systems have no modes
        path.chmod(path.parent.stat().st_mode & 0o666)
