"""Everything that needs a GPU, in one command: the gpu-marked tests, then the small-batch benchmark.

    python -m bench.gpu_report --out bench/results [arguments of bench.small_batch]

Writes gpu_tests.json (commit, device, outcome of every test) beside the benchmark's files. Exit code 1 if a test
failed.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

TESTS = sorted(str(path) for path in pathlib.Path("tests").glob("test_gpu*.py"))


def run_tests() -> tuple[int, dict]:
    """Runs `pytest --gpu` in a process of its own, so that it frees the GPU; exit code and the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "--gpu", "-q", *TESTS, f"--junitxml={report}"]).returncode
        cases = ElementTree.parse(report).iter("testcase")
        outcomes = {
            f"{case.get('classname')}::{case.get('name')}":
                next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed") for case in cases}
    return code, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options, rest = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    code, outcomes = run_tests()

    from bench import small_batch  # imported late: importing jax takes the GPU's memory

    meta = {**small_batch.metadata("gpu_report"), "command": f"python -m pytest --gpu {' '.join(TESTS)}"}
    count = {o: list(outcomes.values()).count(o) for o in sorted(set(outcomes.values()))}
    path = options.out / "gpu_tests.json"
    path.write_text(json.dumps(dict(meta=meta, count=count, outcomes=outcomes), indent=1) + "\n")
    print(f"gpu tests: {count}, wrote {path}", flush=True)
    bench_code = small_batch.main(["--out", str(options.out), *rest])
    return code or bench_code


if __name__ == "__main__":
    sys.exit(main())
