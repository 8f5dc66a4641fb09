"""Whole decode steps of a Qwen3-30B-A3B-shaped model at full size: tokens/s, and where each microsecond goes.

    python -m bench.decode --out bench/results

48 layers, random weights made on the device in bf16 or MXFP8, KV cache in bf16 with random content, greedy sampling on
the device. Only what runs the routed experts differs between the columns. Several steps are one call; time is the
device's timeline, CUDA graphs on. The ceiling is a kernel that reads memory and nothing else, in the same process;
bytes are the weights that a step uses (experts counted from the ids of a real step) and the cached keys and values.
Writes decode_steps.json and decode_steps.png after every group; stops early when --budget is used up.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import small_batch
from bench.decode_report import OURS, describe_row, details, plot, speedups
from bench.peers import STRATEGIES
from jax_warp_decode import moe
from jax_warp_decode.measure import inputs, parts, read_kernel, timing
from jax_warp_decode.models import Qwen3MoeConfig
from jax_warp_decode.models.decode_loop import decode_tokens
from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights, LayerWeights, decode_step_with_routing
from jax_warp_decode.presets import Preset

MODEL = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, rope_theta=1e6,
    max_position_embeddings=262144)
STEPS, CALLS = 4, 4  # steps per call; calls, of which the first is dropped
SHARED_LEN = 32768
FORMS = ("fused", "split_k", "cudnn", "xla")  # of the step around the experts, the first that works is used


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      format: of the experts.
      strategy: "auto" or a key of `bench.peers.STRATEGIES`.
      batch, context: rows, and positions that each of them sees.
      attention: see `DecodeModel`; the same for all that are compared.
    """

    format: str
    strategy: str
    batch: int
    context: int
    attention: str

    @property
    def max_len(self) -> int:
        """Positions that the cache has room for: one program for many contexts, where attention looks at lengths."""
        shared = self.attention == FORMS[0] and self.batch <= 4 and self.context <= SHARED_LEN
        return SHARED_LEN if shared else self.context

    @property
    def program(self) -> tuple:
        """Cases that are equal in this run the same compiled step."""
        return self.format, self.strategy, self.batch, self.max_len, self.attention


def default_cases(attention: str) -> list[Case]:
    """In order of importance within a format; what a format's weights are made for comes together."""
    small, contexts = (1, 2, 4), (1024, 4096, 16384, 32768)
    grid = itertools.product
    return [
        *(Case("mxfp8", OURS, 1, c, attention) for c in contexts),
        *(Case("mxfp8", OURS, b, c, attention) for b, c in grid((2, 4), contexts)),
        *(Case("mxfp8", OURS, b, 1024, attention) for b in (8, 32)),
        Case("mxfp8", OURS, 1, 131072, attention),
        *(Case("mxfp8", OURS, 1, 1024, other) for other in FORMS if other != attention),
        *(Case("mxfp8", "expert_centric_mxfp8", b, 1024, attention) for b in (1, 4)),
        *(Case("bf16", OURS, b, c, attention) for b, c in grid(small, contexts)),
        *(Case("bf16", OURS, b, 1024, attention) for b in (8, 32)),
        *(Case("bf16", "expert_centric", b, 1024, attention) for b in (1, 4)),
        *(Case("bf16", "tokamax_mosaic", b, c, attention) for b, c in grid(small, contexts)),
        Case("bf16", "tokamax_mosaic", 8, 1024, attention),
        *(Case("bf16", "lax_ragged_dot", b, 1024, attention) for b in (1, 4)),
    ]


AS_IT_IS = STRATEGIES["warp_decode"].prepare


def take_memory() -> None:
    """Lets JAX have nearly all of the GPU: weights take 62 GB, caches up to 50. Before its first use."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def layer_function(strategy: str):
    return moe if strategy == OURS else STRATEGIES[strategy].layer


def layout(case: Case):
    """What brings the experts into the layout of the case's strategy."""
    return AS_IT_IS if case.strategy == OURS else STRATEGIES[case.strategy].prepare


@functools.cache
def decode_model(strategy: str, attention: str, layers: int) -> DecodeModel:
    return DecodeModel(dataclasses.replace(MODEL, num_hidden_layers=layers), layer_function(strategy), attention)


def model_of(case: Case, weights: DecoderWeights) -> DecodeModel:
    return decode_model(case.strategy, case.attention, len(weights.layers))


# ------------------------------------------------------------------------------------------------------------ weights


