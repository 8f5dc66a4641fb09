"""The tests that need a GPU, side by side, with the outcome of each in a JSON that survives whatever ends the run.

    python -m bench.gpu_report --out bench/results [--tests tests/test_gpu_shared.py ...] [--seconds 500] [--fill]

Writes gpu_tests.json after every test. When --seconds are over all processes are killed: the tests under way are named,
and so are those that did not begin. --fill keeps the tests of the JSON at --out that passed or were skipped, and runs
the others; the JSON then holds all of them. A process that a kernel has cost its CUDA context ends, and another one
goes on. Exit code 1: a test failed or did not finish.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

from bench.report import device_name, metadata

ROOT = pathlib.Path(__file__).parent.parent
TESTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_gpu*.py"))


def run(options, path: pathlib.Path) -> None:
    """Runs pytest in processes of their own, so that this one takes no memory of the GPU."""
    meta = json.dumps(metadata("gpu_report", device_name()))
    command = [sys.executable, "-m", "pytest", "--gpu", "-q", "--tb=no", "-p", "no:cacheprovider",
               "-p", "bench.outcomes", f"--outcomes={path}", *["--outcomes-fill"] * options.fill, *options.tests]
    if options.processes > 1 and importlib.util.find_spec("xdist"):
        command += [f"-n{options.processes}", "--maxschedchunk=4"]
    env = os.environ | dict(OUTCOMES_META=meta, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        process.wait(options.seconds)
    except subprocess.TimeoutExpired:
        print(f"\nstopped after {options.seconds:.0f} s", flush=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with its workers, which may wait for a kernel that never ends
            process.wait()


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files; default: all with tests for a GPU")
    parser.add_argument("-n", "--processes", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, help="kill what still runs then; default: no limit")
    parser.add_argument("--fill", action="store_true", help="keep what passed in an earlier run of this commit")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    if device_name() == "none":
        raise SystemExit("bench.gpu_report runs the tests that need an NVIDIA GPU; nvidia-smi names none")
    path = options.out.resolve() / "gpu_tests.json"
    run(options, path)
    if not path.exists():
        print("pytest ended before it collected a test")
        return 1
    report = json.loads(path.read_text())
    for row in report["results"]:
        if "error" in row:
            print(f"{row['outcome']} {row['test']}: {row['error'].strip().splitlines()[-1][:300]}")
    if report["missing"]:
        print(f"under way at the end: {report['running']}")
    print(f"gpu tests: {report['count']}, {len(report['missing'])} without outcome, wrote {path}", flush=True)
    return int(bool(report["missing"] or not report["results"] or any("error" in row for row in report["results"])))


if __name__ == "__main__":
    sys.exit(main())
