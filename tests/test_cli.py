"""The command line as a user meets it: output, exit codes, and one clear line for bad input."""

import logging
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest
from flax import nnx
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console

import jax_warp_decode
from jax_warp_decode import cli, demo, info, tuned_table, tuning
from jax_warp_decode.checkpoints import save_qwen3_moe
from jax_warp_decode.compat import JAX_WINDOW
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.models import Qwen3Moe, Qwen3MoeConfig
from jax_warp_decode.presets import PRESETS, SAME_LAYER
from jax_warp_decode.text import ByteCodec

ROOT = pathlib.Path(__file__).parent.parent


def make_folder(path, vocab_size=256, format=None, edit=lambda model: None):
    config = Qwen3MoeConfig(
        vocab_size=vocab_size, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=64, tie_word_embeddings=True)
    model = Qwen3Moe(config, rngs=nnx.Rngs(5))
    edit(model)
    save_qwen3_moe(model, path, format=format)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("checkpoints") / "bytes")


def run(capsys, *argv):
    """Exit code, stdout and stderr of one command."""
    try:
        code = cli.main(list(map(str, argv)))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_info_says_what_runs_here(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert jax.__version__ in out and jax.devices()[0].device_kind in out
    for name in ("bf16", "f16", "f32", *FORMATS):  # warp_decode, shared_decode, expert_centric, reference
        assert re.search(rf"^{name} +no +no +yes +yes", out, re.M), name


def test_info_says_which_tuned_file_is_read(capsys, monkeypatch, tmp_path):
    told = lambda: re.search(r"^tuned file +(.+)$", run(capsys, "info")[1], re.M)[1]
    assert told() == "none is read without a GPU"
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuned_table.VARIABLE, raising=False)
    path = tuned_table.user_file("NVIDIA H200")
    assert told() == f"{path}, which does not exist"
    tuned_table.write_entries(path, "NVIDIA H200", [])
    assert told() == f"{path}, 0 measurements"
    monkeypatch.setenv(tuned_table.VARIABLE, str(tmp_path / "mine.json"))
    assert told().startswith(f"NOT USABLE: tuned configurations: {tmp_path / 'mine.json'} does not exist")
    (tmp_path / "mine.json").write_text("{")
    assert told().startswith(f"NOT USABLE: tuned configurations: {tmp_path / 'mine.json'} is no table")


def test_info_says_why_warp_decode_cannot_run(capsys):
    _, out, _ = run(capsys, "info")
    reason = next(line for line in out.splitlines() if line.startswith("warp_decode") and "GPU" in line)
    assert "cuda12" in reason and "interpret" not in out


def test_the_window_that_info_names_is_the_one_that_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups, requirements = project["dependency-groups"], map(Requirement, project["project"]["dependencies"])
    allowed = next(r.specifier for r in requirements if r.name == "jax")
    assert all(allowed.contains(version) and info.in_window(version) for version in JAX_WINDOW)
    assert not any(allowed.contains(v) or info.in_window(v) for v in ("0.11.1", "0.12.1"))
    for group, version in zip(("aot-oldest", "aot"), JAX_WINDOW, strict=True):
        pins = {r.name: r.specifier for r in map(Requirement, groups[group])}
        assert all(pins[name].contains(Version(version)) for name in
                   ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"))


@pytest.mark.parametrize("format", [None, "mxfp8"])
def test_demo_completes_a_prompt_and_agrees_with_the_reference(capsys, tmp_path, format):
    path = make_folder(tmp_path / "model", format=format)
    code, out, err = run(capsys, "demo", "--checkpoint", path, "--prompt", "Déjà vu: ", "--max-new-tokens", 12)
    assert code == 0, err
    assert "Déjà vu: " in out and f"experts in {format or 'bf16'}" in out
    prefill, decode = re.search(r"^prefill +(\w+): .+\ndecode +(\w+)[:,]", out, re.M).groups()
    assert {prefill, decode} <= {"warp_decode", "expert_centric", "reference"}
    assert re.search(rf"^prefill +11 tokens in [\d.,]+ ms \({prefill}\)", out, re.M)
    assert re.search(rf"^decode +[\d,]+ tokens/s, [\d.,]+ ms per token \({decode}\)", out, re.M)
    steps, cosine, worst, same, of = re.search(
        r"over (\d+) decode steps: cosine ([\d.]+) \(worst ([\d.]+)\), max abs [\d.]+, "
        r"same next token (\d+) of (\d+)", out).groups()
    # bf16 rounds by 2^-9, a few dozen times in a row: an angle of a few percent. A near tie in the router costs more.
    assert float(worst) <= float(cosine) and float(cosine) > 0.995
    assert steps == of == "11" and int(same) >= 8


def test_demo_runs_the_strategy_that_is_asked_for(folder, capsys):
    _, out, _ = run(capsys, "demo", "--checkpoint", folder, "--strategy", "reference", "--max-new-tokens", 1)
    assert re.search(r"^prefill +reference: asked for\ndecode +reference", out, re.M)
    assert "no step was needed" in out and "agreement" not in out


def test_agreement_counts_what_differs():
    found = demo.compare(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.25], [1.0, 0.0]]))
    assert (found.same, found.steps, found.max_abs) == (1, 2, 1.0)
    assert found.worst_cosine == pytest.approx(0.0) and found.cosine == pytest.approx(0.5 / 1.0625**0.5)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_demo_runs_the_bundled_model(capsys, weights):
    code, out, err = run(capsys, "demo", "--weights", weights, "--max-new-tokens", 24)
    assert code == 0, err
    assert f"experts in {weights}" in out
    completion = out.split('The "with" statement', 1)[1].split("\n\nprefill")[0]
    # English words, as a trained model writes them.
    assert len(re.findall(r"\b[a-z]{2,}\b", completion)) >= 2


