"""What a serving stack relies on, on a real GPU: no limit of size, the same bits every time, rows of their own.

pytest --gpu tests/test_gpu_trust.py
"""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_warp_decode import STRATEGIES, ExpertWeights, Routing, UnsupportedError, choose, moe
from jax_warp_decode.formats import quantize

pytestmark = pytest.mark.gpu

FORMATS = ["bf16", *oracle.FORMATS]


def layer(strategy):
    return jax.jit(functools.partial(moe, strategy=strategy))


def need(strategy, case):
    """Skips what a strategy refuses, with its words."""
    x, routing, experts = case.args()
    try:
        choose(x.shape[0], experts, experts_per_token=routing.ids.shape[1], x_dtype=x.dtype, strategy=strategy)
    except UnsupportedError as error:
        pytest.skip(str(error))


def assert_close(y, case, strategy):
    if strategy == "expert_centric":  # gate, up and h are rounded to bfloat16, see test_gpu.py
        error = np.asarray(y, np.float64) - case.exact
        assert np.linalg.norm(error) <= 2.0**-8 * np.sqrt(4 / 3) * np.linalg.norm(case.exact)
    else:
        h_dtype = {"reference": "float32", "shared_decode": oracle.shared_h_dtype(case)}.get(strategy, "bfloat16")
        oracle.assert_close(y, case, h_dtype=h_dtype, unit=oracle.TENSOR_CORE_UNIT)


# ------------------------------------------------------------------------------------------------- offsets beyond 2^31


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "reference"])
def test_first_and_last_expert_of_more_than_two_to_the_31_elements(strategy, weights):
    """2.2e9 elements in each tensor: the expert at both ends, NaN between them."""
    check_ends(strategy, weights, 1408)


def check_ends(strategy, weights, E, H=2048, I=768):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = dict(w_gate=(I, H), w_up=(I, H), w_down=(H, I))
    one = {n: jax.random.normal(k, (1, *s), jnp.bfloat16) / 32 for k, (n, s) in zip(keys, shapes.items(), strict=False)}
    if weights != "bf16":
        one = {name: quantize(w, weights) for name, w in one.items()}

    def double(a):  # all numbers of an expert, by its scales if it has some
        return a if "float8_e4m3" in a.dtype.name else a + 1 if a.dtype == jnp.uint8 else 2 * a

    def ends(a):
        return jnp.concatenate([a, double(a)])

    @jax.jit
    def spread(a):
        nan = 255 if a.dtype == jnp.uint8 else jnp.nan
        return jnp.full((E, *a.shape[1:]), nan, a.dtype).at[0].set(a[0]).at[E - 1].set(double(a)[0])

    x = jax.random.normal(keys[3], (2, H), jnp.bfloat16)
    experts, few = (ExpertWeights(**{n: jax.tree.map(f, w) for n, w in one.items()}) for f in (spread, ends))
    assert E * H * I > 2**31 or E < 100
    y, want = (np.asarray(layer(strategy)(x, Routing(jnp.array([[0], [last]]), jnp.ones((2, 1))), w), np.float32)
               for w, last in ((experts, E - 1), (few, 1)))
    assert np.isfinite(y).all() and y.any(1).all()
    error = np.linalg.norm(y - want, axis=1)
    assert (error <= 2.0**-7 * np.linalg.norm(want, axis=1)).all()


# ---------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("weights", ["bf16", "mxfp8", "mxfp4", "fp8_block128"])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "reference"])
def test_a_thousand_replays_are_bitwise_equal(strategy, weights):
    """Of a captured step of four layers, with the memory around it dirtied in between."""
    case = oracle.make_case(1, tokens=8, experts=16, hidden=2048, intermediate=768, k=8, weights=weights,
                            pattern="skipped")
    need(strategy, case)
    x, routing, experts = case.args()

    @jax.jit
    def step(x):
        for _ in range(4):
            x = jnp.clip(moe(x, routing, experts, strategy=strategy), -2, 2).astype(x.dtype)
        return x

    same = jax.jit(lambda a, b: jnp.all(jax.lax.bitcast_convert_type(a, jnp.int16)
                                        == jax.lax.bitcast_convert_type(b, jnp.int16)))
    want = step(x)
    equal = []
    for n in range(1000):
        if n % 50 == 0:
            dirt = [jnp.full((64, 4096), jnp.nan) for _ in range(3)]
            del dirt
        equal.append(same(step(x), want))
    assert all(jax.device_get(equal))


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "reference"])
def test_a_row_does_not_depend_on_its_mates_or_its_place(strategy):
    """Bitwise, for one number of tokens: other mates, NaN mates, another place. (Another number of tokens may take
    another configuration, which sums in another order; with a fixed one the tests of each kernel show it bitwise.)"""
    case = oracle.make_case(2, tokens=8, experts=16, hidden=2048, intermediate=768, k=4, poison=False)
    need(strategy, case)
    x, routing, experts = case.args()
    run = layer(strategy)
    want = np.asarray(run(x, routing, experts))
    order = np.random.default_rng(3).permutation(8)
    moved = run(x[order], Routing(routing.ids[order], routing.weights[order]), experts)
    np.testing.assert_array_equal(np.asarray(moved), want[order])
    for mates in (jnp.nan, jnp.inf, 0.0):
        others = jnp.full_like(x, mates).at[3].set(x[3])
        same_expert = jnp.broadcast_to(routing.ids[3], routing.ids.shape)
        for ids in (routing.ids, same_expert, jnp.full_like(routing.ids, -1).at[3].set(routing.ids[3])):
            y = run(others, Routing(ids, routing.weights.at[3].set(routing.weights[3])), experts)
            np.testing.assert_array_equal(np.asarray(y)[3], want[3])


