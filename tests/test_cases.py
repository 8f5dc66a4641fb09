"""The public cases D01 to D12 in every strategy, where no other test has them: the decode strategies interpreted.

What stands elsewhere has its number there too: D02 in test_transforms.py and test_paths.py, D06 and D11 in
test_routing.py, D07 on every layout in parallel_checks.py, the codes of D05 in test_format_rows.py and test_kernels.py.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from flax import nnx

from jax_warp_decode import STRATEGIES, ExpertWeights, Router, Routing, UnsupportedError, choose, moe
from jax_warp_decode.choose import COSTS
from jax_warp_decode.layers import MoE
from jax_warp_decode.paths import expert_centric

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
BF16 = ml_dtypes.bfloat16


@functools.cache  # one compilation per strategy, shape and options
def layer(strategy, **options):
    return jax.jit(functools.partial(moe, strategy=strategy, interpret=True, **options))


def smallest(strategy):
    """H and I that a strategy takes; warp decode takes half of what the others do."""
    return (64, 32) if strategy == "warp_decode" else (128, 64)


def f32(a):
    return np.asarray(a, np.float32)


def assert_rows_close(y, exact, tolerance=1e-2):
    """Relative L2 difference of every row."""
    y, exact = np.asarray(y, np.float64), np.asarray(exact, np.float64)
    assert (np.linalg.norm(y - exact, axis=1) <= tolerance * np.linalg.norm(exact, axis=1)).all()


def constant_experts(strategy, outputs, gate=64.0, up=2.0**-6, dtype=jnp.bfloat16):
    """Expert e returns outputs[e] in every element for x[0] = 1: silu(64) = 64 in float32, so its h[0] is 1."""
    H, I = smallest(strategy)
    outputs, gate, up = (np.broadcast_to(np.asarray(a, np.float32), np.shape(outputs)) for a in (outputs, gate, up))
    w_gate, w_up, w_down = (np.zeros((len(outputs), *s), np.float32) for s in ((I, H), (I, H), (H, I)))
    w_gate[:, 0, 0], w_up[:, 0, 0], w_down[:, :, 0] = gate, up, outputs[:, None]
    return ExpertWeights(*(jnp.asarray(w, dtype) for w in (w_gate, w_up, w_down)))


def first_axis(strategy, T, dtype=jnp.bfloat16):
    return jnp.zeros((T, smallest(strategy)[0]), dtype).at[:, 0].set(1)


# ------------------------------------------------------------------------------------------------------------- D01


def nan_except(w, expert):
    """The weight with NaN in all other experts: in the scale where that can hold one, and in the values."""
    others = np.arange(len(oracle._part(w))) != expert
    for part in w if isinstance(w, oracle.Quantized) else (w,):
        if not isinstance(part, np.ndarray):
            continue
        if part.dtype == np.uint8:
            part[others] = 255  # E8M0 NaN, or a 4-bit code under such a scale
        elif part.dtype != np.int8:
            part[others] = np.nan
    return w


@pytest.mark.parametrize("strategy, format, H, I", [
    ("warp_decode", "bf16", 96, 96), ("shared_decode", "bf16", 192, 64), ("expert_centric", "mxfp4", 96, 96),
    ("expert_centric", "fp8_block128", 64, 352), ("reference", "mxfp8", 128, 704)])
def test_d01_sizes_that_the_tile_does_not_divide(strategy, format, H, I):
    """All tokens on expert 1, its neighbours hold NaN, rows 0 and 2 are zero and must stay exactly zero."""
    case = oracle.make_case(1, tokens=3, experts=3, hidden=H, intermediate=I, k=1, weights=format, poison=False)
    case.ids[:], case.x[[0, 2]] = 1, 0
    for name in ("w_gate", "w_up", "w_down"):
        nan_except(getattr(case, name), 1)
    x, routing, experts = case.args()
    y = f32(layer(strategy)(x, routing, experts))
    assert not y[[0, 2]].any() and y[1].any()
    assert_rows_close(y[1:2], case.exact[1:2])
    if strategy == "expert_centric":  # the same three rows as a large batch
        tile = lambda a: jnp.tile(a, (43, 1))
        many = f32(layer(strategy)(tile(x), jax.tree.map(tile, routing), experts))
        np.testing.assert_array_equal(many, np.tile(y, (43, 1)))


# ------------------------------------------------------------------------------------------------------------- D03


@every_strategy
def test_d03_ids_that_mean_not_here(strategy):
    """-1, E and NaN weights in skipped slots, after a run with large values; the last expert counts like any other."""
    H, I = smallest(strategy)
    case = oracle.make_case(3, tokens=4, experts=8, hidden=H, intermediate=I, k=2, poison=False)
    case.ids[:] = [[0, 5], [7, -1], [-1, 8], [3, 2]]
    case.weights[:] = [[0.6, 0.4], [0.7, np.nan], [np.nan, 0.5], [0.9, 0.1]]
    x, routing, experts = case.args()
    layer(strategy)(jnp.full_like(x, 1e4), routing, experts).block_until_ready()
    y = f32(layer(strategy)(x, routing, experts))
    assert not y[2].any()
    assert_rows_close(y[[0, 1, 3]], case.exact[[0, 1, 3]])
    only_seven = oracle.dataclasses.replace(case, ids=np.full((4, 2), 7, np.int32), weights=np.float32([[0.7, 0]] * 4))
    np.testing.assert_allclose(case.exact[1], only_seven.exact[1])


def test_d03_rows_that_nobody_wrote_are_not_summed():
    """On a GPU the grouped products leave rows of skipped slots as they were in memory; here they hold NaN."""
    routing = Routing(jnp.array([[0, 5], [7, -1], [-1, 8]]), jnp.array([[0.6, 0.4], [0.7, 0.5], [0.5, 0.5]]))
    alignment = expert_centric.align(routing.ids, 8)
    rows = jnp.where(jnp.arange(6)[:, None] < 3, jnp.ones((6, 4)), jnp.nan)  # three of six slots are routed
    combine = lambda rows, weights: expert_centric.combine(rows, alignment, Routing(routing.ids, weights), 8)
    np.testing.assert_allclose(combine(rows, routing.weights)[:, 0], [1.0, 0.7, 0.0])
    d_weights = jax.grad(lambda w: combine(rows, w).sum())(routing.weights)
    np.testing.assert_array_equal(d_weights, [[4, 4], [4, 0], [0, 0]])


# ------------------------------------------------------------------------------------------------------------- D04


@every_strategy
def test_d04_gpt_oss_activation_through_the_layer(strategy):
    """One expert for each of the five pairs; what comes out is the activation itself."""
    gate, up = np.float32([10, -10, 1, 1, 2]), np.float32([0.5, 7, -20, -1, 3])
    experts = constant_experts(strategy, np.ones(5), gate, up)
    routing = Routing(jnp.arange(5)[:, None], jnp.ones((5, 1)))
    y = f32(layer(strategy, activation="clamped_swiglu", out_dtype=jnp.float32)(
        first_axis(strategy, 5), routing, experts))
    # A float32 intermediate, or one that is rounded to bfloat16.
    tolerance = 2e-5 if strategy in ("warp_decode", "reference") else 2.0**-8
    np.testing.assert_allclose(y[:, 0], [10.49993, -3.2464e-6, -5.07477, 0, 7.74263], rtol=tolerance)
    np.testing.assert_array_equal(y, np.repeat(y[:, :1], y.shape[1], 1))


# ------------------------------------------------------------------------------------------------------------- D05

MX = {"mxfp8": (oracle.E4M3, [0x38, 0x40, 0x44, 0x48, 0x4C, 0x50, 0x54, 0x80, 0xD0, 0xD4]),
      "mxfp4": (oracle.E2M1, [1, 2, 3, 4, 5, 6, 7, 8, 14, 15])}
SCALES = np.array([0, 1, 126, 127, 128, 134, 254, 255], np.uint8)


def takes(strategy, format):
    H, I = smallest(strategy)
    E = {name: rule.structs for name, rule in sys.modules["jax_warp_decode.formats"].FORMATS.items()}[format]
    try:
        choose(1, ExpertWeights(E((1, I, H)), E((1, I, H)), E((1, H, I))), experts_per_token=1, x_dtype=jnp.bfloat16,
               strategy=strategy, interpret=True)
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize("strategy, format", [(s, f) for s in STRATEGIES for f in MX
                                              if s != "reference" and takes(s, f)])
def test_d05_scale_bytes_and_order_of_nibbles(strategy, format):
    """Token t reads element t of a block of w_down; row r of that block has scale byte SCALES[r].

    Under byte 254, 2 is beyond float32, and infinity times another element's 0 is NaN: that row has small codes only.
    """
    H, I = smallest(strategy)
    table, codes = MX[format]
    rule = oracle.FORMATS[format]
    T, one = len(codes), int(np.flatnonzero(table == 1)[0])

    def weight(n, cols, entries, scale=127):
        code, scales = np.zeros((1, n, cols), np.uint8), np.full((1, n, cols // 32), scale, np.uint8)
        for row, col, value in entries:
            code[0, row, col] = value
        if rule.packed:
            code = code[..., ::2] | code[..., 1::2] << 4
        return oracle.Quantized(code.view(rule.dtype), scales, format)

    diagonal = [(t, t, one) for t in range(T)]
    value = table[codes] * np.ones((len(SCALES), 1))
    value[(SCALES == 254)[:, None] & (np.abs(value) >= 2)] = 0
    w_down = weight(H, I, [(r, t, code) for r in range(len(SCALES)) for t, code in enumerate(codes) if value[r, t]
                           or table[code] == 0])
    w_down.scales[0, :len(SCALES), 0] = SCALES
    experts = ExpertWeights(*(w.to_jax() for w in (
        weight(I, H, diagonal, 127 + 6), weight(I, H, diagonal, 127 - 6), w_down)))
    y = f32(layer(strategy, out_dtype=jnp.float32)(
        jnp.eye(T, H, dtype=jnp.bfloat16), Routing(jnp.zeros((T, 1), jnp.int32), jnp.ones((T, 1))), experts))
    got, want = y[:, :len(SCALES)], value.T * oracle.E8M0[SCALES]
    # The CPU flushes what is smaller; shared_decode's intermediates are, as it scales float16 rows. A GPU keeps these:
    # the tests of every scale byte in test_gpu_shared.py.
    flushed = 2.0**-100 if strategy == "shared_decode" else 2.0**-126
    normal = (np.abs(want) >= flushed) & (SCALES > 0) | np.isnan(want)
    np.testing.assert_array_equal(got[normal], want[normal].astype(np.float32))
    assert ((got == want.astype(np.float32)) | (got == 0))[~normal].all()
    assert np.isnan(got[:, -1]).all() and np.isfinite(got[:, :-1]).all() and not y[:, len(SCALES):].any()


# ---------------------------------------------------------------------------------------- D07, D09 and D12: constants


@every_strategy
def test_d07_d12_weights_multiply_outputs_once_in_float32(strategy):
    """Constant experts 1, 2, 3, 4: routing weights are not rounded, in no other place, and slots may repeat."""
    ids = np.array([[0, 1], [1, 2], [2, 3], [3, 0], [2, 2]])
    weights = np.float32([[1 + 2.0**-20, 2.0**-22], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [2.5, -1.25]])
    experts = constant_experts(strategy, np.arange(1.0, 5))
    y = f32(layer(strategy, out_dtype=jnp.float32)(first_axis(strategy, 5), Routing(ids, weights), experts))
    want = np.sum(weights.astype(np.float64) * (ids + 1), 1)  # exact in float32
    np.testing.assert_array_equal(y, np.repeat(want[:, None].astype(np.float32), y.shape[1], 1))


@pytest.mark.parametrize("strategy, renormalize, shared_gate, want", [
    ("reference", True, True, 7.5), ("reference", False, True, 7.2020), ("expert_centric", True, False, 12.5),
    ("expert_centric", False, True, 7.2020)])
def test_d12_scaling_routing_weight_and_shared_gate(strategy, renormalize, shared_gate, want):
    """2.5 * (sum of the weights) * 1 + g * 10 with g = sigmoid(0), or 1 without a gate; all through the Flax layer."""
    H, I = smallest(strategy)
    block = MoE(H, I, num_experts=4, num_experts_per_token=2, num_shared_experts=1, shared_gate=shared_gate,
                router=Router(2, renormalize=renormalize, scale=np.float64(2.5)), strategy=strategy, rngs=nnx.Rngs(0))
    block.router.set_value(jnp.zeros((4, H)).at[:, 0].set(jnp.array([2.0, 1, 0, -1])))
    if shared_gate:
        block.shared_gate.set_value(jnp.zeros((1, H)))
    block.set_experts(constant_experts(strategy, [1, 1, 1, 1, 10]))
    np.testing.assert_allclose(f32(block(first_axis(strategy, 1, jnp.float32))), want, rtol=2e-5)


@every_strategy
def test_d09_a_float16_intermediate_beyond_its_range(strategy):
    """300 * 300 * 1e-3 = 90 with an intermediate of 90000."""
    experts = constant_experts(strategy, [1e-3], 300.0, 300.0, jnp.float16)
    y = layer(strategy)(first_axis(strategy, 1, jnp.float16), Routing(np.zeros((1, 1), np.uint8), np.ones((1, 1))),
                        experts)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(f32(y), 90, rtol=1e-2)


X64_FROM_THE_START = """
import json, os, sys
import jax, numpy as np
import test_cases as t
assert jax.config.jax_enable_x64
found = {}
ids, weights = np.array([[1, 0], [3, -1]], np.int64), np.array([[0.5, 0.25], [2.0, np.nan]])
for strategy in sys.argv[1:]:
    experts = t.constant_experts(strategy, [1, 2, 3, 4])
    y = t.layer(strategy)(t.first_axis(strategy, 2), t.Routing(ids, weights), experts)
    found[strategy] = [str(y.dtype), np.asarray(y, np.float32)[:, 0].tolist()]