def start(*argv, environment=(), **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"} | dict(environment)
    return subprocess.run([sys.executable, "-m", "jax_warp_decode.cli", *map(str, argv)], cwd=ROOT, env=environment,
                          **options)


def test_piped_output_is_plain_text_and_shows_question_marks_without_unicode(folder):
    done = start("demo", "--checkpoint", folder, "--prompt", "Déjà", "--max-new-tokens", 2, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout
    assert b"D?j?" in done.stdout and b"agreement" in done.stdout


@pytest.mark.parametrize("command", [["info"], ["demo"], ["generate", "--prompt", "a"]])
@pytest.mark.parametrize("platform", ["cuda", "no_such"])
def test_a_platform_that_does_not_start_is_one_line_and_exit_code_2(platform, command):
    environment = {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}
    done = start(*command, capture_output=True, text=True, environment=environment)
    *others, line = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not others or os.path.exists("/dev/nvidiactl"), done.stderr  # where there is a GPU, XLA prints a line itself
    assert line.startswith(f"jax-warp-decode: error: JAX_PLATFORMS: got '{platform}', and JAX cannot start: ")
    assert "unset it, or install JAX's CUDA build" in line


def test_a_plugin_that_does_not_load_is_one_line(capsys, monkeypatch):
    def collect():
        try:
            raise RuntimeError("Unable to load cuDNN.")
        except RuntimeError:
            logging.getLogger("jax._src.xla_bridge").exception("Jax plugin configuration error")
        raise ArgumentError("x: got y")

    monkeypatch.setattr(info, "collect", collect)
    code, _, err = run(capsys, "info")
    assert code == 2 and "Traceback" not in err
    assert err.splitlines() == ["jax-warp-decode: error: x: got y",
                                "jax-warp-decode: warning: a plugin of JAX does not load: Unable to load cuDNN."]


@pytest.mark.parametrize("error", [AssertionError("ours"), RuntimeError("ours")])
def test_a_bug_keeps_its_traceback(monkeypatch, error):
    def collect():
        raise error

    monkeypatch.setattr(info, "collect", collect)
    with pytest.raises(type(error), match="ours"):
        cli.main(["info"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_device_is_one_line_and_exit_code_2():
    with open("/dev/full", "wb") as full:
        done = start("info", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1 and b"No space left" in done.stderr


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_no_success(capsys, tmp_path, number):
    path = make_folder(tmp_path / "damaged", edit=lambda model: model.norm.scale.set_value(
        model.norm.scale.get_value().at[3].set(number)))
    code, out, err = run(capsys, "demo", "--checkpoint", path, "--max-new-tokens", 1)
    assert code == 2 and err.count("\n") == 1 and "NaN or infinite" in err and "damaged" in err
    assert "tokens in" not in out


def test_a_terminal_shows_progress_and_keeps_the_whole_text(folder, tmp_path):
    with (tmp_path / "screen").open("w+", encoding="utf8") as screen:
        console = Console(file=screen, force_terminal=True, width=60, height=10)
        demo.run(demo.Request("word " * 9, 15, checkpoint=str(folder)), console)
        screen.seek(0)
        text = screen.read()
    assert "15/15" in text and "tokens/s" in text
    assert ("word " * 9).strip() in re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text).replace("\n", "")


def test_text_arrives_once_its_last_byte_does():
    step = ByteCodec().stream()
    text = "aé€😀"
    pieces = [step(token) for token in ByteCodec().encode(text)]
    assert "".join(pieces) == text and [len(piece) for piece in pieces] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert "".join(map(ByteCodec().stream(), [0xFF, 0x41])) == "\ufffdA"


@pytest.mark.parametrize(("arguments", "words"), [
    (["--strategy", "fastest"], ["strategy", "'fastest'", "warp_decode", "expert_centric", "reference"]),
    (["--max-new-tokens", "0"], ["max_new_tokens", "0"]),
    (["--max-new-tokens", "100"], ["max_new_tokens", "100", "at most 44"]),
    (["--max-new-tokens", "many"], ["--max-new-tokens", "many"]),
    (["--temperature", "-1", "--max-new-tokens", "4"], ["temperature", "-1.0"]),
    (["--prompt", ""], ["prompt", "empty"]),
    (["--prompt", "\udcff"], ["prompt", "UTF-8"]),
    (["--weights", "mxfp8"], ["weights", "checkpoint"]),
    (["--weights", "int3"], ["--weights", "int3", "mxfp8"]),
    (["--strategy", "warp_decode"], ["warp_decode", "cuda12"]),
])
def test_bad_input_is_one_line_and_exit_code_2(capsys, folder, arguments, words):
    code, _, err = run(capsys, "demo", "--checkpoint", folder, *arguments)
    assert code == 2
    assert err.startswith("jax-warp-decode") and err.count("\n") == 1 and "Traceback" not in err
    assert all(word in err for word in words), err
    assert "interpret" not in err, "the command line has no such option"


@pytest.mark.parametrize("command", ["bench", "plan", "autotune"])
def test_the_models_are_listed_with_their_other_names(capsys, command):
    code, out, err = run(capsys, command, "--model", "list")
    assert code == 0, err
    names = {line.split()[0]: line for line in out.splitlines()}
    assert names.keys() == PRESETS.keys() | SAME_LAYER.keys()
    assert names["deepseek-r1"].endswith("as deepseek-v3")


@pytest.mark.parametrize("name", ["mixtral_tiny", "gpt_oss_tiny"])
def test_a_model_that_the_demo_does_not_take_is_one_for_generate(capsys, name):
    code, _, err = run(capsys, "demo", "--checkpoint", ROOT / "tests" / "fixtures" / name)
    assert code == 2 and "`jax-warp-decode generate --checkpoint` take it" in err and "load_moe_blocks" not in err


@pytest.mark.parametrize("command", ["bench", "profile", "autotune"])
def test_what_needs_a_gpu_says_so(capsys, command):
    assert "needs a GPU" in " ".join(run(capsys, command, "--help")[1].split())


def test_autotune_says_what_switch_alone_does(capsys):
    assert "only the strategies are measured; the option alone: none" in " ".join(
        run(capsys, "autotune", "--help")[1].split())


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"jax-warp-decode {jax_warp_decode.__version__}\n", "")


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "jax_warp_decode", "--version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.startswith("jax-warp-decode ")


def test_unknown_command_is_one_line(capsys):
    code, _, err = run(capsys, "fly")
    assert code == 2 and err.count("\n") == 1 and "fly" in err


def test_missing_and_broken_folders_are_named(capsys, tmp_path, folder):
    code, _, err = run(capsys, "demo", "--checkpoint", tmp_path / "nowhere")
    assert code == 2 and "nowhere" in err and err.count("\n") == 1
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((folder / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1000])
    code, _, err = run(capsys, "demo", "--checkpoint", broken)
    assert code == 2 and "model.safetensors" in err and err.count("\n") == 1


def test_a_model_that_is_not_byte_level_needs_its_tokenizer(capsys, tmp_path, monkeypatch):
    path = make_folder(tmp_path / "words", vocab_size=300)
    code, _, err = run(capsys, "demo", "--checkpoint", path)
    assert code == 2 and "tokenizer.json" in err and "300" in err
    (path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # what an import of a missing package does
    code, _, err = run(capsys, "demo", "--checkpoint", path)
    assert code == 2 and "pip install tokenizers" in err


def test_a_tokenizer_file_is_used(capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = make_folder(tmp_path / "words", vocab_size=300)
    words = {f"w{n}": n for n in range(300)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    tokenizer.save(str(path / "tokenizer.json"))
    for prompt in ("zzz", "\udcff"):  # no token for it, no text
        code, _, err = run(capsys, "generate", "--checkpoint", path, "--prompt", prompt)
        assert code == 2 and err.count("\n") == 1 and "the tokenizer of the model cannot encode" in err
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    code, out, err = run(capsys, "demo", "--checkpoint", path, "--prompt", "w7 w8 w9", "--max-new-tokens", 4)
    assert code == 0, err
    assert "prefill    3 tokens" in out and re.search(r"w7 w8 w9.*\bw\d+", out)
