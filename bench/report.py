"""What benchmarks write down: where a run comes from, and a JSON that grows with it and says what is missing."""

import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable

import jax
import jaxlib

from jax_warp_decode.measure import timing
from jax_warp_decode.measure.variants import WRONG, describe


def need_gpu(module: str) -> None:
    """Ends the run where there is nothing to measure."""
    if jax.default_backend() != "gpu":
        raise SystemExit(f"bench.{module} measures an NVIDIA GPU; JAX sees none")


def output_of(*command) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _of_the_first_gpu(property: str) -> str | None:
    found = output_of("nvidia-smi", f"--query-gpu={property}", "--format=csv,noheader")
    return found and found.splitlines()[0]


def device_name() -> str:
    """The GPU's name, without taking memory of it."""
    return _of_the_first_gpu("name") or "none"


def commit() -> str | None:
    """Of this tree; GIT_COMMIT names that of a copy without its history."""
    return os.environ.get("GIT_COMMIT") or output_of("git", "rev-parse", "HEAD")


def metadata(module: str, device: str | None = None) -> dict:
    """Where a result comes from. The output folder is the reader's own, so the command names none.

    To ask for the device is to take memory of it; name it where others need that.
    """
    words = list(sys.argv[1:])
    if "--out" in words:
        words[words.index("--out") + 1] = "OUT"
    return dict(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", f"bench.{module}", *words]), commit=commit(),
        device=device or jax.devices()[0].device_kind,
        driver=_of_the_first_gpu("driver_version"),
        jax=jax.__version__, jaxlib=jaxlib.__version__, xla_options=timing.GRAPH_OPTIONS)


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a file so that whoever looks, or stops the process, finds the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def draw(plot: Callable, path: pathlib.Path, *args) -> None:
    """Runs plot(path, *args); the figures of a run outlive a picture that cannot be drawn."""
    try:
        plot(path, *args)
        print(f"wrote {path}")
    except Exception as error:
        print(f"no picture: {describe(error)}")


class Report:
    """The rows of a run, in a JSON that is written anew after each change.

    The JSON has `meta`, `complete` (False until `finish`, and if anything was cut), `missing` (what a budget cut),
    the facts, and `results`. With `fill` the good rows of an earlier run of the same commit and device stay, `has`
    tells them, and the run measures the others.

    Example:
      >>> import json, pathlib, tempfile
      >>> from bench.report import Report
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "some.json"
      >>> report = Report(path, "some")
      >>> report.add(dict(batch=1, us=2.5), dict(batch=2, error="ValueError: no"))
      >>> report.cut("B=4")
      out of time: B=4 was not run
      >>> again = Report(path, "some", fill=True)
      >>> again.has(batch=1), again.has(batch=2), json.loads(path.read_text())["complete"]
      (True, False, False)
    """

    def __init__(self, path: pathlib.Path, source: str | dict, *, fill: bool = False, **facts):
        """`source` is the name of the module, or `metadata` of it from a process that may hold the GPU."""
        self.path, self.facts, self.meta = path, facts, metadata(source) if isinstance(source, str) else source
        self.rows, self.missing, self.finished = [], [], False
        if fill and path.exists():
            earlier = json.loads(path.read_text())
            for what in ("commit", "device"):
                if earlier["meta"][what] != self.meta[what]:
                    raise SystemExit(f"{path}: is of {what} {earlier['meta'][what]}, this is {self.meta[what]}; "
                                     f"write elsewhere, or leave --fill out")
            self.rows = [row for row in earlier["results"] if "error" not in row]
            self.meta["filled"] = [*earlier["meta"].get("filled", []), earlier["meta"]["command"]]
        self.write()

    def has(self, **values) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(name) == value for name, value in values.items()) for row in self.rows)

    def add(self, *rows: dict) -> None:
        self.rows += rows
        self.write()

    def cut(self, *what) -> None:
        """Notes what is not run for want of time."""
        for each in map(str, what):
            print(f"out of time: {each} was not run", flush=True)
            self.missing.append(each)
        self.write()

    def write(self) -> None:
        content = dict(meta=self.meta, complete=self.finished and not self.missing, missing=self.missing, **self.facts,
                       results=self.rows)
        replace_text(self.path, json.dumps(content, indent=1, default=float) + "\n")

    def finish(self) -> int:
        """Writes the end of a run and says so; 1 if a result was wrong, else 0."""
        self.finished = True
        self.write()
        cut = f", {len(self.missing)} cut by the budget" if self.missing else ""
        print(f"wrote {self.path}: {len(self.rows)} rows{cut}", flush=True)
        return int(any(WRONG in str(row.get("error", "")) for row in self.rows))
