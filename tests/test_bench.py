"""What the benchmarks rest on: their inputs, their byte counts, their clock and their report."""

import argparse
import dataclasses
import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench import compile_time, crossovers, grouped, kernel_rates, layer_forms, ncu_report, package_layers, small_batch
from bench.report import Report, draw
from jax_warp_decode import choose, tuned_table, tuning
from jax_warp_decode.kernels import DownConfig, GateUpConfig
from jax_warp_decode.measure import inputs, read_kernel, timing, variants
from jax_warp_decode.presets import PRESETS, get_preset

RESULTS = pathlib.Path(__file__).parent.parent / "bench" / "results"


@pytest.mark.parametrize("pattern", inputs.PATTERNS)
def test_routing_patterns(pattern):
    preset = get_preset("qwen3-30b-a3b")
    ids = inputs.routing_ids(np.random.default_rng(0), 32, preset, pattern)
    assert ids.shape == (32, 8) and ids.min() >= 0 and ids.max() < 128
    assert all(len(set(row)) == 8 for row in ids.tolist())
    # Uniform: U = E (1 - (1 - K / E)^T) = 111.8 experts expected, with a deviation of about 3.
    low, high = {"uniform": (100, 123), "one_hot": (8, 8), "zipf": (60, 108)}[pattern]
    assert low <= len(np.unique(ids)) <= high


@pytest.mark.parametrize("format,bytes_per_value", [("bf16", 2), ("mxfp8", 33 / 32)])
def test_traffic_counts_unique_and_logical_bytes(format, bytes_per_value):
    preset = get_preset("tiny-docs")
    experts = jax.eval_shape(lambda key: inputs.make_experts(key, preset, format), jax.random.key(0))
    experts = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), experts)
    found = inputs.traffic(np.array([[0, 1, 2, 3], [3, 2, 1, 9]]), experts)
    per_expert = 3 * preset.hidden * preset.intermediate * bytes_per_value
    assert (found.unique, found.logical) == (5 * per_expert, 8 * per_expert)


def test_presets_are_keyed_by_their_names():
    assert all(p.name == name and p.experts_per_token <= p.num_experts for name, p in PRESETS.items())


def test_device_clock_spans_the_kernels_of_each_step():
    # Two steps of two kernels, on two streams; summary lines and the host are no kernels.
    trace = """
        planes { name: "/device:GPU:0"
          event_metadata { key: 1 value { id: 1 name: "gate_up" } }
          event_metadata { key: 2 value { id: 2 name: "down" } }
          lines { name: "Stream #13(Compute)" timestamp_ns: 100
            events { metadata_id: 1 offset_ps: 0 duration_ps: 5000 }
            events { metadata_id: 1 offset_ps: 50000 duration_ps: 5000 } }
          lines { name: "Stream #14(Compute)" timestamp_ns: 100
            events { metadata_id: 2 offset_ps: 7000 duration_ps: 3000 }
            events { metadata_id: 2 offset_ps: 58000 duration_ps: 4000 } }
          lines { name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 90000 } } }
        planes { name: "/host:CPU"
          event_metadata { key: 1 value { id: 1 name: "wait" } }
          lines { name: "Stream #1" events { metadata_id: 1 offset_ps: 0 duration_ps: 90000 } } }
    """
    data = jax.profiler.ProfileData
    events = timing.device_events(data.from_serialized_xspace(data.text_proto_to_serialized_xspace(trace)))
    assert [e.name for e in events] == ["gate_up", "down", "gate_up", "down"]
    runs = timing.split_runs(events, 2)
    found = timing.summarise(runs, wall_us=1.0, steps=2, layers=2)
    assert (found.us, found.min_us, found.clock) == (11 / 2 / 1e3, 10 / 2 / 1e3, "device")
    assert found.kernels == {"gate_up": 2.5 / 1e3, "down": 1.75 / 1e3}
    assert timing.split_runs(events, 3) == [] and timing.split_runs([], 2) == []
    assert timing.split_runs([*events[:2], events[0], events[0]], 2) == [], "runs of one step have the same kernels"
    assert timing.summarise([], wall_us=1.0, steps=2, layers=2).clock == "host"


