"""Folders from an enemy: 500 and more mutations of sound ones. Each is refused in one short message, or loads whole."""

import fnmatch
import functools
import gc
import json
import os
import pathlib
import re
import resource
import shutil

import numpy as np
import pytest
from limits import in_time
from safetensors.numpy import save_file

from jax_warp_decode import ArgumentError, CheckpointError, UnsupportedError
from jax_warp_decode.checkpoints import load_moe_blocks, load_qwen3_moe, reader, sources
from jax_warp_decode.checkpoints.convert import convert
from jax_warp_decode.checkpoints.family import Encoding
from jax_warp_decode.checkpoints.quantization import is_skipped
from jax_warp_decode.models import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from jax_warp_decode.models.rope import frequencies
from jax_warp_decode.text import codec_for, end_tokens

FIXTURES = pathlib.Path(__file__).parent / "fixtures"

H, I, E, L = 32, 64, 2, 2
MUTATIONS = 25  # of each kind
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


def sound_tensors():
    rng = np.random.default_rng(0)
    tensors = {"model.norm.weight": np.ones(H, np.float32)}
    for n in range(L):
        block = f"model.layers.{n}.mlp"
        tensors[f"{block}.gate.weight"] = rng.standard_normal((E, H)).astype(np.float32)
        for e in range(E):
            for p, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
                tensors[f"{block}.experts.{e}.{p}_proj.weight"] = rng.standard_normal(shape).astype(np.float16)
    return tensors


def write_sound(folder, sharded):
    folder.mkdir()
    tensors = sound_tensors()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:8], "b.safetensors": names[8:]} if sharded else {SINGLE: names}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
    if sharded:
        index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
        (folder / INDEX).write_text(json.dumps(index))
    (folder / CONFIG).write_text(json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": H, "moe_intermediate_size": I, "num_experts": E,
        "num_experts_per_tok": 1, "num_hidden_layers": L, "norm_topk_prob": True, "hidden_act": "silu"}))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    for name in ("single", "sharded"):
        write_sound(root / name, name == "sharded")
        assert set(load_moe_blocks(root / name)) == set(range(L))
    return root


@pytest.fixture(autouse=True)
def only_own_garbage():
    """Collections walk all that this process holds; what other tests left there is none of the loader's time."""
    gc.freeze()
    yield
    gc.unfreeze()


# ---------------------------------------------------------------------------------------------------------- mutations


def header_of(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8:8 + size]), data[8 + size:]


def with_header(folder, change):
    """Rewrites the header as text: `change` gets the parsed object and returns it, or text."""
    data = (folder / SINGLE).read_bytes()
    header, rest = header_of(data)
    new = change(header)
    text = new if isinstance(new, bytes) else json.dumps(header if new is None else new).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + rest)


HOSTILE = (-1, 0, 2**31, 2**63, 10**30, 1e308, -0.5, True, None, "", "x" * 10_000, "\ud800\n\x1b[2J", [], [[]], {},
           {"a": []}, float("nan"), float("inf"), [10**18] * 50, ["BF16"])


def pick(rng, items):
    items = list(items)
    return items[rng.integers(len(items))]


def entry_of(rng, header):
    return header[pick(rng, [name for name in header if ".mlp." in name])]


def truncate(rng, folder):
    file = folder / pick(rng, (SINGLE, CONFIG))
    data = file.read_bytes()
    file.write_bytes(data[:rng.integers(len(data) - 1)])


def grow(rng, folder):
    file = folder / SINGLE
    file.write_bytes(file.read_bytes() + rng.bytes(rng.integers(1, 100)))


def header_length(rng, folder):
    file = folder / SINGLE
    size = pick(rng, (0, 1, 7, 2**16, 2**24, 2**26, 2**32, 2**63, 2**64 - 1, int(rng.integers(2**62))))
    file.write_bytes(size.to_bytes(8, "little") + file.read_bytes()[8:])


