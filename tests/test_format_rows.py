"""Every row of `FORMATS` against the float64 tables: all codes, quantising, shapes, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import qwix
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_warp_decode import ArgumentError, UnsupportedError
from jax_warp_decode.formats import (
    FORMATS,
    QuantizedArray,
    dequantize,
    from_qwix,
    pack_nibbles,
    quantize,
    to_qwix,
    unpack_nibbles,
)

every_format = pytest.mark.parametrize("name", FORMATS)
SCALED = [name for name, rule in oracle.FORMATS.items() if rule.emax is None]
FLOAT32_MAX = float(np.finfo(np.float32).max)
SHAPE = (8, 2, 64)  # one shape for many tests: each is compiled once


def bits(a):
    """float32 bits, NaN made canonical: comparisons that see the sign of zero and flushed subnormals."""
    with np.errstate(over="ignore"):
        a = np.asarray(a).astype(np.float32)
    return np.where(np.isnan(a), np.uint32(0x7FC00000), a.view(np.uint32))


def random(shape, seed=0, scale=1.0, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def assert_same_bits(got, want):
    """Equal float32 bits; where the exact result is subnormal, a CPU may have flushed it."""
    normal = ~((np.abs(want) < 2.0**-126) & (want != 0))
    np.testing.assert_array_equal(bits(got)[normal], bits(want)[normal])


# --------------------------------------------------------------------------------------------------------- decoding


def test_the_table_and_the_oracle_have_the_same_rows():
    assert list(FORMATS) == list(oracle.FORMATS)
    for name, rule in oracle.FORMATS.items():
        spec = FORMATS[name]
        assert (spec.block_shape, spec.bits, spec.global_scale) == (rule.block, 4 + 4 * (not rule.packed),
                                                                    rule.global_scale)


def test_oracle_tables_agree_with_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    for table, dtype in ((oracle.E5M2, ml_dtypes.float8_e5m2), (oracle.E4M3, ml_dtypes.float8_e4m3fn),
                         (oracle.E2M1, ml_dtypes.float4_e2m1fn)):
        np.testing.assert_array_equal(table, codes[:len(table)].view(dtype).astype(np.float64))


def all_codes(name, scales):
    """A `Quantized` whose row r holds every code under scales[r] (and scales[r] only)."""
    rule = oracle.FORMATS[name]
    codes = np.arange(len(rule.table), dtype=np.uint8)
    if rule.packed:  # every code as low and as high nibble, in an order that tells the two apart
        codes = np.repeat(np.concatenate([codes, codes[::-1]]).reshape(-1, 2) @ np.array([1, 16]), 2).astype(np.uint8)
    values = np.broadcast_to(codes, (len(scales), *codes.shape)).copy().view(rule.dtype)
    columns = values.shape[1] * (1 + rule.packed) // rule.block[1] if rule.block[1] else 1
    return oracle.Quantized(values, np.repeat(scales[:, None], columns, 1), name)


@pytest.mark.parametrize("name, jit", [("mxfp8_e5m2", True), ("mxfp4", False), ("mxfp4", True)])
def test_every_code_under_every_scale_byte_is_exact(name, jit):
    q = all_codes(name, np.arange(256, dtype=np.uint8))
    got = (jax.jit(dequantize) if jit else dequantize)(q.to_jax())
    np.testing.assert_array_equal(bits(got), bits(q.decode()))  # subnormals, signs of zero, inf and NaN


@pytest.mark.parametrize("global_scale", [1.0, 0.3, 2.0**-100, 2.0**110])
def test_every_nvfp4_code_under_every_scale(global_scale):
    q = all_codes("nvfp4", np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn))
    q = q._replace(global_scale=np.full((1, 1), global_scale, np.float32))
    assert_same_bits(dequantize(q.to_jax()), q.decode())


@pytest.mark.parametrize("name, dtype", [
    (name, dtype) for name in ("fp8_channel", "int8_channel", "int4_group32")
    for dtype in (np.float32, ml_dtypes.bfloat16)])
def test_every_code_under_ordinary_scales(name, dtype):
    scales = np.array([1, 0.3, 2.0**-100, 2.0**-126, 2.0**100, 3e38, np.inf, np.nan], dtype)
    q = all_codes(name, scales)
    with np.errstate(invalid="ignore"):  # 0 times inf
        assert_same_bits(dequantize(q.to_jax()), q.decode())


@pytest.mark.parametrize("name, dtype", [
    ("fp8_block128", np.float32), ("fp8_block128", ml_dtypes.bfloat16), ("fp8_tensor", np.float32)])
def test_blocks_with_rows_and_partial_blocks_at_the_edges(name, dtype):
    values = random((2, 200, 130), scale=30).astype(ml_dtypes.float8_e4m3fn)
    shape = FORMATS[name].scales_shape(values.shape)
    assert shape == ((2, 2, 2) if name == "fp8_block128" else (2, 1, 1))
    scales = np.random.default_rng(1).uniform(0.01, 0.1, shape).astype(dtype)
    scales[1, -1, -1] = np.nan
    q = oracle.Quantized(values, scales, name)
    got = np.asarray(dequantize(q.to_jax()))
    np.testing.assert_array_equal(bits(got), bits(q.decode()))
    poisoned = np.zeros((2, 200, 130), bool)
    poisoned[1, 128:, 128:] = True
    np.testing.assert_array_equal(np.isnan(got), poisoned if name == "fp8_block128" else np.arange(2)[:, None, None] > 0
                                  | np.zeros((2, 200, 130), bool))


def test_mxfp4_of_the_public_case():
    """D05: the low nibble comes first, whatever dtype the bytes came from, and scale byte 128 doubles."""
    values = np.zeros((8, 16), np.uint8)
    values[:, :5] = 0x21, 0x43, 0x65, 0x87, 0xFE
    scale_bytes = np.array([0, 1, 126, 127, 128, 134, 254, 255], np.uint8)
    got = np.asarray(dequantize(QuantizedArray(jnp.asarray(values), jnp.asarray(scale_bytes)[:, None], "mxfp4")))
    np.testing.assert_array_equal(bits(got[4, :10]), bits(np.array([1, 2, 3, 4, 6, 8, 12, -0.0, -8, -12])))
    scale = np.array([2.0**-127, 2.0**-126, 0.5, 1, 2, 128, 2.0**127, np.nan])[:, None]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bits(got), bits(got[3].astype(np.float64) * scale))


def test_words_of_eight_nibbles_are_bytes_in_order():
    """compressed-tensors packs eight integers + 8 into an int32, the first one lowest."""
    integers = np.random.default_rng(0).integers(-8, 8, (3, 64))
    words = ((integers + 8).reshape(3, 8, 8) << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)
    q = QuantizedArray(jnp.asarray(words.view(np.uint8)), jnp.ones((3, 2), jnp.bfloat16), "int4_group32")
    np.testing.assert_array_equal(dequantize(q), integers)
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(jnp.asarray(integers + 8))), integers + 8)


# -------------------------------------------------------------------------------------------------------- quantising


def check_against_oracle(x, name):
    """Scales of the rule, to the precision of float32 arithmetic, and exactly the nearest codes under these scales.

    Where a scale is a number, a quotient within a few roundings of a tie may go to the other neighbour.
    """
    q, rule = quantize(jnp.asarray(x), name), oracle.FORMATS[name]
    q.check("q")
    scales, global_scale = oracle.fit_scales(x, name)
    got = np.asarray(q.scales, np.float64)
    if rule.emax is not None:
        np.testing.assert_array_equal(got, scales)
    else:
        step = {np.float32: 2.0**-22, ml_dtypes.bfloat16: 2.0**-8 + 2.0**-22}.get(rule.scales_dtype, 2.0**-4 + 2.0**-21)
        np.testing.assert_allclose(got, scales, rtol=step, atol=2.0**-10 if name == "nvfp4" else 0)
        if global_scale is not None:
            np.testing.assert_allclose(q.global_scale, global_scale, rtol=2.0**-22)
    parts = [None if a is None else np.asarray(a) for a in (q.scales, q.global_scale)]
    want = oracle.encode(x, name, *parts).decode()
    got = oracle.Quantized(np.asarray(q.values), parts[0], name, parts[1]).decode()
    differ = got != want
    assert not differ.any() or rule.emax is None
    np.testing.assert_allclose(np.asarray(x, np.float64)[differ], (got + want)[differ] / 2, rtol=2.0**-21)
    return q


@pytest.mark.parametrize("name, dtype, scale", [
    *((name, np.float32, 1.0) for name in FORMATS if name != "mxfp8"),
    *((name, ml_dtypes.bfloat16, 1e-3) for name in ("mxfp4", "nvfp4", "fp8_block128")),
    ("int4_group32", np.float16, 100.0)])
def test_random_data_matches_the_oracle(name, dtype, scale):
    x = random((2, 130, 160), scale=scale, dtype=dtype)
    q = check_against_oracle(x, name)
    if dtype == ml_dtypes.bfloat16:
        jax.tree.map(np.testing.assert_array_equal, jax.jit(quantize, static_argnums=1)(x, name), q)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@every_format
@settings(max_examples=15, deadline=None)
@given(block=st.lists(finite, min_size=64, max_size=64), ulps=st.integers(0, 3))
def test_finite_data_never_becomes_nan_or_inf(name, block, ulps):
    x = np.array([[block, block[::-1]]] * SHAPE[0], np.float32)
    x[0, 0, 0] = (np.float32(FLOAT32_MAX).view(np.int32) - np.int32(ulps)).view(np.float32)
    assert np.isfinite(np.asarray(dequantize(quantize(x, name)))).all()


@every_format
def test_subnormals_zeros_and_maxima(name):
    """A matrix of one magnitude comes back to within the format's precision, or the smallest number that it has."""
    magnitudes = np.array([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-110, 1.0, 2.0**127, FLOAT32_MAX])
    signs = np.where(np.arange(2 * 64).reshape(2, 64) % 2, -1, 1)
    x = (magnitudes[:, None, None] * signs).astype(np.float32)
    got = np.asarray(dequantize(quantize(x, name)), np.float64)
    # MX scales are powers of two, and the largest code lies below the next one; int4 has bfloat16 scales.
    rtol = {"mxfp4": 0.25, "mxfp8": 0.125, "mxfp8_e5m2": 0.125, "int4_group32": 2.0**-8}.get(name, 2.0**-22)
    error = np.abs(got - x)
    assert (error <= np.maximum(rtol * np.abs(x), np.where(np.abs(x) < 2.0**-120, 2.0**-126, 0))).all()
    if "int" not in name:  # floats keep the sign of zero
        np.testing.assert_array_equal(np.signbit(got[0]), signs < 0)


