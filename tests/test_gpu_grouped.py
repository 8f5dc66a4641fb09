"""The grouped kernels of expert_centric on a Hopper GPU, against the float64 oracle; see test_grouped.py."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_warp_decode import moe
from jax_warp_decode.activations import get_activation
from jax_warp_decode.kernels.grouped_config import GroupedConfig
from jax_warp_decode.paths import expert_centric, grouped_layer, grouped_plan
from jax_warp_decode.routing import Routing

pytestmark = pytest.mark.gpu

# H, I, E, K: a quarter of the experts of Qwen3-30B-A3B; of gpt-oss-20b and Gemma4-26B, whose H and I leave parts of
# blocks over; the least sizes. (The oracle needs half a minute for all experts; the plan has as many below.)
SHAPES = {"qwen3-30b": (2048, 768, 32, 8), "gpt-oss": (2880, 2880, 8, 4), "gemma4": (2816, 704, 32, 8),
          "least": (256, 128, 3, 2)}
ROUNDED = oracle.Rounded(rows="bfloat16")  # the intermediate is, too


def make(shape, tokens, **options):
    hidden, intermediate, experts, k = SHAPES[shape]
    return oracle.make_case(tokens, tokens=tokens, experts=experts, hidden=hidden, intermediate=intermediate, k=k,
                            **options)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("shape,tokens", [("qwen3-30b", 300), ("gpt-oss", 65), ("gemma4", 33), ("least", 1000)])
def test_layer_matches_the_oracle(shape, tokens, weights):
    case = make(shape, tokens, weights=weights, pattern="skipped", biases="f32" if shape == "gpt-oss" else None)
    x, routing, experts = case.args()
    assert not grouped_layer.refusal(x.dtype, experts)
    y = jax.jit(functools.partial(moe, strategy="expert_centric"))(x, routing, experts)
    oracle.assert_rounded_close(y, case, ROUNDED)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("shape,tokens", [("qwen3-30b", 33), ("gemma4", 65), ("least", 1000)])
def test_quantised_activations(shape, tokens, weights):
    """In the same kernels: no copy of the experts is made."""
    case = make(shape, tokens, weights=weights, pattern="skipped")
    args = case.args()
    run = jax.jit(functools.partial(moe, strategy="expert_centric", activation_format="mxfp8")).lower(*args).compile()
    y = run(*args)
    oracle.assert_close(y, case.with_mxfp8_x(), h_dtype="mxfp8", unit=oracle.TENSOR_CORE_UNIT, rounded=ROUNDED)
    exact = jax.jit(functools.partial(moe, strategy="expert_centric"))(*args)
    y, exact = (np.nan_to_num(np.asarray(a, np.float64)) for a in (y, exact))
    assert 0.02 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.12  # two roundings of three bits
    if shape != "least":
        assert run.memory_analysis().temp_size_in_bytes < sum(math.prod(w.shape) for w in args[2].weights.values()) / 4


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
@pytest.mark.parametrize("widths,stages", [((16,), 3), ((16, 48), 5), ((80, 160), 3), ((64, 144), 4)])
def test_tiles(widths, stages, weights):
    """One expert with most of the tokens, others with few or none."""
    case = make("least", 700, weights=weights, pattern="skipped")
    x, routing, experts = case.args()
    config = GroupedConfig(widths, stages, ctas=6)
    run = jax.jit(grouped_layer.op(get_activation("silu"), (config, config)))
    want = np.asarray(run(x, routing, experts))
    oracle.assert_rounded_close(jnp.asarray(want).astype(x.dtype), case, ROUNDED)
    for _ in range(20):
        dirt = [jnp.full((512, 1024), jnp.nan) for _ in range(4)]  # freed again: what an unwritten row would hold
        del dirt
        np.testing.assert_array_equal(np.asarray(run(x, routing, experts)), want)


@pytest.mark.parametrize("tokens,k,experts,widest", [(4096, 8, 128, 160), (1, 8, 128, 32), (257, 10, 512, 32),
                                                     (33, 1, 896, 16), (1000, 2, 2, 64)])
def test_the_plan_kernel_equals_its_plain_form(tokens, k, experts, widest):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
    ids[:tokens // 3] = rng.integers(0, max(1, experts // 50), (tokens // 3, k))  # hot experts
    got, want = (jax.tree.map(np.asarray, jax.jit(plan, static_argnums=(1, 2))(ids, experts, widest))
                 for plan in (grouped_plan.plan_on_gpu, grouped_plan.plan))
    routed = (ids >= 0) & (ids < experts)
    rows = want.position[routed]
    np.testing.assert_array_equal(got.position[routed], rows)
    np.testing.assert_array_equal(got.token[rows], want.token[rows])
    assert got.token.min() >= 0 and got.token.max() < tokens
    np.testing.assert_array_equal(got.total, want.total)
    used = 5 * int(want.total[0])
    np.testing.assert_array_equal(got.tiles[:used], want.tiles[:used])


def test_gradients_take_the_stages():
    """The gradient is that of the separate stages, to the bit, and biases have one."""
    case = make("least", 50, biases="bf16", poison=False)
    x, routing, experts = case.args()

    def grad(layer):
        return jax.jit(jax.grad(lambda x, w, e: jnp.sum(jnp.sin(layer(x, Routing(routing.ids, w), e))), (0, 1, 2)))(
            x, routing.weights, experts)

    silu = get_activation("silu")
    got = grad(functools.partial(expert_centric.run, activation=silu, out_dtype=jnp.float32))
    want = grad(functools.partial(expert_centric.stages, activation=silu))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.asarray(got[2].b_down, np.float32).any()
