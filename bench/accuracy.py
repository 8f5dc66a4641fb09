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
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import decode_model, train_tiny
from bench.accuracy_report import layer_summary, plot
from bench.report import Report, draw
from jax_warp_decode import ExpertWeights, Routing, moe
from jax_warp_decode.checkpoints import load_qwen3_moe
from jax_warp_decode.demo import BUNDLED_FORMATS, bundled_model
from jax_warp_decode.measure import inputs
from jax_warp_decode.measure.variants import attempt, describe
from jax_warp_decode.models import Qwen3MoeConfig
from jax_warp_decode.models.decode_step import (
    DecodeModel,
    DecoderWeights,
    MoeOptions,
    decoder_layer,
    turn_of,
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
    """Yields (name, format, function that makes x [T, H], routing and experts)."""
    preset = get_preset(options.model)

    def random(format, distribution):
        key = jax.random.key(len(distribution))
        experts = jax.jit(make_experts, static_argnums=(1, 2, 3))(key, preset, format, distribution)
        routing = inputs.make_routing(np.random.default_rng(1), TOKENS, preset, "uniform")
        return inputs.make_x(key, TOKENS, preset), routing, experts

    for format in options.format:
        for distribution in DISTRIBUTIONS:
            yield distribution, format, functools.partial(random, format, distribution)
    for number in range(model.config.num_hidden_layers):
        yield f"bundled model, layer {number}", "mxfp8", lambda number=number: model.activations()[number]


def run_layer(options, report: Report, model: "Bundled", late) -> None:
    variants, compiled = paths(jax.default_backend() == "gpu"), {}

    def step(name, args):
        return jax.jit(functools.partial(moe, **variants[name])).lower(*args).compile()

    for case, format, make in layer_cases(options, model):
        same = dict(part="layer", case=case, format=format)
        if report.has(**same):
            continue
        if late():
            report.cut(f"layer, {case}, {format}")
            continue
        x, routing, experts = make()
        want = exact(x, routing, experts)
        scale = jnp.float32(0.999 / np.abs(want).max())
        routing = Routing(routing.ids, routing.weights * scale)
        want = exact(x, routing, experts)
        jobs = {(name, b): (x[:b], Routing(routing.ids[:b], routing.weights[:b]), experts)
                for name in variants for b in options.batch if b <= len(x)}
        new = {key: args for key, args in jobs.items() if (*key, format, experts.w_up.shape) not in compiled}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            done = pool.map(lambda key: attempt(step, key[0], new[key]), new)  # noqa: B023 (done within the iteration)
            compiled.update({(*key, format, experts.w_up.shape): found for key, found in zip(new, done, strict=True)})
        rows = []
        for (name, b), args in jobs.items():
            rows.append(dict(same, path=name, batch=b))
            try:
                program = compiled[name, b, format, experts.w_up.shape]
                if isinstance(program, Exception):
                    raise program
                rows[-1] |= compare(np.asarray(program(*args), np.float64), want[:b])
            except Exception as error:
                rows[-1]["error"] = describe(error)
        report.add(*rows)
        print(layer_summary(rows), flush=True)


# -------------------------------------------------------------------------------------------------------------- model


@functools.partial(jax.jit, static_argnums=0)
def run_one(model: DecodeModel, layer, x: jax.Array):
    """A layer on whole sequences: x [B, S, H] -> (x, ids [B, S, K])."""
    B, S, H = x.shape

    def attend(q, k, v):
        q, k, v = (a.reshape(B, S, *a.shape[1:]) for a in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return y.reshape(B * S, *y.shape[2:]), None

    turn = turn_of(model.config, jnp.tile(jnp.arange(S, dtype=jnp.int32), B))
    with jax.default_matmul_precision("highest"):
        x, _, ids = decoder_layer(model, layer, x.reshape(B * S, H), turn, attend)
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

    @functools.cache  # noqa: B019 (there is one of these)
    def activations(self):
        """(x, routing, experts in MXFP8) of every layer, for the first bytes of the text."""
        turn = turn_of(self.config, jnp.arange(TOKENS, dtype=jnp.int32))

        def attend(q, k, v):
            return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0], None

        @jax.jit
        def run(layer, x):
            found = []

            def recording(x, routing, experts):
                found.append((x, routing))
                return moe(x, routing, experts, strategy="reference")

            x, *_ = decoder_layer(DecodeModel(self.config, recording), layer, x, turn, attend)
            return x, *found[0]

        weights, calls = self.weights["mxfp8"], []
        x = weights.embed[self.windows[0, :TOKENS]].astype(jnp.bfloat16)
        for layer in weights.layers:
            x, rows, routing = run(layer, x)
            calls.append((rows, routing, layer.experts))
        return calls

    def embedded(self, model: DecodeModel, format: str) -> jax.Array:
        """x [windows, S, H]."""
        return self.weights[format].embed[self.windows[:, :-1]].astype(model.dtype)

    def nats(self, model: DecodeModel, format: str, run) -> float:
        """Mean loss per byte, in windows that start without context; `run` is the compiled `run_one`."""
        weights, x = self.weights[format], self.embedded(model, format)
        for layer in weights.layers:
            x, _ = run(layer, x)
        wide = x.astype(jnp.float32)
        wide = wide / jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + self.config.rms_norm_eps)
        h = (wide * weights.norm.astype(jnp.float32)).astype(model.dtype)
        logits = jnp.einsum("bsh,vh->bsv", h, weights.head.astype(model.dtype), preferred_element_type=jnp.float32,
                            precision="highest")
        at = self.windows[:, 1:, None]
        return float(-jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), at, axis=-1)))


