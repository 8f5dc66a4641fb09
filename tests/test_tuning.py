"""Where a kernel's configuration comes from, what is refused, and how autotune finds and keeps one."""

import dataclasses
import functools
import importlib
import itertools
import json
import os
import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jax_warp_decode import (
    ArgumentError,
    ExpertSharding,
    ExpertWeights,
    Routing,
    UnsupportedError,
    cli,
    moe,
    quantize,
    tuned_table,
    tuning,
)
from jax_warp_decode import autotune as tune
from jax_warp_decode.explain import KERNELS, explain, explain_config
from jax_warp_decode.kernels import DownConfig, GateUpConfig, down, gate_up, moe_down_3d_batched, moe_gate_up_3d_batched
from jax_warp_decode.kernels.down_tensor import DownTensorConfig
from jax_warp_decode.kernels.gate_up_tensor import GateUpTensorConfig
from jax_warp_decode.kernels.grouped_config import GroupedConfig
from jax_warp_decode.measure import job as measured_job
from jax_warp_decode.measure import strategies, timing, variants, workload
from jax_warp_decode.measure.candidates import candidates
from jax_warp_decode.measure.job import Job, Result
from jax_warp_decode.measure.strategies import StrategyJob
from jax_warp_decode.presets import PRESETS, Preset
from jax_warp_decode.tuned_table import Entry

DEVICE = "NVIDIA Test 100"
SHAPE = dict(format="bf16", T=1, K=2, H=256, I=64)
SMALL = Preset("small", 256, 64, 4, 2, "bf16")


def entry(lanes=32, rows=1, unroll=2, **changes):
    fields = dict(kernel="moe_down", format="bf16", H=256, I=64, K=2, T=1, us=2.5, heuristic_us=3.0, runner_up=None,
                  runner_up_us=None, jax="0.11.2", date="2026-01-02T03:04:05+00:00")
    return Entry(config=dict(lanes=lanes, rows=rows, unroll=unroll), **fields | changes)


def find(config=None, **changes):
    return tuning.find("moe_down", down.CONFIGS, config, **SHAPE | changes)


def small_experts(format="bf16", E=4):
    """Shapes of experts with the sizes of `SHAPE`."""
    def weight(*shape):
        w = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return w if format == "bf16" else jax.eval_shape(functools.partial(quantize, format=format), w)

    return ExpertWeights(weight(E, 64, 256), weight(E, 64, 256), weight(E, 256, 64))


def trace_moe(experts):
    """An interpreted call of `moe` with one token and two slots, as far as JAX traces it."""
    S = jax.ShapeDtypeStruct
    routing = jax.eval_shape(Routing, S((1, 2), jnp.int32), S((1, 2), jnp.float32))
    jax.eval_shape(functools.partial(moe, strategy="warp_decode", interpret=True), S((1, 256), jnp.bfloat16), routing,
                   experts)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A GPU that is not there, and where its user's file and its packaged file would be; neither exists."""
    user, packaged = tmp_path / "user.json", tmp_path / "packaged.json"
    monkeypatch.setattr(tuning, "device_kind", lambda: DEVICE)
    monkeypatch.setattr(tuned_table, "packaged_file", lambda device_kind: packaged)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tuned_table.VARIABLE, raising=False)
    return user, packaged


# ------------------------------------------------------------------------------------------------------ lookup


def test_the_first_source_that_has_a_configuration_wins(files, monkeypatch):
    user, packaged = files
    heuristic = DownConfig.heuristic(1, 2, 256, 64, "bf16")
    assert find().config == heuristic and find().source.startswith("heuristic")
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=1)])
    assert find().config == DownConfig(8, 1, 1) and "packaged.json" in find().source
    tuned_table.write_entries(user, DEVICE, [entry(lanes=4, unroll=1)])
    assert find().config == DownConfig(8, 1, 1), "a file that nobody names is not read"
    monkeypatch.setenv(tuned_table.VARIABLE, str(user))
    assert find().config == DownConfig(4, 1, 1) and "user.json, measured with T=1" in find().source
    with tuning.override(DownConfig(8, 2, 1), GateUpConfig(32, 1, 1)):
        assert find().config == DownConfig(8, 2, 1) and find().source == "tuning.override"
        with tuning.override(DownConfig(8, 4, 1)):
            assert find().config == DownConfig(8, 4, 1)
        assert find(DownConfig(8, 1, 3)).config == DownConfig(8, 1, 3)
    assert find().config == DownConfig(4, 1, 1)


