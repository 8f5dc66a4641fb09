"""Trains the small language model that ships in the package and saves it as Hugging Face folders in bf16 and MXFP8.

  python bench/train_tiny.py --out OUT

Text: the topics of `pydoc_data` (the Python language reference behind `help()`) and the docstrings of the standard
library, both part of the running CPython. About a tenth of the topics, whole ones, are never trained on, nor is any
text that repeats one of their paragraphs. Half of them, the validation topics, choose the step that is kept; the other
half, the held-out topics, give the reported loss. Several training lengths are tried, because the text is small enough
to overfit; validation chooses among them too.

Writes OUT/bf16, OUT/mxfp8 (config.json, model.safetensors) and OUT/metrics.json with the held-out loss in float32 and
of the two saved folders. Takes about three minutes on an H200.
"""

import argparse
import ast
import functools
import importlib.metadata
import json
import math
import pathlib
import platform
import pydoc_data.topics
import random
import re
import shlex
import subprocess
import sys
import sysconfig
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_warp_decode.checkpoints import load_qwen3_moe, save_qwen3_moe
from jax_warp_decode.layers import MoE
from jax_warp_decode.models import Qwen3Moe, Qwen3MoeConfig

CONFIG = Qwen3MoeConfig(
    vocab_size=256, hidden_size=256, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
    max_position_embeddings=512, tie_word_embeddings=True)

SEPARATOR = "\n\n\n"
SPLIT_SEED = 2  # which topics are held out; not a training choice
TOPIC_SHARE = 0.35  # of the windows in a batch; the rest are docstrings
WARMUP_STEPS = 100
BALANCE_WEIGHT = 0.01  # of the load-balancing loss, as in Switch Transformer (arXiv:2101.03961)


def paragraphs(text: str) -> set[str]:
    """The paragraphs long enough to tell texts apart, without line breaks."""
    return {p for p in (" ".join(part.split()) for part in re.split(r"\n\s*\n", text)) if len(p) > 60}


def split_topics(seed: int) -> tuple[list[str], list[str], list[str]]:
    """Topics for training, validation and the reported loss; the latter two are about a tenth of the distinct text.

    Many topics are sections of a larger one. A topic that is mostly a copy is dropped, and only topics that share no
    paragraph with another are candidates for leaving out of training.
    """
    topics = sorted((text.strip() for text in pydoc_data.topics.topics.values()), key=len, reverse=True)
    parts = [paragraphs(text) for text in topics]
    kept, seen = [], set()
    for text, own in zip(topics, parts, strict=True):
        if not own or len(own & seen) < 0.5 * len(own):
            kept.append(text)
        seen |= own
    unique = [text for text in kept if sum(bool(paragraphs(text) & other) for other in parts) == 1]
    random.Random(seed).shuffle(unique)
    total, left_out = sum(map(len, kept)), ([], [])
    for text in unique:
        smaller = min(left_out, key=lambda texts: sum(map(len, texts)))
        if sum(map(len, smaller)) + len(text) <= 0.06 * total:
            smaller.append(text)
    return [text for text in kept if text not in left_out[0] + left_out[1]], *left_out


def docstrings(forbidden: set[str]) -> list[str]:
    """One text a standard library module: its docstrings, without those that contain a forbidden paragraph."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}
    texts = []
    for path in sorted(root.rglob("*.py")):
        if skip & set(path.relative_to(root).parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(path.read_text(encoding="utf8"))
        found = [
            ast.get_docstring(node) or "" for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        found = [text for text in found if len(text) > 80 and not paragraphs(text) & forbidden]
        if found:
            texts.append("\n\n".join(found))
    return texts


def as_bytes(texts: list[str], seed: int) -> np.ndarray:
    texts = list(texts)
    random.Random(seed).shuffle(texts)
    return np.frombuffer(SEPARATOR.join(texts).encode(), np.uint8)


def forward(model: Qwen3Moe, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [B, S, V] and the mean load-balancing loss of the layers (1 if all experts are used alike)."""
    losses = []

    def recording_route(moe: MoE, x: jax.Array):
        routing = MoE.route(moe, x)
        scores = jax.nn.softmax(x.astype(jnp.float32) @ moe.router.get_value().astype(jnp.float32).T)
        share = jnp.mean(jax.nn.one_hot(routing.ids, scores.shape[-1]), axis=(0, 1))
        losses.append(scores.shape[-1] * jnp.sum(share * scores.mean(0)))
        return routing

    for layer in model.layers:
        layer.moe.route = functools.partial(recording_route, layer.moe)
    logits, _ = model(tokens)
    return logits, jnp.mean(jnp.stack(losses))


