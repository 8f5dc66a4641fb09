"""`jax-warp-decode plan`: against what was measured on two GPUs, and what it says about itself."""

import argparse
import json
import math
import pathlib

import numpy as np
import pytest

from jax_warp_decode import ArgumentError, plan
from jax_warp_decode.presets import get_preset
from jax_warp_decode.routing import expected_experts

RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"


def options(line):
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(line.split())


def text(line, capsys):
    assert plan.main(options(line)) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_the_plan_for_two_gpus_is_what_two_gpus_took(model):
    # The table has one GPU's layers alone. With 8 pairs an expert, short rows take longer than their bytes say.
    measured = json.loads((RESULTS / f"parallel-{model}.json").read_text())["results"]
    preset, table = get_preset(model), plan.load_table()
    rows = [r for r in measured if r["layout"] != "one" and r["collectives"] == "graph"]
    assert len(rows) == 8
    for r in rows:
        want = dict(EP2=(2, 1), TP2=(1, 2))[r["layout"]]
        split = next(s for s in plan.splits(table, preset, "bf16", 1, 2, r["batch"], 8) if (s.ep, s.tp) == want)
        load = r["batch"] * preset.experts_per_token / preset.num_experts
        assert abs(split.step_us / r["us"] - 1) < (0.12 if load < 8 else 0.25), r


def test_experts_that_are_touched():
    rng = np.random.default_rng(0)
    preset = get_preset("deepseek-v3")
    draws = [np.argsort(rng.random((32, 256)), 1)[:, :8] for _ in range(300)]
    touched = np.array([[len(np.unique(d[(d >= i) & (d < i + 32)])) for i in range(0, 256, 32)] for d in draws])
    assert math.isclose(expected_experts(256, 8, 32), touched.sum(1).mean(), rel_tol=0.01)
    assert math.isclose(plan.busiest_experts(preset, 8, 32), touched.max(1).mean(), rel_tol=0.1)
    assert plan.busiest_experts(preset, 1, 32) == expected_experts(256, 8, 32)


def test_splits_keep_blocks_whole_and_share_the_memory():
    preset, table = get_preset("deepseek-v3"), plan.load_table()
    found = plan.splits(table, preset, "fp8_block128", 58, 64, 256, 8)
    assert {s.ep * s.tp * s.copies for s in found} == {64}
    assert max(s.tp for s in found) == 16, "I = 2048 in blocks of 128"
    whole = 58 * 256 * 3 * 2048 * 7168 * (1 + 4 / 128**2)
    for s in found:
        assert math.isclose(s.memory * s.ep * s.tp, whole, rel_tol=1e-9)
        assert s.step_us == 58 * (s.layer_us + s.collective_us) and (s.collective_us > 0) == (s.ep * s.tp > 1)
    assert [s.step_us for s in found] == sorted(s.step_us for s in found)


def test_it_says_what_was_measured_and_what_was_not(capsys):
    known = text("--model qwen3-30b-a3b --devices 1 --batch 8 --format bf16", capsys)
    assert "Measured: this layer on one GPU" in known and "Extrapolated" not in known and "Collectives" not in known
    far = text("--model deepseek-v3 --devices 64 --batch 256", capsys)
    for words in ("deepseek-v3: 58 layers of 256 experts, fp8_block128, 256 tokens a step on 64 x NVIDIA H200",
                  "routed experts only", "Extrapolated: the layer", "of 25 splits do not fit 90% of the memory",
                  "Collectives: measured between two GPUs; extrapolated"):
        assert words in far
    assert "between hosts assumed: 50 GB/s" in text("--model deepseek-v3 --devices 16 --batch 16 --per-host 4", capsys)


@pytest.mark.parametrize("line,message", [
    ("--model gpt5 --devices 1 --batch 1", "model: got 'gpt5', expected one of"),
    ("--model glm-5 --devices 8 --batch 1", "--layers: got nothing, expected the number of layers"),
    ("--model deepseek-v3 --devices 0 --batch 1", "--devices: got 0, expected 1 to 2147483647"),
    ("--model tiny-docs --devices 1 --batch " + "9" * 400, "--batch: got a number of 400 digits, expected 1 to"),
    ("--model deepseek-v3 --devices 8 --batch -3", "--batch: got -3"),
    ("--model deepseek-v3 --devices 8 --batch 8 --format fp3", "--format: got 'fp3', expected one of"),
    ("--model deepseek-v3 --devices 7 --batch 5", "--devices: got 7, expected a number that splits E = 256"),
    ("--model deepseek-v3 --devices 1 --batch 8", "--devices: got 1, expected more: at best 65"),
])
def test_bad_input_is_one_line(line, message):
    with pytest.raises(ArgumentError) as error:
        plan.main(options(line))
    assert message in str(error.value) and "\n" not in str(error.value)