def make_layer(config: Qwen3MoeConfig, number: int, format: str) -> LayerWeights:
    """A layer of random weights, scaled so that every projection keeps the size of its input."""
    c = config
    w_qkv, w_o, w_router = _dense_weights(c, jax.random.key(1000 + number))
    gain, head_gain = (jnp.ones((n,), jnp.bfloat16) for n in (c.hidden_size, c.head_dim))
    preset = Preset("", c.hidden_size, c.moe_intermediate_size, c.num_experts, c.num_experts_per_tok, format)
    experts = inputs.make_experts(jax.random.key(number), preset, format)
    return LayerWeights(gain, w_qkv, head_gain, head_gain, w_o, gain, w_router, experts)


def _matrix(key, n, m):
    return jax.random.normal(key, (n, m), jnp.bfloat16) * jnp.bfloat16(1 / math.sqrt(m))


@functools.partial(jax.jit, static_argnums=0)
def _dense_weights(c: Qwen3MoeConfig, key):
    heads, key_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    keys = jax.random.split(key, 3)
    return (_matrix(keys[0], heads + 2 * key_heads, c.hidden_size), _matrix(keys[1], c.hidden_size, heads),
            _matrix(keys[2], c.num_experts, c.hidden_size))


def make_weights(format: str, layers: int) -> DecoderWeights:
    """Random weights of the whole decoder."""
    V, H = MODEL.vocab_size, MODEL.hidden_size
    embed = jax.jit(lambda key: jax.random.normal(key, (V, H), jnp.bfloat16))(jax.random.key(1))
    head = jax.jit(lambda key: _matrix(key, V, H))(jax.random.key(2))
    found = tuple(make_layer(MODEL, number, format) for number in range(layers))
    return jax.block_until_ready(DecoderWeights(embed, found, jnp.ones((H,), jnp.bfloat16), head))


def prepared(weights: DecoderWeights, prepare) -> DecoderWeights:
    """The same weights with every layer's experts in another layout; one layer at a time, freeing the old one."""
    layers = list(weights.layers)
    for number, layer in enumerate(layers):
        experts = jax.block_until_ready(prepare(layer.experts))
        for array in jax.tree.leaves(layer.experts):
            array.delete()
        layers[number] = dataclasses.replace(layer, experts=experts)
    return dataclasses.replace(weights, layers=tuple(layers))


def make_cache(model: DecodeModel, case: Case, spent: int):
    """A cache with random content, so many positions filled that `spent` steps reach `context` of them."""
    cache = jax.eval_shape(lambda: model.new_cache(case.batch, case.max_len))

    @functools.partial(jax.jit, static_argnums=1)
    def random(key, like):
        return jax.random.normal(key, like.shape, like.dtype)

    flat, tree = jax.tree.flatten((cache.k, cache.v))
    like = jax.ShapeDtypeStruct(flat[0].shape, flat[0].dtype)
    k, v = jax.tree.unflatten(tree, [random(jax.random.key(i), like) for i in range(len(flat))])
    return dataclasses.replace(cache, k=k, v=v, lengths=jnp.full((case.batch,), case.context - spent, jnp.int32))


# ------------------------------------------------------------------------------------------------------------- running


def lower(case: Case, weights):
    model = model_of(case, weights)
    cache = jax.eval_shape(lambda: model.new_cache(case.batch, case.max_len))
    tokens = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    step = jax.jit(decode_tokens, static_argnums=(0, 4), donate_argnums=2)
    return step.lower(model, weights, cache, tokens, STEPS)


def first_tokens(case: Case) -> jax.Array:
    return jnp.asarray(np.random.default_rng(case.batch).integers(0, MODEL.vocab_size, case.batch), jnp.int32)


def unique_experts(weights, batch: int, attention: str) -> float:
    """Mean number of experts that a layer uses in a step of `batch` rows."""
    case = Case("", OURS, batch, 1024, attention)
    model = model_of(case, weights)
    cache = make_cache(model, case, 1)
    # Not jitted as a whole: a layer compiles once, which is quicker.
    ids = np.asarray(decode_step_with_routing(model, weights, cache, first_tokens(case))[2])
    return statistics.mean(len(np.unique(layer)) for layer in ids)


