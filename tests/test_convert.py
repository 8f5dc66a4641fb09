"""`jax-warp-decode convert`: experts become exactly what `quantize` makes of them, everything else stays as it was."""

import argparse
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jax_warp_decode import ArgumentError, CheckpointError, cli, quantize
from jax_warp_decode.checkpoints import convert as command
from jax_warp_decode.checkpoints import files, load_model, load_moe_blocks, reader
from jax_warp_decode.checkpoints.convert import convert
from jax_warp_decode.demo import bundled_model

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def assert_equal(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("name", ["mixtral_tiny", "gpt_oss_tiny", "qwen3_5_moe_tiny"])
def test_converted_blocks(tmp_path, name):
    """Separate, transposed and alternating, and fused projections; shared experts, too."""
    calls = []
    convert(FIXTURES / name, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    size = sum(t.nbytes for t in reader.open_folder(FIXTURES / name).tensors.values())
    assert calls[0] == (0, size) and calls[-1] == (size, size)
    before, after = load_moe_blocks(FIXTURES / name, [1])[1], load_moe_blocks(tmp_path / "out", [1])[1]
    for old, new in ((before.experts, after.experts), (before.shared, after.shared)):
        for weight in ("w_gate", "w_up", "w_down") if old is not None else ():
            want, got = quantize(getattr(old, weight), "mxfp8"), getattr(new, weight)
            assert got.format == "mxfp8"
            assert_equal(got.values, want.values)
            assert_equal(got.scales, want.scales)
    assert_equal(before.router, after.router)
    assert before.experts.biases.keys() == after.experts.biases.keys()
    for bias, value in before.experts.biases.items():
        assert_equal(after.experts.biases[bias], value)


def test_converted_model_generates(tmp_path):
    """A sharded decoder: what is no expert stays bit by bit, the tokenizer comes along, code does not."""
    folder = shutil.copytree(bundled_model("bf16"), tmp_path / "in")
    tensors = {}
    for name, stored in reader.open_folder(folder).tensors.items():
        tensors[name] = np.empty(stored.shape, reader.DTYPES[stored.dtype])
        stored.read_into(tensors[name])
    half = sorted(tensors)[: len(tensors) // 2]
    save_file({n: tensors[n] for n in half}, folder / "a.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in half}, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {n: "a.safetensors" if n in half else "b.safetensors" for n in tensors}}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling.py").write_text("")
    options = argparse.Namespace(folder=str(folder), out=str(tmp_path / "new" / "out"), weights="mxfp8")
    assert command.main(options) == 0
    out = tmp_path / "new" / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json"]
    model, want = load_model(out), load_model(bundled_model("mxfp8"))  # the packaged one was quantised as a model
    for ours, theirs in zip(model.layers, want.layers, strict=True):
        assert_equal(ours.moe.experts.w_down.values, theirs.moe.experts.w_down.values)
        assert_equal(ours.moe.experts.w_down.scales, theirs.moe.experts.w_down.scales)
        assert_equal(ours.attention.q_proj.kernel.get_value(), theirs.attention.q_proj.kernel.get_value())
    skipped = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.mlp.gate" in skipped and "model.layers.0.self_attn.q_proj" in skipped
    assert not any("experts" in module for module in skipped)


@pytest.mark.parametrize("name, options, error, message", [
    ("deepseek_v3_tiny", {}, ArgumentError, "folder: got experts in fp8_block128, which are served as they are"),
    ("gpt_oss_mxfp4_tiny", {}, ArgumentError, "folder: got experts in mxfp4, which are served as they are"),
    ("mixtral_tiny", {"weights": "fp4"}, ArgumentError, "weights: got 'fp4', expected one of .'mxfp8'."),
    ("mixtral_tiny", {"out": FIXTURES / "gpt_oss_tiny"}, ArgumentError, "holds config.json, model.safetensors; remove"),
    ("mixtral_tiny", {"out": FIXTURES / "gpt_oss_tiny" / ".." / "mixtral_tiny"}, ArgumentError,
     "out: got .*mixtral_tiny, the folder of the model itself, expected another one"),
    ("mixtral_tiny", {"out": FIXTURES / "mixtral_tiny" / "config.json"}, ArgumentError, "config.json is a file"),
    ("mixtral_tiny", {"out": ""}, ArgumentError, "out: got '', expected a path"),
    ("nowhere", {}, CheckpointError, "no such folder"),
])
def test_what_cannot_be_converted(tmp_path, name, options, error, message):
    with pytest.raises(error, match=message):
        convert(FIXTURES / name, **{"out": tmp_path / "out"} | options)
    assert not (tmp_path / "out").exists()


def test_a_single_shard_with_an_index(tmp_path):
    folder = shutil.copytree(FIXTURES / "mixtral_tiny", tmp_path / "in")
    file = "model-00001-of-00001.safetensors"
    (folder / reader.SINGLE_FILE).rename(folder / file)
    names = reader.read_header(folder / file)
    (folder / reader.INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    out = tmp_path / "out"
    convert(folder, out)
    assert load_moe_blocks(out, [0])[0].experts.format == "mxfp8"
    assert (out / file).stat().st_mode & 0o777 == out.stat().st_mode & 0o666, "others may read what they may list"


def test_a_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    def full(*args, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    assert cli.main(["convert", str(FIXTURES / "mixtral_tiny"), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert re.match("jax-warp-decode: error: .*model.safetensors: .*No space left on device", printed.splitlines()[-1])
