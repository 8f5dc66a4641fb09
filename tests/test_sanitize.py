"""What bench.sanitize makes of the output of compute-sanitizer, and which kernels its cases name. Needs no GPU."""

import inspect
import json
import sys

import pytest

from bench import sanitize, sanitize_cases
from jax_warp_decode.kernels import shared_common

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at {kernel}+0x70
=========     by thread (0,0,0) in block (1,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


def report(folder, processes, tool="memcheck", codes=((0,), (0,))):
    """What `collect` says of processes, each (cases planned, how those that began ended, kernel with a finding)."""
    for n, (planned, ended, kernel) in enumerate(processes):
        lines = [dict(device="GPU", planned=planned)]
        for name, how in ended.items():
            tries = sanitize.TRIES if how == sanitize.BEGUN else 1
            lines += [dict(case=name, outcome=sanitize.BEGUN)] * tries + [dict(case=name, outcome=how)]
        (folder / f"{tool}-{n}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{tool}-{n}-0.log").write_text(LOG.format(kernel=kernel) if kernel else "")
    return sanitize.collect(tool, folder, list(codes))


def problems(got):
    return [p.split(":")[0].split(" (")[0] for p in got["problems"]]


def test_a_clean_run_has_no_problems(tmp_path):
    got = report(tmp_path, [(["a", "planted"], {"a": "ok", "planted": "FAILED context lost"}, "planted_memcheck"),
                            (["b", "c"], {"b": "ok", "c": "no time left"}, None)])
    assert problems(got) == [] and got["cases_run"] == 2
    assert got["findings_by_place"] == {
        "ours": 0, "host": 0, "xla": 0, "tool": 0, "planted": 1, "control": 0}


def test_findings_failures_and_lost_cases_are_problems(tmp_path):
    got = report(tmp_path, [(["a", "planted"], {"a": "FAILED AssertionError: worst", "planted": "ok"}, None),
                            (["b", "c", "d"], {"b": "ok", "c": sanitize.BEGUN}, "moe_down_tensor_mosaic_gpu_kernel")],
                 codes=((0,), (-11, -9)))
    assert problems(got) == ["a", "1 findings in our kernels, 0 outside of kernels", "c", "process 1 ended before d",
                             "the planted fault was not found"]
    assert "c: ended its process (exit codes (-11, -9))" in got["problems"][2]
    (tmp_path / "memcheck-1.jsonl").unlink()  # it did not even import jax
    got = report(tmp_path, [(["planted"], {"planted": "ok"}, "planted_initcheck")])
    assert problems(got)[-2:] == ["process 1 ended before every case", "the planted fault was not found"]


SANITIZER = """#!/bin/bash
case "$1" in --version | --help) exit;; esac
while [ "$1" != "{python}" ]; do [ "$1" = --log-file ] && echo "{log}" > "$2"; shift; done
exec "$@"
"""


def test_another_process_goes_on_where_one_ended(tmp_path, monkeypatch):
    """With a stand-in for compute-sanitizer that runs the program, a case that kills it and one that does so once."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(SANITIZER.format(python=sys.executable, log="========= COMPUTE-SANITIZER"))
    fake.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nfrom bench import sanitize_cases as s\n"
        "kill = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"once = lambda: os.path.exists('{tmp_path}/once') or [open('{tmp_path}/once', 'w'), kill()]\n"
        "s.cases = lambda: [('a', int), ('b', kill), ('c', once), ('d', int)]\n"
        "s.sanitize_controls.planted = str\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{sanitize.ROOT}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert sanitize.main(["--out", str(tmp_path), "--tool", "synccheck", "--processes", "1", "--seconds", "60"]) == 1
    (tool,) = json.loads((tmp_path / "sanitize.json").read_text())["tools"]
    assert [(c["case"], c["outcome"]) for c in tool["cases"]] == [
        ("a", "ok"), ("b", "begun"), ("c", "ok"), ("d", "ok"), ("planted", "ok")]
    assert tool["exit_codes"] == [[-9, -9, -9, 0], [0]] and tool["tried_again"] == ["b", "c"]
    assert [p.split(" (")[0] for p in tool["problems"]] == ["b: ended its process", "the planted fault was not found"]


def test_the_cases_have_names_of_their_own():
    names = [name for name, _ in sanitize_cases.cases()]
    assert len(set(names)) == len(names) > 50


def test_the_cases_can_be_called():
    """None of them runs on a CPU, so that arguments which a function does not take would be found on a GPU only."""
    for _, run in sanitize_cases.cases():
        inspect.signature(run).bind()


@pytest.mark.parametrize("format", sanitize_cases.SHARED)
def test_the_configurations_of_shared_decode_fit(format):
    experts, hidden, intermediate, k = sanitize_cases.SHAPES["blocks"]
    for config in sanitize_cases.SHARED_CONFIGS:
        for cols, matrices in ((hidden, 2), (intermediate, 1)):
            shared_common.check_config(
                shared_common.SharedConfig(**config), cols, format, 33 * k, experts, matrices)
