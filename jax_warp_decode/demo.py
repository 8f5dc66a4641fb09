"""The demo: complete a prompt as text, say which strategy ran and why, and compare with the float32 reference."""

import argparse
import contextlib
import dataclasses
import functools
import importlib.resources
import itertools
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from jax_warp_decode.checkpoints import load_qwen3_moe
from jax_warp_decode.errors import ArgumentError, CheckpointError, counted
from jax_warp_decode.info import print_facts
from jax_warp_decode.models import Qwen3Moe
from jax_warp_decode.models.generate import generate
from jax_warp_decode.text import codec_for

BUNDLED_FORMATS = ("bf16", "mxfp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default='The "with" statement', help="text to continue (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.5, metavar="T",
                        help="0 takes the most likely token every time (default: %(default)s, with a fixed seed)")
    parser.add_argument("--strategy", default="auto", metavar="NAME",
                        help="auto, warp_decode, shared_decode, expert_centric or reference (default: %(default)s)")
    parser.add_argument("--weights", choices=BUNDLED_FORMATS,
                        help="format of the bundled model's experts (default: bf16)")
    parser.add_argument("--checkpoint", metavar="DIR",
                        help="a Hugging Face folder of Qwen3-MoE instead of the bundled model")


def main(options: argparse.Namespace) -> int:
    """Runs the command; bad input raises the package's errors."""
    run(Request(**vars(options)), Console(highlight=False))
    return 0


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
      prompt: text to continue, not empty.
      max_new_tokens: tokens to produce, at least 1.
      temperature: 0 takes the most likely token, above 0 samples with a fixed seed. Small models loop at 0.
      strategy: "auto" or a name in `STRATEGIES`.
      weights: "bf16" or "mxfp8", expert format of the bundled model; None is bf16, or a checkpoint's own format.
      checkpoint: a Qwen3MoeForCausalLM folder; None is the bundled model.
    """

    prompt: str
    max_new_tokens: int
    temperature: float = 0.5
    strategy: str = "auto"
    weights: str | None = None
    checkpoint: str | None = None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How close logits [N, V] are to reference logits of the same N steps.

    Attributes:
      cosine: the median cosine over the steps.
      worst_cosine: the smallest one. It lies far below the median where bf16 noise moved a near tie of the router.
      max_abs: the largest absolute difference.
      same: number of steps whose most likely token is the same.
      steps: N.
    """

    cosine: float
    worst_cosine: float
    max_abs: float
    same: int
    steps: int


def compare(logits: np.ndarray, reference: np.ndarray) -> Agreement:
    """Compares logits [N, V] of N >= 1 steps in float64.

    Example:
      >>> import numpy as np
      >>> from jax_warp_decode.demo import compare
      >>> compare(np.array([[3.0, 4.0]]), np.array([[3.0, 4.5]]))
      Agreement(cosine=0.998..., worst_cosine=0.998..., max_abs=0.5, same=1, steps=1)
    """
    a, b = np.asarray(logits, np.float64), np.asarray(reference, np.float64)
    cosine = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    same = a.argmax(-1) == b.argmax(-1)
    return Agreement(float(np.median(cosine)), float(cosine.min()), float(np.abs(a - b).max()), int(same.sum()), len(a))


def check_finite(logits: np.ndarray, name: str) -> None:
    """Raises `CheckpointError` if the model `name` gave logits that are NaN or infinite."""
    if bad := int(np.count_nonzero(~np.isfinite(logits))):
        raise CheckpointError(
            f"{name}: got {bad} of {logits.size} logits that are NaN or infinite, expected finite ones; the weights "
            f"are damaged or too large for their dtype")


def bundled_model(weights: str) -> pathlib.Path:
    """Folder of the model that ships with the package, with its experts in "bf16" or "mxfp8"."""
    if weights not in BUNDLED_FORMATS:
        raise ArgumentError(f"weights: got {weights!r}, expected one of {list(BUNDLED_FORMATS)}")
    return pathlib.Path(str(importlib.resources.files("jax_warp_decode"))) / "data" / "tiny-docs" / weights


def reference_logits(model: Qwen3Moe, tokens: np.ndarray) -> np.ndarray:
    """Logits [S, V] of tokens [S]: the reference strategy, everything in float32, on the weights that `model` holds."""
    twin = nnx.eval_shape(lambda: Qwen3Moe(model.config, strategy="reference", dtype=jnp.float32, rngs=nnx.Rngs(0)))
    leaves, treedef = jax.tree.flatten(nnx.state(model))

    @jax.jit
    def run(leaves, tokens):
        logits, _ = nnx.merge(nnx.graphdef(twin), jax.tree.unflatten(treedef, leaves))(tokens)
        return logits[0]

    return np.asarray(run(leaves, jnp.asarray(tokens[None], jnp.int32)))


def describe(model: Qwen3Moe, name: str) -> str:
    """One line about a model: layers, experts, format, number of parameters."""
    config = model.config
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    count = sum(leaf.size for leaf in leaves if leaf.dtype != jnp.uint8)  # block scales are no parameters
    return (f"{name}: {counted(config.num_hidden_layers, 'layer')}, hidden {config.hidden_size}, {config.num_experts} "
            f"experts of {config.moe_intermediate_size}, top-{config.num_experts_per_tok}, "
            f"{count / 1e6:.1f} M parameters, experts in {model.layers[0].moe.experts.format}")


def printable(text: str) -> str:
    """The text without control characters: a model may write them, and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


class _Screen:
    """Where the completion goes: a live panel with a progress bar on a terminal, plain text elsewhere."""

    def __init__(self, console: Console, prompt: str, total: int):
        self._console, self._prompt, self._completion = console, prompt, ""
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"), console=console)
        self._task = self._progress.add_task("decode", total=total, rate="")

    def _text(self, height: int | None = None) -> Text:
        text = Text(self._prompt, style="bold").append(self._completion, style="not bold")
        if height is None:
            return text
        # The end of the text is what changes; a live display taller than the screen would flicker.
        return Text("\n").join(text.wrap(self._console, self._console.width)[-height:])

    def __rich__(self) -> Group:
        return Group(self._text(max(self._console.height - 4, 1)), Text(), self._progress)

    @contextlib.contextmanager
    def show(self) -> Iterator[None]:
        if self._console.is_terminal:
            with Live(self, console=self._console, transient=True, refresh_per_second=15):
                yield
            self._console.print(self._text())
        else:
            self._write(self._prompt)
            yield
            self._write("\n")

    def add(self, text: str, rate: float) -> None:
        self._completion += printable(text)
        self._progress.update(self._task, advance=1, rate=f"{rate:,.0f} tokens/s" if rate == rate else "")
        if not self._console.is_terminal:
            self._write(text)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def run(request: Request, console: Console) -> None:
    """Runs the demo and prints to `console`.

    Raises:
      ArgumentError, CheckpointError, UnsupportedError: bad input; nothing was printed about a result yet.
    """
    if not request.prompt:
        raise ArgumentError("prompt: got an empty text, expected at least one character to continue")
    try:
        request.prompt.encode()
    except UnicodeEncodeError:
        raise ArgumentError("prompt: got bytes that are no valid UTF-8, expected text") from None
    if request.checkpoint is not None and request.weights is not None:
        raise ArgumentError(
            f"weights: got {request.weights!r} together with a checkpoint, whose weights are used as they are stored; "
            f"leave one of the two out")
    if request.checkpoint is None:
        folder, name = bundled_model(request.weights or "bf16"), "tiny-docs (bundled)"
    else:
        folder = pathlib.Path(request.checkpoint)
        name = folder.name or str(folder)

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"loading {name}", total=None)
        model = load_qwen3_moe(
            folder, strategy=request.strategy, dtype=jnp.bfloat16,
            progress=lambda done, total: progress.update(task, completed=done, total=total))
    codec = codec_for(folder, model.config.vocab_size)
    prompt = np.asarray([codec.encode(request.prompt)], np.int32)
    prefill, decode = model.choice(prompt.shape[1]), model.choice(1)
    device = jax.devices()[0]
    print_facts(console, {
        "model": describe(model, name),
        "device": f"{device.device_kind}, jax {jax.__version__}",
        "prefill": f"{prefill.strategy}: {prefill.reason}",
        "decode": decode.strategy + (", for the same reason" if decode == prefill else f": {decode.reason}"),
    })
    console.print()

    rng = jax.random.key(0) if request.temperature > 0 else None
    start = functools.partial(generate, model, prompt, request.max_new_tokens, temperature=request.temperature, rng=rng)
    generation = start()
    with console.status("compiling prefill and decode"):
        # The first tokens of a throw-away run compile both steps, so that the rates below are those of the model.
        trial = start()
        for _ in itertools.islice(trial, 2):
            check_finite(jax.device_get(trial.logits), name)
    tokens: list[int] = []
    logits: list[jax.Array | None] = []
    step = codec.stream()
    screen = _Screen(console, request.prompt, request.max_new_tokens)
    with screen.show():
        for ids in generation:
            tokens.append(int(ids[0]))
            logits.append(generation.logits)
            screen.add(step(tokens[-1]), generation.tokens_per_second)

    found_logits = np.concatenate(jax.device_get(logits))
    check_finite(found_logits, name)
    assert generation.prefill_seconds is not None  # a token came
    facts = {"prefill": f"{counted(prompt.shape[1], 'token')} in {generation.prefill_seconds * 1e3:,.1f} ms "
                        f"({prefill.strategy})"}
    if len(tokens) == 1:
        facts["decode"] = "no step was needed for one token"
    else:
        rate = generation.tokens_per_second
        facts["decode"] = f"{rate:,.0f} tokens/s, {1e3 / rate:,.2f} ms per token ({decode.strategy})"
        with console.status("comparing with the float32 reference"):
            sequence = np.concatenate([prompt[0], tokens[:-1]])
            wanted = reference_logits(model, sequence)[prompt.shape[1]:]
            check_finite(wanted, f"{name} (reference)")
            found = compare(found_logits[1:], wanted)
        facts["agreement"] = (
            f"with the float32 reference over {counted(found.steps, 'decode step')}: cosine {found.cosine:.6f} (worst "
            f"{found.worst_cosine:.6f}), max abs {found.max_abs:.4f}, same next token {found.same} of {found.steps}")
    console.print()
    print_facts(console, facts)
