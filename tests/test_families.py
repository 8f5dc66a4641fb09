"""Mixture-of-experts blocks of every family against transformers, see bench/make_parity_fixture.py; and what a family
states: orientation, order of rows, which layers, which tensors belong."""

import json
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jax_warp_decode import ArgumentError, CheckpointError
from jax_warp_decode.activations import get_activation
from jax_warp_decode.checkpoints import MoEFolder, load_model, load_moe_blocks, reader
from jax_warp_decode.formats import FORMATS, dequantize
from jax_warp_decode.presets import PRESETS, SAME_LAYER, get_preset
from jax_warp_decode.routers import ROUTERS, Router

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
BLOCKS = {  # fixture -> format of the experts, format of the shared expert
    "qwen3_next_tiny": ("f32", "f32"), "qwen3_5_moe_tiny": ("f32", "f32"),
    "deepseek_v3_tiny": ("fp8_block128", "fp8_block128"), "minimax_m3_tiny": ("mxfp8", "mxfp8")}


def read_all(folder):
    tensors = {}
    for name, stored in reader.open_folder(folder).tensors.items():
        tensors[name] = np.empty(stored.shape, reader.DTYPES[stored.dtype])
        stored.read_into(tensors[name])
    return tensors


def edited(folder, tmp_path, change=lambda tensors: None, **config):
    """A copy of a fixture with other tensors or another config.json."""
    copy = shutil.copytree(folder, tmp_path / "edited", dirs_exist_ok=True)
    tensors = read_all(copy)
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    content = json.loads((copy / "config.json").read_text()) | config
    (copy / "config.json").write_text(json.dumps(content))
    return copy


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


# Weights and x are the same numbers on both sides, everything is float32: sums of up to 200 terms, twice, and a few
# more operations stay within 200 u.
FLOAT32_ERROR = 200 * 2.0**-24


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_transformers(name):
    expected = np.load(FIXTURES / name / "blocks.npz")
    blocks = load_moe_blocks(FIXTURES / name, dtype=jnp.float32)
    assert {f"y{n}" for n in blocks} == set(expected.files) - {"x"}
    x = jnp.asarray(expected["x"])
    for n, block in blocks.items():
        assert (block.experts.format, block.shared.format) == BLOCKS[name]
        y = jax.jit(lambda block, x: block(x, strategy="reference"))(block, x)
        assert relative(y, expected[f"y{n}"]) < FLOAT32_ERROR
    if name in ("qwen3_next_tiny", "deepseek_v3_tiny"):  # a shared expert of twice the size, and one alike
        in_one_call = nnx.jit(lambda layer, x: layer(x))(block.layer(strategy="reference"), x)
        np.testing.assert_allclose(in_one_call, y, rtol=0, atol=1e-5 * np.abs(y).max())
    elif name == "minimax_m3_tiny":
        with pytest.raises(ArgumentError, match="shared: got I = 64, expected a multiple"):
            block.layer()


def test_what_a_family_says_about_routing():
    spec = {name: MoEFolder(FIXTURES / name).spec for name in (*BLOCKS, "mixtral_tiny", "gpt_oss_tiny")}
    assert spec["deepseek_v3_tiny"].router == Router(3, "sigmoid", True, 4, 2, "top2", 2.5)
    assert spec["minimax_m3_tiny"].router == Router(2, "sigmoid", scale=2.0)
    assert spec["minimax_m3_tiny"].activation == spec["gpt_oss_tiny"].activation == get_activation("clamped_swiglu")
    assert spec["mixtral_tiny"].router == ROUTERS["mixtral"]
    assert spec["deepseek_v3_tiny"].layers == spec["minimax_m3_tiny"].layers == (1,)
    assert spec["mixtral_tiny"].layers == (0, 1)


def test_random_access_reads_only_that_layer(monkeypatch):
    folder = MoEFolder(FIXTURES / "mixtral_tiny")
    read, original = [], reader.StoredTensor.read_into

    def read_into(self, out):
        read.append(self.offset)
        original(self, out)

    monkeypatch.setattr(reader.StoredTensor, "read_into", read_into)
    calls = []
    [(n, block)] = folder.load([1], progress=lambda done, total: calls.append((done, total)))
    assert n == 1 and block.experts.num_experts == 4
    wanted = [t for name, t in folder.opened.tensors.items() if name.startswith("model.layers.1.block_sparse_moe.")]
    assert sorted(read) == sorted(t.offset for t in wanted)
    assert calls[0] == (0, sum(t.nbytes for t in wanted)) and calls[-1] == (calls[0][1],) * 2
    with pytest.raises(ArgumentError, match=r"layers: got \[2\], expected layers with experts, 0 to 1"):
        list(folder.load([2]))