def header_bytes(rng, folder):
    """Random bytes in the header: most break it, some do not matter."""
    data = bytearray((folder / SINGLE).read_bytes())
    size = int.from_bytes(data[:8], "little")
    for _ in range(rng.integers(1, 4)):
        data[8 + rng.integers(size)] = rng.integers(256)
    (folder / SINGLE).write_bytes(bytes(data))


def shape(rng, folder):
    def change(header):
        entry = entry_of(rng, header)
        entry["shape"] = pick(rng, (pick(rng, HOSTILE), [pick(rng, HOSTILE)], [-s for s in entry["shape"]],
                                    entry["shape"][::-1] + [1], [s + 1 for s in entry["shape"]], [2**62, 2**62]))
    with_header(folder, change)


def dtype(rng, folder):
    with_header(folder, lambda header: entry_of(rng, header).update(
        dtype=pick(rng, (pick(rng, HOSTILE), "I16", "U16", "BF17", "F8_E4M3", "bf16", "F4", "pickle"))))


def offsets(rng, folder):
    """Overlapping, reversed, beyond the file, or no offsets at all."""
    def change(header):
        entry = entry_of(rng, header)
        start, end = entry["data_offsets"]
        entry["data_offsets"] = pick(rng, (
            pick(rng, HOSTILE), [end, start], [start + 2, end], [start, end + 2], [start - 2, end - 2], [0, end],
            [start, 2**62], [start], [start, end, end], [pick(rng, HOSTILE), end]))
        if entry["data_offsets"] == [start, end]:
            entry["data_offsets"] = [2, end]
    with_header(folder, change)


def duplicate(rng, folder):
    def change(header):
        name = pick(rng, [name for name in header if name != "__metadata__"])
        text = json.dumps(header).encode()
        return b"{" + json.dumps(name).encode() + b":" + json.dumps(header[name]).encode() + b"," + text[1:]
    with_header(folder, change)


def names(rng, folder):
    """A tensor of a block is gone, renamed, or there is one more."""
    def change(header):
        name = pick(rng, [name for name in header if ".mlp." in name])
        new = pick(rng, ("", "x", "\n\x1b[31m" * 5, "../" * 20, f"{name}x", name.replace("l", "\u202el"), "y" * 5000))
        return {(new if key == name else key): entry for key, entry in header.items()}
    with_header(folder, change)


def nesting(rng, folder):
    depth = int(rng.integers(1_000, 100_000))
    text = pick(rng, (b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth,
                      b'{"a":' * depth + b"1" + b"}" * depth))
    if rng.integers(2):
        (folder / CONFIG).write_bytes(text)
    else:
        with_header(folder, lambda header: text)


def sizes(rng, folder):
    """A size in config.json that the tensors do not have, or that is none."""
    field = pick(rng, (
        "hidden_size", "moe_intermediate_size", "num_experts", "num_hidden_layers", "num_experts_per_tok"))
    config = json.loads((folder / CONFIG).read_text())
    value = pick(rng, [v for v in HOSTILE if v is not None] + [2**30, 10**9, 4096, "32"])
    (folder / CONFIG).write_text(json.dumps(config | {field: value}))


def settings(rng, folder):
    """Any field of config.json with any value: many do not matter."""
    config = json.loads((folder / CONFIG).read_text())
    field = pick(rng, (*config, "quantization_config", "mlp_only_layers", "decoder_sparse_step", "model_type"))
    (folder / CONFIG).write_text(json.dumps(config | {field: pick(rng, HOSTILE)}))


def quantization(rng, folder):
    config = json.loads((folder / CONFIG).read_text())
    options = {"quant_method": pick(rng, ("fp8", "mxfp8", "mxfp4", "gptq", pick(rng, HOSTILE))),
               pick(rng, ("weight_block_size", "block_size", "modules_to_not_convert")): pick(rng, HOSTILE)}
    (folder / CONFIG).write_text(json.dumps(config | {"quantization_config": options}))