def compile_all(jobs: list[tuple]) -> list:
    """`run_one` for each (model, layer, x), or the exception; one after the other lowered, side by side compiled."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        lowered = [attempt(run_one.lower, *job) for job in jobs]
        return list(pool.map(lambda low: low if isinstance(low, Exception) else attempt(low.compile), lowered))


def run_perplexity(report: Report, model: Bundled, late) -> None:
    variants = [("float32", "bf16", DecodeModel(model.config, options(strategy="reference"), dtype=jnp.float32))]
    decoders = {"warp_decode": paths(jax.default_backend() == "gpu")["ours"] | dict(strategy="warp_decode"),
                "expert_centric": dict(strategy="expert_centric"), "conventional": CONVENTIONAL}
    variants += [(name, format, DecodeModel(model.config, options(**chosen)))
                 for format in BUNDLED_FORMATS for name, chosen in decoders.items()]
    variants = [v for v in variants if not report.has(part="perplexity", path=v[0], format=v[1])]
    runs = compile_all([(decoder, model.weights[format].layers[0], model.embedded(decoder, format))
                        for _, format, decoder in variants])
    for (name, format, decoder), run in zip(variants, runs, strict=True):
        if late():
            report.cut(f"perplexity, {name}, {format}")
            continue
        row = dict(part="perplexity", path=name, format=format, bytes=int(model.windows[:, 1:].size))
        try:
            if isinstance(run, Exception):
                raise run
            nats = model.nats(decoder, format, run)
            row.update(nats_per_byte=nats, perplexity=math.exp(nats))
        except Exception as error:
            row["error"] = describe(error)
        report.add(row)
        outcome = row.get("error") or f"{row['perplexity']:.5f} ({row['nats_per_byte']:.6f} nats per byte)"
        print(f"perplexity {format:6} {name:15} {outcome}", flush=True)


def options(**chosen) -> MoeOptions:
    return MoeOptions(tuple(chosen.items()))


# -------------------------------------------------------------------------------------------------------------- drift


def run_drift(report: Report, config: Qwen3MoeConfig, layers: int, tokens: int, late) -> None:
    """Per layer and path: relative L2 distance of the residual stream from float32, and share of equal choices."""
    if report.has(part="drift", layer=layers):
        return
    report.rows = [row for row in report.rows if row["part"] != "drift"]  # of a run that was cut in the middle
    models = {"float32": DecodeModel(config, options(strategy="reference"), dtype=jnp.float32),
              "bf16 stream, exact experts": DecodeModel(config, options(strategy="reference")),
              **{name: DecodeModel(config, options(**chosen))
                 for name, chosen in paths(jax.default_backend() == "gpu").items()}}
    start = jax.random.normal(jax.random.key(5), (1, tokens, config.hidden_size), jnp.bfloat16)
    streams = {name: start.astype(model.dtype) for name, model in models.items()}
    layer = decode_model.make_layer(config, 0, "mxfp8")
    runs = dict(zip(models, compile_all([(model, layer, streams[name]) for name, model in models.items()]),
                    strict=True))
    for number in range(layers):
        if late():
            report.cut(f"drift after layer {number}")
            break
        layer = decode_model.make_layer(config, number, "mxfp8")
        ids, rows = {}, []
        for name in list(streams):
            try:
                if isinstance(runs[name], Exception):
                    raise runs[name]
                streams[name], ids[name] = jax.tree.map(np.asarray, runs[name](layer, streams[name]))
            except Exception as error:
                rows.append(dict(part="drift", path=name, layer=number + 1, error=describe(error)))
                del streams[name]
        if "float32" not in streams:
            report.add(*rows)
            break
        want = np.asarray(streams["float32"], np.float64)
        for name in ids.keys() - {"float32"}:
            distance = np.asarray(streams[name], np.float64) - want
            same = np.mean([len(np.intersect1d(a, b)) for a, b in zip(
                ids[name].reshape(tokens, -1), ids["float32"].reshape(tokens, -1), strict=True)])
            rows.append(dict(
                part="drift", path=name, layer=number + 1, same_experts=float(same / config.num_experts_per_tok),
                relative_l2=float(np.linalg.norm(distance) / np.linalg.norm(want))))
        report.add(*rows)
    for path, row in {row["path"]: row for row in report.rows if row["part"] == "drift"}.items():
        print(f"drift {path:28} after {row['layer']} layers: " + (
            row.get("error") or f"{row['relative_l2']:.2e}, same experts {row['same_experts']:.1%}"), flush=True)


# ------------------------------------------------------------------------------------------------------ command line


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=("qwen3-30b-a3b", "tiny-docs"))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8, 32, 128])
    parser.add_argument("--format", nargs="+", default=["mxfp8", "bf16"], choices=BUNDLED_FORMATS)
    parser.add_argument("--layers", type=int, default=48, help="of the model whose drift is measured")
    parser.add_argument("--tokens", type=int, default=8, help="of the sequence whose drift is measured")
    parser.add_argument("--windows", type=int, help="of held-out text; default: all")
    parser.add_argument("--parts", nargs="+", default=["perplexity", "drift", "layer"])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds after which nothing new starts")
    parser.add_argument("--fill", action="store_true", help="keep what an earlier run wrote, measure what it lacks")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    start, report = time.perf_counter(), Report(options.out / "accuracy.json", "accuracy", fill=options.fill)
    model = Bundled(options.windows)
    config = decode_model.MODEL if options.model == "qwen3-30b-a3b" else model.config
    config = dataclasses.replace(config, num_hidden_layers=options.layers)
    late = lambda: time.perf_counter() - start > options.budget
    parts = dict(perplexity=lambda: run_perplexity(report, model, late),
                 drift=lambda: run_drift(report, config, options.layers, options.tokens, late),
                 layer=lambda: run_layer(options, report, model, late))
    for name in options.parts:
        try:
            parts[name]()
        except Exception as error:
            report.add(dict(part=name, error=describe(error)))
            print(f"{name}: {describe(error)}", flush=True)
        print(f"-- {name}: after {time.perf_counter() - start:.0f} s", flush=True)
    wrong = report.finish()
    draw(plot, report.path.with_suffix(".png"), report.rows)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
