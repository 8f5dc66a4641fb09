"""Limits of processor time that mean the same on a slow or a crowded machine."""

import concurrent.futures
import json
import time
from collections.abc import Callable

from jax_warp_decode.checkpoints.reader import no_collections

SECONDS = 2.0  # of this process, on a machine that takes YARDSTICK seconds for `_yardstick`
YARDSTICK = 0.1
TRIES = 3


@no_collections()
def _yardstick() -> float:
    """Seconds that this machine takes just now to parse the header of a large checkpoint and make objects of it."""
    entry = b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(entry % n for n in range(50_000)) + b"}"
    start = time.process_time()
    parsed = {name: (value["dtype"], tuple(value["shape"]), str(name)) for name, value in json.loads(text).items()}
    assert len(parsed) == 50_000
    return time.process_time() - start


def in_time[T](function: Callable[..., T], *args: object) -> T:
    """What `function(*args)` returns or raises; fails if that takes more than SECONDS three times.

    Where the machine is slower than the one that the limit is for, or shares its cores, it has as much more time.
    """
    taken = []
    for _ in range(TRIES):
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        start = time.process_time()
        try:
            answer.set_result(function(*args))
        except Exception as error:
            answer.set_exception(error)
        seconds = time.process_time() - start
        if seconds < SECONDS or seconds < SECONDS * _yardstick() / YARDSTICK:
            return answer.result()
        taken.append(round(seconds, 2))
    raise AssertionError(f"took {taken} s of processor time, expected {SECONDS}, or more as this machine is slower")