def test_the_default_file_is_in_the_users_cache_and_of_one_gpu(files, tmp_path):
    path = tuned_table.user_file(DEVICE)
    assert path == tmp_path / "cache/jax_warp_decode/tuned/nvidia-test-100.json"
    find()
    assert not (tmp_path / "cache").exists(), "looking up writes nothing"
    tuned_table.write_entries(path, DEVICE, [entry(lanes=8, unroll=1)])
    assert find().config == DownConfig(8, 1, 1)


@pytest.mark.parametrize("other", [
    dict(format="f16"), dict(K=4), dict(H=512), dict(I=128), dict(T=9), dict(kernel="moe_gate_up")])
def test_measurements_of_another_case_do_not_count(files, other):
    _, packaged = files
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=1, **dict(T=4) | other)])
    source = find(T=4).source
    assert source == "heuristic: nothing measured on NVIDIA Test 100 for bf16 H=256 I=64 K=2 near T=4"


def test_other_token_counts_take_the_nearest_measurement(files):
    _, packaged = files
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=t, T=t) for t in (1, 2, 8)])
    assert [find(T=t).config.unroll for t in (1, 2, 3, 4, 5, 8, 16)] == [1, 2, 2, 2, 8, 8, 8]
    assert find(T=17).source.startswith("heuristic")


def test_a_file_is_read_again_when_it_changes(files):
    _, packaged = files
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=1)])
    assert find().config.unroll == 1
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=2)])
    assert find().config.unroll == 2


@pytest.mark.parametrize(("content", "words"), [
    (b"{", ["is no table"]),
    (b"\xff\xfe", ["is no table"]),
    (b"[]", ["is no table"]),
    (b"[" * 100_000, ["is no table"]),
    ([dict(us="x")], ["is no table"]),
    ([dict(heuristic_us=float("nan"))], ["is no table"]),
    ([dict(format=5)], ["is no table"]),
    ([dict(runner_up=3)], ["is no table"]),
    ([dict(config={"lanes": 0, "rows": 1, "unroll": 1})], ["does not fit", "lanes=0"]),
    ([dict(config={"lanes": 8, "rows": 1, "unroll": 10**30})], ["does not fit", "unroll=1000000"]),
    ({"device_kind": DEVICE, "configs": []}, ["has no 'schema'"]),
    ({"schema": 99, "device_kind": DEVICE, "configs": []}, ["schema 99", "expected 2"]),
    ({"schema": 2, "device_kind": "NVIDIA Other", "configs": []}, ["NVIDIA Other", DEVICE]),
    ({"schema": 2, "configs": []}, ["has no 'device_kind'"]),
    ({"schema": 2, "device_kind": DEVICE, "configs": [{"kernel": "moe_down"}]}, ["is no table"]),
    ([dict(T="1")], ["is no table"]),
    ([dict(config={"lanes": 12, "rows": 1, "unroll": 1})], ["does not fit", "lanes=12"]),
    ([dict(config={"lanes": 8, "rows": 3, "unroll": 1})], ["does not fit", "rows=3"]),
    ([dict(config={"lanes": 8, "rows": 1, "unroll": 0})], ["does not fit", "unroll=0"]),
    ([dict(config={"lanes": "8", "rows": 1, "unroll": 1})], ["lanes='8'"]),
    ([dict(config={"lanes": 8, "rows": 1, "unroll": 1, "warps": 4})], ["warps=4", "DownConfig"]),
    ([dict(config={"lanes": 8, "rows": 1})], ["holds lanes=8, rows=1", "unroll"]),
    ([dict(config={"tiles": 1, "unroll": 1, "warps": 4, "parts": 1})], ["does not fit", "bf16"]),
    ([dict(config={"lanes": True, "rows": 1, "unroll": 1})], ["holds lanes=True", "expected integers"]),
    ([dict(T=10**400)], ["is no table"]),
    ([dict(H=2**31)], ["is no table"]),
    ({"schema": 2, "device_kind": DEVICE, "configs": {}}, ["is no table", "configs is {}"]),
    ({"schema": 2, "device_kind": DEVICE, "configs": ""}, ["is no table", "configs is ''"]),
    ([{}, dict(T=2), dict(us=9.0)], ["two entries are of moe_down bf16 H=256 I=64 K=2 T=1"]),
])
def test_a_file_that_cannot_be_used_is_named_with_the_way_out(files, monkeypatch, content, words):
    user, _ = files
    if isinstance(content, list):
        fields = [dataclasses.asdict(entry()) | changes for changes in content]
        content = dict(schema=2, device_kind=DEVICE, configs=fields)
    user.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    monkeypatch.setenv(tuned_table.VARIABLE, str(user))
    with pytest.raises(ArgumentError) as error:
        find()
    assert all(word in str(error.value) for word in (*words, str(user), "delete", "autotune", tuned_table.VARIABLE))


