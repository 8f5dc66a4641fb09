"""Checks the one-launch router against the reference and times it beside what XLA makes of the same router.

    python -m bench.tune_router --out bench/results

Correctness first: random inputs, half of them with many exactly equal rows. Then time, for each shape and number of
tokens. A step is a chain of layers, each with a router weight and a window of memory of its own, which is read before
the router runs and stands for the expert weights: nothing of a router weight is left in the L2 cache when its turn
comes. "added" is the time of that chain less the time of the reads alone, per layer: what a router costs a decode step.
"kernel" is the time inside the router's kernels. "warm" is a chain of routers alone, all with one weight.
"""

import argparse
import functools
import itertools
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report, need_gpu
from jax_warp_decode.kernels.router import RouterConfig, moe_router
from jax_warp_decode.measure.read_kernel import read, window
from jax_warp_decode.measure.variants import WRONG, Variant, describe, measure
from jax_warp_decode.route_tokens import route_tokens
from jax_warp_decode.routing import route

SHAPES = ((128, 2048, 8), (256, 2048, 8), (256, 7168, 8))  # E, H, K
COLD_BYTES = 200_000_000  # read in a step besides the routers: several times the L2 cache of an H200
GOAL_US = 3.0


def check(seeds: int) -> dict:
    """Compares ids and weights with `route` on float64 logits; returns what was compared. Raises on a difference."""
    compared = close = 0
    worst = 0.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        E, H, K = SHAPES[seed % len(SHAPES)]
        T = (1, 2, 4, 8)[seed % 4]
        x = jnp.asarray(rng.standard_normal((T, H)), jnp.bfloat16)
        w = np.asarray(rng.standard_normal((E, H)) / math.sqrt(H), jnp.bfloat16)
        rows = rng.integers(0, E // 3, E) if seed % 2 else np.arange(E)  # half of the draws have many equal rows
        logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64)[rows].T
        renormalize = bool(seed % 3)
        ids, weights = map(np.asarray, moe_router(x, jnp.asarray(w[rows]), K, renormalize=renormalize))
        want = route(jnp.asarray(logits, jnp.float32), K, renormalize=renormalize)
        # Different rows whose logits differ by less than the rounding of a sum may swap; equal rows may not.
        error = 6 * 2.0**-24 * math.sqrt(2 * H) * 1.5
        for t in range(T):
            compared += 1
            if (ids[t] == np.asarray(want.ids[t])).all():
                relative = np.abs(weights[t] / np.asarray(want.weights[t]) - 1).max()
                worst = max(worst, float(relative))
                assert relative < 1e-4, (seed, t, weights[t], want.weights[t])
                continue
            distinct = np.sort(np.unique(logits[t]))[::-1][:K + 1]
            assert (distinct[:-1] - distinct[1:]).min() < 2 * error, (seed, t, ids[t], want.ids[t])
            assert len(set(ids[t])) == K, (seed, t, ids[t])
            close += 1
    return dict(tokens=compared, too_close_to_tell=close, largest_relative_error_of_weights=worst)