def test_both_storage_forms_of_gpt_oss_give_the_same_block(tmp_path):
    """The bfloat16 form is [E, in, out], gate and up columns alternating; values of MXFP4 are exact in bfloat16."""
    packed = load_moe_blocks(FIXTURES / "gpt_oss_mxfp4_tiny", [0])[0]
    assert packed.experts.format == "mxfp4"

    def widen(tensors):
        for name in [name for name in tensors if name.endswith("_blocks")]:
            blocks, scales = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
            values = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
            grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
            wide = grid[values] * np.exp2(scales.astype(np.float32) - 127)[..., None]
            wide = wide.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
            tensors[name.removesuffix("_blocks")] = np.ascontiguousarray(wide).astype(ml_dtypes.bfloat16)

    plain = load_moe_blocks(edited(FIXTURES / "gpt_oss_mxfp4_tiny", tmp_path, widen, quantization_config=None), [0])[0]
    assert plain.experts.format == "bf16"
    for name in ("w_gate", "w_up", "w_down"):
        np.testing.assert_array_equal(
            dequantize(getattr(packed.experts, name)), np.asarray(getattr(plain.experts, name), np.float32))
    for name in ("b_gate", "b_up", "b_down"):
        np.testing.assert_array_equal(getattr(packed.experts, name), getattr(plain.experts, name))


@pytest.mark.parametrize("name", ["gpt_oss_tiny", "gpt_oss_mxfp4_tiny"])
def test_rows_of_gpt_oss_alternate(name):
    """Fused rows g0, u0, g1, u1, ... for weights, scales and biases alike."""
    tensors = read_all(FIXTURES / name)
    experts = load_moe_blocks(FIXTURES / name, [1])[1].experts
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    for part, start in (("gate", 0), ("up", 1)):
        w, b = getattr(experts, f"w_{part}"), getattr(experts, f"b_{part}")
        np.testing.assert_array_equal(b, tensors[f"{fused}_bias"][:, start::2])
        if experts.format == "bf16":
            np.testing.assert_array_equal(w, tensors[fused].swapaxes(1, 2)[:, start::2])
        else:
            np.testing.assert_array_equal(w.values, tensors[f"{fused}_blocks"][:, start::2].reshape(4, 96, 32))
            np.testing.assert_array_equal(w.scales, tensors[f"{fused}_scales"][:, start::2])


def test_square_matrices_keep_their_orientation(tmp_path):
    """With H = I every orientation has fitting sizes; the family decides."""
    rng = np.random.default_rng(0)
    E, N = 2, 32

    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    block = "model.layers.0.mlp"
    gpt = {f"{block}.router.weight": random(E, N), f"{block}.router.bias": random(E),
           f"{block}.experts.gate_up_proj": random(E, N, 2 * N), f"{block}.experts.gate_up_proj_bias": random(E, 2 * N),
           f"{block}.experts.down_proj": random(E, N, N), f"{block}.experts.down_proj_bias": random(E, N)}
    qwen = {f"{block}.gate.weight": random(E, N), **{
        f"{block}.experts.{e}.{p}_proj.weight": random(N, N) for e in range(E) for p in ("gate", "up", "down")}}
    common = dict(hidden_size=N, num_hidden_layers=1, num_experts_per_tok=1)
    for name, tensors, config in (
            ("gpt", gpt, dict(architectures=["GptOssForCausalLM"], intermediate_size=N, num_local_experts=E)),
            ("qwen", qwen, dict(model_type="qwen3_moe", moe_intermediate_size=N, num_experts=E))):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(common | config))
    [experts] = [load_moe_blocks(tmp_path / "gpt")[0].experts]
    np.testing.assert_array_equal(experts.w_up[1], gpt[f"{block}.experts.gate_up_proj"][1][:, 1::2].T)
    np.testing.assert_array_equal(experts.w_down[1], gpt[f"{block}.experts.down_proj"][1].T)
    [experts] = [load_moe_blocks(tmp_path / "qwen")[0].experts]
    np.testing.assert_array_equal(experts.w_up[1], qwen[f"{block}.experts.1.up_proj.weight"])
    np.testing.assert_array_equal(experts.w_down[1], qwen[f"{block}.experts.1.down_proj.weight"])


