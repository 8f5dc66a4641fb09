"""Checkpoint folders: what is written is read back exactly, and every fault is one error before any weight is read."""

import dataclasses
import json
import re
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jax_warp_decode import ArgumentError, CheckpointError, QuantizedArray, quantize
from jax_warp_decode.checkpoints import load_qwen3_moe, reader, save_qwen3_moe
from jax_warp_decode.checkpoints.decoders import find_param
from jax_warp_decode.models import MixtralConfig, Qwen3Moe, Qwen3MoeConfig
from jax_warp_decode.models.decoder_config import DecoderConfig

CONFIG = Qwen3MoeConfig(
    vocab_size=32, hidden_size=64, moe_intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, attention_bias=True)
EXPERT = "model.layers.1.mlp.experts.2"


def make_model(seed=0, dtype=jnp.bfloat16, **changes):
    """A model whose parameters are all random, without compiling the initialisers."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(CONFIG, **changes)
    model = nnx.eval_shape(lambda: Qwen3Moe(config, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    state = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32)).astype(a.dtype), state)
    return nnx.merge(graphdef, state)


def weights(model):
    return {jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model))}


def assert_same(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8), err_msg=name)


def read_all(folder):
    """Every tensor of a folder as numpy, FP8 included."""
    tensors = {}
    for name, stored in reader.open_folder(folder).tensors.items():
        tensors[name] = np.empty(stored.shape, reader.DTYPES[stored.dtype])
        stored.read_into(tensors[name])
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One sound folder of each kind; tests copy before they change."""
    root = tmp_path_factory.mktemp("sound")
    model = make_model()
    save_qwen3_moe(model, root / "plain")
    save_qwen3_moe(model, root / "sharded", max_shard_size=150_000)
    save_qwen3_moe(model, root / "mxfp8", format="mxfp8")
    save_qwen3_moe(make_model(tie_word_embeddings=True), root / "tied")
    return root


@pytest.fixture
def copy(folders, tmp_path):
    return lambda kind: shutil.copytree(folders / kind, tmp_path / kind)


@pytest.fixture
def no_reads(monkeypatch):
    """Makes reading a weight fail, so that a test shows that headers were enough."""
    def read_into(self, out):
        raise AssertionError(f"read {self.file} at {self.offset}")
    monkeypatch.setattr(reader.StoredTensor, "read_into", read_into)


# ------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
def test_round_trip_is_exact(tmp_path, dtype):
    model = make_model(1, dtype)
    save_qwen3_moe(model, tmp_path / "new" / "folder")
    loaded = load_qwen3_moe(tmp_path / "new" / "folder", strategy="reference")
    assert_same(model, loaded)
    assert (loaded.config, loaded.dtype, loaded.strategy) == (CONFIG, jnp.dtype(dtype), "reference")


def test_shards_hold_the_same_model(folders):
    assert len(list((folders / "sharded").glob("model-*-of-*.safetensors"))) > 2
    assert_same(load_qwen3_moe(folders / "plain"), load_qwen3_moe(folders / "sharded"))


