"""MXFP8 against the float64 tables, code by code, and the rules of OCP MX v1.0 for quantising."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import qwix
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_warp_decode import formats
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.formats import (
    FORMATS,
    QuantizedArray,
    dequantize,
    dequantize_mxfp8,
    from_qwix,
    quantize_mxfp8,
    to_qwix,
)

E4M3 = ml_dtypes.float8_e4m3fn


def bits(a):
    """float32 bits, NaN made canonical: comparisons that see the sign of zero and flushed subnormals."""
    a = np.asarray(a, np.float32)
    return np.where(np.isnan(a), np.uint32(0x7FC00000), a.view(np.uint32))


def all_products():
    """Every value code under every scale byte: values [256 scales, 256 codes], scales [256, 8], exact float64."""
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256)).copy().view(E4M3)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, 1)
    return values, scales, oracle.decode_mx(values, scales)


# --------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_every_value_code_under_every_scale_byte_is_exact_in_float32(jit):
    values, scales, want = all_products()
    decode = jax.jit(dequantize_mxfp8) if jit else dequantize_mxfp8
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bits(decode(values, scales)), bits(want))  # subnormals, signs of zero, inf, NaN


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decoding_to_a_narrow_dtype_rounds_the_exact_product_once(dtype):
    values, scales, want = all_products()
    normal = ~((np.abs(want) < 2.0**-126) & (want != 0))  # the CPU may flush float32 subnormals in the cast
    with np.errstate(over="ignore"):
        want = want.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).astype(np.float32)
    got = np.asarray(dequantize_mxfp8(values, scales, dtype).astype(jnp.float32))
    assert dequantize_mxfp8(values, scales, dtype).dtype == dtype
    np.testing.assert_array_equal(bits(got)[normal], bits(want)[normal])


def test_oracle_tables_agree_with_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(oracle.E4M3, codes.view(E4M3).astype(np.float64))
    np.testing.assert_array_equal(oracle.E8M0, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))


def test_scale_bytes_of_the_public_case():
    """D05: 2^(byte - 127) at the ends; byte 255 poisons its block and no other."""
    scale_bytes = np.array([0, 1, 126, 127, 128, 134, 254, 255], np.uint8)
    ones = np.ones(8 * 32, E4M3)
    want = np.repeat([2.0**-127, 2.0**-126, 0.5, 1, 2, 128, 2.0**127, np.nan], 32).astype(np.float32)
    np.testing.assert_array_equal(bits(dequantize_mxfp8(ones, scale_bytes)), bits(want))
    as_float = scale_bytes.view(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(bits(dequantize_mxfp8(ones, as_float)), bits(want))


def test_dequantising_to_bfloat16_is_exact_within_its_range():
    values, scales, want = all_products()
    ok = (np.abs(want) >= 2.0**-126) & (np.abs(want) < 2.0**127)
    got = np.asarray(dequantize_mxfp8(values, scales, jnp.bfloat16), np.float64)
    np.testing.assert_array_equal(got[ok], want[ok])


# -------------------------------------------------------------------------------------------------------- quantising


def check_against_oracle(x):
    q = quantize_mxfp8(jnp.asarray(x))
    values, scales = oracle.encode_mx(x)
    np.testing.assert_array_equal(np.asarray(q.scales), scales)
    np.testing.assert_array_equal(oracle.bytes_of(np.asarray(q.values)), oracle.bytes_of(values))
    q.check("q")
    return q


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_random_data_matches_the_oracle_byte_for_byte(dtype, scale):
    x = (np.random.default_rng(0).standard_normal((3, 5, 96)) * scale).astype(dtype)
    check_against_oracle(x)
    jitted = jax.jit(quantize_mxfp8)(x)
    np.testing.assert_array_equal(np.asarray(jitted.scales), np.asarray(quantize_mxfp8(x).scales))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_any_finite_block_matches_the_oracle_and_is_never_nan(block):
    q = check_against_oracle(np.array(block, np.float32))
    assert np.isfinite(np.asarray(q.values, np.float32)).all() and int(q.scales[0]) < 255


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-149, 127))
def test_blocks_of_any_magnitude_with_wide_spread(seed, exponent):
    """Random float32 bit patterns below 2^(exponent + 1): subnormals, elements far below the maximum, both signs."""
    rng = np.random.default_rng(seed)
    exponents = np.maximum(exponent - rng.integers(0, 24, 32), -149)
    x = np.ldexp(rng.uniform(1, 2, 32) * rng.choice([-1, 1], 32), exponents).astype(np.float32)
    check_against_oracle(x)


def test_ties_round_to_even_and_the_largest_values_saturate():
    # Scale 2^0 from a maximum of 511: the grid is 16 wide from 128, 32 wide from 256, and ends at 448.
    x = np.zeros(32, np.float32)
    x[:9] = 511, 464, 448, 447, 432, 400, -136, -152, 2.0**-10
    q = quantize_mxfp8(x)
    assert int(q.scales[0]) == 127
    np.testing.assert_array_equal(
        np.asarray(q.values[:9], np.float32), [448, 448, 448, 448, 448, 384, -128, -160, 0])
    assert float(quantize_mxfp8(x * np.float32(-1)).values[0]) == -448


@pytest.mark.parametrize("largest, byte", [
    (0.0, 0), (2.0**-149, 0), (2.0**-126, 0), (2.0**-119, 0), (2.0**-118, 1), (1.0, 119), (1.99, 119), (2.0, 120),
    (448.0, 127), (float(np.finfo(np.float32).max), 246)])
def test_shared_exponent(largest, byte):
    """floor(log2(max)) - 8, not below 2^-127; no rounding of the logarithm just below a power of two."""
    x = np.zeros(32, np.float32)
    x[7] = -largest
    assert int(quantize_mxfp8(x).scales[0]) == byte
    if largest > 2.0**-126:
        x[7] = np.nextafter(np.float32(-largest), np.float32(0))
        power_of_two = np.frexp(largest)[0] == 0.5
        assert int(quantize_mxfp8(x).scales[0]) == byte - (power_of_two and byte > 0)


def test_zeros_keep_their_sign_and_subnormal_blocks_their_values():
    x = np.full(32, -0.0, np.float32)
    np.testing.assert_array_equal(oracle.bytes_of(np.asarray(quantize_mxfp8(x).values)), 0x80)
    x[3] = 2.0**-130  # 2^-3 at the smallest scale
    assert float(quantize_mxfp8(x).values[3]) == 0.125
    assert bits(quantize_mxfp8(x).dequantize())[3] == bits(np.float32(2.0**-130))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_nonfinite_element_makes_its_block_nan_and_no_other(bad):
    x = np.ones(96, np.float32)
    x[40] = bad
    q = quantize_mxfp8(x)
    np.testing.assert_array_equal(np.isnan(np.asarray(q.dequantize())), np.arange(96) // 32 == 1)
    np.testing.assert_array_equal(np.isnan(np.asarray(q.values, np.float32)), np.arange(96) // 32 == 1)


def test_quantised_values_survive_a_second_round():
    """Representable blocks come back: exactly if their maximum reaches the binade that the scale expects."""
    values, scales = oracle.encode_mx(np.random.default_rng(1).standard_normal((4, 128)))
    again = quantize_mxfp8(dequantize_mxfp8(values, scales))
    np.testing.assert_array_equal(np.asarray(again.dequantize()), np.asarray(dequantize_mxfp8(values, scales)))


def test_x64_mode_changes_nothing():
    x = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    want = quantize_mxfp8(x)
    with jax.enable_x64(True):
        got = quantize_mxfp8(x)
        assert (got.values.dtype, got.scales.dtype, got.dequantize().dtype) == (
            jnp.float8_e4m3fn, jnp.uint8, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ----------------------------------------------------------------------------------------------------- QuantizedArray


@pytest.fixture
def q():
    return formats.quantize(jax.random.normal(jax.random.key(0), (4, 8, 64)), "mxfp8")


def test_shape_size_and_default_dtype(q):
    assert (q.shape, q.ndim, q.dtype, q.format) == ((4, 8, 64), 3, jnp.bfloat16, "mxfp8")
    assert q.nbytes == 4 * 8 * 64 * 33 // 32 == FORMATS["mxfp8"].nbytes(q.shape)


def test_is_a_pytree_with_static_format(q):
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == 2 and jax.tree.unflatten(tree, ["a", "b"]) == QuantizedArray("a", "b", "mxfp8")
    out = jax.jit(lambda q: q)(q)
    assert out.format == "mxfp8"
    assert jax.eval_shape(lambda q: q, q).nbytes == q.nbytes


def test_indexing_leading_axes_inside_scan_matches_dense_indexing(q):
    dense = q.dequantize()
    picked = jax.lax.map(lambda e: q[e].dequantize(), jnp.array([3, 0]))
    np.testing.assert_array_equal(picked, dense[jnp.array([3, 0])])
    for index in (1, (2, 3), (slice(1, 3), 0), (None, 1), np.array([[0, 1], [3, 3]])):
        np.testing.assert_array_equal(q[index].dequantize(), dense[index])


@pytest.mark.parametrize("index", [(0, 0, 0), (..., 0), np.ones(4, bool)])
def test_indexing_that_would_cut_blocks_is_refused(q, index):
    with pytest.raises(ArgumentError, match=r"^index: got .*\(4, 8, 64\)"):
        q[index]


@pytest.mark.parametrize("change, message", [
    (dict(values=jnp.zeros((4, 8, 64), jnp.uint8)), r"^w.values: got dtype uint8, expected float8_e4m3fn"),
    (dict(values=jnp.zeros((4, 8, 64), jnp.float8_e4m3fnuz)), r"^w.values: got dtype float8_e4m3fnuz"),
    (dict(scales=jnp.zeros((4, 8, 2), jnp.float32)), r"^w.scales: got dtype float32, expected uint8"),
    (dict(scales=jnp.zeros((4, 8, 4), jnp.uint8)), r"^w.scales: got shape \(4, 8, 4\), expected \(4, 8, 2\)"),
    (dict(values=jnp.zeros((4, 8, 48), jnp.float8_e4m3fn)), r"^w.values: got shape \(4, 8, 48\).*multiple of 32"),
    (dict(format="mxfp9"), r"^w.format: got 'mxfp9', expected one of \['mxfp8'"),
])
def test_check_names_the_part_that_is_wrong(q, change, message):
    broken = QuantizedArray(**{"values": q.values, "scales": q.scales, "format": q.format} | change)
    with pytest.raises(ArgumentError, match=message):
        broken.check("w")
    with pytest.raises(ArgumentError):
        broken.dequantize()


@pytest.mark.parametrize("call, message", [
    (lambda: formats.quantize(jnp.ones(32), "mxfp3"), r"^format: got 'mxfp3', expected one of"),
    (lambda: quantize_mxfp8(jnp.ones(33)), r"^x: got shape \(33,\).*multiple of 32"),
    (lambda: quantize_mxfp8(jnp.float32(1)), r"^x: got shape \(\)"),
    (lambda: quantize_mxfp8(jnp.ones(32, jnp.int8)), r"^x: got int8, expected a float32"),
    (lambda: quantize_mxfp8(np.ones(32)), r"^x: got float64, expected a float32.*astype"),
    (lambda: quantize_mxfp8([1.0] * 32), r"^x: got list"),
    (lambda: formats.quantize(quantize_mxfp8(jnp.ones(32)), "mxfp8"), r"^x: got an array that is already mxfp8"),
    (lambda: dequantize_mxfp8(jnp.ones(32, E4M3), jnp.ones(1, jnp.uint8), jnp.int32), r"^dtype: got"),
    (lambda: dequantize_mxfp8(jnp.ones(32, E4M3), jnp.ones(2, jnp.uint8)), r"^mxfp8.scales: got shape \(2,\)"),
])
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_dequantize_takes_plain_arrays_too(q):
    np.testing.assert_array_equal(dequantize(jnp.arange(3), jnp.bfloat16), jnp.arange(3, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(dequantize(q, jnp.bfloat16), q.dequantize(jnp.bfloat16))


# -------------------------------------------------------------------------------------------------------------- qwix


def test_round_trip_through_qwix_keeps_every_byte(q):
    array = to_qwix(q)
    np.testing.assert_array_equal(qwix.dequantize(array), q.dequantize())
    jax.tree.map(np.testing.assert_array_equal, from_qwix(array), q)


def test_every_scale_byte_survives_qwix():
    q = QuantizedArray(jnp.ones((256, 32), E4M3), jnp.arange(256, dtype=jnp.uint8)[:, None], "mxfp8")
    jax.tree.map(np.testing.assert_array_equal, from_qwix(to_qwix(q)), q)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda q: from_qwix(to_qwix(q)))(q), q)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_that_qwix_quantised_mean_the_same(dtype):
    x = jax.random.normal(jax.random.key(1), (4, 128), dtype)
    array = qwix.quantize(x, "mxfp8", tiled_axes={1: 32}, channelwise_axes=[0])
    np.testing.assert_array_equal(
        np.asarray(from_qwix(array).dequantize(dtype), np.float32), np.asarray(qwix.dequantize(array), np.float32))


@pytest.mark.parametrize("change, message", [
    (dict(zero_point=jnp.zeros((2, 2), E4M3)), r"^qarray.zero_point"),
    (dict(scale=jnp.ones((2, 1))), r"^qarray.scale: got shape \(2, 1\).*tiled_axes=\{1: 32\}, channelwise_axes=\[0\]"),
    (dict(scale=jnp.full((2, 2), 0.3)), r"^qarray.scale: .*not powers of two"),
    (dict(scale=jnp.zeros((2, 2))), r"^qarray.scale: .*not powers of two"),
    (dict(scale=-jnp.ones((2, 2))), r"^qarray.scale: .*not powers of two"),
    (dict(qvalue=jnp.ones((2, 64), jnp.int8)), r"^qarray.values: got dtype int8"),
])
def test_other_qwix_arrays_are_refused(change, message):
    parts = dict(qvalue=jnp.ones((2, 64), E4M3), scale=jnp.ones((2, 2)), zero_point=None) | change
    with pytest.raises(ArgumentError, match=message):
        from_qwix(qwix.QArray(**parts))


def test_scales_that_are_not_powers_of_two_show_as_nan_under_jit():
    scale = jnp.array([[0.5, 0.3]])
    out = jax.jit(lambda s: from_qwix(qwix.QArray(jnp.ones((1, 64), E4M3), s)).dequantize())(scale)
    np.testing.assert_array_equal(np.isnan(out[0]), np.arange(64) >= 32)


def test_experts_become_plain_only_if_asked_and_the_message_says_how_large():
    w_up, w_down = (FORMATS["mxfp4"].structs((2, *shape)) for shape in ((96, 64), (64, 96)))
    with pytest.raises(ArgumentError, match="got mxfp4 weights, expected plain ones; in bfloat16 they take 73,728 byt"):
        ExpertWeights(w_up, w_up, w_down).astype(jnp.bfloat16)
