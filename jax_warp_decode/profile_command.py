"""`jax-warp-decode profile`: traces decode steps on a GPU and says where each microsecond goes."""

import argparse
from typing import cast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="DIR",
                        help="a Hugging Face folder of Qwen3-MoE, Mixtral or gpt-oss (default: the bundled model)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, metavar="S",
                        help="cached positions that each row sees (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps in the trace (default: %(default)s)")
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="how the experts run (default: %(default)s)")
    parser.add_argument("--activation-format", choices=("mxfp8",),
                        help="quantise the activations, as conventional serving does (with expert_centric)")
    parser.add_argument("--out", default="profile", metavar="DIR",
                        help="folder for the trace, which Perfetto and xprof open (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    """Runs the command; bad input raises the package's errors."""
    from rich.console import Console

    run(options, Console(highlight=False))
    return 0


def run(options: argparse.Namespace, console) -> None:
    """`main` on a console of the caller's."""
    import dataclasses
    import functools
    import pathlib
    import statistics

    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode.checkpoints import load_model
    from jax_warp_decode.choose import no_gpu_reason
    from jax_warp_decode.demo import bundled_model
    from jax_warp_decode.errors import ArgumentError, UnsupportedError
    from jax_warp_decode.measure import parts, read_kernel, timing
    from jax_warp_decode.models.decode_loop import decode_tokens
    from jax_warp_decode.models.decode_step import (
        DecodeModel,
        DecoderWeights,
        MoeOptions,
        decode_step_with_routing,
    )

    for name in ("batch", "context", "steps"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"{name}: got {getattr(options, name)}, expected at least 1")
    if reason := no_gpu_reason():
        raise UnsupportedError(f"profile: traces a GPU: {reason}")
    folder = bundled_model("bf16") if options.checkpoint is None else pathlib.Path(options.checkpoint)
    module = load_model(folder, strategy=options.strategy, dtype=jnp.bfloat16)
    model, weights = DecodeModel.of(module), DecoderWeights.from_model(module)
    if options.activation_format:
        options_of = cast(MoeOptions, model.experts).options
        experts = MoeOptions((*options_of, ("activation_format", options.activation_format)))
        model = dataclasses.replace(model, experts=experts)
    config, B, steps = model.config, options.batch, options.steps

    def cache():
        empty = model.new_cache(B, options.context + 2 * steps)
        normal = functools.partial(jax.random.normal, shape=empty.k[0].shape, dtype=empty.k[0].dtype)
        keys = jax.random.split(jax.random.key(0), 2 * len(empty.k))
        return dataclasses.replace(empty, k=tuple(map(normal, keys[::2])), v=tuple(map(normal, keys[1::2])),
                                   lengths=jnp.full((B,), options.context - 1, jnp.int32))

    tokens = jax.random.randint(jax.random.key(1), (B,), 0, config.vocab_size, jnp.int32)
    with console.status("compiling"):
        ids = np.asarray(decode_step_with_routing(model, weights, cache(), tokens)[2])
        lowered = jax.jit(decode_tokens, static_argnums=(0, 4), donate_argnums=2).lower(
            model, weights, cache(), tokens, steps)
        step = lowered.compile(compiler_options=timing.GRAPH_OPTIONS)
        _, tokens, state = jax.block_until_ready(step(weights, cache(), tokens))
    with jax.profiler.trace(options.out, create_perfetto_trace=True):
        jax.block_until_ready(step(weights, state, tokens))
    trace = max(pathlib.Path(options.out).glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    events = timing.device_events(jax.profiler.ProfileData.from_file(str(trace)))
    if not events:
        raise UnsupportedError(f"profile: {trace} holds no events of a GPU; is another profiler running?")
    experts = weights.layers[0].experts
    nbytes = parts.step_bytes(
        weights, batch=B, context=options.context, unique=statistics.mean(len(np.unique(layer)) for layer in ids),
        expert_bytes=sum(a.nbytes for a in jax.tree.leaves(experts)) / experts.num_experts,
        row_bytes=2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)
    split = parts.split_parts(events, parts.kernel_scopes(step.as_text() or ""), steps)
    ceiling = read_kernel.bytes_per_us(1e9)
    console.print(table(split, nbytes, ceiling, config.num_hidden_layers))
    us = sum(part.us for part in split.values())
    console.print(f"{us:,.1f} us per step, {B / us * 1e6:,.0f} tokens/s, {sum(nbytes.values()) / ceiling / us:.1%} of "
                  f"reading {sum(nbytes.values()) / 1e6:,.1f} MB at {ceiling / 1e6:.2f} TB/s", soft_wrap=True)
    perfetto = trace.parent / "perfetto_trace.json.gz"
    console.print(f"trace: {trace} (xprof), {perfetto} (ui.perfetto.dev)", soft_wrap=True, markup=False)


def table(split: dict, nbytes: dict, ceiling: float, layers: int):
    """A line per part: launches per layer, time, bytes, share of the ceiling (bytes per us) and its longest kernels."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column("part")
    for name in ("launches/layer", "us/step", "MB", "TB/s", "of read"):
        found.add_column(name, justify="right")
    found.add_column("kernels", overflow="fold")
    for name, part in split.items():
        size = nbytes.get(name)
        moved = ["", "", ""] if not size else [
            f"{size / 1e6:,.2f}", f"{size / part.us / 1e6:.2f}", f"{size / ceiling / part.us:.0%}"]
        found.add_row(name, f"{part.kernels / layers:.2f}" if part.kernels else "", f"{part.us:,.1f}", *moved,
                      ", ".join(list(part.names)[:3]))
    return found
