"""What a shared expert costs: appended to the routed ones (no launch of its own), or run by a second call of the op.

    python -m bench.shared_expert --out OUT [--model qwen3-next-80b-a3b] [--format bf16 mxfp8] [--batch 1 8 32]

Prints microseconds per layer for the routed experts alone, for both forms, and writes OUT/shared_expert.json. The
bytes of one expert more set the least that a shared expert can cost. Needs a GPU.
"""

import argparse
import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report, need_gpu
from jax_warp_decode import ExpertWeights, Routing, choose, moe
from jax_warp_decode.measure.inputs import make_experts, make_routing, make_x
from jax_warp_decode.measure.variants import Variant, compare, describe, measure
from jax_warp_decode.presets import get_preset
from jax_warp_decode.shared_experts import append_shared, with_shared

TOLERANCE = 1e-2  # relative L2 error against the float32 reference


def routed(x, routing, gate, experts, shared, joined):
    return moe(x, routing, experts)


def appended(x, routing, gate, experts, shared, joined):
    return moe(x, with_shared(routing, experts.num_experts, joined.num_experts, gate), joined)


def second_call(x, routing, gate, experts, shared, joined):
    own = Routing(jnp.zeros(gate.shape, jnp.int32), gate)
    y = moe(x, routing, experts, out_dtype=jnp.float32) + moe(x, own, shared, out_dtype=jnp.float32)
    return y.astype(x.dtype)


def reference(x, routing, gate, experts, shared, joined):
    ids = with_shared(routing, experts.num_experts, joined.num_experts, gate)
    return moe(x.astype(jnp.float32), ids, joined, strategy="reference")


def make_weights(preset, format: str, layers: int) -> list[tuple[ExpertWeights, ...]]:
    """The routed experts, the shared one, and both joined, of each layer."""
    weights = []
    for i in range(layers):
        keys = jax.random.split(jax.random.key(i))
        experts = make_experts(keys[0], preset, format)
        shared = make_experts(keys[1], dataclasses.replace(preset, num_experts=1), format)
        weights.append((experts, shared, jax.jit(append_shared)(experts, shared)))
    return weights


def make_layers(preset, batch: int, weights: list[tuple[ExpertWeights, ...]]) -> list[tuple]:
    rng = np.random.default_rng(batch)
    return [(make_x(jax.random.key(i), batch, preset), make_routing(rng, batch, preset, "uniform"),
             jnp.asarray(rng.random((batch, 1), np.float32)), *layer) for i, layer in enumerate(weights)]


def variants(preset, format: str, batch: int, weights) -> list[Variant]:
    layers = make_layers(preset, batch, weights)
    check = compare([jax.jit(reference)(*layers[0])], TOLERANCE)
    row = dict(model=preset.name, format=format, batch=batch)
    checks = {routed: lambda outputs: {}, appended: check, second_call: check}
    return [Variant(dict(row, form=form.__name__), form, layers, found) for form, found in checks.items()]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="qwen3-next-80b-a3b")
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)
    need_gpu("shared_expert")
    preset, report = get_preset(options.model), Report(options.out / "shared_expert.json", "shared_expert")
    for format in options.format:
        try:
            weights = make_weights(preset, format, options.layers)
            rows = measure([v for batch in options.batch for v in variants(preset, format, batch, weights)],
                           options.steps)
        except Exception as error:  # of one format, such as too little memory
            rows = [dict(model=preset.name, format=format, batch=0, form="", error=describe(error))]
        for row in rows:
            outcome = row.get("error") or f"{row['us']:.1f} us"
            print(f"{preset.name} {format} B={row['batch']} {row['form']}: {outcome}", flush=True)
        report.add(*rows)
        weights = None  # before those of the next format
        shape = jax.eval_shape(lambda: make_experts(jax.random.key(0), preset, format))  # noqa: B023
        print(f"  {format}: {choose(1, shape, experts_per_token=preset.experts_per_token, x_dtype=jnp.bfloat16)}")
    return max(report.finish(), int(any("error" in row for row in report.rows)))


if __name__ == "__main__":
    sys.exit(main())