def layers(rng, folder):
    """Layers that are there and not in config.json, or the other way round."""
    config = json.loads((folder / CONFIG).read_text())
    change = pick(rng, ({"num_hidden_layers": int(rng.integers(3, 4096))}, {"num_hidden_layers": 1}, {
        "mlp_only_layers": [int(rng.integers(L))]}, {"decoder_sparse_step": int(rng.integers(2, 100))}))
    (folder / CONFIG).write_text(json.dumps(config | change))


def traversal(rng, folder):
    index = json.loads((folder / INDEX).read_text())
    name = pick(rng, list(index["weight_map"]))
    index["weight_map"][name] = pick(rng, (
        "../single/model.safetensors", "/etc/passwd", "/proc/self/mem", "a.safetensors/", "./a.safetensors", "..", ".",
        "..\\a.safetensors", "a\0.safetensors", "", "config.json", "x" * 300 + ".safetensors", "c.safetensors",
        "file:///etc/x.safetensors", "~/x.safetensors", "\ud800.safetensors", 5, None, ["a.safetensors"], {}))
    (folder / INDEX).write_text(json.dumps(index))


def index(rng, folder):
    content = json.loads((folder / INDEX).read_text())
    weights = content["weight_map"]
    kind = rng.integers(6)
    if kind == 0:
        weights.pop(pick(rng, list(weights)))
    elif kind == 1:
        weights[pick(rng, ("ghost", "model.layers.9.mlp.gate.weight"))] = "a.safetensors"
    elif kind == 2:
        name = pick(rng, list(weights))
        weights[name] = "b.safetensors" if weights[name] == "a.safetensors" else "a.safetensors"
    elif kind == 3:
        content["weight_map"] = pick(rng, HOSTILE)
    elif kind == 4:
        content = {"metadata": content}
    text = json.dumps(content)
    if kind == 5:
        text = text[:rng.integers(len(text) - 1)]
    (folder / INDEX).write_text(text)


def links(rng, folder):
    file = folder / pick(rng, (CONFIG, INDEX, "a.safetensors"))
    file.unlink()
    kind = rng.integers(7)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    else:
        file.symlink_to(("/dev/zero", file.name, "nowhere", "/proc/self/mem", folder.parent)[kind - 2])


def shards(rng, folder):
    """A tensor in two shards, or a shard from another model."""
    if rng.integers(2):
        shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    else:
        save_file({"model.norm.weight": np.ones(int(rng.integers(1, 9)), np.float32)}, folder / "b.safetensors")


MUST_FAIL = {"single": (truncate, grow, header_length, shape, dtype, offsets, duplicate, names, nesting, sizes, layers),
             "sharded": (traversal, index, links, shards)}
MAY_LOAD = {"single": (header_bytes, settings, quantization)}
KINDS = [(kind, mutate, True) for kind, group in MUST_FAIL.items() for mutate in group]
KINDS += [(kind, mutate, False) for kind, group in MAY_LOAD.items() for mutate in group]
assert len(KINDS) * MUTATIONS >= 450


