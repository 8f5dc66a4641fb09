"""The two kernels, interpreted on the CPU with race detection, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_warp_decode import ArgumentError, QuantizedArray, UnsupportedError, quantize
from jax_warp_decode.kernels import DownConfig, GateUpConfig, moe_down_3d_batched, moe_gate_up_3d_batched, tile

# (T, E, H, I, K). H and I that the widest step divides, that need an overlapping last step, and that are short.
SHAPES = [(2, 4, 256, 96, 2), (1, 3, 96, 64, 3), (3, 3, 352, 192, 1), (1, 2, 704, 128, 2)]


def run_gate_up(case, interpreter, **options):
    x, routing, experts = case.args()
    return moe_gate_up_3d_batched(x, routing.ids, experts.w_gate, experts.w_up, interpret=interpreter, **options)


def run_layer(case, interpreter, h_dtype=jnp.float32, gate_up=None, down=None):
    x, routing, experts = case.args()
    h = run_gate_up(case, interpreter, out_dtype=h_dtype, config=gate_up)
    return moe_down_3d_batched(
        h, routing.ids, routing.weights, experts.w_down, out_dtype=x.dtype, interpret=interpreter, config=down)


@pytest.mark.parametrize("T,E,H,I,K", SHAPES)
@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_gate_up_and_layer_match_the_oracle(interpreter, weights, T, E, H, I, K):
    case = oracle.make_case(
        H + T, tokens=T, experts=E, hidden=H, intermediate=I, k=K, weights=weights, pattern="skipped")
    oracle.assert_hidden_close(run_gate_up(case, interpreter), case)
    oracle.assert_close(run_layer(case, interpreter), case)


@pytest.mark.parametrize("x_dtype,weights", [("f16", "f16"), ("f16", "mxfp8"), ("bf16", "f16")])
def test_float16(interpreter, x_dtype, weights):
    case = oracle.make_case(7, tokens=2, experts=3, hidden=128, intermediate=64, k=2, x_dtype=x_dtype, weights=weights)
    oracle.assert_close(run_layer(case, interpreter), case)


@pytest.mark.parametrize("pattern", ["same", "repeated", "none"])
def test_routing_patterns(interpreter, pattern):
    case = oracle.make_case(3, tokens=3, experts=4, hidden=128, intermediate=64, k=2, pattern=pattern)
    oracle.assert_close(run_layer(case, interpreter), case)


@pytest.mark.parametrize("weights, lanes", [("bf16", 32), ("mxfp8", 16), ("bf16", 8), ("mxfp8", 4)])
def test_every_lane_width_and_leftover_steps(interpreter, weights, lanes):
    case = oracle.make_case(lanes, tokens=1, experts=2, hidden=704, intermediate=544, k=2, weights=weights)
    rows = 1 if lanes == 4 else 2
    rows = rows if case.w_gate[0].shape[-2] % (4 * rows * 32 // lanes) == 0 else 1
    y = run_layer(case, interpreter, gate_up=GateUpConfig(lanes, 1, 2), down=DownConfig(lanes, rows, 3))
    oracle.assert_close(y, case)


def test_a_bfloat16_intermediate_is_less_accurate(interpreter):
    case = oracle.make_case(11, tokens=1, experts=2, hidden=64, intermediate=256, k=2)

    def error(h_dtype):
        x, routing, experts = case.args()
        h = run_gate_up(case, interpreter, out_dtype=h_dtype)
        y = moe_down_3d_batched(
            h, routing.ids, routing.weights, experts.w_down, out_dtype=jnp.float32, interpret=interpreter)
        return np.linalg.norm(np.asarray(y, np.float64) - case.exact)

    oracle.assert_close(run_layer(case, interpreter, h_dtype=jnp.bfloat16), case, h_dtype="bfloat16")
    assert error(jnp.bfloat16) > 100 * error(jnp.float32)


def read_back(w, column, interpreter):
    """Column `column` of every row of w [1, n, cols] through the down kernel: y[n] = w[0, n, column]."""
    h = jnp.zeros((1, 1, w.shape[2]), jnp.float32).at[0, 0, column].set(1)
    return np.asarray(moe_down_3d_batched(
        h, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), w, out_dtype=jnp.float32, interpret=interpreter))[0]


BYTES = np.arange(256, dtype=np.uint8)


def test_every_scale_byte(interpreter):
    """Row r has scale byte r: 2**(r - 127) and NaN for 255, which reaches the rows whose block is read and no other."""
    ones = jnp.full((1, 256, 64), 0x38, jnp.uint8).view(jnp.float8_e4m3fn)
    scales = np.stack([np.full(256, 127, np.uint8), BYTES], -1)[None]
    want = oracle.E8M0.astype(np.float32)
    want[0] = 0  # 2^-127: the CPU that interprets the kernel flushes subnormal numbers, a GPU does not
    np.testing.assert_array_equal(read_back(QuantizedArray(ones, jnp.asarray(scales), "mxfp8"), 40, interpreter), want)


def test_every_e4m3_byte(interpreter):
    """Row r holds byte r in one column."""
    values = np.zeros((1, 256, 64), np.uint8)
    values[0, :, 5] = BYTES
    w = QuantizedArray(jnp.asarray(values).view(jnp.float8_e4m3fn), jnp.full((1, 256, 2), 127, jnp.uint8), "mxfp8")
    np.testing.assert_array_equal(read_back(w, 5, interpreter), oracle.E4M3.astype(np.float32))


def test_no_tokens():
    w = jnp.ones((2, 32, 64), jnp.bfloat16)
    h = moe_gate_up_3d_batched(jnp.zeros((0, 64), jnp.bfloat16), jnp.zeros((0, 2), jnp.int32), w, w)
    y = moe_down_3d_batched(h, jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2)), jnp.ones((2, 64, 32), jnp.bfloat16))
    assert h.shape == (0, 2, 32) and y.shape == (0, 64)


def test_ids_of_any_integer_type(interpreter):
    case = oracle.make_case(5, tokens=2, experts=4, hidden=64, intermediate=64, k=2)
    want = np.asarray(run_gate_up(case, interpreter))
    x, routing, experts = case.args()
    for ids in (routing.ids.astype(jnp.uint8), np.asarray(routing.ids, np.int64), routing.ids.astype(jnp.uint32)):
        h = moe_gate_up_3d_batched(x, ids, experts.w_gate, experts.w_up, interpret=interpreter)
        np.testing.assert_array_equal(np.asarray(h), want)
    beyond = np.asarray(routing.ids, np.int64) + 2**32  # must not wrap around to a valid expert
    h = moe_gate_up_3d_batched(x, beyond, experts.w_gate, experts.w_up, interpret=interpreter)
    assert not np.asarray(h).any()


GOOD = dict(x=jnp.ones((2, 64), jnp.bfloat16), ids=jnp.zeros((2, 1), jnp.int32),
            w_gate=jnp.ones((3, 32, 64), jnp.bfloat16), w_up=jnp.ones((3, 32, 64), jnp.bfloat16))


@pytest.mark.parametrize("change,error,words", [
    (dict(x=jnp.ones((2, 32), jnp.bfloat16)), ArgumentError, ["w_gate", "(3, 32, 64)", "(3, 32, 32)"]),
    (dict(x=jnp.ones((64,), jnp.bfloat16)), ArgumentError, ["x", "(64,)", "[T, H]"]),
    (dict(x=jnp.ones((2, 64))), ArgumentError, ["x", "float32", "bfloat16", "auto"]),
    (dict(ids=jnp.zeros((2, 1))), ArgumentError, ["ids", "float32", "integer"]),
    (dict(ids=jnp.zeros((3, 1), jnp.int32)), ArgumentError, ["ids", "(3, 1)", "(2, 1)"]),
    (dict(w_up=jnp.ones((3, 64, 64), jnp.bfloat16)), ArgumentError, ["w_up", "(3, 64, 64)", "(3, 32, 64)"]),
    (dict(w_up=quantize(jnp.ones((3, 32, 64)), "mxfp8")), ArgumentError, ["w_up", "format of w_gate"]),
    (dict(w_gate=jnp.ones((3, 32, 64), jnp.int8)), ArgumentError, ["w_gate", "int8"]),
    (dict(config=GateUpConfig(lanes=32, rows=1, unroll=1)), ArgumentError, ["config", "lanes=32"]),
    (dict(config=GateUpConfig(lanes=8, rows=1, unroll=0)), ArgumentError, ["config", "unroll=0"]),
    (dict(activation="swish"), ArgumentError, ["activation", "swish", "silu"]),
    (dict(x=[[1.0] * 64] * 2), ArgumentError, ["x", "list"]),
    (dict(x=quantize(jnp.ones((2, 64)), "mxfp8")), ArgumentError, ["x: got mxfp8 (2, 64)", "float16; dequantise it"]),
    (dict(b_up=quantize(jnp.ones((3, 32)), "mxfp8")), ArgumentError, ["b_up: got mxfp8 (3, 32)", "never quantised"]),
    (dict(interpret="yes"), ArgumentError, ["interpret: got 'yes'", "True or False"]),
    (dict(w_up=None), ArgumentError, ["w_up", "NoneType"]),
    (dict(out_dtype=jnp.int8), ArgumentError, ["out_dtype", "int8", "bfloat16"]),
    (dict(config=DownConfig(32, 1, 1)), ArgumentError, ["config", "DownConfig", "GateUpConfig"]),
])
def test_bad_arguments_are_named(change, error, words):
    arguments = {**GOOD, "interpret": True, **change}
    with pytest.raises(error) as caught:
        moe_gate_up_3d_batched(**arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("H,I,weights", [(48, 32, "bf16"), (64, 40, "bf16"), (96, 48, "mxfp8")])
def test_dimensions_the_kernel_cannot_walk(H, I, weights):
    w = jnp.ones((2, I, H), jnp.bfloat16)
    w = quantize(w, weights) if weights == "mxfp8" else w
    with pytest.raises(UnsupportedError, match="pad with zeros to .*auto"):
        moe_gate_up_3d_batched(jnp.ones((1, H), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32), w, w, interpret=True)


@pytest.mark.parametrize("weights", [jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1), jnp.complex64)])
def test_routing_weights_must_be_real_numbers(weights):
    with pytest.raises(ArgumentError, match="weights: got dtype"):
        moe_down_3d_batched(jnp.ones((1, 1, 64)), jnp.zeros((1, 1), jnp.int32), weights,
                            jnp.ones((1, 32, 64), jnp.bfloat16), interpret=True)


def test_the_kernels_refuse_gradients_by_name():
    h, ids, w = jnp.ones((1, 1, 64)), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 32, 64), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match="moe_down_3d_batched: has no gradient.*expert_centric"):
        jax.grad(lambda h: moe_down_3d_batched(h, ids, jnp.ones((1, 1)), w, interpret=True).sum().astype(float))(h)


def test_the_heuristics_fit_every_shape():
    """Any multiple of 32 is walked without a padded copy, by both kernels, at any number of tokens."""
    for format in ("mxfp8", "bf16"):
        for cols in range(64, 4096, 32):
            for n in (32, 96, 704, 2880, 4096):
                for tokens in (1, 3, 64):
                    config = DownConfig.heuristic(tokens, 4, n, cols, format)
                    rows = tile.RowTile(cols, format, config.lanes, config.rows)
                    assert n % rows.out_rows == 0 and rows.step <= cols and config.unroll >= 1, (config, cols, n)


def test_equal_layers_share_one_kernel(interpreter):
    from jax_warp_decode.kernels import gate_up

    case = oracle.make_case(1, tokens=1, experts=2, hidden=64, intermediate=32, k=1)
    before = gate_up._build.cache_info()
    for _ in range(3):
        run_gate_up(case, interpreter)
    after = gate_up._build.cache_info()
    assert after.misses - before.misses <= 1 and after.hits - before.hits >= 2


def test_without_a_gpu_they_say_so_where_they_would_run():
    with pytest.raises(UnsupportedError, match="^moe_gate_up_3d_batched: cannot run: JAX sees no NVIDIA .*interpret=T"):
        moe_gate_up_3d_batched(**GOOD)
    with pytest.raises(UnsupportedError, match="^moe_down_3d_batched: cannot run: JAX sees no NVIDIA .*interpret=T"):
        moe_down_3d_batched(jnp.ones((1, 1, 64)), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)),
                            jnp.ones((1, 32, 64), jnp.bfloat16))


def test_the_same_kernel_lowers_for_cuda():
    """The source that is interpreted here is the one that a GPU runs."""
    x, ids, w = GOOD["x"], GOOD["ids"], GOOD["w_gate"]
    lowered = jax.jit(moe_gate_up_3d_batched).trace(x, ids, w, w).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 1


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_stacked_layers_give_the_bits_of_each_layer(interpreter, weights):
    """[L, E, ..] with a layer number, the other layers and everything that is not routed poisoned."""
    case = oracle.make_case(
        5, tokens=2, experts=3, hidden=128, intermediate=64, k=2, weights=weights, pattern="skipped")
    x, routing, experts = case.args()
    alone = run_layer(case, interpreter)
    poison = jax.tree.map(lambda a: jnp.full_like(a, 255 if a.dtype == jnp.uint8 else jnp.nan), experts)
    stack = jax.tree.map(lambda a, p: jnp.stack([p, a, p]), experts, poison)

    def run(layer):
        h = moe_gate_up_3d_batched(
            x, routing.ids, stack.w_gate, stack.w_up, layer=layer, interpret=interpreter)
        return moe_down_3d_batched(
            h, routing.ids, routing.weights, stack.w_down, layer=layer, out_dtype=x.dtype, interpret=interpreter)

    np.testing.assert_array_equal(np.asarray(run(1), np.float32), np.asarray(alone, np.float32))
    for outside in (-1, 3):  # known only when it runs: reads nothing, like an id that is not routed
        assert not np.asarray(jax.jit(run)(jnp.int32(outside)), np.float32).any()


def test_what_a_stack_refuses():
    x, routing, experts = oracle.make_case(0, tokens=1, experts=3, hidden=64, intermediate=32, k=2).args()
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), experts)

    def gate_up(weights, **options):
        moe_gate_up_3d_batched(x, routing.ids, weights.w_gate, weights.w_up, interpret=True, **options)

    with pytest.raises(ArgumentError, match="layer: got None with stacked weights w_gate"):
        gate_up(stack)
    with pytest.raises(ArgumentError, match="layer: got 0 with w_gate .*expected stacked weights"):
        gate_up(experts, layer=0)
    with pytest.raises(ArgumentError, match="layer: got 2, expected 0 <= layer < 2"):
        gate_up(stack, layer=2)
    with pytest.raises(ArgumentError, match=r"layer: got float64 \(\), expected an integer scalar"):
        gate_up(stack, layer=0.5)
