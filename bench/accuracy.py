"""How exact the layer and the model are: warp decode, and the conventional path that quantises its activations.

    python -m bench.accuracy --out bench/results

Layer: MXFP8 (and bf16) experts of Qwen3-30B-A3B's size against float64 with the same weights, for three weight
distributions and for activations of the bundled model; the routing weights are scaled so that the largest output is 1.
Model: perplexity of the bundled model on held-out text. Drift: the residual stream of a 48-layer model of random
weights against float32, layer by layer. Writes accuracy.json and accuracy.png.

`--model tiny-docs --layers 4 --windows 1` is small enough for a CPU, where the kernels are interpreted.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import decode, small_batch, train_tiny
from jax_warp_decode import ExpertWeights, Routing, moe
from jax_warp_decode.checkpoints import load_qwen3_moe
from jax_warp_decode.demo import BUNDLED_FORMATS, bundled_model
from jax_warp_decode.measure import inputs
from jax_warp_decode.models import Qwen3MoeConfig
from jax_warp_decode.models.decode_step import (
    DecodeModel,
    DecoderWeights,
    MoeOptions,
    decoder_layer,
    rotation_of,
)
from jax_warp_decode.presets import Preset, get_preset

TOKENS = 128
DISTRIBUTIONS = ("normal", "heavy_tails", "outlier_columns")
CONVENTIONAL = dict(strategy="expert_centric", activation_format="mxfp8")


def paths(on_gpu: bool) -> dict[str, dict]:
    """Name -> options of `moe`."""
    ours = {} if on_gpu else dict(strategy="warp_decode", interpret=True)
    return {"ours": ours, "expert_centric": dict(strategy="expert_centric"), "conventional": CONVENTIONAL}


# -------------------------------------------------------------------------------------------------------------- layer


def make_experts(key: jax.Array, preset: Preset, format: str, distribution: str) -> ExpertWeights:
    """bf16 weights of a distribution, then in `format`.

    "normal"; "heavy_tails": Student's t with 3 degrees of freedom; "outlier_columns": 1 % of the input dimensions are
    16 times as large, as activations of trained models make them.
    """
    keys = iter(jax.random.split(key, 3))

    def one(n, m):
        key, columns, tails = jax.random.split(next(keys), 3)
        shape = (preset.num_experts, n, m)
        w = jax.random.normal(key, shape, jnp.float32)
        if distribution == "heavy_tails":
            w = w / jnp.sqrt(sum(jax.random.normal(k, shape, jnp.float32) ** 2 for k in jax.random.split(tails, 3)))
        if distribution == "outlier_columns":
            w = w * jnp.where(jax.random.bernoulli(columns, 0.01, (m,)), 16.0, 1.0)
        return (w / math.sqrt(m)).astype(jnp.bfloat16)

    I, H = preset.intermediate, preset.hidden
    experts = ExpertWeights(one(I, H), one(I, H), one(H, I))
    return experts if format == "bf16" else experts.quantize(format)


def exact(x: jax.Array, routing: Routing, experts: ExpertWeights) -> np.ndarray:
    """y [T, H] in float64 with the weights as they are stored."""
    with jax.enable_x64(True):
        return np.asarray(_exact(x, routing, experts))


@jax.jit
def _exact(x, routing, experts):
    def wide(w, ids):
        picked = w[ids]
        picked = picked if isinstance(picked, jax.Array) else picked.dequantize(jnp.float32)
        return picked.astype(jnp.float64)

    def token(args):
        x, ids, weights = args
        x = x.astype(jnp.float64)
        gate, up = (jnp.einsum("kih,h->ki", wide(w, ids), x) for w in (experts.w_gate, experts.w_up))
        h = gate / (1 + jnp.exp(-gate)) * up
        return jnp.einsum("khi,ki,k->h", wide(experts.w_down, ids), h, weights.astype(jnp.float64))

    return jax.lax.map(token, (x, routing.ids, routing.weights))


def compare(got: np.ndarray, want: np.ndarray) -> dict:
    """Errors of y [T, H] against float64, and those of rounding the exact result once to bf16."""
    once = np.asarray(want.astype(jnp.bfloat16), np.float64)
    norm = np.linalg.norm
    cosine = (got * want).sum(-1) / (norm(got, axis=-1) * norm(want, axis=-1))
    relative, least = norm(got - want) / norm(want), norm(once - want) / norm(want)
    return dict(relative_l2=relative, over_rounding_once=relative / least, min_cosine=cosine.min(),
                max_abs=np.abs(got - want).max(), correctly_rounded=float(np.mean(got == once)))


def layer_cases(options, model: "Bundled"):
    """Yields (name, format, x [T, H], routing, experts)."""
    preset = get_preset(options.model)
    for format in options.format:
        for distribution in DISTRIBUTIONS:
            key = jax.random.key(len(distribution))
            experts = jax.jit(make_experts, static_argnums=(1, 2, 3))(key, preset, format, distribution)
            routing = inputs.make_routing(np.random.default_rng(1), TOKENS, preset, "uniform")
            yield distribution, format, inputs.make_x(key, TOKENS, preset), routing, experts
    for number, (x, routing, experts) in enumerate(model.activations()):
        yield f"bundled model, layer {number}", experts.format, x, routing, experts


def run_layer(options, model: "Bundled") -> list[dict]:
    results, compiled, began = [], {}, time.perf_counter()
    variants = paths(jax.default_backend() == "gpu")

    def step(name, args):
        return jax.jit(functools.partial(moe, **variants[name])).lower(*args).compile()

    for case, format, x, routing, experts in layer_cases(options, model):
        if time.perf_counter() - began > options.budget:
            print(f"out of time: {format} {case} was not run", flush=True)
            continue
        want = exact(x, routing, experts)
        scale = jnp.float32(0.999 / np.abs(want).max())
        routing = Routing(routing.ids, routing.weights * scale)
        want = exact(x, routing, experts)
        jobs = {(name, b): (x[:b], Routing(routing.ids[:b], routing.weights[:b]), experts)
                for name in variants for b in options.batch if b <= len(x)}
        new = {key: args for key, args in jobs.items() if (*key, format, x.shape) not in compiled}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            pending = {key: pool.submit(step, key[0], args) for key, args in new.items()}
        compiled.update({(*key, format, x.shape): future for key, future in pending.items()})
        for (name, b), args in jobs.items():
            row = dict(case=case, format=format, path=name, batch=b)
            try:
                got = np.asarray(compiled[name, b, format, x.shape].result()(*args), np.float64)
                results.append(dict(row, **compare(got, want[:b])))
            except Exception as error:
                results.append(dict(row, error=small_batch.describe(error)))
        print(f"  {case}, {format}: {time.perf_counter() - began:.0f} s", flush=True)
    return results


# -------------------------------------------------------------------------------------------------------------- model


@functools.partial(jax.jit, static_argnums=0)
def run_one(model: DecodeModel, layer, x: jax.Array):
    """A layer on whole sequences: x [B, S, H] -> (x, ids [B, S, K])."""
    B, S, H = x.shape

    def attend(q, k, v):
        q, k, v = (a.reshape(B, S, *a.shape[1:]) for a in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return y.reshape(B * S, *y.shape[2:]), None

    rotation = rotation_of(model.config, jnp.tile(jnp.arange(S, dtype=jnp.int32), B))
    with jax.default_matmul_precision("highest"):
        x, _, ids = decoder_layer(model, layer, x.reshape(B * S, H), rotation, attend)
    return x.reshape(B, S, H), ids.reshape(B, S, -1)


class Bundled:
    """The model of the package, and text that it was not trained on."""

    def __init__(self, windows: int | None):
        held_out = train_tiny.as_bytes(train_tiny.split_topics(train_tiny.SPLIT_SEED)[2], seed=0)
        size = train_tiny.CONFIG.max_position_embeddings
        count = min((len(held_out) - 1) // size, windows or len(held_out))
        self.windows = np.stack([held_out[i * size:i * size + size + 1] for i in range(count)]).astype(np.int32)
        modules = {format: load_qwen3_moe(bundled_model(format)) for format in BUNDLED_FORMATS}
        self.config = modules["bf16"].config
        self.weights = {format: DecoderWeights.from_model(module) for format, module in modules.items()}

    def activations(self):
        """(x, routing, experts in MXFP8) of every layer, for the first bytes of the text."""
        weights, found = self.weights["mxfp8"], []

        def recording(x, routing, experts):
            found.append((x, routing, experts))
            return moe(x, routing, experts, strategy="reference")

        model = DecodeModel(self.config, recording)
        x = weights.embed[self.windows[0, :TOKENS]].astype(model.dtype)
        rotation = rotation_of(self.config, jnp.arange(TOKENS, dtype=jnp.int32))

        def attend(q, k, v):
            return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0], None

        for layer in weights.layers:
            x, *_ = decoder_layer(model, layer, x, rotation, attend)
        return found

    def nats(self, model: DecodeModel, format: str) -> float:
        """Mean loss per byte, in windows that start without context."""
        weights = self.weights[format]
        x = weights.embed[self.windows[:, :-1]].astype(model.dtype)
        for layer in weights.layers:
            x, _ = run_one(model, layer, x)
        wide = x.astype(jnp.float32)
        wide = wide / jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + self.config.rms_norm_eps)
        h = (wide * weights.norm.astype(jnp.float32)).astype(model.dtype)
        logits = jnp.einsum("bsh,vh->bsv", h, weights.head.astype(model.dtype), preferred_element_type=jnp.float32,
                            precision="highest")
        at = self.windows[:, 1:, None]
        return float(-jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), at, axis=-1)))


def run_perplexity(model: Bundled) -> list[dict]:
    variants = [("float32", "bf16", DecodeModel(model.config, options(strategy="reference"), dtype=jnp.float32))]
    decoders = {"warp_decode": paths(jax.default_backend() == "gpu")["ours"] | dict(strategy="warp_decode"),
                "expert_centric": dict(strategy="expert_centric"), "conventional": CONVENTIONAL}
    variants += [(name, format, DecodeModel(model.config, options(**chosen)))
                 for format in BUNDLED_FORMATS for name, chosen in decoders.items()]
    results = []
    for name, format, decoder in variants:
        row = dict(path=name, format=format, bytes=int(model.windows[:, 1:].size))
        try:
            nats = model.nats(decoder, format)
            results.append(dict(row, nats_per_byte=nats, perplexity=math.exp(nats)))
        except Exception as error:
            results.append(dict(row, error=small_batch.describe(error)))
    return results


def options(**chosen) -> MoeOptions:
    return MoeOptions(tuple(chosen.items()))


# -------------------------------------------------------------------------------------------------------------- drift


def run_drift(config: Qwen3MoeConfig, layers: int, tokens: int) -> list[dict]:
    """Per layer and path: relative L2 distance of the residual stream from float32, and share of equal choices."""
    on_gpu = jax.default_backend() == "gpu"
    exact_model = DecodeModel(config, options(strategy="reference"), dtype=jnp.float32)
    models = {"bf16 stream, exact experts": DecodeModel(config, options(strategy="reference")),
              **{name: DecodeModel(config, options(**chosen)) for name, chosen in paths(on_gpu).items()}}
    start = jax.random.normal(jax.random.key(5), (1, tokens, config.hidden_size), jnp.bfloat16)
    want, streams, results = start.astype(jnp.float32), dict.fromkeys(models, start), []
    for number in range(layers):
        layer = decode.make_layer(config, number, "mxfp8")
        want, want_ids = run_one(exact_model, layer, want)
        for name, model in models.items():
            if name not in streams:
                continue
            row = dict(path=name, layer=number + 1)
            try:
                streams[name], ids = run_one(model, layer, streams[name])
                distance = np.asarray(streams[name], np.float64) - np.asarray(want, np.float64)
                same = np.mean([len(np.intersect1d(a, b)) for a, b in zip(
                    np.asarray(ids).reshape(tokens, -1), np.asarray(want_ids).reshape(tokens, -1), strict=True)])
                results.append(dict(row, relative_l2=float(np.linalg.norm(distance) / np.linalg.norm(want)),
                                    same_experts=float(same / config.num_experts_per_tok)))
            except Exception as error:
                results.append(dict(row, error=small_batch.describe(error)))
                del streams[name]
    return results


# ------------------------------------------------------------------------------------------------------------- report


def summary(report: dict) -> str:
    lines = []
    rows = [r for r in report["layer"] if "error" not in r]
    for case, format, path in dict.fromkeys((r["case"], r["format"], r["path"]) for r in rows):
        mine = [r for r in rows if (r["case"], r["format"], r["path"]) == (case, format, path)]
        worst = {key: f(r[key] for r in mine) for key, f in (
            ("relative_l2", max), ("over_rounding_once", max), ("min_cosine", min), ("max_abs", max),
            ("correctly_rounded", min))}
        lines.append(f"{case:24} {format:6} {path:15} worst over B: relative L2 {worst['relative_l2']:.2e} "
                     f"({worst['over_rounding_once']:.2f} x rounding once), cosine {worst['min_cosine']:.7f}, max abs "
                     f"{worst['max_abs']:.6f}, correctly rounded {worst['correctly_rounded']:.1%}")
    for r in report["perplexity"]:
        lines.append(f"perplexity {r['format']:6} {r['path']:15} " + (
            r.get("error") or f"{r['perplexity']:.5f} ({r['nats_per_byte']:.6f} nats per byte)"))
    for path in dict.fromkeys(r["path"] for r in report["drift"]):
        last = [r for r in report["drift"] if r["path"] == path][-1]
        lines.append(f"drift {path:28} after {last['layer']} layers: " + (
            last.get("error") or f"{last['relative_l2']:.2e}, same experts {last['same_experts']:.1%}"))
    errors = {r["error"] for part in ("layer", "perplexity", "drift") for r in report[part] if "error" in r}
    return "\n".join([*lines, *(f"error: {e}" for e in errors)])


def plot(path: pathlib.Path, report: dict) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 4.8))
    rows = [r for r in report["layer"] if "error" not in r]
    for case, format, name in dict.fromkeys((r["case"], r["format"], r["path"]) for r in rows):
        mine = [r for r in rows if (r["case"], r["format"], r["path"]) == (case, format, name)]
        color = {"ours": "C0", "expert_centric": "C2", "conventional": "C3"}[name]
        left.plot([r["batch"] for r in mine], [r["relative_l2"] for r in mine], color=color, alpha=0.7,
                  linestyle="-" if format == "mxfp8" else ":", marker=".")
    for name, color in (("ours", "C0"), ("expert_centric", "C2"), ("conventional, MXFP8 activations", "C3")):
        left.plot([], [], color=color, label=name)
    left.set(xscale="log", yscale="log", xlabel="tokens B", ylabel="relative L2 against float64",
             title="One layer, every case (dotted: bf16 weights)")
    left.legend(fontsize=8)
    found = [r for r in report["perplexity"] if "error" not in r]
    names = [f"{r['format']}\n{r['path']}" for r in found]
    middle.bar(range(len(found)), [r["perplexity"] for r in found])
    middle.set_xticks(range(len(found)), names, fontsize=7, rotation=30)
    if found:
        low, high = min(r["perplexity"] for r in found), max(r["perplexity"] for r in found)
        middle.set_ylim(low - (high - low) - 1e-3, high + 0.3 * (high - low) + 1e-3)
    middle.set(ylabel="perplexity per byte (axis does not start at 0)", title="Bundled model, held-out text")
    for name in dict.fromkeys(r["path"] for r in report["drift"]):
        mine = [r for r in report["drift"] if r["path"] == name and "error" not in r]
        right.plot([r["layer"] for r in mine], [r["relative_l2"] for r in mine], label=name)
    right.set(yscale="log", xlabel="layer", ylabel="relative L2 of the residual stream against float32",
              title="Random 48-layer model, MXFP8 experts")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=("qwen3-30b-a3b", "tiny-docs"))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8, 32, 128])
    parser.add_argument("--format", nargs="+", default=["mxfp8", "bf16"], choices=BUNDLED_FORMATS)
    parser.add_argument("--layers", type=int, default=48, help="of the model whose drift is measured")
    parser.add_argument("--tokens", type=int, default=8, help="of the sequence whose drift is measured")
    parser.add_argument("--windows", type=int, help="of held-out text; default: all")
    parser.add_argument("--parts", nargs="+", default=["layer", "perplexity", "drift"])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which no new case of a layer starts")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    model = Bundled(options.windows)
    config = decode.MODEL if options.model == "qwen3-30b-a3b" else model.config
    config = dataclasses.replace(config, num_hidden_layers=options.layers)
    report = dict(meta=small_batch.metadata("accuracy"), layer=[], perplexity=[], drift=[])
    path = options.out / "accuracy.json"
    for name, run in (("perplexity", lambda: run_perplexity(model)), ("layer", lambda: run_layer(options, model)),
                      ("drift", lambda: run_drift(config, options.layers, options.tokens))):
        if name in options.parts:
            report[name] = run()
            path.write_text(json.dumps(report, indent=1, default=float) + "\n")
            print(summary({**dict(layer=[], perplexity=[], drift=[]), name: report[name]}), flush=True)
    plot(path.with_suffix(".png"), report)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