def test_markers_tell_the_steps_of_one_trace_apart():
    names = ["a", "a", "timing_marker_mosaic_gpu_kernel", "b", "timing_marker_mosaic_gpu_kernel"]
    events = [timing.Event(name, start, start + 1) for start, name in enumerate(names)]
    assert [[e.name for e in call] for call in timing.split_calls(events, 2)] == [["a", "a"], ["b"]]
    assert timing.split_calls(events, 3) == [], "a marker that is missing makes the trace useless"


@pytest.mark.parametrize("form", compile_time.FORMS)
def test_equal_layers_share_their_kernels_and_another_batch_size_adds_its_own(form):
    with tuning.override(GateUpConfig(32, 1, 1), DownConfig(32, 1, 1)):  # quick to lower
        results = compile_time.measure(form, "bf16", layers=4, batches=[1, 2, 1])
    assert [(r["kernels"], r["new_kernels"]) for r in results] == [(2, 2), (2, 2), (2, 0)]
    assert results[2]["phases"] == dict(trace=0, lower=0, compile=0) and not results[0]["compiled"]


def test_read_kernel_reads_every_element():
    x = read_kernel.window(jax.random.key(0), 2 * read_kernel.CHUNK_BYTES)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        sums = read_kernel.read(x)
    np.testing.assert_allclose(np.asarray(sums), np.asarray(x, np.float64).sum(2), atol=1e-3)


def test_small_batch_without_a_gpu_checks_results_and_says_so(tmp_path, capsys):
    arguments = ["--model", "tiny-docs", "--batch", "2", "--format", "bf16", "--out", str(tmp_path)]
    assert small_batch.main([*arguments, "--strategies", "warp_decode", "expert_centric", "tokamax_mosaic"]) == 0
    assert "No NVIDIA GPU" in capsys.readouterr().out
    report = json.loads((tmp_path / "small_batch-tiny-docs-uniform.json").read_text())
    found = {row["strategy"]: row for row in report["results"]}
    ours, conventional, tokamax = (found[name] for name in ("warp_decode", "expert_centric", "tokamax_mosaic"))
    assert "no NVIDIA GPU" in ours["error"] and "error" in tokamax
    assert conventional["relative_l2"] < 1e-2 and conventional["cosine"] > 0.9999 and "us" not in conventional
    assert report["meta"]["jax"] == jax.__version__


def test_small_batch_report_of_a_timed_run(tmp_path):
    options = small_batch.parse(["--batch", "1", "8", "--format", "bf16", "--out", str(tmp_path)])
    results = [
        dict(format="bf16", strategy=name, batch=b, us=us * b, fraction_of_read=20 / us)
        for name, us in (("read", 20.0), ("warp_decode", 25.0)) for b in (1, 8)]
    small_batch.plot(tmp_path / "plot.png", options, results)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert "25.0  80%" in small_batch.summary(options, results)


def test_a_report_survives_a_cut_and_a_second_run_fills_it(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "one")
    path = tmp_path / "folder" / "some.json"
    report = Report(path, "some", facts=1)
    report.add(dict(batch=1, us=2.0), dict(batch=2, error="ValueError: no"))
    report.cut("B=4")
    found = json.loads(path.read_text())  # as a run leaves it that is killed now
    assert (found["complete"], found["missing"], found["facts"], len(found["results"])) == (False, ["B=4"], 1, 2)
    again = Report(path, "some", fill=True)
    assert again.has(batch=1) and not again.has(batch=2)
    again.add(dict(batch=2, us=3.0))
    assert again.finish() == 0 and json.loads(path.read_text())["complete"]
    monkeypatch.setenv("GIT_COMMIT", "two")
    with pytest.raises(SystemExit, match="is of commit one"):
        Report(path, "some", fill=True)


def test_a_picture_that_cannot_be_drawn_ends_nothing(tmp_path, capsys):
    draw(lambda path: 1 / 0, tmp_path / "x.png")
    assert "no picture: ZeroDivisionError" in capsys.readouterr().out