def test_layers_are_streamed(tmp_path):
    """Host memory: one layer and one matrix, whatever the size of the folder."""
    rng, sizes, layers = np.random.default_rng(0), (4, 128, 256), 8
    E, I, H = sizes
    tensors, shards = {}, {}
    for n in range(layers):
        block = f"model.layers.{n}.block_sparse_moe"
        tensors = {f"{block}.gate.weight": rng.standard_normal((E, H), np.float32)}
        for e in range(E):
            for w, shape in (("w1", (I, H)), ("w2", (H, I)), ("w3", (I, H))):
                tensors[f"{block}.experts.{e}.{w}.weight"] = rng.standard_normal(shape, np.float32)
        save_file(tensors, tmp_path / f"{n}.safetensors")
        shards |= dict.fromkeys(tensors, f"{n}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="mixtral", hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=2,
        num_hidden_layers=layers)))
    folder = MoEFolder(tmp_path)
    tracemalloc.start()
    for n, block in folder.load(range(layers - 1, -1, -1)):
        assert block.experts.w_up.shape == sizes
        del block
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == 0 and peak < 2 * sum(a.nbytes for a in tensors.values())


def test_language_model_inside_a_multimodal_one(tmp_path):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)
        tensors["mtp.layers.0.mlp.gate.weight"] = np.ones(3, np.float32)

    text = json.loads((FIXTURES / "qwen3_5_moe_tiny" / "config.json").read_text())
    folder = edited(FIXTURES / "qwen3_5_moe_tiny", tmp_path, rename)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    inner, alone = load_moe_blocks(folder)[1], load_moe_blocks(FIXTURES / "qwen3_5_moe_tiny")[1]
    jax.tree.map(np.testing.assert_array_equal, inner, alone)


def test_layers_beyond_the_decoder_are_left_alone(tmp_path):
    """DeepSeek's layer for multi-token prediction is numbered after the last one, if config.json has it."""
    extra = put("model.layers.2.mlp.experts.0.up_proj.weight", lambda old: np.ones(3, np.float32))
    folder = edited(FIXTURES / "deepseek_v3_tiny", tmp_path, extra, num_nextn_predict_layers=1)
    assert MoEFolder(folder).layers == (1,)
    with pytest.raises(CheckpointError, match="1 tensor unexpected: model.layers.2.mlp.experts.0.up_proj.weight"):
        MoEFolder(edited(FIXTURES / "deepseek_v3_tiny", tmp_path, extra, num_nextn_predict_layers=0))


def test_presets_name_what_exists():
    for preset in PRESETS.values():
        preset.routing.check(preset.num_experts)
        assert preset.routing.k == preset.experts_per_token
        assert preset.act.name == preset.activation and preset.format in ("bf16", *FORMATS)
    assert get_preset("deepseek-r1") is PRESETS["deepseek-v3"] and not SAME_LAYER.keys() & PRESETS.keys()
    assert all(get_preset(name).name == target for name, target in SAME_LAYER.items())


@pytest.mark.parametrize("name, change, attribute, want", [
    ("minimax_m3_tiny", dict(routed_scaling_factor=None), "router", Router(2, "sigmoid", scale=2.0)),
    ("gpt_oss_tiny", dict(num_experts_per_tok=None, experts_per_token=3), "router", Router(3, "topk_softmax")),
    ("mixtral_tiny", dict(hidden_act="gelu"), "activation", get_activation("gelu_erf")),
    ("mixtral_tiny", dict(hidden_act="gelu_pytorch_tanh"), "activation", get_activation("gelu_tanh")),
])
def test_names_and_defaults_of_transformers(tmp_path, name, change, attribute, want):
    text = dict(text_config=json.loads((FIXTURES / name / "config.json").read_text()).get("text_config"))
    change = dict(text_config=text["text_config"] | change) if text["text_config"] else change
    assert getattr(MoEFolder(edited(FIXTURES / name, tmp_path, **change)).spec, attribute) == want


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors.get(name))})