def candidates(T: int, E: int, H: int) -> list[RouterConfig]:
    """The heuristic first, then other clusters, experts per warp and unrolls."""
    found = [RouterConfig.heuristic(T, E, H, 2)]
    for cluster, rows, in_flight in itertools.product((16, 8), (1, 2), (8, 14)):
        warpgroups, steps = E // (4 * cluster * rows), math.ceil(H / 256)
        if 1 <= warpgroups <= 8:
            found.append(RouterConfig(cluster, warpgroups, min(steps, in_flight // rows)))
    return list(dict.fromkeys(found))


def route_xla(x, w, k):
    routing = route_tokens(x, w, k, strategy="xla")
    return routing.ids, routing.weights


def time_shape(E: int, H: int, K: int, options) -> list[dict]:
    keys = jax.random.split(jax.random.key(E + H), 2 * options.layers)
    weights = [jax.random.normal(key, (E, H), jnp.bfloat16) / math.sqrt(H) for key in keys[:options.layers]]
    windows = [window(key, COLD_BYTES // options.layers) for key in keys[options.layers:]]

    def cold(router):
        return lambda space, x, w: (read(space), *router(x, w))

    jobs = {("read", 0, None): (read, [(space,) for space in windows])}
    for T in options.tokens:
        x = jax.random.normal(jax.random.key(T), (T, H), jnp.bfloat16)
        layers = list(zip(windows, [x] * len(windows), weights, strict=True))
        sweep = options.sweep and T in (min(options.tokens), max(options.tokens))
        for config in candidates(T, E, H) if sweep else candidates(T, E, H)[:1]:
            jobs["cold", T, config] = cold(functools.partial(moe_router, k=K, config=config)), layers
        jobs["warm", T, None] = functools.partial(moe_router, k=K), [(x, weights[0])] * options.layers
        jobs["xla", T, None] = cold(functools.partial(route_xla, k=K)), layers
    rows = measure([Variant({}, fn, layers) for fn, layers in jobs.values()], options.steps)
    rows = dict(zip(jobs, rows, strict=True))
    nothing = dict(us=math.nan, kernels={}, clock="none")  # of what failed
    times = {job: row if "us" in row else nothing | row for job, row in rows.items()}

    base = times["read", 0, None]["us"]
    results = []
    for T in options.tokens:
        by_config = {config: times[name, t, config] for name, t, config in jobs if (name, t) == ("cold", T)}
        default, xla = next(iter(by_config.values())), times["xla", T, None]
        result = dict(
            experts=E, hidden=H, k=K, tokens=T, bytes=2 * E * H, clock=default["clock"], goal_us=GOAL_US,
            added_us=default["us"] - base, kernel_us=in_kernels(default), warm_us=times["warm", T, None]["us"],
            xla_added_us=xla["us"] - base, xla_kernels_us=in_kernels(xla), read_us=base,
            configs={str(c): dict(added_us=t["us"] - base, kernel_us=in_kernels(t)) for c, t in by_config.items()},
            errors=sorted({row["error"] for (_, t, _), row in rows.items() if t in (0, T) and "error" in row}))
        print(f"E={E} H={H} K={K} T={T}: added {result['added_us']:.2f} us, kernel {result['kernel_us']:.2f}, warm "
              f"{result['warm_us']:.2f}; XLA added {result['xla_added_us']:.2f}, kernels "
              f"{result['xla_kernels_us']:.2f} ({default['clock']} clock) {' '.join(result['errors'])}", flush=True)
        for config, t in sorted(by_config.items(), key=lambda item: item[1]["us"])[:3]:
            print(f"    {config}: added {t['us'] - base:.2f}, kernel {in_kernels(t):.2f}")
        results.append(result)
    return results


def in_kernels(row: dict) -> float:
    """Microseconds a layer spends in kernels other than the reads."""
    return sum(us for name, us in row["kernels"].items() if "read_only" not in name)


def aot_cases():
    """Cases for a deviceless compile, see tests/aot.py: (name, function, arguments, limits)."""
    # Barriers and the shuffle of a warpgroup's number are Mosaic GPU's own; what goes through shared memory is the
    # E logits and K scores that a warp looks at.
    limits = dict(max_registers=128, max_narrow_loads=0, min_shuffles=5, max_barriers=3, max_shared=16)
    sizes = [SHAPES[0], (512, 2048, 10), (72, 2880, 4)]
    for (E, H, K), renormalize in itertools.product(sizes, (True, False)):
        args = jax.ShapeDtypeStruct((2, H), jnp.bfloat16), jax.ShapeDtypeStruct((E, H), jnp.bfloat16)
        fn = functools.partial(moe_router, k=K, renormalize=renormalize)
        yield f"router-E{E}-H{H}-{'' if renormalize else 'un'}normalized", fn, args, limits


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=60, help="random inputs that are compared with the reference")
    parser.add_argument("--no-sweep", dest="sweep", action="store_false", help="time the heuristic configuration alone")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(argv)
    need_gpu("tune_router")
    start, report = time.time(), Report(options.out / "router.json", "tune_router", checked={})
    try:
        report.facts["checked"] = check(options.seeds)
    except Exception as error:
        report.facts["checked"] = dict(error=f"{WRONG}: {describe(error)}")
    report.write()
    print(f"checked: {report.facts['checked']} ({time.time() - start:.0f} s)", flush=True)
    for shape in SHAPES:
        try:
            report.add(*time_shape(*shape, options))
        except Exception as error:
            report.add(dict(shape=shape, error=describe(error)))
            print(f"{shape}: {describe(error)}", flush=True)
        print(f"-- {time.time() - start:.0f} s", flush=True)
    return max(report.finish(), int("error" in report.facts["checked"]))


if __name__ == "__main__":
    sys.exit(main())