def check_forms(weights, forms) -> dict:
    """Per form of the step: how far its logits are from those through XLA alone, or what went wrong.

    Relative L2, the median over rows: rounding moves a near tie of the router in some row now and then.
    """
    two = dataclasses.replace(weights, layers=weights.layers[:2])
    found, want = {}, None
    for name in ("xla", *(form for form in forms if form != "xla")):
        case = Case("", OURS, 8, 256, name)  # more rows than share a program: a short cache
        try:
            model = model_of(case, two)
            cache = make_cache(model_of(dataclasses.replace(case, attention="xla"), two), case, 100)
            if model.new_cache(1, 1).heads_first:
                turned = [tuple(a.swapaxes(1, 2) for a in arrays) for arrays in (cache.k, cache.v)]
                cache = dataclasses.replace(cache, k=turned[0], v=turned[1], heads_first=True)
            logits, cache, _ = decode_step_with_routing(model, two, cache, first_tokens(case))
            logits = np.asarray(decode_step_with_routing(model, two, cache, first_tokens(case))[0], np.float64)
            want = logits if want is None else want
            norm = functools.partial(np.linalg.norm, axis=1)
            found[name] = float(np.median(norm(logits - want) / norm(want)))
            if not found[name] < 0.02:
                raise ArithmeticError(f"{small_batch.WRONG}: relative L2 {found[name]}")
        except Exception as error:
            found[name] = small_batch.describe(error)
        print(f"form {name}: {found[name]}", flush=True)
    return {name: found[name] for name in (*forms, "xla") if name in found}


def run_group(cases: list[Case], weights, options, facts: dict) -> list[dict]:
    """Compiles all cases side by side, then runs each, then all of them in one trace."""
    rows = {case: dict(dataclasses.asdict(case), max_len=case.max_len) for case in cases}

    def compile_one(lowered):
        try:
            return timing.compile_step(lowered)
        except Exception as error:
            return error

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        pending = {}
        for case in cases:
            if case.program not in pending:
                try:
                    pending[case.program] = pool.submit(compile_one, lower(case, weights))
                except Exception as error:
                    pending[case.program] = concurrent.futures.Future()
                    pending[case.program].set_result(error)
        lowered_after = time.perf_counter() - start
        steps = {case: pending[case.program].result() for case in cases}
    print(f"  {len(pending)} programs: lowered in {lowered_after:.0f} s, compiled after "
          f"{time.perf_counter() - start:.0f} s", flush=True)
    spent = STEPS * (CALLS + 3)
    runnable = []
    for case, step in steps.items():
        try:
            if isinstance(step, Exception):
                raise step
            rows[case].update(_wall(case, step, weights, spent))
            runnable.append(case)
        except Exception as error:
            rows[case]["error"] = small_batch.describe(error)
    jobs = [(functools.partial(_prepare, case, weights, spent),
             functools.partial(_calls, steps[case], weights)) for case in runnable]
    try:
        traced = timing.record_runs(jobs) if jobs else []
    except Exception as error:
        traced = []
        print(f"  trace failed: {small_batch.describe(error)}", flush=True)
    for case, events in zip(runnable, traced or [[]] * len(runnable), strict=True):
        rows[case].update(_summary(case, steps[case], events, weights, facts))
    return list(rows.values())


def _prepare(case, weights, spent):
    return first_tokens(case), make_cache(model_of(case, weights), case, spent)


def _calls(step, weights, state, calls=CALLS):
    tokens, cache = state
    for _ in range(calls):
        _, tokens, cache = step(weights, cache, tokens)
    return tokens


def _wall(case, step, weights, spent) -> dict:
    """Host clock over queued calls, after one call that warms up; and what the compiled step needs."""
    tokens, cache = _prepare(case, weights, spent)
    memory = step.memory_analysis()
    cache_bytes = sum(a.nbytes for a in jax.tree.leaves(cache))
    ids, tokens, cache = step(weights, cache, tokens)
    jax.block_until_ready(ids)
    start = time.perf_counter()
    for _ in range(2):
        ids, tokens, cache = step(weights, cache, tokens)
    ids = np.asarray(ids)
    wall = (time.perf_counter() - start) / (2 * STEPS) * 1e6
    if ids.min() < 0 or ids.max() >= MODEL.vocab_size:
        raise ArithmeticError(small_batch.WRONG)
    return dict(wall_us=wall, temp_bytes=memory.temp_size_in_bytes, aliased_bytes=memory.alias_size_in_bytes,
                cache_bytes=cache_bytes, last_ids=ids[-1].tolist()[:8])


