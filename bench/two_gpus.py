"""All that needs two GPUs, in one command: the tests for two GPUs, then bench.parallel.

    python -m bench.two_gpus --out bench/results [--seconds 200] [arguments of bench.parallel]
    python -m bench.two_gpus --out bench/results --tests-only

Writes gpu_tests_two.json after every test (commit, device, outcome of each; tests that did not end are named), and the
files of bench.parallel. Exit code 1: a test failed, was skipped or did not finish, or a result of the benchmark was
wrong; 2: there are no two GPUs.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

from bench import gpu_report
from bench.report import output_of, replace_text

TESTS = ("tests/test_gpu_transforms.py", "-k", "two_gpus")


def run_tests(seconds: float | None, path: pathlib.Path) -> int:
    """Runs the tests in one process of its own; 1 unless every one passed."""
    path.unlink(missing_ok=True)
    gpu_report.run(argparse.Namespace(tests=TESTS, processes=1, seconds=seconds, fill=False), path)
    if not path.exists():
        print("pytest ended before it collected a test")
        return 1
    report = json.loads(path.read_text())
    report["meta"]["command"] = "python -m bench.two_gpus --out OUT"
    replace_text(path, json.dumps(report, indent=1) + "\n")
    passed = all(row["outcome"] == "passed" for row in report["results"])
    print(f"tests of two GPUs: {report['count']}, {len(report['missing'])} without outcome, wrote {path}", flush=True)
    return int(not (passed and report["results"] and not report["missing"]))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, help="kill tests that still run then; default: no limit")
    parser.add_argument("--tests-only", action="store_true", help="leave bench.parallel out")
    options, rest = parser.parse_known_args(argv)
    gpus = (output_of("nvidia-smi", "--list-gpus") or "").splitlines()
    if len(gpus) < 2:
        print(f"two GPUs are needed, nvidia-smi lists {len(gpus)}", file=sys.stderr)
        return 2
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast: not every host can
    code = run_tests(options.seconds, options.out.resolve() / "gpu_tests_two.json")
    if options.tests_only:
        return code
    command = [sys.executable, "-m", "bench.parallel", "--out", str(options.out), *rest]
    return code or subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
