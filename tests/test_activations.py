"""Activations against float64, and that each of them lowers inside a kernel."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_warp_decode import ACTIVATIONS, ArgumentError
from jax_warp_decode.activations import Activation, GeluErf, SiTU, SwiGLU, get_activation
from jax_warp_decode.kernels import moe_gate_up_3d_batched

every_activation = pytest.mark.parametrize("name", ACTIVATIONS)
UNIT = 2.0**-24


def inputs(seed=0, n=4000):
    """Gates and ups of all magnitudes and both signs, float32; many pairs near the clamps."""
    rng = np.random.default_rng(seed)
    draw = lambda: np.concatenate([rng.standard_normal(n) * 4, rng.uniform(-15, 15, n),
                                   rng.choice([-1, 1], n) * 10.0 ** rng.uniform(-8, 4, n)]).astype(np.float32)
    return draw(), rng.permutation(draw())


def apply(activation, gate, up):
    """In float32, under jit; gate is None where there is none."""
    return np.asarray(jax.jit(activation.apply)(gate if activation.gated else None, up))


# ---------------------------------------------------------------------------------------------------------- numbers


@every_activation
def test_agrees_with_float64(name):
    """The relative error is a few roundings, and one more for each unit that exp's argument has."""
    gate, up = inputs()
    rule = oracle.ACTIVATIONS[name]
    wide_gate, wide_up = gate.astype(np.float64), up.astype(np.float64)
    exact = rule.apply(wide_gate if rule.gated else None, wide_up)
    # exp flushes below 2^-126, and overflows beyond 2^127, which a reciprocal then flushes; up and gate follow.
    flushed = 2.0**-126 * (1 + np.abs(wide_gate)) * (1 + np.abs(wide_up))
    bound = (rule.argument(np.abs(wide_gate)) + 16) * UNIT * np.abs(exact) + flushed
    error = np.abs(apply(ACTIVATIONS[name], gate, up) - exact)
    worst = np.argmax(error / bound)
    assert error[worst] <= bound[worst], (gate[worst], up[worst], exact[worst], error[worst] / bound[worst])


PAIRS = np.array([(10, 0.5), (-10, 7), (1, -20), (1, -1), (2, 3)], np.float32)


def test_clamped_swiglu_of_the_public_case():
    """D04, gpt-oss: the gate is clamped from above only, up on both sides."""
    got = apply(get_activation("clamped_swiglu"), *PAIRS.T)
    np.testing.assert_allclose(got, [10.49993, -3.2464e-6, -5.07477, 0, 7.74263], rtol=2e-5)


def test_plain_silu_of_the_public_case():
    """D04, Qwen, Mixtral and DeepSeek-V3: no clamp, no + 1."""
    got = apply(get_activation("silu"), *PAIRS.T)
    np.testing.assert_allclose(got[-1], 5.28478, rtol=2e-6)
    np.testing.assert_allclose(got[2], -20 / (1 + math.exp(-1)), rtol=1e-6)


def test_clamped_silu_clamps_at_ten():
    """DeepSeek-V4: silu(min(gate, 10)) * clip(up, -10, 10)."""
    gate, up = np.array([20, -20, 3, 3], np.float32), np.array([1, 1, 30, -30], np.float32)
    silu = lambda x: x / (1 + math.exp(-x))
    np.testing.assert_allclose(apply(ACTIVATIONS["clamped_silu"], gate, up),
                               [silu(10), silu(-20), 10 * silu(3), -10 * silu(3)], rtol=1e-5)