@every_format
def test_a_nonfinite_element_makes_what_shares_its_scale_nan(name):
    x = random(SHAPE)
    x[0, 1, 40], x[3, 1, 40] = np.inf, np.nan
    rule = oracle.FORMATS[name]
    marked = np.zeros(x.shape)
    marked[[0, 3], 1, 40] = 1
    block = (None, None) if rule.global_scale else rule.block
    want = oracle.spread(oracle.block_max(marked, block), x.shape, block) > 0
    np.testing.assert_array_equal(np.isnan(np.asarray(dequantize(quantize(x, name)))), want)


@every_format
def test_quantising_again_loses_nothing(name):
    """Blocks whose largest element sits at the largest code come back, to a rounding of the scale."""
    x = random(SHAPE)
    x[..., ::16] = 6  # the largest of each block, and a code of every format
    once = quantize(x, name)
    twice = quantize(dequantize(once), name)
    np.testing.assert_array_equal(oracle.bytes_of(twice.values), oracle.bytes_of(once.values))
    np.testing.assert_allclose(dequantize(twice), dequantize(once), rtol=2.0**-22 if name in SCALED else 0)


@pytest.mark.parametrize("name", ["nvfp4", "int4_group32"])
def test_x64_mode_changes_nothing(name):
    x = random(SHAPE)
    want = quantize(x, name)
    with jax.enable_x64(True):
        got = quantize(x, name)
        assert dequantize(got).dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), got, want)


