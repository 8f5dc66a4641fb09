"""`jax-warp-decode plan`: against what was measured on two GPUs, and what it says about itself."""

import argparse
import json
import math
import pathlib

import numpy as np
import pytest

from bench import plan_table
from jax_warp_decode import ArgumentError, plan
from jax_warp_decode.presets import get_preset
from jax_warp_decode.routing import expected_experts

RESULTS = pathlib.Path(__file__).parents[1] / "bench" / "results"


def options(line):
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(line.split())


def one_gpu(model, format, tokens):
    (found,) = plan.splits(plan.load_table(), get_preset(model), format, 1, 1, tokens, 8)
    return found


def text(line, capsys):
    assert plan.main(options(line)) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_the_plan_for_two_gpus_is_what_two_gpus_took(model):
    # From one GPU's layers of that time. With 8 pairs an expert, short rows take longer than their bytes say.
    measured = json.loads((RESULTS / f"parallel-{model}.json").read_text())["results"]
    preset, date = get_preset(model), lambda path: json.loads(path.read_text()).get("meta", {}).get("date", "")
    until = date(RESULTS / "collectives.json")
    table = plan_table.collect(path for path in RESULTS.glob("*.json") if date(path) <= until)
    rows = [r for r in measured if r["layout"] != "one" and r["collectives"] == "graph"]
    assert len(rows) == 8
    for r in rows:
        want = dict(EP2=(2, 1), TP2=(1, 2))[r["layout"]]
        split = next(s for s in plan.splits(table, preset, "bf16", 1, 2, r["batch"], 8) if (s.ep, s.tp) == want)
        load = r["batch"] * preset.experts_per_token / preset.num_experts
        assert abs(split.step_us / r["us"] - 1) < (0.1 if load < 8 else 0.15), r


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


def test_the_table_is_what_the_results_make():
    assert plan_table.collect(RESULTS.glob("*.json")) == plan.load_table(), "run python -m bench.plan_table"


def test_the_newest_time_of_a_strategy_counts_and_the_fastest_strategy(tmp_path):
    def write(name, day, *rows, device="NVIDIA H200"):
        same = dict(model="qwen3-30b-a3b", format="bf16", pattern="uniform", batch=8, clock="device",
                    unique_bytes=10**9)
        content = dict(meta=dict(date=f"2026-12-{day:02}", device=device), results=[same | row for row in rows])
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    write("b", 1, dict(strategy="read", us=200.0), dict(strategy="warp_decode", us=100.0),
          dict(strategy="shared_decode", us=300.0), dict(strategy="warp_decode", us=50.0, batch=4))
    write("a", 2, dict(strategy="read", us=2000.0, unique_bytes=10**10), dict(strategy="warp_decode", us=280.0),
          dict(strategy="expert_centric", us=1.0, pattern="zipf"), dict(strategy="tokamax_mosaic", us=1.0),
          dict(strategy="expert_centric", us=1.0, clock="host"), dict(strategy="expert_centric", error="wrong"))
    write("c", 3, dict(strategy="warp_decode", us=1.0), device="NVIDIA H100")
    (tmp_path / "d.json").write_text(json.dumps(dict(date="2026-12-04", results=[])))
    table = plan_table.collect(tmp_path.glob("*.json"))
    assert [(r["tokens"], r["strategy"], r["us"], r["source"]) for r in table["layers"]] == [
        (4, "warp_decode", 50.0, "b.json"), (8, "warp_decode", 280.0, "a.json")]
    assert table["sources"] == ["a.json", "b.json"]


@pytest.mark.parametrize("format,tokens,us", [("bf16", 128, 294), ("bf16", 256, 306), ("bf16", 1024, 333),
                                              ("bf16", 4096, 592), ("bf16", 8192, 1143), ("mxfp8", 128, 172)])