def test_mxfp8_quantises_experts_only(folders, tmp_path):
    plain, loaded = load_qwen3_moe(folders / "plain"), load_qwen3_moe(folders / "mxfp8")
    for ours, theirs in zip(plain.layers, loaded.layers, strict=True):
        for name in ("w_gate", "w_up", "w_down"):
            w = getattr(theirs.moe, name).get_value()
            assert isinstance(w, QuantizedArray)
            want = quantize(getattr(ours.moe, name).get_value(), "mxfp8")
            np.testing.assert_array_equal(np.asarray(w.values).view(np.uint8), np.asarray(want.values).view(np.uint8))
            np.testing.assert_array_equal(w.scales, want.scales)
        np.testing.assert_array_equal(ours.moe.router.get_value(), theirs.moe.router.get_value())
    save_qwen3_moe(loaded, tmp_path / "again")
    assert_same(loaded, load_qwen3_moe(tmp_path / "again"))
    stored = read_all(tmp_path / "again")
    assert stored[f"{EXPERT}.down_proj.weight"].dtype == ml_dtypes.float8_e4m3fn
    assert stored[f"{EXPERT}.down_proj.weight_scale_inv"].shape == (64, 96 // 32)


def test_equal_models_give_equal_bytes(folders, tmp_path):
    for kind, options in (("sharded", dict(max_shard_size=150_000)), ("mxfp8", dict(format="mxfp8"))):
        save_qwen3_moe(make_model(), tmp_path / kind, **options)
        files = sorted(p.name for p in (tmp_path / kind).iterdir())
        assert files == sorted(p.name for p in (folders / kind).iterdir())
        for file in files:
            assert (tmp_path / kind / file).read_bytes() == (folders / kind / file).read_bytes()


def test_names_and_orientation_are_those_of_transformers(folders):
    """nnx.Linear keeps [in, out]; the folder has [out, in] and one tensor for each expert."""
    model, stored = load_qwen3_moe(folders / "plain"), read_all(folders / "plain")
    layer = model.layers[1]
    np.testing.assert_array_equal(
        stored["model.layers.1.self_attn.k_proj.weight"], layer.attention.k_proj.kernel.get_value().T)
    np.testing.assert_array_equal(stored[f"{EXPERT}.up_proj.weight"], layer.moe.w_up.get_value()[2])
    np.testing.assert_array_equal(stored["model.layers.1.mlp.gate.weight"], layer.moe.router.get_value())
    assert len(stored) == 3 + 2 * (9 + 4 + 3 * 4)


def test_dtype_converts_plain_weights(folders):
    loaded = load_qwen3_moe(folders / "mxfp8", dtype=jnp.float32)
    assert loaded.dtype == jnp.float32
    assert {str(w.dtype) for w in weights(loaded).values()} == {"float32", "float8_e4m3fn", "uint8"}
    np.testing.assert_array_equal(
        loaded.embed.embedding.get_value(), load_qwen3_moe(folders / "plain").embed.embedding.get_value())
    with pytest.raises(ArgumentError, match="dtype: got int8"):
        load_qwen3_moe(folders / "plain", dtype=jnp.int8)


def test_experts_of_mixed_types_need_a_dtype(copy):
    folder = copy("plain")
    tensors = read_all(folder)
    tensors[f"{EXPERT}.up_proj.weight"] = tensors[f"{EXPERT}.up_proj.weight"].astype(np.float32)
    tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"].astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.moe .w_gate BF16, w_up BF16/F32, w_down BF16.*dtype="):
        load_qwen3_moe(folder)
    loaded = load_qwen3_moe(folder, dtype=jnp.bfloat16)
    assert {str(w.dtype) for w in weights(loaded).values()} == {"bfloat16"}


def test_projections_of_different_types_need_a_dtype(copy):
    folder = copy("plain")
    tensors = read_all(folder)
    for name in [name for name in tensors if "layers.0.mlp.experts" in name and "gate_proj" in name]:
        tensors[name] = tensors[name].astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 layer: layers.0.moe .w_gate F32, w_up BF16, w_down BF16.*dtype="):
        load_qwen3_moe(folder)
    assert load_qwen3_moe(folder, dtype=jnp.float32).layers[0].moe.experts.format == "f32"


@pytest.mark.parametrize("folder, options, message", [
    (None, {}, "folder: got None, expected a path"),
    ("any", dict(dtype="float8"), "dtype: got 'float8', expected bfloat16"),
])
def test_bad_arguments_of_load(folder, options, message):
    with pytest.raises(ArgumentError, match=message):
        load_qwen3_moe(folder, **options)


def test_a_path_that_the_system_refuses(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="cannot be read: .*too long"):
        load_qwen3_moe(tmp_path / ("x" * 300))
    monkeypatch.setattr(reader, "read_json", lambda path, limit: open(tmp_path))  # any OSError
    with pytest.raises(CheckpointError, match="cannot be read: "):
        load_qwen3_moe(tmp_path)


def test_progress_counts_every_byte(folders):
    calls = []
    load_qwen3_moe(folders / "mxfp8", progress=lambda done, total: calls.append((done, total)))
    total = sum(t.nbytes for t in reader.open_folder(folders / "mxfp8").tensors.values())
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_checkpoint_is_never_held_twice(tmp_path):
    """Host memory: at most the model itself (where the device shares it with the host) and one stacked parameter."""
    model = make_model(num_experts=64, moe_intermediate_size=256)
    save_qwen3_moe(model, tmp_path / "big")
    size = sum(w.nbytes for w in weights(model).values())
    largest = max(w.nbytes for w in weights(model).values())
    assert largest < size / 5
    tracemalloc.start()
    load_qwen3_moe(tmp_path / "big")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size + largest


