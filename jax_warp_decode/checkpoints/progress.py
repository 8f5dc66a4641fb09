"""A progress bar for whatever counts bytes."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

Report = Callable[[int, int], None]


@contextlib.contextmanager
def reporting(title: str, report: Report | None) -> Iterator[Report]:
    """`report`, or where it is None a bar on stderr, which shows only on a terminal.

    Both are called with (bytes done, bytes in all).
    """
    if report is not None:
        yield report
        return
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
