"""The two warp-decode kernels with every weight format, biases and activations, interpreted, against the oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_formats
import pytest

from jax_warp_decode import ArgumentError, QuantizedArray
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels import (
    DownConfig,
    GateUpConfig,
    checks,
    kernel_format,
    moe_down_3d_batched,
    moe_gate_up_3d_batched,
)
from jax_warp_decode.kernels.tile import RowTile

MX = ("mxfp8", "mxfp8_e5m2", "mxfp4")  # with E8M0 scales
BYTES = np.arange(256, dtype=np.uint8)


# (H, I): sizes that steps divide and that they do not, blocks of 128 cut at the edge, rows shorter than four chunks.
SIZES = {"mxfp8_e5m2": (96, 64), "mxfp4": (160, 96), "nvfp4": (96, 160), "fp8_block128": (160, 160),
         "fp8_channel": (96, 64), "fp8_tensor": (64, 96), "int8_channel": (96, 32), "int4_group32": (160, 32)}


def make_case(seed, hidden, intermediate, k=2, **options):
    return oracle.make_case(seed, tokens=1, experts=3, hidden=hidden, intermediate=intermediate, k=k,
                            **dict(pattern="skipped") | options)


def few(kind, rows, unroll, lanes=4):
    """A configuration with few programs, each of which takes the interpreter its time."""
    return kind(lanes, rows * lanes // 128, unroll)


def run_gate_up(case, experts, config=None, **options):
    x, routing, _ = case.args()
    return moe_gate_up_3d_batched(
        x, routing.ids, experts.w_gate, experts.w_up, b_gate=experts.b_gate, b_up=experts.b_up,
        activation=case.activation, config=config or few(GateUpConfig, experts.intermediate, 1), interpret=True,
        **options)


def assert_layer(case, gate_up=None, down=None, stack=lambda experts: experts, **layer):
    x, routing, experts = case.args()
    experts = stack(experts)
    h = run_gate_up(case, experts, out_dtype=jnp.bfloat16, config=gate_up, **layer)
    oracle.assert_hidden_close(h, case)
    y = moe_down_3d_batched(h, routing.ids, routing.weights, experts.w_down, b_down=experts.b_down, out_dtype=x.dtype,
                            config=down or few(DownConfig, experts.hidden, 2), interpret=True, **layer)
    oracle.assert_close(y, case, h_dtype="bfloat16")


@pytest.mark.parametrize("format", [f for f in SIZES if f != "fp8_block128"])  # test_kernels has mxfp8
def test_every_format(format):
    """With experts that nobody asked for poisoned, and slots that are not routed."""
    assert_layer(make_case(list(SIZES).index(format), *SIZES[format], weights=format))


@pytest.mark.parametrize("lanes,H,I", [(4, 160, 160), (8, 256, 128)])
def test_blocks_of_128_rows_and_columns(lanes, H, I):
    """Blocks cut at the edges, which lanes cross within a step; and whole ones, under several lanes each."""
    rows = lanes // 4 * (1 if H % 128 else 4)
    assert_layer(make_case(1, H, I, k=1, weights="fp8_block128", pattern="uniform"),
                 gate_up=GateUpConfig(lanes, rows, 1), down=DownConfig(lanes, rows, 2))


def test_float16_activations_with_packed_weights():
    case = make_case(7, 64, 32, weights="mxfp4", x_dtype="f16", pattern="uniform")
    oracle.assert_hidden_close(run_gate_up(case, case.args()[2]), case)


@pytest.mark.parametrize("activation,biases,weights", [("clamped_swiglu", "bf16", "mxfp4"), ("relu2", "f32", "bf16")])
def test_biases_and_experts_without_a_gate(activation, biases, weights):
    """A bias counts once per slot, and not at all in slots that are not routed."""
    assert_layer(make_case(3, 64, 32, weights=weights, activation=activation, biases=biases))


def test_a_layer_of_a_stack():
    """Biases and scales of the layer asked for; the other is poisoned."""
    case = make_case(5, 64, 32, weights="fp8_block128", activation="clamped_swiglu", biases="f32")
    assert_layer(
        case, stack=lambda experts: jax.tree.map(lambda a: jnp.stack([jnp.full_like(a, jnp.nan), a]), experts), layer=1)


# ------------------------------------------------------------------------------------------------------ byte by byte


def read_back(w, columns, interpret, lanes):
    """Those columns of w [1, n, cols] through the down kernel, by one-hot h: [n, len(columns)]."""
    h = jnp.zeros((len(columns), 1, w.shape[2]), jnp.bfloat16).at[np.arange(len(columns)), 0, columns].set(1)
    ids, weights = jnp.zeros((len(columns), 1), jnp.int32), jnp.ones((len(columns), 1))
    return np.asarray(moe_down_3d_batched(h, ids, weights, w, out_dtype=jnp.float32, config=DownConfig(lanes, lanes, 1),
                                          interpret=interpret)).T


def stored(format, fill=0):
    """Items of 256 rows of 256 values, all of them `fill`."""
    return np.full((1, 256, 256 // FORMATS[format].values_per_item), fill, np.uint8)


def wrap(format, items, scales):
    """A weight of these bytes; `scales` in their own dtype."""
    spec = FORMATS[format]
    values = jnp.asarray(items.view(spec.values_dtype))
    return QuantizedArray(values, jnp.asarray(scales), format, jnp.ones((1, 1, 1)) if spec.global_scale else None)


def check_scale_bytes(format, interpret=False, lanes=4):
    """Row r has scale byte r in its second block: 2**(r - 127), and NaN for 255; other blocks are not touched by it."""
    one = {"mxfp8": 0x38, "mxfp8_e5m2": 0x3C, "mxfp4": 0xE2}[format]  # mxfp4: 1, and -4 in the odd column
    items, per_item = stored(format), FORMATS[format].values_per_item
    items[..., [0, 40 // per_item]] = one
    scales = np.full((1, 256, 8), 127, np.uint8)
    scales[..., 1] = BYTES
    got = read_back(wrap(format, items, scales), [0, 40, 41], interpret, lanes)
    with np.errstate(over="ignore"):
        powers = oracle.E8M0.astype(np.float32)
        want = np.stack([np.where(BYTES == 255, np.nan, 1), powers, (-4 if per_item == 2 else 0) * powers], -1)
    if interpret:
        want[0, 1:] = 0  # 2^-127: the CPU that interprets the kernel flushes subnormal numbers, a GPU does not
    np.testing.assert_array_equal(got, want)


def check_value_bytes(format, lanes, interpret=False):
    """Row r holds byte r; two values a byte are the low nibble and the high one."""
    table, spec = oracle_formats.FORMATS[format].table, FORMATS[format]
    items = stored(format, fill=0x88 if format == "int4_group32" else 0)
    items[..., 5] = BYTES
    ones = np.ones(spec.scales_shape((1, 256, 256)), spec.scales_dtypes[0])
    w = wrap(format, items, ones * np.uint8(127) if ones.dtype == np.uint8 else ones)
    packed = spec.values_per_item == 2
    want = np.stack([table[BYTES & 15], table[BYTES >> 4]] if packed else [table], -1).astype(np.float32)
    np.testing.assert_array_equal(read_back(w, [10, 11] if packed else [5], interpret, lanes), want)


def test_every_scale_byte():
    check_scale_bytes("mxfp4", interpret=True)  # test_kernels has mxfp8, test_gpu_formats all of them


@pytest.mark.parametrize("format", FORMATS)
def test_every_value_byte(format):
    check_value_bytes(format, lanes=4, interpret=True)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_every_format_has_a_row():
    assert {*FORMATS, "bf16", "f16"} <= {*kernel_format.KERNEL_FORMATS}


@pytest.mark.parametrize("change,words", [
    (dict(b_up=jnp.ones((3, 64))), ["b_up", "(3, 64)", "(3, 32)", "[E, I]"]),
    (dict(b_gate=jnp.ones((3, 32), jnp.int32)), ["b_gate", "int32"]),
    (dict(w_gate=None), ["w_gate", "None", "silu", "gated"]),
    (dict(activation="relu2"), ["w_gate", "relu2", "None"]),
    (dict(activation="relu2", w_gate=None, b_gate=jnp.ones((3, 32))), ["b_gate", "w_gate"]),
])
def test_what_gate_up_refuses(change, words):
    w = jnp.ones((3, 32, 64), jnp.bfloat16)
    good = dict(x=jnp.ones((2, 64), jnp.bfloat16), ids=jnp.zeros((2, 1), jnp.int32), w_gate=w, w_up=w)
    with pytest.raises(ArgumentError) as caught:
        moe_gate_up_3d_batched(**good | change, interpret=True)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_down_refuses():
    w = FORMATS["mxfp4"].quantize(jnp.ones((3, 32, 64)))
    h, ids, weights = jnp.ones((1, 1, 64)), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
    with pytest.raises(ArgumentError, match="h: got dtype float32.*mxfp4"):
        moe_down_3d_batched(h, ids, weights, w, interpret=True)
    with pytest.raises(ArgumentError, match=r"b_down: got shape \(3, 64\), expected \(3, 32\)"):
        moe_down_3d_batched(h.astype(jnp.bfloat16), ids, weights, w, b_down=jnp.ones((3, 64)), interpret=True)


@pytest.mark.parametrize("format", kernel_format.KERNEL_FORMATS)
def test_the_heuristics_fit_every_shape(format):
    """Any multiple of 32 is walked without a padded copy, and under one row of scales."""
    for cols in (32, 64, 96, 160, 352, 704, 768, 1536, 2880, 4096):
        for n in (32, 96, 704, 2880, 4096):
            for T in (1, 3, 64):
                for config in (DownConfig.heuristic(T, 4, n, cols, format),
                               GateUpConfig.heuristic(T, 4, cols, n, format)):
                    checks.config_fits("w", RowTile(cols, format, config.lanes, config.rows), n, config.unroll)


@pytest.mark.parametrize("format", kernel_format.KERNEL_FORMATS)
def test_every_tile_has_registers(format):
    """Layouts that the interpreter does not look at, and the compiler refuses where an axis is of size 1."""
    for cols, lanes in itertools.product((32, 64, 96, 128, 384, 640, 2816, 2880), (4, 8, 16, 32)):
        rows = RowTile(cols, format, lanes, 1)
        if rows.step <= cols:
            for axes in ("SWGCV", "SWGC", "GCV", "SW"):
                rows._layout(axes).to_mgpu()