def mean_loss(model: Qwen3Moe, text: np.ndarray, seq: int) -> float:
    """Mean nats per byte over a text, in windows of `seq` bytes that start without context."""
    count = (len(text) - 1) // seq
    windows = jnp.asarray(np.stack([text[i * seq:i * seq + seq + 1] for i in range(count)]).astype(np.int32))
    return float(_window_loss(*nnx.split(model), windows))


@functools.partial(jax.jit, static_argnums=0)
def _window_loss(graphdef, params, windows):
    logits, _ = nnx.merge(graphdef, params)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def make_train_chunk(graphdef, optimizer, topics: np.ndarray, docs: np.ndarray, args):
    """A jitted function that takes `args.eval_every` optimiser steps at one learning rate; it holds the text."""
    from_topics = round(args.batch * TOPIC_SHARE)
    sources = [(jnp.asarray(topics), from_topics), (jnp.asarray(docs), args.batch - from_topics)]

    def draw(key):
        """Windows [B, S + 1] of int32 at random places."""
        rows = []
        for text, share in sources:
            key, sub = jax.random.split(key)
            starts = jax.random.randint(sub, (share,), 0, len(text) - args.seq)
            rows.append(jax.vmap(lambda s, text=text: jax.lax.dynamic_slice(text, (s,), (args.seq + 1,)))(starts))
        return jnp.concatenate(rows).astype(jnp.int32)

    def loss_fn(params, key):
        draw_key, noise_key, byte_key = jax.random.split(key, 3)
        windows = draw(draw_key)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        # Wrong bytes in the input keep the model from memorising: the text is seen dozens of times.
        noisy = jax.random.bernoulli(noise_key, args.noise, inputs.shape)
        inputs = jnp.where(noisy, jax.random.randint(byte_key, inputs.shape, 0, 256), inputs)
        logits, balance = forward(nnx.merge(graphdef, params), inputs)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return loss + BALANCE_WEIGHT * balance, (loss, balance)

    def step(rate, carry, number):
        params, opt_state, key = carry
        key, sub = jax.random.split(key)
        (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, sub)
        directions, opt_state = optimizer.update(grads, opt_state, params)
        warm = rate * jnp.minimum(1.0, (number + 1) / WARMUP_STEPS)
        params = jax.tree.map(lambda p, d: p - warm * d, params, directions)
        return (params, opt_state, key), aux

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def chunk(params, opt_state, key, done, rate):
        numbers = done + jnp.arange(args.eval_every)
        carry, aux = jax.lax.scan(functools.partial(step, rate), (params, opt_state, key), numbers)
        return *carry, jax.tree.map(jnp.mean, aux)

    return chunk