def test_a_named_file_that_is_missing_or_a_folder_is_an_error(files, monkeypatch, tmp_path):
    monkeypatch.setenv(tuned_table.VARIABLE, str(tmp_path / "nowhere.json"))
    with pytest.raises(ArgumentError, match="nowhere.json does not exist, but .* unset the variable") as error:
        find()
    assert "delete" not in str(error.value)
    monkeypatch.setenv(tuned_table.VARIABLE, str(tmp_path))
    with pytest.raises(ArgumentError, match="cannot be read"):
        find()


def test_an_interpreted_kernel_takes_no_measurement(files):
    _, packaged = files
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=1)])
    assert find(interpret=True).source == "heuristic: interpreted, so no measurement applies"
    with tuning.override(DownConfig(8, 2, 1)):
        assert find(interpret=True).config == DownConfig(8, 2, 1)


def test_without_a_gpu_no_file_is_read(monkeypatch, tmp_path):
    (tmp_path / "corrupt.json").write_text("{")
    monkeypatch.setenv(tuned_table.VARIABLE, str(tmp_path / "corrupt.json"))
    assert find().source == "heuristic: no GPU, so no measurement applies"


def test_the_tables_that_ship_hold_configurations_that_fit(monkeypatch):
    folder = tuned_table.packaged_file("any").parent
    for path in folder.glob("*.json"):
        device = json.loads(path.read_text())["device_kind"]
        assert tuned_table.packaged_file(device) == path
        monkeypatch.setattr(tuning, "device_kind", lambda device=device: device)
        for shape, by_tokens in tuned_table.packaged_table(device).shapes.items():
            kernel, format, H, I, K = shape
            for T in by_tokens:
                found = tuning.find(kernel, KERNELS[kernel], None, format=format, T=T, K=K, H=H, I=I)
                assert path.name in found.source


def test_explain_config_names_the_source_of_both_kernels(files):
    _, packaged = files
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=1)])
    w = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    experts = ExpertWeights(w(4, 64, 256), w(4, 64, 256), w(4, 256, 64))
    found = explain_config(experts, tokens=1, experts_per_token=2)
    assert "packaged.json" in found["moe_down"].source and found["moe_gate_up"].source.startswith("heuristic")


def test_a_file_with_booleans_for_tiles_is_refused(files):
    _, packaged = files
    sizes = dict(format="mxfp4", T=1, K=2, H=256, I=64)
    written = dataclasses.replace(entry(**sizes, kernel="moe_gate_up"), config={"tiles": True, "unroll": True})
    tuned_table.write_entries(packaged, DEVICE, [written])
    with pytest.raises(ArgumentError, match="packaged.json holds tiles=True, unroll=True for moe_gate_up, expected"):
        tuning.find("moe_gate_up", gate_up.CONFIGS, None, **sizes)


def test_what_another_version_measured_is_ignored_and_kept(files):
    _, packaged = files
    theirs = [entry(kernel="moe_sideways"), entry(format="mxfp2")]
    tuned_table.write_entries(packaged, DEVICE, theirs)
    assert find().source.startswith("heuristic")
    tuned_table.write_entries(packaged, DEVICE, [entry(lanes=8, unroll=1)])
    assert find().config == DownConfig(8, 1, 1)
    assert all(dataclasses.asdict(e) in json.loads(packaged.read_text())["configs"] for e in theirs)


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_explain_tells_what_an_interpreted_call_takes(files, monkeypatch, format):
    user, _ = files
    user.write_text("{")  # which an interpreted call does not read
    monkeypatch.setenv(tuned_table.VARIABLE, str(user))
    experts, real, taken = small_experts(format), tuning.find, {}

    def recording(kernel, *args, **options):
        taken[kernel] = real(kernel, *args, **options)
        return taken[kernel]

    monkeypatch.setattr(tuning, "find", recording)
    trace_moe(experts)
    called = dict(taken)
    told = explain(experts, tokens=1, experts_per_token=2, x_dtype=jnp.bfloat16, strategy="warp_decode", interpret=True)
    assert told.configs == called and list(called) == list(KERNELS)
    assert explain_config(experts, tokens=1, experts_per_token=2, interpret=True) == called


