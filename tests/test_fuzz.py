"""Random layers against float64, under a bound that holds for any values: python -m pytest tests/test_fuzz.py.

The default takes seconds. `python -m bench.fuzz --out bench/results` is for a night: 10,000 examples with other seeds,
and a report of what ran. Layers, fixed ones and drawn ones, are compiled once each (`fuzz_layers`). Hypothesis draws
for each of them routing, magnitudes, special values, scales, elements and the layer of a stack. Of what is hostile a
draw has two kinds at most: with more at once, hardly an element has a bound left. It is derived in `fuzz_bound`.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from fuzz_bound import Bound
from fuzz_layers import EMULATED, INTERPRETED, LAYERS, QUICK, RULES, U, drawn
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from oracle import UNIT

from jax_warp_decode.experts import BIASES

SPECIALS = np.array([0.0, -0.0, 2.0**-126, -(2.0**-133), 2.0**-149, 2.0**-24, -65504.0, 1.0, -1.0, 2.0**60, -(2.0**100),
                     3.3e38])
# Bytes of stored elements: the largest, the smallest, zeros; and those that are not finite, where there are any.
ENDS = {"mxfp8_e5m2": [0x7B, 0xFB, 0x01, 0x81, 0x80, 0x00], "int8_channel": [0x7F, 0x80, 0x81, 0xFF, 0x01, 0x00],
        "E4M3": [0x7E, 0xFE, 0x01, 0x81, 0x80, 0x00], "packed": [0x77, 0xFF, 0x88, 0x10, 0x01, 0x00]}
NOT_FINITE = {"mxfp8_e5m2": [*range(0x7C, 0x80), *range(0xFC, 0x100)], "E4M3": [0x7F, 0xFF]}

# ------------------------------------------------------------------------------------------------------------ drawing

magnitudes = st.sampled_from([-3, 3, -20, 20, -60, 40, -100, -120, 90])
HOSTILE = dict(
    x=magnitudes, up=magnitudes, down=magnitudes, bias=st.sampled_from([-3, 3, -20, 20, -120]),
    routing=st.sampled_from([-10, 10, -140, 100]), specials=st.sampled_from([1, 2, 3]),
    scales=st.sampled_from(["low", "any", "ends"]), elements=st.sampled_from(["one", "ends", "not finite"]))
ORDINARY = st.fixed_dictionaries(dict(
    rng=st.integers(0, 2**32 - 1), pattern=st.sampled_from(oracle.PATTERNS), signs=st.booleans(),
    layer=st.sampled_from([0, 1, 0, 1, 0, 1, 2, -1, 2**31 - 1, -2**31])))
SIMPLEST = dict(rng=0, pattern="uniform", signs=False, layer=0)


@st.composite
def draws(draw):
    kinds = draw(st.lists(st.sampled_from(list(HOSTILE)), max_size=2, unique=True))
    return draw(ORDINARY) | {kind: draw(HOSTILE[kind]) for kind in kinds}


def make(layer, draw):
    """A case of a layer: `oracle.make_case` with other magnitudes, signs, special values, scales and elements."""
    case = layer.case(draw["rng"], draw["pattern"])
    rng = np.random.default_rng(draw["rng"] + 1)
    routed = np.unique(case.ids[case.routed()])

    def change(a, exponent):
        with np.errstate(over="ignore", invalid="ignore"):
            wide = a.astype(np.float64) * 2.0**exponent
            wide = np.abs(wide) if draw["signs"] else wide  # nothing cancels: the largest sums of rounding errors
            clean = np.flatnonzero(np.isfinite(wide))
            if clean.size:
                at = rng.choice(clean, draw.get("specials", 0))
                wide.flat[at] = rng.choice(SPECIALS, len(at))
            largest = min(float(ml_dtypes.finfo(a.dtype).max), float(np.finfo(np.float32).max) / 2)
            return np.where(np.isnan(wide), wide, np.clip(wide, -largest, largest)).astype(a.dtype)

    def weight(w, exponent, outer):
        """outer: one of its wild weights spoils an element of y, and not all."""
        if not isinstance(w, oracle.Quantized):
            return None if w is None else change(w, exponent)
        w = w._replace(values=_elements(w, draw.get("elements"), routed, rng))
        if oracle.FORMATS[w.format].emax is not None:
            return w._replace(scales=_exponents(w, exponent, draw.get("scales"), outer, rng))
        return _numbers(w, exponent, draw.get("scales"), outer, rng)

    routing = case.weights.astype(np.float64) * 2.0**draw.get("routing", 0)
    routing *= rng.choice([1, 1, 1, -1, 0], case.weights.shape)
    up, down = draw.get("up", 0), draw.get("down", 0)
    biases = {name: change(b, draw.get("bias", 0)) for name in BIASES if (b := getattr(case, name)) is not None}
    return dataclasses.replace(
        case, x=change(case.x, draw.get("x", 0)), weights=routing.astype(np.float32), **biases,
        w_gate=weight(case.w_gate, up, outer=False), w_up=weight(case.w_up, up, outer=False),
        w_down=weight(case.w_down, down, outer=True))


def _elements(w, kind, routed, rng):
    """Stored values of experts that are read: one byte in all places, so that what it stands for is all that counts;
    one in fifty at an end of the format; or one that is not finite."""
    values = w.values.copy()
    stored = oracle.bytes_of(values)
    group = "packed" if oracle.FORMATS[w.format].packed else w.format if w.format in ENDS else "E4M3"
    if kind == "ends":
        few = rng.random(stored.shape) < 0.02
        few[np.setdiff1d(np.arange(len(stored)), routed)] = False
        stored[few] = rng.choice(ENDS[group], few.sum())
    elif kind == "one":
        any_byte = np.setdiff1d(np.arange(256), NOT_FINITE.get(group, []))
        stored[routed] = rng.choice(ENDS[group] if rng.random() < 0.5 else any_byte)
    elif kind == "not finite" and group in NOT_FINITE and routed.size:
        at = rng.integers(stored.shape)
        stored[rng.choice(routed), at[1], at[2]] = rng.choice(NOT_FINITE[group])
    return stored.view(values.dtype)


def _exponents(w, exponent, kind, outer, rng):
    """E8M0 bytes, moved, and one in ten of them another; those of 255, which are poison, stay."""
    live = w.scales != 255
    moved = np.clip(w.scales.astype(int) + exponent, 0, 254)
    others = dict(ends=[0, 1, 2, 23, 24, 127, 128, *[250, 254, 255] * outer], low=range(120),
                  any=range(256 if outer else 128))
    choice = moved
    if kind:
        choice = np.where(rng.random(moved.shape) < 0.1, rng.choice(list(others[kind]), moved.shape), moved)
    highest = 254 if rng.random() < 0.25 else 253 - oracle.FORMATS[w.format].emax  # no weight of 2^127 has a bound
    return np.where(live & (choice != 255), np.minimum(choice, highest), 255).astype(np.uint8)


def _numbers(w, exponent, kind, outer, rng):
    """The same of scales that are numbers; with a global scale, that is moved."""
    def scaled(a):
        largest = float(ml_dtypes.finfo(a.dtype).max) / 512
        with np.errstate(invalid="ignore"):
            return np.minimum(a.astype(np.float64) * 2.0**exponent, largest).astype(a.dtype)

    if w.global_scale is None:
        w = w._replace(scales=scaled(w.scales))
    else:
        w = w._replace(global_scale=scaled(w.global_scale))
    if not kind:
        return w
    if w.scales.dtype.itemsize == 1:
        others = dict(ends=[0.0, 2.0**-9, 2.0**-6, 1.0, *[448.0, np.nan] * outer], low=[2.0**-9, 2.0**-8, 0.015],
                      any=np.arange(0.0, 448.0, 7.0))
    else:
        powers = 2.0**np.arange(-148, 118 if outer else 1)
        ends = [0.0, 2.0**-149, 2.0**-126, 2.0**-104, 2.0**-102, 1.0, *[2.0**100, 2.0**118, np.nan] * outer]
        others = dict(ends=ends, low=powers[:120], any=powers)
    few = (rng.random(w.scales.shape) < 0.1) & ~np.isnan(w.scales.astype(np.float64))
    return w._replace(scales=np.where(few, rng.choice(others[kind], w.scales.shape).astype(w.scales.dtype), w.scales))


def call(layer, case, number):
    """y of the layer; of a stack, of layer `number` between poisoned ones, or of none, and the case that this is."""
    x, routing, experts = case.args()
    if not layer.layers:
        return case, layer.compiled(x, routing, experts)

    def stack(a):
        poison = jnp.full_like(a, {"uint8": 255, "int8": 127}.get(a.dtype.name, jnp.nan))
        return jnp.stack([a if n == number % layer.layers else poison for n in range(layer.layers)])

    if not 0 <= number < layer.layers:  # such a layer does not exist: no slot is routed
        case = dataclasses.replace(case, ids=np.full_like(case.ids, -1))
    return case, layer.compiled(x, routing, jax.tree.map(stack, experts), layer=jnp.int32(number))


def run(layer, examples, number=2026, simplest=True):
    """Tries so many cases of one layer, drawn from a seed; returns the share of the elements of each with a bound.

    Hypothesis begins with the `SIMPLEST` draw, whatever the seed; `simplest` says whether that is one of them.
    """
    checked = []

    @seed(zlib.crc32(f"{layer} {number}".encode()))  # other layers get other draws
    # Not shrunk: the failing draw, which is printed, is a handful of numbers and a seed already.
    @settings(max_examples=max(1, examples) + (not simplest), deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(draws())
    def attempt(draw):
        if simplest or draw != SIMPLEST:
            case, y = call(layer, make(layer, draw), draw["layer"])
            checked.append(Bound(layer, case).check(y))

    attempt()
    return checked


# -------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.id)
def test_random_layers(layer, request):
    checked = np.mean(run(layer, request.config.getoption("--fuzz-examples") // len(LAYERS)))
    assert checked >= 0.4, f"only {checked:.0%} of the elements had a bound"


@pytest.mark.parametrize("layer", INTERPRETED, ids=lambda layer: layer.id)
def test_random_layers_in_the_interpreter(layer, request):
    run(layer, request.config.getoption("--fuzz-examples") // 100)


@pytest.mark.parametrize("layer", EMULATED[:1], ids=lambda layer: layer.id)
def test_a_random_layer_of_executed_ptx(layer, machines):
    run(layer, 1)
    assert machines and not any(m.races.found for m in machines)


@pytest.mark.parametrize("strategy, emulated", [kind for kind in RULES if not kind[1]], ids=lambda part: str(part))
def test_drawn_layers(strategy, emulated, request):
    for_each, examples = (60, 6) if (strategy, emulated) in QUICK else (150, 2)
    for layer in drawn(strategy, emulated, max(1, request.config.getoption("--fuzz-examples") // for_each), 2026):
        try:
            run(layer, examples)
        except Exception as error:
            error.add_note(f"of {layer}")
            raise


@pytest.mark.parametrize("strategy", [strategy for strategy, emulated in RULES if emulated])
def test_a_drawn_layer_of_executed_ptx(strategy, machines):
    (layer,) = drawn(strategy, True, 1, 2026)
    run(layer, 1)
    assert machines and not any(m.races.found for m in machines)


@pytest.mark.parametrize("layer", [layer for layer in (*LAYERS, *INTERPRETED, *EMULATED) if layer.weight_unit < U * 5],
                         ids=lambda layer: layer.id)
def test_the_bound_is_not_loose(layer):
    """An ordinary layer's bound stays near what its rounding costs, so that a wrong factor or term shows: that of y, of
    the terms of down, whose sizes add up to about sqrt(I) times their sum, and of float32 sums."""
    case = make(layer, SIMPLEST | dict(rng=1))
    bound = Bound(layer, case)
    h_unit = UNIT["float16" if layer.float16_rows else layer.h_dtype]
    limit = 2 * UNIT[case.x.dtype.name] + h_unit * layer.intermediate**0.5
    limit += 64 * U * (layer.hidden + layer.intermediate)
    assert np.median(bound.high - bound.low) / 2 < limit * np.median(np.abs(bound.exact))