@pytest.mark.parametrize("kind, mutate, must_fail", KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_mutated_folders(sound, tmp_path, kind, mutate, must_fail):
    for seed in range(MUTATIONS * (1 if must_fail else 3)):
        folder = shutil.copytree(sound / kind, tmp_path / str(seed))
        mutate(np.random.default_rng(seed), folder)
        try:
            blocks = in_time(load_moe_blocks, folder)
        except CheckpointError as error:
            message = str(error)
            assert message.isprintable() and len(message) < 3000, (seed, message)
            assert str(folder) in message
        else:
            assert not must_fail, (seed, "loaded")
            assert set(blocks) == set(range(L)), seed
            for block in blocks.values():
                assert block.experts.w_down.shape == (E, H, I) and block.router.shape == (E, H)
        shutil.rmtree(folder)


@pytest.mark.parametrize("config", [GptOssConfig, MixtralConfig, Qwen3MoeConfig])
def test_any_value_in_the_config_of_a_decoder(config):
    """Every field with every hostile value, also inside the rotary options: a config, or an error about a field."""
    sound = dict(
        architectures=[config.ARCHITECTURE], model_type=config.MODEL_TYPE, vocab_size=8, hidden_size=32, head_dim=32,
        moe_intermediate_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=1, swiglu_limit=7.0,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64,
        rms_norm_eps=1e-5, rope_theta=1e4, sliding_window=4, layer_types=["full_attention"] * 2,
        attention_bias=True, hidden_act="silu", norm_topk_prob=True, rope_parameters=None, use_sliding_window=False,
        tie_word_embeddings=False)
    yarn = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=1.0,
                truncate=False, attention_factor=1.0)
    made = 0
    for value in HOSTILE:
        cases = [sound | {name: value} for name in sound]
        cases += [sound | {"rope_scaling": yarn | {name: value}} for name in yarn]
        for case in cases:
            try:
                read = config.from_hf(case)
            except (ArgumentError, UnsupportedError) as error:
                assert str(error).isprintable() and len(str(error)) < 1000
            else:
                made += 1
                angles, factor = frequencies(read.rope_theta, read.head_dim, read.yarn)
                assert len(angles) == read.head_dim // 2 and np.isfinite(factor)
                assert len([read.window(n) for n in range(read.num_hidden_layers)]) == 2
    assert made > 20


def test_nothing_of_a_folder_is_executed(sound, tmp_path):
    """Pickled weights and Python files beside a sound model are never opened."""
    folder = shutil.copytree(sound / "single", tmp_path / "code")
    (folder / "modeling_evil.py").write_text("raise SystemExit('executed')")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}))
    assert len(load_moe_blocks(folder)) == L
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds neither model.safetensors nor"):
        load_moe_blocks(folder)


@pytest.mark.parametrize("file, make, message", [
    (CONFIG, lambda: b'{"a": [' + b"0," * 2**20 + b"0]}", "config.json: got more than 1048576 bytes"),
    (CONFIG, lambda: b"{" + b" " * 2**20 + b"}", "config.json: got more than 1048576 bytes"),
    (INDEX, lambda: b'{"weight_map": {' + b",".join(b'"%d":"a"' % n for n in range(9 * 2**14 + 2)) + b"}}",
     "index.json: got over 147456 entries"),
    (INDEX, lambda: b'{"weight_map": ' + b"[" * 2**20 + b"]" * 2**20 + b"}", "index.json: got over 100 objects"),
    (INDEX, lambda: b" " * (2**25 + 1), "index.json: got more than 33554432 bytes"),
    (INDEX, lambda: b'{"weight_map": {"' + b"x" * 2**24 + b'": "a.safetensors"}}', "not hold what the index says: xx"),
    ("a.safetensors", lambda: (2**25).to_bytes(8, "little") + b'{"' + b"x" * 2**25, "a header of 33554432 bytes, exp"),
    ("a.safetensors", lambda: (2**22).to_bytes(8, "little") + b"[" * 2**22, "not a valid safetensors file"),
])
def test_huge_json_costs_little(sound, tmp_path, file, make, message):
    """Billions of entries would be as many bytes: what is too large is refused before it is parsed."""
    folder = shutil.copytree(sound / "sharded", tmp_path / "huge")
    (folder / file).write_bytes(make())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message) as caught:
        in_time(load_moe_blocks, folder)
    assert len(str(caught.value)) < 3000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB


def full_header(first=0, last=b""):
    """A header of as many empty tensors as a file may have, and what comes after them."""
    count = reader.MAX_TENSORS - 1
    entry = b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(entry % (first + n) for n in range(count)) + last + b"}"
    assert len(text) <= reader.MAX_HEADER_BYTES
    return len(text).to_bytes(8, "little") + text


ROOM = 2 * reader.MAX_TENSORS - 10  # values that full_header leaves