def test_situ_saturates_softly():
    """Kimi-K3: 4 tanh(gate / 4) sigmoid(gate) times 25 tanh(up / 25)."""
    got = apply(ACTIVATIONS["situ"], np.float32([2, 1e4, -3]), np.float32([10, 1e4, 5]))
    want = [4 * math.tanh(0.5) / (1 + math.exp(-2)) * 25 * math.tanh(0.4), 100,
            4 * math.tanh(-0.75) / (1 + math.exp(3)) * 25 * math.tanh(0.2)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    linear = apply(SiTU("situ_linear", beta=4.0, linear_beta=None), np.float32(2), np.float32(1e4))
    np.testing.assert_allclose(linear, 4 * math.tanh(0.5) / (1 + math.exp(-2)) * 1e4, rtol=1e-6)


def test_relu2_has_no_gate():
    activation = ACTIVATIONS["relu2"]
    assert not activation.gated and all(a.gated for a in ACTIVATIONS.values() if a is not activation)
    np.testing.assert_array_equal(apply(activation, None, np.float32([-3, -0.0, 2])), [0, 0, 4])


def test_gelu_erf_keeps_its_relative_accuracy_in_the_tail():
    """Where 1 + erf would have cancelled to nothing: gelu(-8) = -8 * 6.22e-16."""
    tail = lambda a: 0.5 * math.erfc(a / math.sqrt(2))
    gate = -np.linspace(0.01, 12.9, 500, dtype=np.float32)
    want = np.array([g * tail(-g) for g in gate.astype(float)])
    bound = (gate.astype(float)**2 / 2 + 10) * UNIT
    assert (np.abs(apply(ACTIVATIONS["gelu_erf"], gate, np.ones_like(gate)) - want) <= bound * np.abs(want)).all()


def test_the_fit_of_the_normal_tail():
    """The coefficients themselves, in float64: the relative error that the docstring gives."""
    a = np.linspace(0, 13, 20001)
    t = 1 / (1 + GeluErf._SLOPE * a)
    fit = np.exp(-a**2 / 2) * t * np.polyval(GeluErf._COEFFICIENTS, t)
    assert np.abs(fit / oracle.normal_cdf(-a) - 1).max() < 1.3e-8


@every_activation
def test_extremes_stay_quiet_and_nan_stays_nan(name):
    activation = ACTIVATIONS[name]
    big = np.float32([3e38, -3e38])
    assert np.isfinite(apply(activation, big, np.float32([0.5, 0.5]))).all()
    assert np.isnan(apply(activation, np.float32(1), np.float32(np.nan)))
    if activation.gated:
        assert np.isnan(apply(activation, np.float32(np.nan), np.float32(1)))
        assert apply(activation, np.float32(0), np.float32(2)) == 0


@every_activation
def test_gradients_are_those_of_float64(name):
    """A polynomial in place of erf, a select and a clamp keep their derivatives; checked away from the kinks."""
    activation, rule = ACTIVATIONS[name], oracle.ACTIVATIONS[name]
    gate = np.linspace(-6, 6, 101, dtype=np.float32) + np.float32(0.013)
    up = np.linspace(6, -6.1, 101, dtype=np.float32)
    grads = jax.grad(lambda gate, up: activation.apply(gate, up).sum(), (0, 1) if activation.gated else 1)(gate, up)
    step = 2.0**-20
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    shifted = lambda dg, du: rule.apply(gate + dg if rule.gated else None, up + du)
    want = [(shifted(step, 0) - shifted(-step, 0)) / (2 * step), (shifted(0, step) - shifted(0, -step)) / (2 * step)]
    for got, numeric in zip(grads if activation.gated else (grads,), want if rule.gated else want[1:], strict=True):
        np.testing.assert_allclose(got, numeric, rtol=2e-5, atol=2e-5)


def test_x64_mode_changes_nothing():
    gate, up = inputs(1, 50)
    for activation in ACTIVATIONS.values():
        want = apply(activation, gate, up)
        with jax.enable_x64(True):
            got = jax.jit(activation.apply)(jnp.asarray(gate) if activation.gated else None, jnp.asarray(up))
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


# -------------------------------------------------------------------------------------------------------- the table


def test_an_instance_of_ones_own():
    tight = SwiGLU("tight", alpha=2.0, limit=1.0, up_offset=0.5)
    assert get_activation(tight) is tight and tight == SwiGLU("tight", alpha=2.0, limit=1.0, up_offset=0.5)
    assert hash(tight) != hash(SwiGLU("tight", alpha=2.0, limit=2.0, up_offset=0.5))  # a key of compiled kernels
    want = 1 / (1 + math.exp(-2)) * 1.5
    np.testing.assert_allclose(apply(tight, np.float32(9), np.float32(9)), want, rtol=1e-6)


@pytest.mark.parametrize("call, message", [
    (lambda: get_activation("swish"), r"^activation: got 'swish', expected one of \['clamped_silu'"),
    (lambda: SwiGLU("a", limit=0.0), r"^limit: got 0.0, expected a positive number or None"),
    (lambda: SwiGLU("a", limit=math.nan), r"^limit: got nan"),
    (lambda: SiTU("a", beta=-1.0), r"^beta: got -1.0"),
])
def test_bad_parameters_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


@every_activation
def test_lowers_inside_a_kernel(name):
    """Mosaic GPU has a rule for every operation; tests/test_aot.py takes kernels through ptxas."""
    S = jax.ShapeDtypeStruct
    w = S((4, 64, 256), jnp.bfloat16)
    gate_up = functools.partial(moe_gate_up_3d_batched, activation=name)
    w_gate = w if ACTIVATIONS[name].gated else None
    lowered = jax.jit(gate_up).trace(S((1, 256), jnp.bfloat16), S((1, 2), jnp.int32), w_gate, w)
    assert "mosaic_gpu" in lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert isinstance(ACTIVATIONS[name], Activation)
