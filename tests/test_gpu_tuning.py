"""On a GPU: the clock that times many steps in one trace, and a tiny autotune whose file the kernels then take."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from jax_warp_decode import choose, moe, tuned_table, tuning
from jax_warp_decode.autotune import autotune
from jax_warp_decode.explain import explain_config
from jax_warp_decode.kernels import DownConfig, GateUpConfig
from jax_warp_decode.measure import inputs, timing
from jax_warp_decode.measure.job import Job, measure
from jax_warp_decode.measure.strategies import StrategyJob
from jax_warp_decode.presets import Preset

pytestmark = pytest.mark.gpu

SMALL = Preset("small", 1024, 512, 32, 4, "bf16")


def arguments(count: int) -> list[tuple]:
    rng = np.random.default_rng(0)
    experts = inputs.make_experts(jax.random.key(0), SMALL, "bf16")
    x = inputs.make_x(jax.random.key(1), 1, SMALL)
    return [(x, inputs.make_routing(rng, 1, SMALL, "uniform"), experts) for _ in range(count)]


def layer(x, routing, experts):
    return moe(x, routing, experts, strategy="warp_decode")


def test_steps_of_different_lengths_are_told_apart_in_one_trace():
    calls = []
    for count in (2, 5, 2):
        args = arguments(count)
        calls.append((timing.compile_step(timing.lower_step(layer, args, f"step{count}")), args))
    together = timing.time_steps(calls, steps=10)
    assert [(t.clock, t.layers) for t in together] == [("device", 2), ("device", 5), ("device", 2)]
    for found in together:
        assert {name.split("_3d")[0] for name in found.kernels} == {"moe_gate_up", "moe_down"}
        assert sum(found.kernels.values()) <= found.us * 1.01 and found.min_us <= found.us <= found.p90_us
    alone = timing.time_step(*calls[1], steps=10)
    assert together[1].us == pytest.approx(alone.us, rel=0.3)  # a few microseconds, all of it in L2


@pytest.mark.parametrize("tokens", [[1], [1, 2]], ids=["in this process", "in processes"])
def test_autotune_writes_what_the_kernels_then_take(tmp_path, monkeypatch, tokens):
    path, screen = tmp_path / "tuned.json", io.StringIO()
    autotune([Job(SMALL, "mxfp8", T, most=3) for T in tokens], path, Console(file=screen))
    assert "warning" not in screen.getvalue(), screen.getvalue()
    device = jax.devices()[0].device_kind
    shapes = tuned_table.read_table(path, device).shapes
    assert len(shapes) == 2
    for by_tokens in shapes.values():
        assert list(by_tokens) == tokens
        for entry in by_tokens.values():
            assert 0.5 < entry.us < 100 and entry.us <= entry.runner_up_us and entry.us <= entry.heuristic_us

    monkeypatch.setenv(tuned_table.VARIABLE, str(path))
    ((x, routing, experts),) = arguments(1)
    experts = experts.quantize("mxfp8")
    found = explain_config(experts, tokens=1, experts_per_token=4)
    assert all(str(path) in f.source for f in found.values())
    got = np.asarray(jax.jit(layer)(x, routing, experts), np.float64)
    want = np.asarray(moe(x.astype("float32"), routing, experts, strategy="reference"), np.float64)
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


def test_autotune_writes_times_of_strategies_and_auto_goes_by_them(tmp_path, monkeypatch):
    path, screen = tmp_path / "tuned.json", io.StringIO()
    job = StrategyJob(SMALL, "mxfp8", 2)
    autotune([Job(SMALL, "mxfp8", 2, most=2), job], path, Console(file=screen))
    assert "warning" not in screen.getvalue(), screen.getvalue()
    assert "small mxfp8 T=2: fastest " in screen.getvalue()
    table = tuned_table.read_table(path, jax.devices()[0].device_kind)
    us = {shape[0]: by_tokens[2].us for shape, by_tokens in table.layers.items()}
    assert sorted(us) == sorted(job.strategies) and {"warp_decode", "shared_decode"} <= us.keys()
    assert all(1 < t < 5e3 for t in us.values()), us
    # The kernels in the same file, timed on their own, with their gap.
    kernels = sum(by_tokens[2].us for by_tokens in table.shapes.values())
    assert 0.6 * kernels < us["warp_decode"] < 2 * kernels + 10, (us, kernels)

    monkeypatch.setenv(tuned_table.VARIABLE, str(path))
    experts = inputs.make_experts(jax.random.key(0), SMALL, "mxfp8")
    pick = lambda T: choose(T, experts, experts_per_token=4, x_dtype="bfloat16")
    fastest = min(us, key=us.__getitem__)
    assert pick(2).strategy == fastest and f"measured {us[fastest]:.1f} us against " in pick(2).reason
    assert all(f"({path}, T=2)" in pick(T).reason for T in (1, 2, 4)) and str(path) not in pick(5).reason
    x, routing = inputs.make_x(jax.random.key(1), 2, SMALL), inputs.make_routing(
        np.random.default_rng(0), 2, SMALL, "uniform")
    got = np.asarray(jax.jit(moe)(x, routing, experts), np.float64)
    want = np.asarray(moe(x.astype("float32"), routing, experts, strategy="reference"), np.float64)
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


def test_candidates_really_run_with_different_configurations(monkeypatch):
    slow, fast = (GateUpConfig(8, 1, 1), DownConfig(8, 1, 1)), (GateUpConfig(32, 1, 4), DownConfig(32, 1, 8))
    monkeypatch.setattr(Job, "candidates", lambda self, kernel: [c[kernel == "moe_down"] for c in (slow, fast)])
    result = measure(Job(Preset("wide", 4096, 2048, 32, 4, "bf16"), "bf16", 1))
    assert not result.problems
    for entry, config in zip(result.entries, fast, strict=True):
        assert entry.config["lanes"] == config.lanes and entry.us < entry.heuristic_us == entry.runner_up_us


def test_override_runs_another_kernel_under_jit():
    ((x, routing, experts),) = arguments(1)
    run = jax.jit(layer)
    plain = run(x, routing, experts)
    with tuning.override(GateUpConfig(8, 1, 1), DownConfig(8, 1, 1)):
        other = run(x, routing, experts)
    # Another order of summation: not the same bits everywhere, but the same result.
    np.testing.assert_allclose(np.asarray(other, np.float32), np.asarray(plain, np.float32), rtol=0.05, atol=0.02)