ASKS = {
    "explain": functools.partial(explain, tokens=1, experts_per_token=2, x_dtype=jnp.bfloat16, strategy="warp_decode",
                                 interpret=True),
    "explain_config": functools.partial(explain_config, tokens=1, experts_per_token=2, interpret=True),
    "moe": trace_moe}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize(("config", "message"), [
    (DownConfig(3, 1, 1), r"lanes=3, rows=1 do not fit w_down"),
    (GateUpConfig(8, 1, 2000), "got unroll=2000, expected 1 to 1024"),
    (DownTensorConfig(1, 1, 4, 1), "got DownTensorConfig in the interpreter, expected DownConfig"),
])
def test_an_override_that_does_not_fit_is_named(ask, config, message):
    with tuning.override(config), pytest.raises(ArgumentError, match=f"^tuning.override: {message}"):
        ask(small_experts())


def test_an_override_for_other_weights_is_named():
    with tuning.override(DownTensorConfig(1, 1, 4, 1)), pytest.raises(
            ArgumentError, match="^tuning.override: got DownTensorConfig.* for bf16 weights, expected"):
        find()


def test_explain_refuses_more_slots_than_experts():
    experts = small_experts(E=8)
    for ask in (explain_config, functools.partial(explain, x_dtype=jnp.bfloat16, strategy="reference")):
        ask(experts, tokens=1, experts_per_token=8)
        with pytest.raises(ArgumentError, match="^experts_per_token: got 99, expected at most E = 8"):
            ask(experts, tokens=1, experts_per_token=99)


def test_explain_of_a_share_may_have_more_slots_than_experts():
    mesh = jax.sharding.AbstractMesh((4,), ("expert",))
    told = explain(small_experts(), tokens=1, experts_per_token=4, x_dtype=jnp.bfloat16, strategy="warp_decode",
                   interpret=True, sharding=ExpertSharding(mesh, expert_axis="expert"))
    assert list(told.configs) == list(KERNELS)


@pytest.mark.parametrize(("token_axis", "tokens"), [
    (None, 16), ("data", 8), ("expert", 16), (("data", "expert"), 8)])
