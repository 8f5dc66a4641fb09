"""What bench.two_gpus writes and says, with tests that are made up."""

import json

import pytest

from bench import gpu_report, two_gpus


def found(*outcomes, missing=()):
    rows = [dict(test=f"t{i}", outcome=outcome) for i, outcome in enumerate(outcomes)]
    return dict(meta=dict(commit="c", device="d", command="x"), count={}, missing=list(missing), results=rows)


@pytest.mark.parametrize("report,code", [
    (found("passed", "passed"), 0), (found("passed", "failed"), 1), (found("passed", "skipped"), 1), (found(), 1),
    (found("passed", missing=["t1"]), 1), (None, 1)])
def test_only_a_whole_pass_passes(report, code, tmp_path, monkeypatch):
    path = tmp_path / "gpu_tests_two.json"
    path.write_text("of an earlier run")

    def run(options, path):
        assert options.processes == 1 and options.tests[0].endswith("test_gpu_transforms.py")
        if report:
            path.write_text(json.dumps(report))

    monkeypatch.setattr(gpu_report, "run", run)
    assert two_gpus.run_tests(None, path) == code
    if report:
        assert json.loads(path.read_text())["meta"] == dict(
            commit="c", device="d", command="python -m bench.two_gpus --out OUT")


def test_without_two_gpus_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(two_gpus, "output_of", lambda *_: "GPU 0: NVIDIA H200")
    assert two_gpus.main(["--out", str(tmp_path / "new")]) == 2 and not (tmp_path / "new").exists()
    assert "two GPUs are needed, nvidia-smi lists 1" in capsys.readouterr().err