def test_one_variant_that_fails_stops_no_other():
    x = jnp.arange(4.0)
    check = variants.compare([np.arange(4.0) * 2], 1e-3)
    found = variants.measure([
        variants.Variant(dict(name="right"), lambda x: 2 * x, [(x,)], check),
        variants.Variant(dict(name="wrong"), lambda x: 3 * x, [(x,)], check),
        variants.Variant(dict(name="raises"), lambda x: x.no_such, [(x,)], check),
        variants.Variant(dict(name="absent"), ImportError("no such module"), [(x,)], check)], steps=1)
    assert found[0] == dict(name="right", relative_l2=0.0, cosine=pytest.approx(1), max_abs=0.0)
    assert [row["error"].split(":")[0] for row in found[1:]] == ["ArithmeticError", "AttributeError", "ImportError"]


def test_a_group_goes_on_without_the_kernel_that_ended_its_process(monkeypatch):
    options = type("Options", (), {})()
    case = dict(format="bf16", tokens=8)
    said = iter([
        ([dict(trying=dict(case, variant="a")), dict(trying=dict(case, variant="b"))], "ended with -11: fault"),
        ([dict(row=dict(case, variant="a", us=1.0)), dict(row=dict(case, variant="c", error="X: CUDA_ERROR_LAUNCH")),
          dict(row=dict(case, variant="d", error="X: CUDA_ERROR_LAUNCH"))], ""),
        ([dict(row=dict(case, variant="d", us=2.0))], "")])
    asked = []
    monkeypatch.setattr(grouped, "start_child", lambda group, done, options: (
        asked.append([name for _, _, name in done]), next(said))[1])
    rows = grouped.run_group("bf16", options)
    assert asked == [[], ["b"], ["b", "a", "c"]]
    assert {row["variant"]: "us" in row for row in rows} == dict(b=False, a=True, c=False, d=True)


@pytest.mark.parametrize(("script", "ended"), [
    ("echo no such kernel >&2; exit 3", "ended with 3: no such kernel"), ("exit 0", ""),
    ("exec sleep 60", "stopped after 1 s")])