def _summary(case, step, events, weights, facts) -> dict:
    unique = facts["unique"].get(case.batch, float("nan"))
    by_part = parts.step_bytes(weights, batch=case.batch, context=case.context, unique=unique,
                               expert_bytes=facts["expert_bytes"][case.format],
                               row_bytes=2 * MODEL.num_key_value_heads * MODEL.head_dim * 2)
    total = sum(by_part.values())
    hlo, layers = step.as_text(), len(weights.layers)
    count, written = parts.stages(hlo, "experts")
    found = dict(unique_experts=unique, bytes=by_part, read_us=total / facts["bytes_per_us"],
                 expert_stages=count / layers, expert_bytes_written=written / layers)
    runs = timing.split_runs(events, CALLS)[1:]
    clock = "device"
    if runs:
        us = statistics.median(parts.span_us(run) for run in runs) / STEPS
        # From the start of the first kept call to the end of the last: also what lies between calls.
        kept = [event for run in runs for event in run]
        with_calls = parts.span_us(kept) / (STEPS * len(runs))
        scopes = parts.kernel_scopes(hlo)
        split = parts.split_parts(kept, scopes, STEPS * len(runs))
        found.update(parts={name: dataclasses.asdict(part) for name, part in split.items()}, with_calls_us=with_calls,
                     launches=sum(part.kernels for part in split.values()))
    elif events:  # calls cannot be told apart: all of them
        us, clock = parts.span_us(events) / (STEPS * CALLS), "device, first call included"
    else:
        us, clock = float("nan"), "none"
    return dict(found, us=us, clock=clock, tokens_per_s=case.batch / us * 1e6,
                fraction_of_read=found["read_us"] / us)


# ------------------------------------------------------------------------------------------------------ command line


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, help="only these of the grid")
    parser.add_argument("--context", nargs="+", type=int, help="only these of the grid")
    parser.add_argument("--format", nargs="+", default=["mxfp8", "bf16"], choices=inputs.FORMATS)
    parser.add_argument("--strategies", nargs="+", help="only these of the grid")
    parser.add_argument("--layers", type=int, default=MODEL.num_hidden_layers)
    parser.add_argument("--form", nargs="+", default=FORMS, choices=FORMS,
                        help="of the step around the experts: the first that works is used, the others at B = 1 only")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no new group starts")
    parser.add_argument("--group", type=int, default=8, help="cases compiled side by side and traced together")
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    return parser.parse_args(argv)


def main(argv=None) -> None:
    options = parse(argv)
    take_memory()
    if jax.default_backend() != "gpu":
        raise SystemExit("bench.decode measures an NVIDIA GPU; JAX sees none")
    start = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    results, facts = [], dict(bytes_per_us=read_kernel.bytes_per_us(), unique={}, expert_bytes={}, forms={})
    print(f"read ceiling {facts['bytes_per_us'] / 1e6:.2f} TB/s", flush=True)
    path = options.out / "decode_steps.json"
    for format in options.format:
        weights = make_weights(format, options.layers)
        if not facts["forms"]:
            facts["forms"] = check_forms(weights, options.form)
            working = [name for name, outcome in facts["forms"].items() if isinstance(outcome, float)]
            attention = working[0]
        one = weights.layers[0].experts
        facts["expert_bytes"][format] = sum(a.nbytes for a in jax.tree.leaves(one)) // MODEL.num_experts
        print(f"{format}: weights after {time.perf_counter() - start:.0f} s", flush=True)
        mine = [c for c in default_cases(attention) if c.format == format and c.attention in working
                and (not options.batch or c.batch in options.batch)
                and (not options.context or c.context in options.context)
                and (not options.strategies or c.strategy in options.strategies)]
        new = [batch for batch in dict.fromkeys(c.batch for c in mine) if batch not in facts["unique"]]
        with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
            count = functools.partial(unique_experts, weights, attention=attention)
            facts["unique"].update(zip(new, pool.map(count, new), strict=True))
        print(f"experts used per layer {facts['unique']}", flush=True)
        for prepare, cases in itertools.groupby(sorted(mine, key=lambda c: layout(c) is not AS_IT_IS), key=layout):
            if prepare is not AS_IT_IS:
                weights = prepared(weights, prepare)
            for group in itertools.batched(cases, options.group):
                if time.perf_counter() - start > options.budget:
                    print(f"out of time: {len(group)} cases from {group[0]} on were not run", flush=True)
                    continue
                found = run_group(list(group), weights, options, facts)
                results += found
                for row in found:
                    show = row["batch"] == 1 and row["context"] <= 1024
                    print(details(row) if show else describe_row(row), flush=True)
                meta = small_batch.metadata("decode")
                path.write_text(json.dumps(dict(
                    meta=meta, facts=facts, speedups=speedups(results), results=results), indent=1) + "\n")
        del weights
    for row in speedups(results):
        print(f"B={row['batch']} {row['context']:6} {row['format']:6} over {row['peer']} in {row['peer_format']}: step "
              f"{row['tokens_per_s']:.2f} x, experts {row['experts']:.2f} x")
    if any("parts" in r for r in results):
        plot(path.with_suffix(".png"), results)
    print(f"wrote {path} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