print(json.dumps(found))
"""


def test_d09_x64_from_the_environment():
    tests = pathlib.Path(__file__).parent
    env = dict(os.environ, JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu",
               PYTHONPATH=os.pathsep.join([str(tests.parent), str(tests)]))
    strategies = ["expert_centric"]  # switched on at run time: all of them, in test_moe.py
    done = subprocess.run(
        [sys.executable, "-c", X64_FROM_THE_START, *strategies], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {s: ["bfloat16", [1.25, 8.0]] for s in strategies}


# ------------------------------------------------------------------------------------------------------------- D08


def test_d08_the_paths_agree_on_both_sides_of_the_switch(monkeypatch):
    """`auto` takes one strategy after the other as T grows; the rows of a small batch are those of a large one."""
    free = dict.fromkeys(COSTS["bf16"].launches, 0.0)  # a layer as small as this costs little else
    monkeypatch.setitem(COSTS, "bf16", dataclasses.replace(COSTS["bf16"], launches=free))
    case = oracle.make_case(8, tokens=33, experts=4, hidden=128, intermediate=64, k=1)
    x, routing, experts = case.args()
    taken = []
    for T in (1, 33):
        chosen = choose(T, experts, experts_per_token=1, x_dtype=x.dtype, interpret=True).strategy
        part = Routing(routing.ids[:T], routing.weights[:T])
        assert_rows_close(layer("auto")(x[:T], part, experts), case.exact[:T])
        taken.append(chosen)
    assert len(set(taken)) == 2, taken


def test_d08_many_tokens_are_rows_of_their_own():
    """T * K = 3075 is no multiple of 64; prefixes and a permutation give the same rows."""
    case = oracle.make_case(9, tokens=1025, experts=60, hidden=32, intermediate=32, k=3)
    x, routing, weights = case.args()
    y = layer("expert_centric")(x, routing, weights)
    oracle.assert_close(y, case, h_dtype="bfloat16")
    rows = np.random.default_rng(1).permutation(1025)
    shuffled = layer("expert_centric")(x[rows], Routing(routing.ids[rows], routing.weights[rows]), weights)
    np.testing.assert_array_equal(f32(shuffled), f32(y)[rows])
    few = layer("expert_centric")(x[:2], Routing(routing.ids[:2], routing.weights[:2]), weights)
    np.testing.assert_array_equal(f32(few), f32(y)[:2])


# ------------------------------------------------------------------------------------------------------------- D10


@every_strategy
def test_d10_nothing_to_do(strategy):
    """No tokens, with and without leading axes, also mapped; tokens without a routed slot give exact zeros."""
    H, I = smallest(strategy)
    case = oracle.make_case(10, tokens=3, experts=4, hidden=H, intermediate=I, k=2, pattern="none")
    x, routing, experts = case.args()
    nothing = lambda *shape: (jnp.zeros((*shape, H), x.dtype), Routing(
        jnp.zeros((*shape, 2), jnp.int32), jnp.zeros((*shape, 2))), experts)
    assert layer(strategy)(*nothing(0)).shape == (0, H)
    assert layer(strategy)(*nothing(2, 0)).shape == (2, 0, H)
    assert jax.vmap(layer(strategy), (0, 0, None))(*nothing(2, 0)).shape == (2, 0, H)
    y = layer(strategy)(x, routing, experts)  # NaN in every row, expert and weight
    assert y.dtype == x.dtype and not f32(y).any()