# ------------------------------------------------------------------------------------------------------- out of memory

TOO_LARGE = """
import jax, jax.numpy as jnp
from jax_warp_decode import ExpertWeights, Routing, moe
from jax_warp_decode.device import explain_failure
routing = Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
layer = jax.jit(lambda E: moe(jnp.ones((1, 512), jnp.bfloat16), routing, ExpertWeights(
    *(jnp.full((E, *s), 2.0**-6, jnp.bfloat16) for s in ((512, 512),) * 3))), static_argnums=0)
try:
    jax.block_until_ready(layer(4096))
except RuntimeError as error:
    print(explain_failure(error))
print(float(layer(4)[0, 0]))
"""


def limited(fraction, *command):
    env = os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION=fraction)
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=300)


def test_out_of_memory_is_said_and_a_smaller_layer_runs_afterwards():
    done = limited("0.01", "-c", TOO_LARGE)  # 6 GB of weights
    said, y = done.stdout.splitlines()
    assert said.startswith("the device is out of memory (") and "use quantised weights" in said
    assert float(y) == pytest.approx(512 * jax.nn.silu(8.0) * 8 / 64, rel=1e-2)


def test_out_of_memory_ends_a_command_with_one_line():
    done = limited("0.00001", "-m", "jax_warp_decode.cli", "generate", "--prompt", "a")  # 1.4 MB
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("jax-warp-decode: error: the device is out of memory")
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------------- cases D01 and D08


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("H, I", [(96, 96), (64, 192), (64, 352), (128, 704), (2048, 1408), (2880, 2880)])
def test_d01_sizes_that_the_tile_does_not_divide(strategy, weights, H, I):
    if H * I > 2**20 and weights not in ("bf16", "mxfp8", "fp8_block128", "mxfp4"):
        pytest.skip("large sizes in the formats of the case")
    case = _three_rows(weights, H, I)
    need(strategy, case)
    x, routing, experts = case.args()
    run = layer(strategy)
    y = np.asarray(run(x, routing, experts), np.float32)
    assert not y[[0, 2]].any() and y[1].any()
    assert np.linalg.norm(y[1] - case.exact[1]) <= 1e-2 * np.linalg.norm(case.exact[1])
    tile = lambda a: jnp.tile(a, (43, 1))
    if strategy == "expert_centric":
        many = np.asarray(run(tile(x), jax.tree.map(tile, routing), experts), np.float32)
        assert not many[0::3].any() and not many[2::3].any()
        assert (np.linalg.norm(many[1::3] - case.exact[1], axis=1) <= 1e-2 * np.linalg.norm(case.exact[1])).all()


@functools.cache
def _three_rows(weights, H, I):
    from test_cases import nan_except

    case = oracle.make_case(4, tokens=3, experts=3, hidden=H, intermediate=I, k=1, weights=weights, poison=False)
    case.ids[:], case.x[[0, 2]] = 1, 0
    for name in ("w_gate", "w_up", "w_down"):
        nan_except(getattr(case, name), 1)
    case.exact  # computed once
    return case


@pytest.mark.parametrize("T, K", [(1025, 3), (4097, 8)])  # no multiple of 64; just above 32768 slots
@pytest.mark.parametrize("pattern", ["uniform", "same"])
def test_d08_many_tokens(T, K, pattern):
    case = oracle.make_case(5, tokens=T, experts=60, hidden=128, intermediate=64, k=K, pattern=pattern, poison=False)
    x, routing, experts = case.args()
    y = layer("expert_centric")(x, routing, experts)
    assert_close(y, case, "expert_centric")
    few = dataclasses.replace(case, x=case.x[:5], ids=case.ids[:5], weights=case.weights[:5])
    for strategy in STRATEGIES:
        got, want = np.asarray(layer(strategy)(*few.args()), np.float64), np.asarray(y[:5], np.float64)
        assert (np.linalg.norm(got - want, axis=1) <= 1e-2 * np.linalg.norm(want, axis=1)).all(), strategy