@pytest.mark.parametrize("last, message", [
    (b"", "14 tensors missing"), (b',"7":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', "repeated keys: 7$"),
    (b',"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"shape":[0]}', "not a valid safetensors file"),
    (b',"__metadata__":{":\\"":":","":"}:{"}', "14 tensors missing"),
    (b',"__metadata__":{"a":"{","a":"b"}', "repeated keys: a$"),
    (b',"x":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}' % b",".join([b"0"] * ROOM), "14 tensors missing"),
    (b',"__metadata__":{%s}' % b",".join(b'"%x":""' % n for n in range(ROOM)), "14 tensors missing"),
    (b',"__metadata__":{%s}' % b",".join(b'"%x":""' % n for n in range(2 * ROOM)), "or more values, exp"),
    (b',"x":{}' * 3, "or more objects, expected at most 98304 tensors"),
], ids=["sound", "repeated", "inside", "strings", "metadata", "dimensions", "much metadata", "values", "objects"])
def test_a_header_full_of_tensors_costs_little(sound, tmp_path, last, message):
    folder = shutil.copytree(sound / "single", tmp_path / "many")
    (folder / SINGLE).write_bytes(full_header(last=last))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message):
        in_time(load_moe_blocks, folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB


@pytest.mark.parametrize("parts", [("weight",), ("weight", "weight_scale_inv"),
                                   ("weight", "weight_scale", "weight_scale_2", "input_scale")])
def test_a_real_model_in_one_file(tmp_path, parts):
    """48 layers of 128 experts, merged to one file, whose header has up to 9 MB."""
    names = [f"model.layers.{n}.mlp.experts.{e}.{p}_proj.{part}" for n in range(48) for e in range(128)
             for p in ("gate", "up", "down") for part in parts]
    header = {name: dict(dtype="BF16", shape=[1, 0], data_offsets=[0, 0]) for name in names}
    text = json.dumps(header).encode()
    file = tmp_path / SINGLE
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    assert set(in_time(reader.read_header, file)) == set(names)


def test_shards_that_the_index_does_not_list_cost_one_header(sound, tmp_path, monkeypatch):
    """Each shard is compared with the index when it is read; and all headers together have a limit, too."""
    folder = shutil.copytree(sound / "sharded", tmp_path / "many")
    content = json.loads((folder / INDEX).read_text())
    for n in range(3):
        (folder / f"{n}.safetensors").write_bytes(full_header(first=n << 17))
        content["weight_map"][f"{n << 17:x}"] = f"{n}.safetensors"
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="in a shard but not in the index: 1, 10, 100, "):
        in_time(load_moe_blocks, folder)
    monkeypatch.setattr(reader, "_Room", functools.partial(reader._Room, nbytes=1000))
    with pytest.raises(CheckpointError, match="a header of .* at most 16777216, and 67108864 in all shards together"):
        load_moe_blocks(folder)


# -------------------------------------------------------------------------------------------------- patterns of modules


def with_patterns(folder, patterns):
    config = json.loads((folder / CONFIG).read_text())
    options = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "modules_to_not_convert": patterns}
    (folder / CONFIG).write_text(json.dumps(config | {"quantization_config": options}))