def train(args, topics: np.ndarray, docs: np.ndarray, validation: np.ndarray):
    """The model with the best float32 parameters, and a log with one entry an evaluation."""
    make = functools.partial(Qwen3Moe, CONFIG, strategy="reference", dtype=jnp.bfloat16, param_dtype=jnp.float32)
    graphdef, params = nnx.split(make(rngs=nnx.Rngs(args.seed)))
    matrices = jax.tree.map(lambda p: p.ndim > 1, params)
    optimizer = optax.chain(  # AdamW without its learning rate, which `chunk` takes
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98), optax.add_decayed_weights(0.1, matrices))
    chunk = make_train_chunk(graphdef, optimizer, topics, docs, args)
    best, log, start = (math.inf, None), [], None
    for steps in args.steps:
        params = nnx.state(make(rngs=nnx.Rngs(args.seed)))
        opt_state, key = optimizer.init(params), jax.random.key(args.seed)
        for done in range(0, steps, args.eval_every):
            rate = args.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done / steps)))
            params, opt_state, key, (loss, balance) = chunk(params, opt_state, key, done, rate)
            loss, balance = float(loss), float(balance)
            start = start or time.perf_counter()  # after compiling
            found = mean_loss(nnx.merge(graphdef, params), validation, args.seq)
            row = dict(steps=steps, step=done + args.eval_every, train=loss, balance=balance, validation=found)
            log.append(row)
            print(f"of {steps}: step {row['step']:5d}  train {loss:.4f}  balance {balance:.3f}  validation {found:.4f} "
                  f"nats/byte  {time.perf_counter() - start:.1f} s", flush=True)
            if not math.isfinite(found):
                raise FloatingPointError(f"validation loss {found}; lower --lr")
            if found < best[0]:
                best = (found, jax.tree.map(jnp.copy, params))  # a copy: the next chunk takes params over
            if time.perf_counter() - start > args.max_seconds:
                print(f"stopped at --max-seconds {args.max_seconds}", flush=True)
                return nnx.merge(graphdef, best[1]), log
    return nnx.merge(graphdef, best[1]), log


def commit() -> str:
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for bf16/, mxfp8/ and metrics.json")
    parser.add_argument("--steps", type=int, nargs="+", default=[600, 1000], help="training lengths to try")
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--seq", type=int, default=CONFIG.max_position_embeddings, help="bytes a window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--noise", type=float, default=0.05, help="share of input bytes replaced by random ones")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--max-seconds", type=float, default=160.0, help="of training, without compiling")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if any((args.out / format).exists() for format in ("bf16", "mxfp8")):
        parser.error(f"--out: {args.out} already holds a model; choose another folder")

    topics = split_topics(SPLIT_SEED)
    forbidden = set().union(*map(paragraphs, topics[1] + topics[2]))
    texts = dict(zip(("topics", "validation", "held_out"), topics, strict=True), docstrings=docstrings(forbidden))
    texts = {name: as_bytes(parts, args.seed) for name, parts in texts.items()}
    sizes = {name: len(text) for name, text in texts.items()}
    print(f"bytes of text {sizes}; {jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)

    start = time.perf_counter()
    model, log = train(args, texts["topics"], texts["docstrings"], texts["validation"])
    seconds = time.perf_counter() - start

    graphdef, params = nnx.split(model)
    rounded = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    save_qwen3_moe(rounded, args.out / "bf16")
    save_qwen3_moe(rounded, args.out / "mxfp8", format="mxfp8")
    # What a user loads: the saved folders, computed in bf16; float32 is the model before rounding, in float32.
    exact = Qwen3Moe(CONFIG, strategy="reference", dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    nnx.update(exact, params)
    nats = {"float32": mean_loss(exact, texts["held_out"], args.seq)}
    for format in ("bf16", "mxfp8"):
        loaded = load_qwen3_moe(args.out / format, dtype=jnp.bfloat16, strategy="reference")
        nats[format] = mean_loss(loaded, texts["held_out"], args.seq)

    metrics = {
        "held_out_nats_per_byte": nats,
        "held_out_bits_per_byte": {name: loss / math.log(2) for name, loss in nats.items()},
        "bytes": sizes,
        "parameters": sum(p.size for p in jax.tree.leaves(params)),
        "best": min(log, key=lambda row: row["validation"]), "seconds": round(seconds, 1),
        "device": jax.devices()[0].device_kind, "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "commit": commit(), "command": shlex.join(["python", *sys.argv]),
        "log": log,
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps({key: value for key, value in metrics.items() if key != "log"}, indent=1))


if __name__ == "__main__":
    main()
