"""What a shared expert costs: appended to the routed ones (no launch of its own), or run by a second call of the op.

    python -m bench.shared_expert --out OUT [--model qwen3-next-80b-a3b] [--format bf16 mxfp8] [--batch 1 8 32]

Prints microseconds per layer for the routed experts alone, for both forms, and writes OUT/shared_expert.json. The
bytes of one expert more set the least that a shared expert can cost. Needs a GPU.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode import ExpertWeights, Routing, choose, moe
from jax_warp_decode.measure.inputs import make_experts, make_routing, make_x
from jax_warp_decode.measure.timing import compile_step, lower_step, time_steps
from jax_warp_decode.presets import get_preset
from jax_warp_decode.shared_experts import append_shared, with_shared


def routed(x, routing, gate, experts, shared, joined):
    return moe(x, routing, experts)


def appended(x, routing, gate, experts, shared, joined):
    return moe(x, with_shared(routing, experts.num_experts, joined.num_experts, gate), joined)


def second_call(x, routing, gate, experts, shared, joined):
    own = Routing(jnp.zeros(gate.shape, jnp.int32), gate)
    y = moe(x, routing, experts, out_dtype=jnp.float32) + moe(x, own, shared, out_dtype=jnp.float32)
    return y.astype(x.dtype)


FORMS = (routed, appended, second_call)


def make_layers(preset, format: str, batch: int, layers: int, weights: list[tuple[ExpertWeights, ...]]):
    rng = np.random.default_rng(batch)
    return [(make_x(jax.random.key(i), batch, preset), make_routing(rng, batch, preset, "uniform"),
             jnp.asarray(rng.random((batch, 1), np.float32)), *weights[i]) for i in range(layers)]


def measure(preset, format: str, batches: list[int], layers: int):
    """Yields (batch, form, microseconds per layer or a message)."""
    weights = []
    for i in range(layers):
        keys = jax.random.split(jax.random.key(i))
        experts = make_experts(keys[0], preset, format)
        shared = make_experts(keys[1], dataclasses.replace(preset, num_experts=1), format)
        weights.append((experts, shared, jax.jit(append_shared)(experts, shared)))
    for batch in batches:
        args = make_layers(preset, format, batch, layers, weights)
        apart, joined = (np.asarray(jax.jit(form)(*args[0]), np.float64) for form in (second_call, appended))
        error = np.linalg.norm(apart - joined) / np.linalg.norm(apart)
        if not error < 1e-2:
            yield batch, "difference", f"WRONG: {error:.1e}"
        for form in FORMS:
            try:
                timing, = time_steps([(compile_step(lower_step(form, args, form.__name__)), args)])
                yield batch, form.__name__, timing.us
            except Exception:
                yield batch, form.__name__, traceback.format_exc().strip().splitlines()[-1][:200]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="qwen3-next-80b-a3b")
    parser.add_argument("--format", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(argv)
    preset, rows = get_preset(options.model), []
    for format in options.format:
        for batch, form, us in measure(preset, format, options.batch, options.layers):
            rows.append(dict(model=preset.name, format=format, batch=batch, form=form, us=us))
            shown = us if isinstance(us, str) else f"{us:.1f} us"
            print(f"{preset.name} {format} B={batch} {form}: {shown}", flush=True)
        shape = jax.eval_shape(lambda: make_experts(jax.random.key(0), preset, format))  # noqa: B023
        print(f"  {format}: {choose(1, shape, experts_per_token=preset.experts_per_token, x_dtype=jnp.bfloat16)}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "shared_expert.json").write_text(json.dumps(rows, indent=1))
    return int(any(isinstance(row["us"], str) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
