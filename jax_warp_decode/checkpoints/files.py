"""What everything that writes a checkpoint folder does: never overwrite one, and write JSON that is always the same."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