# ------------------------------------------------------------------------------------------------- shapes and sizes


@every_format
@pytest.mark.parametrize("shape", [(3, 96, 160), (0, 64, 32), (2, 1, 32)])
def test_sizes_are_known_without_the_data(name, shape):
    spec = FORMATS[name]
    q = jax.eval_shape(lambda x: quantize(x, name), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert q == spec.structs(shape) and q.shape == shape
    assert spec.nbytes(shape) == q.nbytes == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(q))
    assert jax.eval_shape(dequantize, q).shape == shape
    q.check("q")


@pytest.mark.parametrize("name, bytes_per_value", [
    ("mxfp8", 33 / 32), ("mxfp8_e5m2", 33 / 32), ("mxfp4", 17 / 32), ("fp8_block128", 1 + 4 / 128**2),
    ("int8_channel", 1 + 4 / 2048), ("int4_group32", 18 / 32)])
def test_bytes_of_a_model_sized_weight(name, bytes_per_value):
    shape = (1024, 2048, 2048)  # beyond 2^31 values
    assert FORMATS[name].nbytes(shape) == 1024 * 2048 * 2048 * bytes_per_value


def test_bytes_with_other_scales_and_a_global_scale():
    assert FORMATS["nvfp4"].nbytes((8, 64, 64)) == 8 * (64 * 64 * 9 // 16 + 4)
    assert FORMATS["fp8_block128"].nbytes((8, 256, 200), jnp.bfloat16) == 8 * (256 * 200 + 2 * 2 * 2)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block128"])
def test_indexing_experts_keeps_their_scales(name):
    q = quantize(jnp.asarray(random((4, 40, 160))), name)
    dense = np.asarray(dequantize(q))
    for index in (2, (None, 2)):
        q[index].check("q")
        np.testing.assert_array_equal(dequantize(q[index]), dense[index])
    with pytest.raises(ArgumentError, match=r"index: got .*at most 1 entries.*two axes"):
        q[0, 0]


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name, change, message", [
    ("mxfp4", dict(values=(4, 64, 49)), r"w.values: got shape \(4, 64, 49\), 98 values at 2 a byte.*multiple of 32"),
    ("mxfp4", dict(values=((4, 64, 12), jnp.int32)), r"w.values: got dtype int32, expected uint8.*words of eight"),
    ("mxfp4", dict(values=((4, 64, 96), jnp.float4_e2m1fn)), r"w.values: got dtype float4_e2m1fn.*pack two values"),
    ("mxfp4", dict(values=(4, 64, 96)), r"w.scales: got shape \(4, 64, 3\), expected \(4, 64, 6\).*not packed yet"),
    ("mxfp4", dict(scales=(4, 3, 64)), r"w.scales: .*looks transposed"),
    ("mxfp4", dict(scales=(4, 64, 6)), r"w.scales: .*would fit blocks of 1 x 16"),
    ("mxfp4", dict(scales=((4, 64, 3), jnp.float8_e4m3fn)), r"w.scales: got dtype float8_e4m3fn, expected uint8"),
    ("mxfp4", dict(scales=((4, 64, 3), jnp.float8_e8m0fnu)), r"w.scales: got dtype float8_e8m0fnu.*bitcast_convert"),
    ("mxfp4", dict(global_scale=((4, 1, 1), jnp.float32)), r"w.global_scale: got an array, expected None"),
    ("nvfp4", dict(global_scale=None), r"w.global_scale: got None, expected float32"),
    ("nvfp4", dict(global_scale=((4,), jnp.float32)), r"w.global_scale: got shape \(4,\).*\(4, 1, 1\).*reshape"),
    ("nvfp4", dict(global_scale=((4, 1, 1), jnp.bfloat16)), r"w.global_scale: got dtype bfloat16, expected float32"),
    ("nvfp4", dict(scales=(4, 64, 3)), r"w.scales: .*fit blocks of 1 x 32"),
    ("mxfp8_e5m2", dict(values=((4, 64, 96), jnp.float8_e4m3fn)), r"w.values: got dtype float8_e4m3fn, expected flo"),
    ("fp8_block128", dict(scales=(4, 1, 2)), r"w.scales: got shape \(4, 1, 2\), expected \(4, 2, 1\).*transposed"),
    ("fp8_block128", dict(scales=(4, 3, 2)), r"w.scales: .*128 x 128.*would fit blocks of 64 x 48"),
    ("fp8_block128", dict(scales=((4, 2, 1), jnp.float16)), r"w.scales: got dtype float16.*float32 or bfloat16"),
    ("fp8_block128", dict(values=(96,), scales=(1,)), r"w.values: got shape \(96,\), expected at least two axes"),
    ("fp8_block128", dict(values=((4, 192, 96), jnp.float8_e4m3fnuz)), r"w.values: got dtype float8_e4m3fnuz"),
    ("fp8_channel", dict(scales=(4, 64)), r"w.scales: got shape \(4, 64\), expected \(4, 64, 1\).*reshape"),
    ("fp8_channel", dict(scales=(4, 1, 96)), r"w.scales: got shape \(4, 1, 96\)"),
    ("fp8_tensor", dict(scales=(4,)), r"w.scales: got shape \(4,\), expected \(4, 1, 1\).*reshape"),
    ("int8_channel", dict(values=((4, 64, 96), jnp.uint8)), r"w.values: got dtype uint8, expected int8"),
    ("int4_group32", dict(values=((4, 64, 12), jnp.int32)), r"w.values: got dtype int32.*words of eight"),
    ("int4_group32", dict(values=((4, 64, 96), jnp.int4)), r"w.values: got dtype int4, expected uint8"),
    ("int4_group32", dict(scales=(4, 64, 1)), r"w.scales: .*would fit blocks of 1 x 96"),
])
def test_check_says_what_is_wrong(name, change, message):
    spec = FORMATS[name]
    good = spec.structs((4, 192 if name == "fp8_block128" else 64, 96))
    parts = {part: getattr(good, part) for part in ("values", "scales", "global_scale")}
    for part, new in change.items():
        shape, dtype = new if new and isinstance(new[0], tuple) else (new, getattr(parts[part], "dtype", None))
        parts[part] = None if new is None else jax.ShapeDtypeStruct(shape, dtype)
    broken = QuantizedArray(format=name, **parts)
    with pytest.raises(ArgumentError, match="^" + message):
        broken.check("w")
    with pytest.raises(ArgumentError):
        jax.eval_shape(dequantize, broken)


