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


@pytest.mark.parametrize("lanes", [32, 16, 8, 4])
@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
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


def test_scale_bytes_keep_their_meaning(interpreter):
    """Every E8M0 byte: 2**(s - 127), NaN for 255; a NaN block reaches the rows that use it and no other."""
    scales = np.array([1, 2, 64, 126, 127, 128, 134, 200, 254, 255], np.uint8)
    decoded = np.asarray(tile.e8m0_to_f32(jnp.asarray(scales)))
    np.testing.assert_array_equal(decoded, oracle.E8M0[scales].astype(np.float32))

    E, H, I = 1, 64, 64
    one = np.full((E, H, I), 0x38, np.uint8).view(jnp.float8_e4m3fn.dtype)  # E4M3 1.0
    w_down = np.full((E, H, I // 32), 127, np.uint8)
    w_down[0, :10, 1] = scales
    h = np.zeros((1, 1, I), np.float32)
    h[0, 0, 32] = 2.0**-8
    y = moe_down_3d_batched(
        jnp.asarray(h), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), QuantizedArray(
            jnp.asarray(one), jnp.asarray(w_down), "mxfp8"), out_dtype=jnp.float32, interpret=interpreter)
    want = (2.0**-8 * oracle.E8M0[np.concatenate([scales, np.full(H - 10, 127, np.uint8)])]).astype(np.float32)
    want[np.abs(want) < 2.0**-126] = 0  # the CPU that interprets the kernel flushes subnormal results
    np.testing.assert_array_equal(np.asarray(y)[0], want)


def test_every_e4m3_byte_is_decoded(interpreter):
    """One-hot activations read the 256 codes back one by one through the gate-free down kernel."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256).repeat(32, 1)  # [E=1, H=32, I=256]
    w = QuantizedArray(jnp.asarray(codes.view(jnp.float8_e4m3fn.dtype)), jnp.full((1, 32, 8), 127, jnp.uint8), "mxfp8")
    probe = np.array([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF])
    h = np.zeros((len(probe), 1, 256), np.float32)
    h[np.arange(len(probe)), 0, probe] = 1
    finite = ~np.isnan(oracle.E4M3)
    h[:, :, ~finite] = np.where(h[:, :, ~finite] == 1, 1, 0)
    w_finite = np.where(finite, codes, 0).astype(np.uint8)
    clean = QuantizedArray(jnp.asarray(w_finite.view(jnp.float8_e4m3fn.dtype)), w.scales, "mxfp8")
    T = len(probe)
    ids, ones = jnp.zeros((T, 1), jnp.int32), jnp.ones((T, 1))
    y = moe_down_3d_batched(jnp.asarray(h), ids, ones, clean, out_dtype=jnp.float32, interpret=interpreter)
    np.testing.assert_array_equal(np.asarray(y)[:, 0], np.where(finite, oracle.E4M3, 0)[probe])
    y = moe_down_3d_batched(jnp.asarray(h[:1]), ids[:1], ones[:1], w, out_dtype=jnp.float32, interpret=interpreter)
    assert np.isnan(np.asarray(y)).all()  # a NaN code in the row is a NaN result


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
    (dict(x=jnp.ones((2, 64))), ArgumentError, ["x", "float32", "bfloat16", "expert_centric"]),
    (dict(ids=jnp.zeros((2, 1))), ArgumentError, ["ids", "float32", "integer"]),
    (dict(ids=jnp.zeros((3, 1), jnp.int32)), ArgumentError, ["ids", "(3, 1)", "(2, 1)"]),
    (dict(w_up=jnp.ones((3, 64, 64), jnp.bfloat16)), ArgumentError, ["w_up", "(3, 64, 64)", "(3, 32, 64)"]),
    (dict(w_up=quantize(jnp.ones((3, 32, 64)), "mxfp8")), ArgumentError, ["w_up", "format of w_gate"]),
    (dict(w_gate=jnp.ones((3, 32, 64), jnp.int8)), ArgumentError, ["w_gate", "int8"]),
    (dict(config=GateUpConfig(lanes=32, rows=1, unroll=1)), ArgumentError, ["config", "lanes=32"]),
    (dict(config=GateUpConfig(lanes=8, rows=1, unroll=0)), ArgumentError, ["config", "unroll=0"]),
    (dict(activation="swish"), ArgumentError, ["activation", "swish", "silu"]),
])
def test_bad_arguments_are_named(change, error, words):
    arguments = {**GOOD, **change}
    with pytest.raises(error) as caught:
        moe_gate_up_3d_batched(**arguments, interpret=True)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("H,I,weights", [(48, 32, "bf16"), (64, 40, "bf16"), (32, 64, "mxfp8")])
def test_dimensions_the_kernel_cannot_walk(H, I, weights):
    w = jnp.ones((2, I, H), jnp.bfloat16)
    w = quantize(w, weights) if weights == "mxfp8" else w
    with pytest.raises(UnsupportedError, match="pad with zeros to .*expert_centric"):
        moe_gate_up_3d_batched(jnp.ones((1, H), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32), w, w, interpret=True)


def test_the_heuristics_fit_every_shape():
    """Any multiple of 32 is walked without a padded copy, by both kernels, at any number of tokens."""
    for itemsize in (1, 2):
        for cols in range(64, 4096, 32):
            for n in (32, 96, 704, 2880, 4096):
                for tokens in (1, 3, 64):
                    config = DownConfig.heuristic(tokens, 4, n, cols, itemsize)
                    rows = tile.RowTile(cols, itemsize, config.lanes, config.rows)
                    assert n % rows.out_rows == 0 and rows.step <= cols and config.unroll >= 1, (config, cols, n)


def test_equal_layers_share_one_kernel(interpreter):
    from jax_warp_decode.kernels import gate_up

    case = oracle.make_case(1, tokens=1, experts=2, hidden=64, intermediate=32, k=1)
    before = gate_up._build.cache_info()
    for _ in range(3):
        run_gate_up(case, interpreter)
    after = gate_up._build.cache_info()
    assert after.misses - before.misses <= 1 and after.hits - before.hits >= 2


def test_the_same_kernel_lowers_for_cuda():
    """The source that is interpreted here is the one that a GPU runs."""
    x, ids, w = GOOD["x"], GOOD["ids"], GOOD["w_gate"]
    lowered = jax.jit(moe_gate_up_3d_batched).trace(x, ids, w, w).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 1
