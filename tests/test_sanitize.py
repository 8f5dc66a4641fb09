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


def report(folder, processes, planned, tool="memcheck", codes=((0,), (0,))):
    """What `collect` says of processes, each (how the cases that it began ended, kernel with a finding)."""
    for n, (ended, kernel) in enumerate(processes):
        lines = [dict(device="GPU")]
        for name, how in ended.items():
            tries = sanitize.TRIES if how == sanitize.BEGUN else 1
            lines += [dict(case=name, outcome=sanitize.BEGUN)] * tries + [dict(case=name, outcome=how)]
        (folder / f"{tool}-{n}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{tool}-{n}-0.log").write_text(LOG.format(kernel=kernel) if kernel else "")
    return sanitize.collect(tool, folder, list(codes), planned)


def problems(got):
    return [p.split(":")[0].split(" (")[0] for p in got["problems"]]


def test_a_clean_run_has_no_problems(tmp_path):
    got = report(tmp_path, [({"planted": "FAILED context lost"}, "planted_memcheck"),
                            ({"a": "ok", "b": "ok", "c": "no time left"}, None)], ["a", "b", "c"])
    assert problems(got) == [] and got["cases_run"] == 2
    assert got["findings_by_place"] == {
        "ours": 0, "host": 0, "xla": 0, "tool": 0, "planted": 1, "control": 0}


def test_findings_failures_and_lost_cases_are_problems(tmp_path):
    got = report(tmp_path, [({"a": "FAILED AssertionError: worst", "planted": "ok"}, None),
                            ({"b": "ok", "c": sanitize.BEGUN}, "moe_down_tensor_mosaic_gpu_kernel")],
                 ["a", "b", "c", "d"], codes=((0,), (-11, -9)))
    assert problems(got) == ["a", "1 findings in our kernels, 0 outside of kernels", "c", "no process finished d",
                             "the planted fault was not found"]
    assert "c: ended its process (exit codes (-11, -9))" in got["problems"][2]
    (tmp_path / "memcheck-1.jsonl").unlink()  # it did not even import jax
    got = report(tmp_path, [({"planted": "ok"}, "planted_initcheck")], ["a"])
    assert problems(got)[-2:] == ["no process finished a", "the planted fault was not found"]


SANITIZER = """#!/bin/bash
case "$1" in --version | --help) exit;; esac
while [ "$1" != "{python}" ]; do [ "$1" = --log-file ] && echo "{log}" > "$2"; shift; done
exec "$@"
"""


def run_with_a_stand_in(tmp_path, monkeypatch, cases, processes):
    """The report of one tool, with a stand-in for compute-sanitizer that runs the program."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(SANITIZER.format(python=sys.executable, log="========= COMPUTE-SANITIZER"))
    fake.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nfrom bench import sanitize_cases as s\n"
        "kill = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"once = lambda: os.path.exists('{tmp_path}/once') or [open('{tmp_path}/once', 'w'), kill()]\n"
        f"s.cases = lambda: [{', '.join(f"('{name}', {run})" for name, run in cases.items())}]\n"
        "s.sanitize_controls.planted = str\n")
    monkeypatch.setattr(sanitize_cases, "cases", lambda: [(name, None) for name in cases])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{sanitize.ROOT}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    options = ["--out", str(tmp_path), "--tool", "racecheck", "--seconds", "60", "--processes", str(processes)]
    assert sanitize.main(options) == 1  # nothing finds the planted fault here
    (tool,) = json.loads((tmp_path / "sanitize.json").read_text())["tools"]
    return tool


def test_another_process_goes_on_where_one_ended(tmp_path, monkeypatch):
    """A case that kills its process, and one that does so once."""
    cases = {"a": "int", "b": "kill", "c": "once", "d": "int"}
    tool = run_with_a_stand_in(tmp_path, monkeypatch, cases, processes=1)
    assert [(c["case"], c["outcome"]) for c in tool["cases"]] == [
        ("planted", "ok"), ("a", "ok"), ("b", "begun"), ("c", "ok"), ("d", "ok")]
    assert sum(code == -9 for codes in tool["exit_codes"] for code in codes) == 3 and tool["tried_again"] == ["b", "c"]
    assert [p.split(" (")[0] for p in tool["problems"]] == ["b: ended its process", "the planted fault was not found"]


def test_every_case_runs_in_one_process(tmp_path, monkeypatch):
    cases = {str(n): f"lambda: open('{tmp_path}/{n}', 'x')" for n in range(6)}
    tool = run_with_a_stand_in(tmp_path, monkeypatch, cases, processes=3)
    assert sorted(c["case"] for c in tool["cases"]) == [*cases, "planted"]
    assert tool["cases_run"] == 7 and len(tool["exit_codes"]) > 2 and tool["problems"] == [
        "the planted fault was not found"]


def test_the_cases_have_names_of_their_own():
    names = [name for name, _ in sanitize_cases.cases()]
    assert len(set(names)) == len(names) > 50


def test_the_cases_can_be_called():
    """None of them runs on a CPU, so that arguments which a function does not take would be found on a GPU only."""
    for _, run in sanitize_cases.cases():
        inspect.signature(run).bind()


@pytest.mark.parametrize("format", sanitize_cases.SHARED)
def test_the_configurations_of_shared_decode_fit(format):
    experts, hidden, intermediate, k = sanitize_cases.SHAPES[sanitize_cases.shape_of_configurations(format)]
    for config in sanitize_cases.SHARED_CONFIGS:
        for cols, matrices in ((hidden, 2), (intermediate, 1)):
            shared_common.check_config(
                shared_common.SharedConfig(**config), cols, format, 17 * k, experts, matrices)
