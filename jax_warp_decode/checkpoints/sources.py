"""Which files of a checkpoint folder are opened at all: regular ones with content."""

import pathlib
import stat
from typing import BinaryIO

from jax_warp_decode.errors import CheckpointError


def check_regular(path: pathlib.Path) -> None:
    """Raises `CheckpointError` unless there is a regular file that has more than 0 bytes.

    A file of 0 bytes is refused unread: files of /proc and the like say that they have none, and to read from some of
    them, such as /proc/kmsg, may never end.

    Links are followed, out of the folder too: in the cache of the Hugging Face hub every file is one.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if status is None or not stat.S_ISREG(status.st_mode):
        way_out = f"is {path.parent} the folder of a model?" if path.name == "config.json" else "fetch it again"
        raise CheckpointError(f"{path}: no such file, or not a regular one, expected a file that a checkpoint folder "
                              f"has; {way_out}")
    if not status.st_size:
        raise CheckpointError(f"{path}: got a file of 0 bytes, expected one with content; fetch it again")


def open_regular(path: pathlib.Path) -> BinaryIO:
    """Opens a file of a checkpoint folder for reading, where links lead too; raises as `check_regular`."""
    check_regular(path)
    return open(path, "rb")