def test_layers_take_what_they_took_last(format, tokens, us):
    found = one_gpu("qwen3-30b-a3b", format, tokens)
    assert found.measured and found.layer_us < 1.01 * us


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-20b", "tiny-docs"])
def test_more_tokens_never_take_less_time(model, format):
    found = [one_gpu(model, format, tokens) for tokens in range(1, 8193)]
    us = np.array([split.step_us for split in found])
    assert (np.diff(us) >= 0).all(), np.flatnonzero(np.diff(us) < 0) + 2
    rows = {r["tokens"]: r["us"] for r in plan.load_table()["layers"] if (r["model"], r["format"]) == (model, format)}
    measured = [tokens for tokens, split in enumerate(found, 1) if split.measured]
    assert all(us[tokens - 1] == rows[tokens] for tokens in measured) and len(measured) >= len(rows) - 1
    if measured and (last := measured[-1]) < len(us):  # the estimate beyond goes on from there
        assert us[last] <= us[last - 1] * (1 + 1.05 / last)


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_more_tokens_never_take_less_time_on_several_gpus(format):
    last = {}
    for tokens in range(8, 8193, 8):
        for s in plan.splits(plan.load_table(), get_preset("qwen3-30b-a3b"), format, 1, 8, tokens, 8):
            assert s.step_us >= last.get((s.ep, s.tp), 0), (tokens, s)
            last[s.ep, s.tp] = s.step_us
    assert len(last) > 8


def test_it_says_what_was_measured_and_what_was_not(capsys):
    known = text("--model qwen3-30b-a3b --devices 1 --batch 8 --format bf16", capsys)
    assert "Measured: this layer on one GPU" in known and "Extrapolated" not in known and "Collectives" not in known
    between = text("--model qwen3-30b-a3b --devices 1 --batch 300 --format bf16", capsys)
    assert "Interpolated: between 256 and 512 tokens of this layer" in between and "Measured:" not in between
    beyond = text("--model qwen3-30b-a3b --devices 1 --batch 9000 --format bf16", capsys)
    assert "in bf16, scaled to 8192 tokens of this layer" in beyond and "Measured:" not in beyond
    far = text("--model deepseek-v3 --devices 64 --batch 256", capsys)
    for words in ("deepseek-v3: 58 layers of 256 experts, fp8_block128, 256 tokens a step on 64 x NVIDIA H200",
                  "routed experts only", "Extrapolated: the layer", "of 25 splits do not fit 90% of the memory",
                  "Collectives: measured between two GPUs; extrapolated"):
        assert words in far
    assert "between hosts assumed: 50 GB/s" in text("--model deepseek-v3 --devices 16 --batch 16 --per-host 4", capsys)


def test_it_says_when_fewer_gpus_are_faster(capsys):
    shown = text("--model qwen3-30b-a3b --devices 2 --batch 1", capsys)
    alone = one_gpu("qwen3-30b-a3b", "bf16", 1).step_us * 48
    assert f"One GPU alone makes {1e6 / alone:,.0f} tokens/s: more than this. Of the best: " in shown
    assert "bf16, 1 token a step on" in shown
    assert "4 GPUs alone make" in text("--model qwen3-235b-a22b --devices 8 --batch 1", capsys)
    assert "alone" not in text("--model qwen3-30b-a3b --devices 2 --batch 4096", capsys)


@pytest.mark.parametrize("line,message", [
    ("--model gpt5 --devices 1 --batch 1", "model: got 'gpt5', expected one of"),
    ("--model qwen3-30b --devices 1 --batch 1", "model: got 'qwen3-30b', did you mean qwen3-30b-a3b? expected one of"),
    ("--model deepseek-v3 --batch 1", "--devices: got nothing, expected the number of GPUs"),
    ("--model deepseek-v3 --devices 8", "--batch: got nothing, expected the number of tokens"),
    ("--model glm-5 --devices 8 --batch 1", "--layers: got nothing, expected the number of layers"),
    ("--model deepseek-v3 --devices 0 --batch 1", "--devices: got 0, expected 1 to 2147483647"),
    ("--model tiny-docs --devices 1 --batch " + "9" * 400, "--batch: got a number of 400 digits, expected 1 to"),
    ("--model deepseek-v3 --devices 8 --batch -3", "--batch: got -3"),
    ("--model deepseek-v3 --devices 8 --batch 8 --format fp3", "--format: got 'fp3', expected one of"),
    ("--model deepseek-v3 --devices 16 --batch 16 --per-host 5", "--per-host: got 5, expected a number that divides"),
    ("--model deepseek-v3 --devices 7 --batch 5", "--devices: got 7, expected a number that splits E = 256"),
    ("--model deepseek-v3 --devices 1 --batch 8", "--devices: got 1, expected more: at best 65"),
])
def test_bad_input_is_one_line(line, message):
    with pytest.raises(ArgumentError) as error:
        plan.main(options(line))
    assert message in str(error.value) and "\n" not in str(error.value)