@pytest.mark.parametrize("name, x, message", [
    ("mxfp4", jnp.ones((2, 48)), r"x: got shape \(2, 48\), expected a last axis that is a multiple of 32"),
    ("nvfp4", jnp.ones(32), r"x: got shape \(32,\), expected at least two axes and a last axis .* multiple of 16"),
    ("fp8_tensor", jnp.ones(32), r"x: got shape \(32,\), expected at least two axes"),
    ("int8_channel", jnp.float32(1), r"x: got shape \(\), expected at least one axis"),
    ("int4_group32", jnp.ones(32, jnp.int8), r"x: got int8, expected a float32"),
])
def test_arrays_that_cannot_be_quantised(name, x, message):
    with pytest.raises(ArgumentError, match="^" + message):
        quantize(x, name)


# -------------------------------------------------------------------------------------------------------------- qwix


@pytest.mark.parametrize("name, tile, dtype", [("mxfp4", 32, jnp.bfloat16), ("nvfp4", 16, jnp.float32)])
def test_four_bit_arrays_that_qwix_quantised_mean_the_same(name, tile, dtype):
    x = jnp.asarray(random((4, 128)), dtype)
    array = jax.jit(lambda x: qwix.quantize(x, name, tiled_axes={1: tile}, channelwise_axes=[0]))(x)
    ours = from_qwix(array)
    assert ours.format == name
    np.testing.assert_array_equal(np.asarray(dequantize(ours, dtype), np.float32),
                                  np.asarray(jax.jit(qwix.dequantize)(array), np.float32))
    jax.tree.map(np.testing.assert_array_equal, from_qwix(to_qwix(ours)), ours)


@pytest.mark.parametrize("name, rtol", [("mxfp4", 0), ("nvfp4", 2.0**-23)])
def test_qwix_reads_our_four_bit_arrays(name, rtol):
    q = quantize(jnp.asarray(random((2, 8, 64))), name)
    np.testing.assert_allclose(jax.jit(lambda q: qwix.dequantize(to_qwix(q)))(q), dequantize(q), rtol=rtol)


def test_formats_that_qwix_does_not_have_are_refused():
    with pytest.raises(UnsupportedError, match="^q.format: got 'int8_channel'"):
        to_qwix(quantize(jnp.ones((2, 8)), "int8_channel"))
    with pytest.raises(ArgumentError, match="^qarray.scale: got values that E4M3 does not have"):
        values, scale = np.ones((2, 16), ml_dtypes.float4_e2m1fn), np.full((2, 1), 0.3, np.float32)
        from_qwix(qwix.QArray(values, scale, None, "nvfp4"))
