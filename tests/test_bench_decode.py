"""What the end-to-end benchmarks conclude from numbers: errors, speed-ups, bytes."""

import jax.numpy as jnp
import numpy as np
import oracle

from bench import accuracy, decode_model, decode_report
from jax_warp_decode import ExpertWeights, Routing
from jax_warp_decode.measure import parts


def test_exact_is_the_float64_layer_and_its_rounding_is_correctly_rounded():
    rng = np.random.default_rng(0)
    shapes = ((4, 32, 64), (4, 32, 64), (4, 64, 32))
    w_gate, w_up, w_down = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    x, ids = jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16), np.array([[0, 2], [3, 1], [1, 0]])
    weights = rng.random((3, 2)).astype(np.float32)
    y = accuracy.exact(x, Routing(jnp.asarray(ids), jnp.asarray(weights)), ExpertWeights(w_gate, w_up, w_down))
    wide = [np.asarray(a, np.float64) for a in (w_gate, w_up, w_down, x)]
    want = np.zeros((3, 64))
    for t in range(3):
        for k in range(2):
            gate, up = wide[0][ids[t, k]] @ wide[3][t], wide[1][ids[t, k]] @ wide[3][t]
            want[t] += weights[t, k] * wide[2][ids[t, k]] @ oracle.silu(gate, up)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)
    once = np.asarray(y.astype(jnp.bfloat16), np.float64)
    found = accuracy.compare(once, y)
    assert found["over_rounding_once"] == 1 and found["correctly_rounded"] == 1 and found["min_cosine"] > 0.99999
    assert accuracy.compare(once * 1.5, y)["over_rounding_once"] > 100


def test_speedups_compare_equal_batches_and_contexts_with_the_best_peer_of_each_form():
    def row(strategy, us, experts, attention="fused", context=1024):
        times = dict(gate_up=experts, head=us - experts)
        split = {name: dict(us=float(n), kernels=1, names={}) for name, n in times.items()}
        return dict(format="bf16", strategy=strategy, batch=1, context=context, attention=attention, us=us, parts=split)

    found = decode_report.speedups([
        row("auto", 100, 40), row("tokamax_mosaic", 200, 140), row("lax_ragged_dot", 400, 340),
        row("expert_centric", 150, 90), row("auto", 90, 40, "xla"), row("auto", 100, 40, context=4096),
        row("tokamax_mosaic", 300, 140, "cudnn")])
    assert [(f["peer"], f["form"], f["tokens_per_s"], f["experts"]) for f in found] == [
        ("tokamax_mosaic", "fused", 2.0, 3.5), ("tokamax_mosaic", "cudnn", 3.0, 3.5)]


def test_stages_counts_what_lies_between_kernels_and_not_what_is_inside_them():
    hlo = """
%fused_add (p: f32[8]) -> f32[8] {
  %copy.9 = f32[8]{0} copy(%p), metadata={op_name="jit(f)/experts/add"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %fusion.1 = (f32[8,4]{1,0}, s32[]) fusion(%a), calls=%fused_add, metadata={op_name="jit(f)/experts/add"}
  %gate.2 = bf16[2,16]{1,0} custom-call(%a), metadata={op_name="jit(f)/experts/moe/gate_up"}
  ROOT %head.3 = f32[9]{0} fusion(%a), metadata={op_name="jit(f)/head/dot"}
}
"""
    assert parts.stages(hlo, "experts") == (2, 8 * 4 * 4 + 4 + 2 * 16 * 2)


def test_every_case_of_the_grid_names_a_strategy_and_those_alike_share_a_program():
    cases = decode_model.default_cases("fused")
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert case.context <= case.max_len and callable(decode_model.layer_function(case.strategy))
    assert len({case.program for case in cases if case.strategy == "auto" and case.batch == 1 and case.format == "bf16"
                and case.context <= 32768}) == 1