def test_what_a_group_said_before_it_ended_is_kept(monkeypatch, tmp_path, capsys, script, ended):
    """With a stand-in for the process."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho text\necho \'{"row": {"variant": "a", "us": 1.0, "tflops": 2.0}}\'\n' + script)
    program.chmod(0o755)
    monkeypatch.setattr(grouped.sys, "executable", str(program))
    options = type("Options", (), dict(model="qwen3-30b-a3b", out=tmp_path, xla_plan=False, limit=1.0))
    said, how = grouped.start_child("bf16", [], options)
    assert said == [dict(row=dict(variant="a", us=1.0, tflops=2.0))] and how.rstrip(": ") == ended
    assert "1.0 us" in capsys.readouterr().out


def test_ncu_tables_name_their_cases():
    text = "==PROF== Connected\n" + "\n".join((
        '"ID","Kernel Name","gpu__time_duration.sum","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"',
        '"","","us","inst"', '"0","moe_gate_up","9.5","1,234.5"', '"1","moe_down","5.5","2"'))
    up, down = ncu_report.read_table(text, "bf16", 1)
    assert (up["kernel"], up["batch"], up["time"]) == ("moe_gate_up", 1, dict(value=9.5, unit="us"))
    assert down["stalled_warps_per_issue"] == dict(wait=2.0)
    with pytest.raises(ValueError, match="3 kernels are a layer of shared_decode, found 2"):
        ncu_report.read_table(text, "bf16", 32)


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H200 NVL"])
def test_auto_is_within_three_percent_of_the_fastest_that_was_measured(monkeypatch, device):
    """Where crossovers.json, or an earlier run, timed two strategies on an H200: by its table, and by the estimate."""
    monkeypatch.setattr(tuning, "device_kind", lambda: device)
    monkeypatch.setattr(importlib.import_module("jax_warp_decode.choose"), "no_gpu_reason", lambda: "")
    rows = [row for name in ("crossovers-first.json", "crossovers.json")
            for row in json.loads((RESULTS / name).read_text())["results"]]
    choices: dict[str, dict] = {}
    reasons = []
    for model, format, batch in {(row["model"], row["format"], row["batch"]) for row in rows}:
        preset = get_preset(model)
        experts = jax.eval_shape(lambda key, p=preset, f=format: inputs.make_experts(key, p, f), jax.random.key(0))
        found = choose(batch, experts, experts_per_token=preset.experts_per_token, x_dtype=jnp.bfloat16)
        choices.setdefault(f"{model} {format}", {})[batch] = found.strategy
        reasons.append("measured" in found.reason)
    slower = crossovers.slower(rows, choices)
    assert len(slower) == 47  # 36 of the newest run, and 11 that only the first one had
    assert max(place["ratio"] for place in slower) <= crossovers.GOAL, slower
    assert sum(reasons) > 36 if device == package_layers.DEVICE else not any(reasons)


def test_the_times_of_layers_in_the_package_are_those_of_committed_runs():
    table = tuned_table.packaged_table(package_layers.DEVICE)
    packaged = [entry for entry in table.entries() if isinstance(entry, tuned_table.LayerTime)]
    assert packaged == package_layers.collect(), "run python -m bench.package_layers"


def test_of_several_runs_the_newest_time_of_a_layer_is_packaged(tmp_path, monkeypatch):
    def row(strategy, batch, us, **changes):
        return dict(model="mixtral-8x7b", format="bf16", strategy=strategy, batch=batch, us=us, clock="device",
                    pattern="uniform") | changes

    def write(name, date, *rows):
        meta = dict(device=package_layers.DEVICE, date=date, jax="0.11.2")
        (tmp_path / name).write_text(json.dumps(dict(meta=meta, results=rows)))

    write("a.json", "2026-01-03", row("warp_decode", 1, 1.0), row("shared_decode", 9, 9.0), row("read", 1, 1.0))
    write("b.json", "2026-01-02", row("warp_decode", 1, 2.0), row("warp_decode", 8, 3.0), row("warp_decode", 16, 4.0))
    write("c.json", "2026-01-04", row("shared_decode", 9, 5.0, pattern="zipf"),
          row("shared_decode", 9, 6.0, clock="host"),
          dict(model="mixtral-8x7b", format="bf16", pattern="uniform", strategy="warp_decode", batch=8, error="X: no"))
    monkeypatch.setattr(package_layers, "SOURCES", ("a.json", "b.json", "c.json"))
    found = package_layers.collect(tmp_path)
    # One token has no other strategy near it.
    assert [(e.strategy, e.T, e.us, e.date) for e in found] == [
        ("shared_decode", 9, 9.0, "2026-01-03"), ("warp_decode", 8, 3.0, "2026-01-02"),
        ("warp_decode", 16, 4.0, "2026-01-02")]
    assert (found[0].H, found[0].I, found[0].E, found[0].K) == (4096, 14336, 8, 2)


def test_all_forms_of_a_layer_give_the_same_result():
    """bench.layer_forms on a CPU, where it checks and times nothing: alone, with the router, and out of a stack."""
    preset = dataclasses.replace(get_preset("qwen3-30b-a3b"), hidden=128, intermediate=64, num_experts=16)
    weights = [(jax.random.normal(jax.random.key(i), (16, 128)).astype(jnp.bfloat16),
                inputs.make_experts(jax.random.key(9 + i), preset, "mxfp8")) for i in range(2)]
    rows = layer_forms.run(preset, "mxfp8", argparse.Namespace(batch=[1, 3], steps=1), weights)
    assert [row["form"] for row in rows] == ["experts", "router and experts", "stacked"] * 2
    assert all(row["relative_l2"] < 5e-3 for row in rows), rows


def test_kernel_rates_take_a_layer_apart():
    """Gate/up reads two thirds and down one third; of the suite as it is committed, no kernel beats a plain read."""
    reads = [dict(strategy="read", us=2 + n / 4e6, unique_bytes=n) for n in (30e6, 300e6, 900e6)]
    layer = dict(model="m", format="bf16", pattern="uniform", strategy="warp_decode", batch=2, us=17.0,
                 unique_bytes=30e6, logical_bytes=60e6, kernels={"moe_gate_up_tensor": 10.0, "moe_down": 7.0})
    gate_up, down = kernel_rates.rates([*reads, layer])
    assert (gate_up["kernel"], down["kernel"]) == ("gate_up", "down")
    np.testing.assert_allclose([gate_up["of_line"], gate_up["tb_per_s"]], [10 / 7, 40 / 8])
    np.testing.assert_allclose([down["of_line"], down["tb_per_s"]], [7 / 4.5, 20 / 5])
    found = kernel_rates.rates(json.loads((RESULTS / "suite.json").read_text())["results"])
    assert len(found) > 60 and all(row["of_line"] > 0.98 for row in found)