def test_tied_folder_may_repeat_the_embedding(copy):
    folder = copy("tied")
    tensors = read_all(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    assert load_qwen3_moe(folder).lm_head is None
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight: differs from model.embed_tokens.weight"):
        load_qwen3_moe(folder)


# ------------------------------------------------------------------------------------------------------------ faults


def edit_config(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
    return edit


def write(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def edit_tensors(change):
    def edit(folder):
        tensors = read_all(folder)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return edit


def drop(*names):
    return edit_tensors(lambda tensors: [tensors.pop(name) for name in names])


def put(name, make):
    """Replaces or adds the tensor make(old)."""
    return edit_tensors(lambda tensors: tensors.update({name: make(tensors.get(name))}))


def edit_index(change):
    def edit(folder):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index = change(index["weight_map"]) or index
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return edit


def edit_bytes(change):
    def edit(folder):
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))
    return edit


def with_header(change):
    """Rewrites the header of a safetensors file as text, keeping its length field right."""
    def rewrite(data):
        size = int.from_bytes(data[:8], "little")
        header = change(data[8:8 + size].decode()).encode()
        return len(header).to_bytes(8, "little") + header + data[8 + size:]
    return edit_bytes(rewrite)


def repeat_first_tensor(header):
    start = header.index('"', header.index("}") if "__metadata__" in header else 0)
    return header[:start] + header[start:header.index("}", start) + 1] + "," + header[start:]


def store_twice(folder):
    """Adds a copy of the head, which lies in the last shard, to the first one."""
    tensors = {name: tensor for name, tensor in read_all(folder).items()
               if reader.open_folder(folder).tensors[name].file.name == SHARD}
    save_file(tensors | {"lm_head.weight": np.zeros((32, 64), np.float32)}, folder / SHARD)


SHARD = "model-00001-of-00003.safetensors"

FAULTS = {
    # config.json
    "no folder": ("plain", shutil.rmtree, "no such folder; fetch a model with `hf download"),
    "no config": ("plain", lambda f: (f / "config.json").unlink(),
                  "config.json: no such file.*; is .* the folder of a model.$"),
    "config is cut off": ("plain", write("config.json", b'{"architectures": ['), "config.json: not a JSON object"),
    "config is a list": ("plain", write("config.json", b"[]"), "got list, expected an object"),
    "config is no text": ("plain", write("config.json", b"\xff\xfe\x00"), "config.json: not a JSON object"),
    "config nests too deep": ("plain", write("config.json", b"[" * 200_000), "config.json: not a JSON object"),
    "config repeats a key": ("plain", write("config.json", b'{"a": 1, "a": 2}'), "repeated keys: a"),
    "other architecture": ("plain", edit_config(architectures=["MixtralForCausalLM"]),
                           "config.json: architectures: got .'MixtralForCausalLM'., expected .'Qwen3MoeForCausalLM'"),
    "bad size": ("plain", edit_config(num_experts=-4), "config.json: num_experts: got -4"),
    "sliding window": ("plain", edit_config(use_sliding_window=True), "use_sliding_window: got True"),
    "other quantisation": ("plain", edit_config(quantization_config={"quant_method": "fp8"}),
                           "quantization_config: got .* expected .*mxfp8"),
    "other block": ("mxfp8", edit_config(quantization_config={"quant_method": "mxfp8", "block_size": 16}),
                    "quantization_config: got quant_method 'mxfp8' with block 16, expected"),
    "block does not divide": ("mxfp8", edit_config(moe_intermediate_size=80),
                              "intermediate size: got 80, expected a multiple of 32, the block of mxfp8"),
    # tensors
    "missing": ("plain", drop(f"{EXPERT}.up_proj.weight", "model.norm.weight"),
                f"2 tensors missing: {EXPERT}.up_proj.weight, model.norm.weight$"),
    "unexpected": ("plain", put("model.layers.2.mlp.gate.weight", lambda old: np.zeros(3, np.float32)),
                   "1 tensor unexpected: model.layers.2.mlp.gate.weight$"),
    "head of an untied model": ("plain", drop("lm_head.weight"), "1 tensor missing: lm_head.weight"),
    "transposed": ("plain", put("model.layers.0.self_attn.v_proj.weight", lambda old: old.T.copy()),
                   r"v_proj.weight: got BF16\[64, 32\], expected BF16/F16/F32\[32, 64\]"),
    "wrong type": ("plain", put(f"{EXPERT}.down_proj.weight", lambda old: old.astype(np.int32)),
                   rf"{EXPERT}.down_proj.weight: got I32\[64, 96\], expected BF16/F16/F32\[64, 96\]"),
    "promises more": ("plain", edit_config(num_experts=2 * 10**9),
                      r"1000 or more tensors missing: \S+experts.{\d+-\d+}.gate_proj.weight; 1"),
    "quantised without notice": ("mxfp8", edit_config(quantization_config=None), r"got F8_E4M3\[96, 64\]"),
    "scales missing": ("mxfp8", drop(f"{EXPERT}.gate_proj.weight_scale_inv"),
                       f"1 tensor missing: {EXPERT}.gate_proj.weight_scale_inv$"),
    "scales transposed": ("mxfp8", put(f"{EXPERT}.gate_proj.weight_scale_inv", lambda old: old.T.copy()),
                          r"gate_proj.weight_scale_inv: got U8\[2, 96\], expected U8/F8_E8M0\[96, 2\]"),
    "scales of the other dimension": ("mxfp8", put(f"{EXPERT}.gate_proj.weight_scale_inv",
                                                   lambda old: np.zeros((64, 3), np.uint8)),
                                      r"got U8\[64, 3\], expected U8/F8_E8M0\[96, 2\]"),
    "scales are numbers": ("mxfp8", put(f"{EXPERT}.gate_proj.weight_scale_inv", lambda old: old.astype(np.float32)),
                           r"weight_scale_inv: got F32\[96, 2\], expected U8"),
    "values are plain": ("mxfp8", put(f"{EXPERT}.gate_proj.weight", lambda old: old.astype(ml_dtypes.bfloat16)),
                         r"gate_proj.weight: got BF16\[96, 64\], expected F8_E4M3\[96, 64\]"),
    # safetensors
    "no weights": ("plain", lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "weights are a folder": ("plain", lambda f: [(f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()],
                             "not a regular one"),
    "empty file": ("plain", edit_bytes(lambda data: b""), "model.safetensors: got a file of 0 bytes, expected one"),
    "truncated": ("plain", edit_bytes(lambda data: data[:-1]), "not a valid safetensors file"),
    "trailing bytes": ("plain", edit_bytes(lambda data: data + b"\0"), "not a valid safetensors file"),
    "truncated header": ("plain", edit_bytes(lambda data: data[:100]), "not a valid safetensors file"),
    "huge header": ("plain", edit_bytes(lambda data: b"\xff" * 8 + data[8:]), "not a valid safetensors file"),
    "garbage": ("plain", edit_bytes(lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
                "not a valid safetensors file"),
    "overlapping tensors": ("plain", with_header(lambda h: h.replace('"data_offsets":[0,', '"data_offsets":[2,')),
                            "not a valid safetensors file"),
    "negative shape": ("plain", with_header(lambda h: h.replace('"shape":[64]', '"shape":[-64]')),
                       "not a valid safetensors file"),
    "shape of another size": ("plain", with_header(lambda h: h.replace('"shape":[64]', '"shape":[65]')),
                              "not a valid safetensors file"),
    "unknown type": ("plain", with_header(lambda h: h.replace('"BF16"', '"BF17"', 1)), "not a valid safetensors file"),
    "repeated tensor": ("plain", with_header(repeat_first_tensor), "repeated keys: "),
    # shards
    "both forms": ("sharded", lambda f: shutil.copy(f / SHARD, f / "model.safetensors"), "remove the stale one"),
    "index is cut off": ("sharded", write("model.safetensors.index.json", b"{"), "index.json: not a JSON object"),
    "index without map": ("sharded", edit_index(lambda m: {"metadata": {}}), "expected an object 'weight_map'"),
    "index maps to numbers": ("sharded", edit_index(lambda m: m.update(dict.fromkeys(m, 1))), "'weight_map' from"),
    "shard missing": ("sharded", lambda f: (f / SHARD).unlink(), f"{SHARD}: no such file"),
    "shard truncated": ("sharded", lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-9]),
                        f"{SHARD}: not a valid safetensors file"),
    "climbs out": ("sharded", edit_index(lambda m: m.update({"lm_head.weight": "../plain/model.safetensors"})),
                   "got shard '../plain/model.safetensors', expected the name of a .safetensors file beside it"),
    "absolute path": ("sharded", edit_index(lambda m: m.update({"lm_head.weight": "/etc/passwd"})),
                      "got shard '/etc/passwd'"),
    "other file type": ("sharded", edit_index(lambda m: m.update({"lm_head.weight": "config.json"})),
                        "got shard 'config.json'"),
    "wrong shard": ("sharded", edit_index(lambda m: m.update({"lm_head.weight": SHARD})),
                    f"does not hold what the index says: lm_head.weight in {SHARD}"),
    "not in the index": ("sharded", edit_index(lambda m: m.pop("lm_head.weight") and None),
                         "in a shard but not in the index: lm_head.weight"),
    "stored twice": ("sharded", store_twice, "stored twice, in .*: lm_head.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_one_error_before_anything_is_read(fault, copy, request):
    kind, spoil, message = FAULTS[fault]
    folder = copy(kind)
    spoil(folder)
    request.getfixturevalue("no_reads")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_qwen3_moe(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_all_problems_are_named_at_once(copy):
    folder = copy("plain")
    edit_tensors(lambda tensors: tensors.update({
        "extra": np.zeros(3, np.float32),
        "model.norm.weight": np.zeros(3, np.float32),
        "wrong": tensors.pop(f"{EXPERT}.up_proj.weight")}))(folder)
    with pytest.raises(CheckpointError) as caught:
        load_qwen3_moe(folder)
    for part in (f"1 tensor missing: {EXPERT}.up_proj.weight", "2 tensors unexpected: extra, wrong",
                 "1 tensor of the wrong shape or type: model.norm.weight: got F32[3]"):
        assert part in str(caught.value)


def test_file_that_shrinks_while_it_is_read(copy):
    folder = copy("plain")

    def shrink(done, total):
        if done == 0:
            (folder / "model.safetensors").write_bytes(b"x" * 100)

    with pytest.raises(CheckpointError, match="ends early, .* bytes are missing"):
        load_qwen3_moe(folder, progress=shrink)


# ------------------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("options, message", [
    (dict(format="fp4"), "format: got 'fp4', expected None or one of"),
    (dict(format="mxfp8"), "format: got 'mxfp8', which needs a moe_intermediate_size that is a multiple of 32, not 48"),
])
def test_saving_in_an_impossible_format(tmp_path, options, message):
    with pytest.raises(ArgumentError, match=message):
        save_qwen3_moe(make_model(moe_intermediate_size=48), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_saving_another_architecture(tmp_path):
    config = MixtralConfig(**{field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(DecoderConfig)})
    with pytest.raises(ArgumentError, match="model: got a MixtralForCausalLM, expected a Qwen3MoeForCausalLM"):
        save_qwen3_moe(nnx.eval_shape(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0))), tmp_path / "new")


def test_saving_never_overwrites(copy):
    folder = copy("plain")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ArgumentError, match="holds config.json, model.safetensors; remove them"):
        save_qwen3_moe(make_model(5), folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("format", [None, "mxfp8"])
@pytest.mark.parametrize("path, shape", [
    ("moe.w_gate", (5, 96, 64)), ("moe.w_down", (4, 96, 64)), ("moe.router", (3, 64)),
    ("attention.q_proj.kernel", (64, 32)), ("input_norm.scale", (1,))])
def test_saving_parameters_of_another_shape(tmp_path, path, shape, format):
    model = make_model()
    param = find_param(model, f"layers.1.{path}")
    expected = param.get_value().shape
    param.set_value(jnp.ones(shape, jnp.bfloat16))
    with pytest.raises(ArgumentError, match=re.escape(f"layers.1.{path}: got shape {shape}, expected {expected}")):
        save_qwen3_moe(model, tmp_path / "new", format=format)
    assert not (tmp_path / "new").exists()


def test_saving_a_model_that_is_not_its_config(tmp_path):
    model = make_model()
    model.config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    with pytest.raises(ArgumentError, match="with also layers.1.attention.k_norm.scale"):
        save_qwen3_moe(model, tmp_path / "new")
    model.config = dataclasses.replace(CONFIG, num_hidden_layers=3)
    with pytest.raises(ArgumentError, match="without layers.2.attention.k_norm.scale"):
        save_qwen3_moe(model, tmp_path / "new")
    model = make_model()
    model.layers[1].moe.w_down.set_value(model.layers[1].moe.w_down.get_value().astype(jnp.float32))
    with pytest.raises(ArgumentError, match="layers.1.moe.experts: got mixed formats"):
        save_qwen3_moe(model, tmp_path / "new")
    model = make_model()
    model.norm.scale.set_value(jnp.ones(64, jnp.int32))
    with pytest.raises(ArgumentError, match="norm.scale: got dtype int32, expected bfloat16"):
        save_qwen3_moe(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_saving_where_a_file_lies(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("kept")
    for folder in (file, file / "model"):
        with pytest.raises(ArgumentError, match="folder: got .*notes.txt is a file"):
            save_qwen3_moe(make_model(), folder)
    assert file.read_text() == "kept"


def test_saving_layers_of_different_formats(tmp_path):
    model = make_model()
    model.layers[0].moe.set_experts(model.layers[0].moe.experts.quantize("mxfp8"))
    with pytest.raises(ArgumentError, match="layers with experts in .'bf16', 'mxfp8'., expected one format"):
        save_qwen3_moe(model, tmp_path / "new")
