"""Biases, shared experts, weights on the input and experts without a gate on a real GPU: pytest --gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_gradients import assert_bias_gradients

from jax_warp_decode import moe
from jax_warp_decode.choose import TABLE
from jax_warp_decode.shared_experts import append_shared, with_shared

pytestmark = pytest.mark.gpu

SIZE = dict(experts=8, hidden=512, intermediate=256, k=4, poison=False)
# Relative L2 error: a bfloat16 result, and what strategies round on the way (the products and the intermediate).
BOUND = 2.0**-8 * np.sqrt(4 / 3)


def relative(y, exact):
    return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("strategy", TABLE)
@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("weights, activation, weight_on", [
    ("bf16", "clamped_swiglu", "output"), ("mxfp8", "silu", "output"), ("bf16", "silu", "input"),
    ("bf16", "relu2", "output")])
def test_structure_matches_float32(strategy, tokens, weights, activation, weight_on):
    """Two shared experts of twice the width, a gate, biases of every projection, against the reference in float32."""
    options = SIZE | dict(weights=weights, biases="f32", activation=activation)
    x, routing, routed = oracle.make_case(tokens, tokens=tokens, **options).args()
    shared = oracle.make_case(1, tokens=1, **options | dict(experts=1, intermediate=512, k=1)).args()[2]
    experts = append_shared(routed, shared)
    gate = jnp.asarray(np.random.default_rng(0).random((tokens, 1)), jnp.float32)
    routing = with_shared(routing, routed.num_experts, experts.num_experts, gate)
    if reason := TABLE[strategy].refuses(tokens, routing.ids.shape[1], experts, x.dtype, interpret=False):
        pytest.skip(reason)
    run = jax.jit(lambda x, strategy: moe(x, routing, experts, activation=activation, strategy=strategy,
                                          weight_on=weight_on), static_argnums=1)
    if weight_on == "input":  # rounded to bfloat16 before the experts; the reference would not
        exact = np.asarray(run(x, "reference"), np.float64)
        assert relative(run(x, strategy), exact) < 2 * BOUND
        return
    assert relative(run(x, strategy), np.asarray(run(x.astype(jnp.float32), "reference"), np.float64)) < BOUND


@pytest.mark.parametrize("tokens, pattern", [(40, "uniform"), (40, "skipped"), (3000, "same")])
def test_gradients_of_biases(tokens, pattern):
    """For a given gradient of y: b_down to float32, the others to what the bfloat16 products before them round."""
    assert_bias_gradients(oracle.make_case(3, tokens=tokens, **SIZE, biases="f32", pattern=pattern))