DEEPSEEK, GPT = "model.layers.1.mlp", "model.layers.0.mlp.experts"
FAULTS = [
    ("deepseek_v3_tiny", drop(f"{DEEPSEEK}.experts.5.up_proj.weight_scale_inv"), {},
     f"1 tensor missing: {DEEPSEEK}.experts.5.up_proj.weight_scale_inv$"),
    ("deepseek_v3_tiny", put(f"{DEEPSEEK}.experts.5.up_proj.weight_scale_inv", lambda s: s.T.copy()), {},
     rf"{DEEPSEEK}.experts.5.up_proj.weight_scale_inv: got F32\[2, 1\], expected F32/BF16\[1, 2\]"),
    ("deepseek_v3_tiny", put(f"{DEEPSEEK}.experts.5.up_proj.weight_scale_inv", lambda s: np.ones((32, 8), np.uint8)),
     {}, r"got U8\[32, 8\], expected F32/BF16\[1, 2\]"),
    ("deepseek_v3_tiny", put(f"{DEEPSEEK}.experts.8.up_proj.weight", lambda s: np.zeros(3, np.float32)), {},
     f"1 tensor unexpected: {DEEPSEEK}.experts.8.up_proj.weight"),
    ("deepseek_v3_tiny", put("model.layers.0.mlp.experts.0.up_proj.weight", lambda s: np.zeros(3, np.float32)), {},
     "1 tensor unexpected: model.layers.0.mlp.experts.0.up_proj.weight"),
    ("deepseek_v3_tiny", put(f"{DEEPSEEK}.gate.e_score_correction_bias", lambda s: s.astype(np.int32)), {},
     r"e_score_correction_bias: got I32\[8\], expected BF16/F16/F32\[8\]"),
    ("deepseek_v3_tiny", None, dict(n_group=3), "n_group: got 3, expected a divisor of E = 8"),
    ("deepseek_v3_tiny", None, dict(n_group=None), "n_group: missing, expected in the configuration of a DeepseekV3"),
    ("deepseek_v3_tiny", None, dict(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}),
     r"quant_method 'fp8' with block \(64, 64\), expected fp8 with block \(128, 128\)"),
    ("deepseek_v3_tiny", None, dict(quantization_config={"quant_method": "mxfp4"}),
     "quantization_config: got mxfp4, expected .* for DeepSeek-V3"),
    ("deepseek_v3_tiny", None, dict(quantization_config={
        "quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["a*"] * 101}), "got 101 patterns"),
    ("gpt_oss_mxfp4_tiny", put(f"{GPT}.down_proj_blocks", lambda b: np.ascontiguousarray(b[..., :8])), {},
     r"down_proj_blocks: got U8\[4, 64, 3, 8\], expected U8\[4, 64, 3, 16\]"),
    ("gpt_oss_mxfp4_tiny", put(f"{GPT}.down_proj_scales", lambda s: np.ascontiguousarray(s.swapaxes(1, 2))), {},
     r"down_proj_scales: got U8\[4, 3, 64\], expected U8/F8_E8M0\[4, 64, 3\]"),
    ("gpt_oss_mxfp4_tiny", drop(f"{GPT}.gate_up_proj_blocks"), {}, f"1 tensor missing: {GPT}.gate_up_proj_blocks"),
    ("gpt_oss_mxfp4_tiny", None, dict(quantization_config=None), f"missing: {GPT}.gate_up_proj, {GPT}.down_proj"),
    ("gpt_oss_tiny", put(f"{GPT}.gate_up_proj", lambda w: np.ascontiguousarray(w.swapaxes(1, 2))), {},
     rf"{GPT}.gate_up_proj: got BF16\[4, 192, 64\], expected BF16/F16/F32\[4, 64, 192\]"),
    ("gpt_oss_tiny", None, dict(num_hidden_layers=1), "unexpected: model.layers.1.mlp.experts.down_proj"),
    ("mixtral_tiny", None, dict(architectures=["LlamaForCausalLM"]), "architectures: got .'LlamaForCausalLM'., exp"),
    ("mixtral_tiny", None, dict(num_local_experts=3), "6 tensors unexpected: .*experts.3.w1.weight.*wrong shape"),
    ("mixtral_tiny", None, dict(num_hidden_layers=3),
     r"missing: model.layers.2.block_sparse_moe.gate.weight, .*moe.experts.{0-3}.w1.weight, .*{0-3}.w3.*{0-3}.w2"),
    ("mixtral_tiny", None, dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, moe_intermediate_size=96),
     r"26 tensors missing: .* 24 tensors unexpected: model.layers.{0, 1}.block_sparse_moe.experts.{0-3}.w1.weight, "),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case[3][:40])
def test_a_folder_that_does_not_fit_says_where(tmp_path, case):
    name, change, config, message = case
    folder = edited(FIXTURES / name, tmp_path, change or (lambda tensors: None), **config)
    with pytest.raises(CheckpointError, match=message):
        load_moe_blocks(folder)


def test_scales_of_eight_bits_may_have_their_own_type(tmp_path):
    """E8M0 scales come as bytes or as that type, float block scales in float32 or bfloat16."""
    def retype(suffix, dtype):
        def change(tensors):
            for name in [name for name in tensors if name.endswith(suffix)]:
                old = tensors[name]
                tensors[name] = old.view(dtype) if old.dtype == np.uint8 else old.astype(dtype)
        return change

    for name, dtype in (("minimax_m3_tiny", ml_dtypes.float8_e8m0fnu), ("deepseek_v3_tiny", ml_dtypes.bfloat16)):
        want = load_moe_blocks(FIXTURES / name)[1].experts.w_up
        got = load_moe_blocks(edited(FIXTURES / name, tmp_path, retype("_scale_inv", dtype)))[1].experts.w_up
        assert got.scales.dtype == (want.scales.dtype if name == "minimax_m3_tiny" else jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(got.scales), np.asarray(want.scales.astype(got.scales.dtype)))


def test_modules_that_stay_plain(tmp_path):
    """A quantised folder may leave its shared expert in bfloat16, and says so."""
    quantised = json.loads((FIXTURES / "deepseek_v3_tiny" / "config.json").read_text())["quantization_config"]

    def widen(tensors):
        for p in ("gate", "up", "down"):
            name = f"{DEEPSEEK}.shared_experts.{p}_proj.weight"
            tensors.pop(f"{name}_scale_inv")
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    def widen_one(tensors):
        tensors.pop(f"{DEEPSEEK}.shared_experts.up_proj.weight_scale_inv")
        tensors[f"{DEEPSEEK}.shared_experts.up_proj.weight"] = np.ones((32, 256), np.float32)

    for field, entry in (("modules_to_not_convert", f"{DEEPSEEK}.shared_experts"), ("ignore", "shared_experts"),
                         ("ignored_layers", "model.layers.*.mlp.shared_experts")):
        folder = edited(FIXTURES / "deepseek_v3_tiny", tmp_path, widen, quantization_config=quantised | {
            field: [entry]})
        block = load_moe_blocks(folder)[1]
        assert (block.experts.format, block.shared.format) == ("fp8_block128", "bf16")
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"mixed types in 1 layer: 1.shared \(fp8_block128 and plain\)"):
        load_moe_blocks(edited(FIXTURES / "deepseek_v3_tiny", tmp_path, widen_one, quantization_config=quantised | {
            "modules_to_not_convert": [f"{DEEPSEEK}.shared_experts.up_proj"]}))
    shutil.rmtree(tmp_path / "edited")
    with pytest.raises(CheckpointError, match="missing: .*shared_experts.gate_proj.weight_scale_inv.*; modules that "
                       "stay plain beside quantised ones must be named in modules_to_not_convert"):
        load_moe_blocks(edited(FIXTURES / "deepseek_v3_tiny", tmp_path, widen))


@pytest.mark.parametrize("name, architecture, way_out", [
    ("deepseek_v3_tiny", "DeepseekV3ForCausalLM", "; `load_moe_blocks` takes its experts$"),
    ("mixtral_tiny", "LlamaForCausalLM", "'GptOssForCausalLM'.$"),
])
def test_what_no_decoder_takes(tmp_path, name, architecture, way_out):
    folder = shutil.copytree(FIXTURES / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=way_out):
        load_model(folder)