def test_explain_counts_the_tokens_that_a_device_works_on(token_axis, tokens):
    """Of those that are split along with the weights, it works on all."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "expert"))
    told = explain(small_experts(), tokens=16, experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True,
                   sharding=ExpertSharding(mesh, expert_axis="expert", token_axis=token_axis))
    assert told.choice.reason.startswith(f"{tokens} tokens x")


@pytest.mark.parametrize(("tokens", "sharding", "message"), [
    (1, lambda mesh: mesh, "^sharding: got AbstractMesh, expected ExpertSharding"),
    ("4", lambda mesh: ExpertSharding(mesh, token_axis="data"), "^tokens: got '4', expected a static integer"),
    (3, lambda mesh: ExpertSharding(mesh, token_axis="data"), "^tokens: got 3, expected .* of 2.*leave token_axis out"),
])
def test_explain_checks_the_question_about_a_mesh(tokens, sharding, message):
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with pytest.raises(ArgumentError, match=message):
        explain(small_experts(), tokens=tokens, experts_per_token=2, x_dtype=jnp.bfloat16, sharding=sharding(mesh))


@pytest.mark.parametrize(("configs", "message"), [
    (((32, 1, 4),), "configs: got .32, 1, 4., expected a kernel configuration"),
    ((GateUpConfig,), "configs: got .*, expected a kernel configuration"),
    ((small_experts(),), "configs: got .*, expected a kernel configuration"),
    ((GroupedConfig((16,), 3),), "configs: got .*, expected a kernel configuration"),
    ((GateUpConfig([8], 1, 1),), r"tuning.override: got lanes=\[8\], expected an integer"),
    ((DownConfig(8, 1, True),), "tuning.override: got unroll=True, expected an integer"),
    ((GateUpConfig(8, 1, 1), DownConfig(8, 1, 1), GateUpConfig(16, 1, 1)),
     r"configs: got GateUpConfig\(lanes=8.* and GateUpConfig\(lanes=16.*, expected one .* of moe_gate_up"),
    ((DownTensorConfig(1, 1, 4, 1), DownConfig(8, 1, 1)), "configs: got .*, expected one .* of moe_down"),
])
def test_override_takes_one_configuration_per_kernel(configs, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        tuning.override(*configs)


@pytest.mark.parametrize("config", [
    GateUpConfig("8", 1, 1), GateUpConfig(8, 1, True), GateUpConfig(8, 1.0, 1), GateUpTensorConfig("1", 1),
    GateUpTensorConfig(None, 1), GateUpTensorConfig(1.0, 1), GateUpTensorConfig(True, 1), GateUpTensorConfig(1, [1]),
    GateUpTensorConfig(0, 1), DownConfig(8, None, 1), DownTensorConfig("1", 1, 4, 1), DownTensorConfig(1, 1, 4.0, 1),
    DownTensorConfig(1, 1, 4, True), DownTensorConfig(1, 1, 4, 0)], ids=str)
def test_fields_of_a_configuration_are_integers(config):
    with pytest.raises(ArgumentError, match="^config: got [a-z]+=.*, expected an integer of at least 1"):
        config.check(256, 64, 2, "mxfp4")


def test_override_reaches_the_kernels_and_compiled_functions_are_kept_apart():
    S = jax.ShapeDtypeStruct
    ids, weights = S((1, 2), jnp.int32), S((1, 2), jnp.float32)
    traced = []

    @jax.jit
    def down(*args):
        traced.append(1)
        return moe_down_3d_batched(*args)

    def lowered():
        args = S((1, 2, 64), jnp.float32), ids, weights, S((4, 256, 64), jnp.bfloat16)
        return down.trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    plain = lowered()
    with tuning.override(DownConfig(lanes=4, rows=1, unroll=1)):
        assert lowered() != plain
    assert lowered() == plain and len(traced) == 2


# -------------------------------------------------------------------------------------------------------- files


def test_writing_merges_and_replaces_what_was_measured_again(tmp_path):
    path = tmp_path / "new/folder/tuned.json"
    tuned_table.write_entries(path, DEVICE, [entry(unroll=1), entry(unroll=1, T=2)])
    tuned_table.write_entries(path, DEVICE, [entry(unroll=5, T=2), entry(unroll=1, K=4)])
    shapes = tuned_table.read_table(path, DEVICE).shapes
    by_tokens = shapes["moe_down", "bf16", 256, 64, 2]
    assert len(shapes) == 2 and [by_tokens[t].config["unroll"] for t in (1, 2)] == [1, 5]
    assert json.loads(path.read_text())["configs"][0]["jax"] == "0.11.2"
    assert os.listdir(path.parent) == ["tuned.json"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    tuned_table.write_entries(path, DEVICE, [entry()])
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="was measured on"):
        tuned_table.write_entries(path, "NVIDIA Other", [entry(T=2)])

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        tuned_table.write_entries(path, DEVICE, [entry(T=2)])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["tuned.json"]


# --------------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("preset", PRESETS.values(), ids=str)
def test_candidates_fit_every_preset(preset):
    for kernel, format, T in itertools.product(KERNELS, ("mxfp8", "bf16"), (1, 8)):
        sizes = dict(H=preset.hidden, I=preset.intermediate, format=format)
        found = candidates(kernel, T=T, K=preset.experts_per_token, **sizes)
        assert found[0] == tuning.rule_of_thumb(
            KERNELS[kernel], T, preset.experts_per_token, preset.hidden, preset.intermediate, format)
        assert len(set(found)) == len(found) <= 16 and (len(found) > 5 or preset.name == "tiny-docs")
        for config in found:
            config.check(K=preset.experts_per_token, **sizes)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=str)
def test_candidates_can_be_traced(preset):
    H, I, E, K = preset.hidden, preset.intermediate, preset.num_experts, preset.experts_per_token
    S, turn = jax.ShapeDtypeStruct, list(PRESETS).index(preset.name)
    ids, weights = S((1, K), jnp.int32), S((1, K), jnp.float32)
    calls = {"moe_gate_up": (moe_gate_up_3d_batched, (S((1, H), jnp.bfloat16), ids, *[S((E, I, H), jnp.bfloat16)] * 2)),
             "moe_down": (moe_down_3d_batched, (S((1, K, I), jnp.float32), ids, weights, S((E, H, I), jnp.bfloat16)))}
    for kernel, (function, args) in calls.items():
        found = candidates(kernel, T=1, K=K, H=H, I=I, format="bf16")
        for config in (found[turn % len(found)], found[(turn + 7) % len(found)]):
            jax.eval_shape(functools.partial(function, config=config), *args)


# ----------------------------------------------------------------------------------------------------- autotune


def test_autotune_without_a_gpu_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "measure", None)
    assert cli.main(["autotune", "--shape", "256", "64", "4", "2", "--out", str(tmp_path / "tuned.json")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "autotune" in err and "GPU" in err and "cuda12" in err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("arguments", "words"), [
    (["--model", "gpt-oss"], ["gpt-oss", "did you mean gpt-oss-20b?", "--model list"]),
    (["--shape", "100", "64", "4", "2"], ["100", "multiples of 32"]),
    (["--shape", "256", "64", "2", "4"], ["K = 4", "E = 2"]),
    (["--shape", "256", "64", "4", "0"], ["K=0", "positive"]),
    (["--shape", "256", "64", "4", "2", "--batch", "0"], ["batch", "0"]),
    (["--shape", "256", "64", "4", "2", "--switch", "16", "-1"], ["switch", "-1"]),
    (["--shape", "256", "64", "4", "2", "--format", "int3"], ["int3", "mxfp8"]),
    (["--shape", "240", "64", "4", "2", "--format", "mxfp8"], ["H=240", "MXFP8"]),
    (["--shape", "256", "64"], ["--shape", "4 arguments"]),
    ([], ["--model", "--shape"]),
])
def test_autotune_refuses_bad_input(capsys, arguments, words):
    try:
        code = cli.main(["autotune", *arguments])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and all(word in err for word in words), err


def test_layers_of_a_step_read_different_experts_and_enough_of_them():
    job = Job(PRESETS["qwen3-30b-a3b"], "mxfp8", 4)
    pool, layers = job.routing
    chosen = [set(ids.ravel().tolist()) for ids in layers]
    assert set.union(*chosen) == set(range(pool)) and sum(map(len, chosen)) == pool
    assert job.nbytes > 300e6 and all(len(set(row)) == 8 for ids in layers for row in ids.tolist())


@pytest.fixture
def interpreted(monkeypatch):
    """A GPU played by the interpreter, whose clock prefers many rows and whose results are wrong for 32 lanes."""
    real, pairs = measured_job.moe, []

    def moe(*args, strategy, **options):
        y = real(*args, strategy=strategy, interpret=strategy == "warp_decode", **options)
        if strategy == "warp_decode":
            pairs.append({type(c): c for c in tuning._overrides.value})
            y = y * jnp.asarray(2 if pairs[-1][GateUpConfig].lanes == 32 else 1, y.dtype)
        return y

    class Recording:
        def __init__(self, calls, steps):
            self.right = [p for p in pairs if p[GateUpConfig].lanes != 32]
            assert len(calls) == len(self.right)

        def timings(self):
            runs = [[timing.Event("moe_gate_up_3d_batched", 0, 8e3 / p[GateUpConfig].rows),
                     timing.Event("moe_down_3d_batched", 9e3, 9e3 + 4e3 / p[DownConfig].rows)] for p in self.right]
            return [timing.summarise([run], wall_us=1.0, steps=1, layers=1) for run in runs]

    monkeypatch.setattr(measured_job, "moe", moe)
    monkeypatch.setattr(measured_job, "MOST_LAYERS", 1)
    monkeypatch.setattr(timing, "record_steps", Recording)


def test_autotune_keeps_the_fastest_of_the_right_ones(interpreted, files, monkeypatch):
    user, _ = files
    chosen = {"moe_gate_up": [GateUpConfig(32, 1, 1), GateUpConfig(8, 1, 2), GateUpConfig(8, 2, 1)],
              "moe_down": [DownConfig(8, 1, 2), DownConfig(8, 4, 1), DownConfig(8, 2, 1)]}
    monkeypatch.setattr(Job, "candidates", lambda self, kernel: chosen[kernel])
    monkeypatch.setattr(tune, "no_gpu_reason", lambda: "")
    monkeypatch.setattr(tune, "_workers", lambda jobs: 1)
    with user.with_suffix(".txt").open("w+") as screen:
        tune.autotune([Job(SMALL, "bf16", 1)], user, Console(file=screen))
        screen.seek(0)
        text = screen.read()
    assert "warning: small bf16 T=1: GateUpConfig(lanes=32, rows=1, unroll=1) with" in text and "is wrong" in text
    assert f"export {tuned_table.VARIABLE}={user}" in text
    monkeypatch.setenv(tuned_table.VARIABLE, str(user))
    assert find().config == DownConfig(8, 4, 1)
    kept = tuned_table.read_table(user, DEVICE).shapes["moe_gate_up", "bf16", 256, 64, 2][1]
    assert (kept.config["rows"], kept.us, kept.runner_up_us, kept.heuristic_us) == (2, 4.0, 8.0, None)
    assert kept.jax == jax.__version__


STRATEGY_US = dict(warp_decode=4.0, shared_decode=9.0, expert_centric=7.0)


@pytest.fixture
def timed_strategies(interpreted, monkeypatch):
    """The same GPU, on which a strategy takes `STRATEGY_US`, and `expert_centric` is wrong for two tokens.

    Yields what was lowered: (strategy, tokens, the configurations of `warp_decode`).
    """
    real, real_measure, lowered = strategies.moe, variants.measure, []

    def moe(x, *args, strategy, **options):
        lowered.append((strategy, len(x), set(tuning._overrides.value)))
        y = real(x, *args, strategy=strategy, interpret=strategy != "expert_centric", **options)
        return y * jnp.asarray(2 if (strategy, len(x)) == ("expert_centric", 2) else 1, y.dtype)

    def measure(steps, count, threads, gpu):
        assert all(len(v.layers) >= 2 and v.layers[0][2] is not v.layers[1][2] for v in steps)
        rows = real_measure(steps, count, threads, gpu=gpu)
        return [row if "error" in row else row | dict(us=STRATEGY_US[row["strategy"]], clock="device") for row in rows]

    monkeypatch.setattr(strategies, "moe", moe)
    monkeypatch.setattr(workload, "LAYERS", (2, 2))
    monkeypatch.setattr(variants, "measure", measure)
    monkeypatch.setattr(importlib.import_module("jax_warp_decode.choose"), "no_gpu_reason", lambda: "")
    monkeypatch.setattr(tune, "no_gpu_reason", lambda: "")
    monkeypatch.setattr(tune, "_workers", lambda jobs: 1)
    monkeypatch.setattr(tune, "_room", lambda: 1e9)
    return lowered


def test_autotune_times_the_strategies_with_the_configurations_that_it_found(timed_strategies, files, monkeypatch):
    user, _ = files
    chosen = {"moe_gate_up": [GateUpConfig(8, 1, 2), GateUpConfig(8, 2, 1)], "moe_down": [DownConfig(8, 4, 1)]}
    monkeypatch.setattr(Job, "candidates", lambda self, kernel: chosen[kernel])
    with user.with_suffix(".txt").open("w+") as screen:
        tune.autotune([StrategyJob(SMALL, "bf16", 2), Job(SMALL, "bf16", 1), StrategyJob(SMALL, "bf16", 1)], user,
                      Console(file=screen))
        screen.seek(0)
        text = screen.read()
    assert "small bf16 T=1: fastest warp_decode 4.0 us; expert_centric 7.0 us; shared_decode 9.0 us" in text
    assert "small bf16 T=2: fastest warp_decode 4.0 us; shared_decode 9.0 us\n" in text
    assert "warning: small bf16 T=2: expert_centric was not timed: ArithmeticError: wrong result" in text
    assert tuned_table.VARIABLE not in os.environ
    fastest = {GateUpConfig(8, 2, 1), DownConfig(8, 4, 1)}
    assert len(timed_strategies) >= 6 and all(configs == fastest for _, _, configs in timed_strategies)
    table = tuned_table.read_table(user, DEVICE)
    assert {(shape[0], T): time.us for shape, times in table.layers.items() for T, time in times.items()} == {
        ("warp_decode", 1): 4.0, ("warp_decode", 2): 4.0, ("shared_decode", 1): 9.0, ("shared_decode", 2): 9.0,
        ("expert_centric", 1): 7.0}
    assert ("warp_decode", "bf16", 256, 64, 4, 2) in table.layers and len(table.shapes) == 2


def test_strategies_that_do_not_fit_on_the_gpu_are_told_and_configurations_kept(timed_strategies, files, monkeypatch):
    monkeypatch.setattr(tune, "_room", lambda: 1e5)
    monkeypatch.setattr(Job, "candidates", lambda self, kernel: dict(
        moe_gate_up=[GateUpConfig(8, 1, 2)], moe_down=[DownConfig(8, 4, 1)])[kernel])
    told = "T=1: strategies were not timed: the layers of a step take .* GB, more"
    monkeypatch.setenv(tuned_table.VARIABLE, "before")
    with files[0].with_suffix(".txt").open("w+") as screen:
        tune.autotune([Job(SMALL, "bf16", 1), StrategyJob(SMALL, "bf16", 1)], files[0], Console(file=screen))
        screen.seek(0)
        assert re.search(f"warning: .*{told}", screen.read())
    table = tuned_table.read_table(files[0], DEVICE)
    assert len(table.shapes) == 2 and not table.layers and timed_strategies == []
    with pytest.raises(ArgumentError, match=told):  # nothing else was asked for
        tune.autotune([StrategyJob(SMALL, "bf16", 1)], files[0], Console(quiet=True))
    monkeypatch.setattr(tune, "_room", lambda: 1e9)
    other = files[0].with_name("other.json")
    tune.autotune([StrategyJob(SMALL, "bf16", 1)], other, Console(quiet=True))
    assert os.environ[tuned_table.VARIABLE] == "before", "as it was"
    assert tuned_table.read_table(other, DEVICE).layers


def test_the_command_times_strategies_at_both_lists(files, monkeypatch):
    asked = []
    monkeypatch.setattr(tune, "autotune", lambda jobs, *_: asked.extend(jobs))
    for arguments in ([], ["--batch", "3", "16", "--switch"]):
        assert cli.main(["autotune", "--shape", "256", "64", "4", "2", *arguments]) == 0
    tokens = [(type(job).__name__, job.tokens) for job in asked]
    assert tokens == [("Job", T) for T in (1, 2, 4, 8)] + [
        ("StrategyJob", T) for T in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)] + [
        ("Job", 3), ("Job", 16), ("StrategyJob", 3), ("StrategyJob", 16)]


def test_a_file_that_cannot_be_used_is_deleted_and_written_anew(files, monkeypatch):
    user, _ = files
    user.write_text("{")
    monkeypatch.setenv(tuned_table.VARIABLE, str(user))
    monkeypatch.setattr(tune, "no_gpu_reason", lambda: "")
    monkeypatch.setattr(tune, "_workers", lambda jobs: 1)
    found = entry(lanes=8, unroll=1)
    monkeypatch.setattr(tune, "_results", lambda jobs, *_: [Result(job, (found,), ()) for job in jobs])
    run = functools.partial(tune.autotune, [Job(SMALL, "bf16", 1)], console=Console(quiet=True))
    for use in (find, run):
        with pytest.raises(ArgumentError, match="delete the file, after which 'jax-warp-decode autotune' can write it"):
            use()
    user.unlink()
    with pytest.raises(ArgumentError, match="let 'jax-warp-decode autotune' write the file"):
        find()
    assert run() == user and find().config == DownConfig(8, 1, 1)


def test_a_job_in_a_process_of_its_own_reports_what_went_wrong():
    lowered = []
    (result,) = tune._results([Job(SMALL, "bf16", 1, most=1)], 2, lambda: lowered.append(1))
    refused, summary = result.problems
    assert "sees no NVIDIA GPU" in refused and "no candidate could be lowered" in summary and lowered == [1]


def test_a_process_of_its_own_checks_the_strategies_that_run_there():
    """On this machine one of them, whose result is right and whose time nobody measures."""
    timed = []
    (result,) = tune._results([StrategyJob(SMALL, "mxfp8", 3)], 2, lambda: timed.append(1))
    assert result.job.strategies == ["expert_centric"] and result.entries == () and timed == [1]
    assert result.problems == (
        "small mxfp8 T=3: the profiler's trace does not show expert_centric; is another profiler running?",)


def test_autotune_refuses_what_does_not_fit_on_the_gpu(monkeypatch, files):
    class Device:
        def memory_stats(self):
            return dict(bytes_limit=1_000_000)

    monkeypatch.setattr(tune, "no_gpu_reason", lambda: "")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(ArgumentError, match="small bf16 T=1, whose experts take .* half of the GPU's memory"):
        tune.autotune([Job(SMALL, "bf16", 1)], files[0], Console(quiet=True))
    with pytest.raises(UnsupportedError, match="multiples of 32"):
        tune.autotune([Job(dataclasses.replace(SMALL, hidden=100), "bf16", 1)], files[0], Console(quiet=True))
    assert not files[0].exists()
