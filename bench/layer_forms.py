"""A layer's experts alone, with the router before them, and out of a stack of layers.

    python -m bench.layer_forms --out bench/results [--model qwen3-30b-a3b] [--format bf16 mxfp8] [--batch 1 2 4 8]

Every form runs the same experts on the same tokens. "experts" is given its routing; "router and experts" computes it,
in one launch on a GPU, from weights of its own in every layer, and the routing that it finds is the others'; "stacked"
reads its layer in place from weights [L, E, ..] by an index. What a router adds, and that a stack adds nothing, is the
difference. Microseconds per layer, cold, as in bench.small_batch. Needs a GPU.
"""

import argparse
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

from bench.report import Report, need_gpu
from jax_warp_decode import moe, route_tokens
from jax_warp_decode.measure.inputs import make_experts, make_x
from jax_warp_decode.measure.variants import Variant, compare, compile_reference, describe, measure
from jax_warp_decode.presets import get_preset

TOLERANCE = 1e-2  # relative L2 error against the float32 reference


def make_layers(preset, batch: int, weights: list) -> list[tuple]:
    """Of each layer: x, router weight [E, H], experts, and the routing that the router finds."""
    found = []
    for i, (router, experts) in enumerate(weights):
        x = make_x(jax.random.key(batch * len(weights) + i), batch, preset)
        found.append((x, router, experts, route_tokens(x, router, preset.experts_per_token)))
    return found


def forms(preset, layers: list[tuple], stack) -> dict[str, tuple]:
    """Name -> a form of the layer, and what it is called with for every layer."""
    def routed(x, router, experts):
        return moe(x, route_tokens(x, router, preset.experts_per_token), experts)

    def stacked(x, routing, stack, layer):
        return moe(x, routing, stack, layer=layer)

    return {
        "experts": (moe, [(x, routing, experts) for x, _, experts, routing in layers]),
        "router and experts": (routed, [(x, router, experts) for x, router, experts, _ in layers]),
        "stacked": (stacked, [(x, routing, stack, jnp.int32(i)) for i, (x, _, _, routing) in enumerate(layers)])}


def run(preset, format: str, options, weights: list) -> list[dict]:
    """The rows of a format, checked and, on a GPU, timed."""
    rows = []
    stack = jax.jit(lambda *all: jax.tree.map(lambda *a: jnp.stack(a), *all))(*(experts for _, experts in weights))
    for batch in options.batch:
        layers = make_layers(preset, batch, weights)
        x, _, experts, routing = layers[0]
        arguments = x.astype(jnp.float32), routing, experts
        check = compare([compile_reference(*arguments)(*arguments)], TOLERANCE)
        found = [Variant(dict(model=preset.name, format=format, batch=batch, form=name), form, calls, check)
                 for name, (form, calls) in forms(preset, layers, stack).items()]
        measure(found, options.steps)
        alone = found[0].row.get("us", float("nan"))
        for variant in found:
            row = variant.row
            if "us" in row:
                row["added_us"] = row["us"] - alone
            print(f"{format:6} B={batch:<3} {row['form']:20} " + (
                row.get("error") or f"{row.get('us', float('nan')):8.2f} us  added {row.get('added_us', 0):+.2f}"),
                flush=True)
            rows.append(row)
    return rows


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    need_gpu("layer_forms")
    start, preset = time.monotonic(), get_preset(options.model)
    report = Report(options.out / "layer_forms.json", "layer_forms")
    for format in options.format:
        try:
            keys = [jax.random.split(jax.random.key(i)) for i in range(options.layers)]
            shape = preset.num_experts, preset.hidden
            weights = [((jax.random.normal(a, shape) / preset.hidden**0.5).astype(jnp.bfloat16),
                        make_experts(b, preset, format)) for a, b in keys]
            report.add(*run(preset, format, options, weights))
        except Exception as error:
            report.add(dict(model=preset.name, format=format, form="", batch=0, error=describe(error)))
            print(f"{format}: {describe(error)}", flush=True)
        print(f"-- {time.monotonic() - start:.0f} s", flush=True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