@pytest.mark.parametrize("patterns, message", [
    (["*" + "[" * 9000 + str(n) for n in range(100)], "got 100 patterns of .* with 100 '.', expected at most 16"),
    (["?*" * 3000], "got 1 patterns of modules .* with 3000 '.', expected at most 16"),
    (["*a" * 400_000], "got 1 patterns of modules .* with 400000 '.', expected at most 16"),
    (["*" + "x" * 1_000_000], "pattern '.x.*x' of 1000001 characters .* expected at most 256 and no wildcard but '.'"),
    (["model.layers.[0-9]*"], "pattern 'model.layers.*' of 19 characters for modules .* no wildcard but"),
    (["*.layers.?"], "pattern '.*layers.*' of 10 characters for modules .* no wildcard but"),
], ids=["brackets", "question marks", "stars", "long", "bracket", "question mark"])
def test_patterns_that_would_take_long_are_refused(sound, tmp_path, patterns, message):
    folder = shutil.copytree(sound / "single", tmp_path / "patterns")
    with_patterns(folder, patterns)
    with pytest.raises(CheckpointError, match=message) as caught:
        in_time(load_moe_blocks, folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("pattern", ["*", "*.experts", "model.*.mlp", "model.layers.*.mlp.experts.*_proj", "**l*"])
def test_patterns_still_keep_modules_plain(sound, tmp_path, pattern):
    folder = shutil.copytree(sound / "single", tmp_path / "plain")
    with_patterns(folder, ["re:.?[x]", "lm_head", pattern])
    assert load_moe_blocks(folder)[0].experts.format == "f16"


def test_patterns_agree_with_fnmatch():
    rng = np.random.default_rng(0)
    text = lambda letters, size: "".join(rng.choice(list(letters), rng.integers(size)))
    found = 0
    for _ in range(3000):
        module, pattern = "a" + text("ab.", 8), text("ab.*", 6)
        expected = fnmatch.fnmatchcase(f"{module}.", f"{pattern}.*")
        assert is_skipped(module, Encoding("mxfp8", patterns=(pattern,))) == expected, (module, pattern)
        found += expected
    assert found > 100


@pytest.mark.parametrize("pattern", ["*e*e*e*e*e*e*e*z", "*z"])
def test_patterns_cost_each_module_little(pattern):
    """100,000 modules and as many patterns as there may be; none of them matches."""
    encoding = Encoding("mxfp8", patterns=(pattern,) * (16 // pattern.count("*")))
    modules = [f"model.layers.33.mlp.experts.{n}.gate_proj" for n in range(100_000)]
    assert not in_time(lambda: any(is_skipped(module, encoding) for module in modules))


# ------------------------------------------------------------------------------------------- files that are none, links


@pytest.mark.parametrize("file", [CONFIG, INDEX, "a.safetensors"])
@pytest.mark.parametrize("target", ["/proc/self/status", "empty"])
def test_files_of_no_bytes_are_refused_unread(sound, tmp_path, monkeypatch, file, target):
    """What /proc holds is a regular file of 0 bytes; to read /proc/kmsg, which is one, never ends."""
    folder = shutil.copytree(sound / "sharded", tmp_path / "proc")
    (folder / "empty").touch()
    (folder / file).unlink()
    (folder / file).symlink_to(target)
    opened = []
    monkeypatch.setattr(sources, "open", lambda path, mode: opened.append(path.name) or open(path, mode), raising=False)
    with pytest.raises(CheckpointError, match=f"{file}: got a file of 0 bytes, expected one with content; fetch"):
        load_moe_blocks(folder)
    assert file not in opened


@pytest.mark.parametrize("target", ["/proc/self/status", "empty"])
def test_a_tokenizer_of_no_bytes_is_not_read(sound, tmp_path, target):
    folder = shutil.copytree(sound / "single", tmp_path / "proc")
    (folder / "empty").touch()
    (folder / "tokenizer.json").symlink_to(target)
    convert(folder, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b""
    pytest.importorskip("tokenizers")
    with pytest.raises(CheckpointError, match="tokenizer.json: got a file of 0 bytes"):
        codec_for(folder, 300)


def test_links_out_of_the_folder_are_followed(sound, tmp_path):
    """So the cache of the Hugging Face hub is made: snapshots hold links to blobs."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in (sound / "sharded").iterdir():
        (folder / file.name).symlink_to(file)
    assert set(load_moe_blocks(folder)) == set(range(L))


# -------------------------------------------------------------------------------------------------------- whole folders


def write_shards(folder, shards, **metadata):
    """Replaces the weights of a folder by shards of tensors without content."""
    for file in ("a.safetensors", "b.safetensors"):
        (folder / file).unlink()
    for file, held in shards.items():
        text = json.dumps({name: dict(dtype="U8", shape=[0], data_offsets=[0, 0]) for name in held} | metadata).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: file for file in shards for name in shards[file]}}))


EXPERTS = "model.layers.{}.mlp.experts.{}.gate_proj.weight"


@pytest.mark.parametrize("shards, message", [
    (lambda: {f"{n}.safetensors": [f"t{n}"] for n in range(2001)}, "got 2001 shards, expected at most 2000; save"),
    (lambda: {f"{n}.safetensors": [f"t{n}"] for n in range(2000)}, "14 tensors missing"),
    (lambda: {f"{n}.safetensors": [f"{n}.{m}" for m in range(97_500)] for n in range(4)}, "got over 147456 entries"),
    (lambda: {f"{n}.safetensors": [f"{n}.{m}" for m in range(559)] for n in range(163)}, "14 tensors missing"),
    (lambda: {"a.safetensors": [EXPERTS.format(n, n) for n in range(90_000)]},
     "89998 tensors unexpected: .*, and 85902 more names; 2 tensors of"),
], ids=["shards", "most shards", "tensors", "DeepSeek-V3", "names"])
def test_a_large_folder_costs_little(sound, tmp_path, shards, message):
    folder = shutil.copytree(sound / "sharded", tmp_path / "large")
    write_shards(folder, shards())
    with pytest.raises(CheckpointError, match=message) as caught:
        in_time(load_moe_blocks, folder)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("room, message", [
    (dict(tensors=3), "2 or more objects, expected at most 98304 tensors, and 147456 in all shards together"),
    (dict(values=10), "9 or more values, expected at most 589824, and 884736 in all shards together"),
])
def test_all_headers_together_have_limits(sound, tmp_path, monkeypatch, room, message):
    """The second shard is within the limits of one file, and has no room beside the first."""
    folder = shutil.copytree(sound / "sharded", tmp_path / "room")
    write_shards(folder, {"a.safetensors": ["1", "2"], "b.safetensors": ["3", "4"]}, __metadata__={"a": "", "b": ""})
    monkeypatch.setattr(reader, "_Room", functools.partial(reader._Room, **room))
    with pytest.raises(CheckpointError, match=f"b.safetensors: not a valid .* {message}"):
        load_moe_blocks(folder)


def test_a_folder_of_the_size_of_kimi_k2_is_within_the_limits():
    names = 60 * (384 + 1) * 3 * 2 + 61 * 16 + 9  # experts in FP8 with scales, attention, the rest
    assert names <= reader.MAX_INDEX_TENSORS and 163 <= reader.MAX_SHARDS


# ------------------------------------------------------------------------------------------------- single odd values


def tiny(tmp_path, name, **config):
    """A copy of a fixture with other fields in its config."""
    folder = shutil.copytree(FIXTURES / name, tmp_path / name)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize("name,field,value", [
    ("deepseek_v3_tiny", "routed_scaling_factor", 1e39), ("qwen3_moe_tiny", "rms_norm_eps", 1e39),
    ("qwen3_moe_tiny", "rope_theta", 1e-300)])
def test_numbers_that_float32_cannot_hold_are_refused(tmp_path, name, field, value):
    """Models compute in float32 at most: they would be infinite or 0 there, and logits NaN."""
    folder = tiny(tmp_path, name, **{field: value}, **({"rope_parameters": None} if field == "rope_theta" else {}))
    with pytest.raises(CheckpointError, match=re.escape(f"{field}: got {value}")):
        load_moe_blocks(folder) if name == "deepseek_v3_tiny" else load_qwen3_moe(folder)


def test_a_model_without_expert_layers_is_no_empty_load(tmp_path):
    with pytest.raises(CheckpointError, match="has no layer with experts by its config.json"):
        load_moe_blocks(tiny(tmp_path, "deepseek_v3_tiny", num_hidden_layers=1))


def test_a_tokenizer_that_panics_is_an_unreadable_one(tmp_path):
    """A panic of Rust is no Exception."""
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}))
    with pytest.raises(CheckpointError, match="tokenizer.json is not a readable tokenizer"):
        codec_for(tmp_path, 300)


def test_what_ends_a_text_is_quoted_briefly(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["x" * 100_000]}))
    with pytest.raises(CheckpointError) as caught:
        end_tokens(tmp_path)
    assert len(str(caught.value)) < 1000
