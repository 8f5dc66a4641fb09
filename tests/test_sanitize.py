"""What bench.sanitize makes of the output of compute-sanitizer, and which kernels its cases name. Needs no GPU."""

import json

from bench import sanitize, sanitize_cases

LOG = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at {kernel}+0x70
=========     by thread (0,0,0) in block (1,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


def report(folder, processes, tool="memcheck", codes=(0, 0)):
    """What `collect` says of processes, each (cases planned, cases that ended and how, kernel with a finding)."""
    for n, (planned, ended, kernel) in enumerate(processes):
        lines = [dict(device="GPU", planned=planned)] + [dict(case=name, outcome=how) for name, how in ended.items()]
        (folder / f"{tool}-{n}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / f"{tool}-{n}.log").write_text(LOG.format(kernel=kernel) if kernel else "")
    return sanitize.collect(tool, folder, list(codes))


def test_a_clean_run_has_no_problems(tmp_path):
    got = report(tmp_path, [(["a", "planted"], {"a": "ok", "planted": "started"}, "planted_memcheck"),
                            (["b", "c"], {"b": "ok", "c": "no time left"}, None)])
    assert got["problems"] == [] and got["cases_run"] == 2
    assert got["findings_by_place"] == {"ours": 0, "host": 0, "xla": 0, "planted": 1}


def test_findings_failures_and_lost_cases_are_problems(tmp_path):
    got = report(tmp_path, [(["a", "planted"], {"a": "FAILED AssertionError: worst", "planted": "started"}, None),
                            (["b", "c"], {"b": "ok"}, "moe_down_tensor_mosaic_gpu_kernel")], codes=(0, -9))
    assert [p.split(":")[0] for p in got["problems"]] == [
        "a", "1 findings in our kernels, 0 outside of kernels", "process 1 ended (-9) before c",
        "the planted fault was not found"]
    (tmp_path / "memcheck-1.jsonl").unlink()  # it did not even import jax
    got = report(tmp_path, [(["planted"], {"planted": "started"}, "planted_memcheck")])
    assert [p.split(":")[0] for p in got["problems"]][-1] == "process 1 ended (0) before every case"


def test_the_cases_have_names_of_their_own():
    names = [name for name, _ in sanitize_cases.cases()]
    assert len(set(names)) == len(names) > 50
