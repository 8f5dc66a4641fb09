"""Float64 oracle of the layer, random cases, and an error bound derived from the arithmetic.

Everything is NumPy and independent of the package. A `Case` holds inputs rounded to their storage dtypes; its exact
output is computed from those, so that only the arithmetic of the code under test is left to compare:

    case = oracle.make_case(0, tokens=4, experts=8, hidden=256, intermediate=128, k=2, weights="mxfp8")
    y = moe(*case.args(), strategy="warp_decode")
    oracle.assert_close(y, case)

Letters: T tokens, H hidden, I intermediate, E experts, K slots per token. An id outside [0, E) is not routed.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
from oracle_formats import (  # noqa: F401  part of the oracle for its users
    BLOCK,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    INT4,
    INT8,
    Quantized,
    block_max,
    bytes_of,
    decode_mx,
    encode,
    encode_mx,
    fit_scales,
    nearest_codes,
    spread,
)

# ---------------------------------------------------------------------------------------------- router and experts


def route(logits, k, renormalize=True):
    """Softmax over all experts, the k best (ties to the lower id), optionally renormalised: ids, weights [T, k]."""
    z = np.asarray(logits, np.float64)
    score = np.exp(z - z.max(-1, keepdims=True))
    score /= score.sum(-1, keepdims=True)
    ids = np.argsort(-z, axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(score, ids, -1)
    return ids, weights / weights.sum(-1, keepdims=True) if renormalize else weights


def sigmoid(z):
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1, e) / (1 + e)


def silu(gate, up):
    return gate * sigmoid(gate) * up


def relu(x):
    return np.maximum(x, 0.0)


def normal_cdf(x):
    return 0.5 * np.vectorize(math.erfc, otypes=[float])(-np.asarray(x, np.float64) / math.sqrt(2))


def gelu_tanh_argument(gate):
    return math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)


@dataclasses.dataclass(frozen=True)
class OracleActivation:
    """act(gate, up) = f(gate) * u(up) in float64 with what the bound needs: |f'| <= slope and |u'| <= 1.

    argument is the size of what a float32 form takes exp of, times the roundings that this takes, for a gate of this
    size. A non-gated activation has only an up projection and gets it as gate too.
    """

    f: Callable
    slope: float
    argument: Callable = lambda gate: gate
    u: Callable = lambda up: up
    gated: bool = True

    def apply(self, gate, up):
        return self.f(up if gate is None else gate) * self.u(up)


def clamped(alpha, limit, up_offset):
    return OracleActivation(
        lambda gate: np.minimum(gate, limit) * sigmoid(alpha * np.minimum(gate, limit)), 1.1,
        lambda gate: 3 * alpha * gate, lambda up: np.clip(up, -limit, limit) + up_offset)


ACTIVATIONS = {
    "silu": OracleActivation(lambda gate: gate * sigmoid(gate), 1.1),
    "gelu_tanh": OracleActivation(lambda gate: gate * sigmoid(gelu_tanh_argument(gate)), 1.13,
                                  lambda gate: 7 * gelu_tanh_argument(gate)),
    "gelu_erf": OracleActivation(lambda gate: gate * normal_cdf(gate), 1.13, lambda gate: gate**2 / 2),
    "relu2": OracleActivation(relu, 1.0, u=relu, gated=False),
    "clamped_swiglu": clamped(1.702, 7.0, 1.0),
    "clamped_silu": clamped(1.0, 10.0, 0.0),
    "situ": OracleActivation(
        lambda gate: 4 * np.tanh(gate / 4) * sigmoid(gate), 1.1, u=lambda up: 25 * np.tanh(up / 25)),
}

# ----------------------------------------------------------------------------------------------------- error bound

# Unit roundoff of a rounding to nearest, and the largest error of one that ends among the subnormals.
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SUBNORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}  # 2^-126: flushed to zero
TENSOR_CORE_UNIT = 2.0**-23  # tensor cores truncate their float32 sums instead of rounding them

# The inputs of `make_case` have random signs, so that the errors of a sum are a random walk: by Hoeffding's inequality
# |sum of c_i s_i| with random signs s_i exceeds LAMBDA * norm(c) with a probability below 2 exp(-LAMBDA^2 / 2) = 3e-8,
# and of rounding errors, which fill [-c_i, c_i], only one in 1e23 does. Worst-case bounds grow with n instead of
# sqrt(n) and would miss a bfloat16 sum at the sizes of real models (Higham & Mary 2019, SIAM J. Sci. Comput. 41(5)).
LAMBDA = 6.0
MANY = 2048  # elements whose L2 error is near its expectation


def _sum_error(n, norm, unit):
    """Bound on the error of n roundings in a sum in any order; partial sums are of the size of `norm`, its terms'."""
    return LAMBDA * unit * np.sqrt(n) * norm


def _store_error(value, dtype):
    """Largest error of storing values of at most this size; "mxfp8" quantises blocks of 32."""
    if dtype != "mxfp8":
        return np.where(value > 0, UNIT[dtype] * value + SUBNORMAL[dtype], 0.0)
    blocks = value.reshape(*value.shape[:-1], -1, BLOCK)
    shared = np.maximum(np.frexp(blocks.max(-1, keepdims=True))[1] - 1 - 8, -127)
    half_step = np.ldexp(1.0, np.maximum(np.frexp(blocks)[1] - 1, shared - 6) - 4)
    saturated = blocks - np.ldexp(448.0, shared)
    return np.maximum(half_step, saturated).reshape(value.shape)


def _norm(a, w):
    """2-norm of the products a[n, :] * w[m, :], [N, M]."""
    return np.sqrt(np.square(a, dtype=np.float32) @ np.square(w, dtype=np.float32).T).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Rounded:
    """What a path rounds besides the intermediate and y: the dtypes of the products of gate and up, of the rows of down
    before they are combined, and of weights whose format it widens."""

    products: str = "float32"
    rows: str = "float32"
    weights: str = "float32"

    @property
    def count(self):
        """Roundings to a narrow type on the way of a value, that of the intermediate and that of y included."""
        narrow = [dtype != "float32" for dtype in (self.products, self.rows, *[self.weights] * 3)]
        return 2 + sum(narrow)


def _stored(value, err, dtype):
    """The bound `err` after values of this size were stored; float32 is what they were."""
    return err if dtype == "float32" else err + _store_error(np.abs(value) + err, dtype)


def _project(x, w, b, unit, rounded):
    """w x + b of rows x [N, H]: exact [N, I] and a bound on the error of its float32 sum."""
    terms = 2 * x.shape[1] + (b is not None)  # products, sums and the bias
    size = _norm(x, w)
    widened = LAMBDA * UNIT[rounded.weights] * size if rounded.weights != "float32" else 0.0
    exact, size = (x @ w.T, size) if b is None else (x @ w.T + b, np.hypot(size, b))
    return exact, _stored(exact, _sum_error(terms, size, unit) + widened, rounded.products)


def _hidden(x, expert, act, h_dtype, unit, rounded):
    """h = act(w_gate x, w_up x) of rows x [N, H]: exact [N, I] and a bound on its error as stored in h_dtype."""
    up, up_err = _project(x, expert.w_up, expert.b_up, unit, rounded)
    gate, gate_err = up, up_err
    if act.gated:
        gate, gate_err = _project(x, expert.w_gate, expert.b_gate, unit, rounded)
    f, u = act.f(gate), act.u(up)
    h = f * u
    err = act.slope * gate_err * np.abs(u) + (np.abs(f) + act.slope * gate_err) * up_err
    # exp(-z) inherits |z| roundings from its scaled argument; a handful more for exp, division and products. It
    # overflows where silu is below 2^-120.
    err += (act.argument(np.abs(gate) + gate_err) + 16) * 2.0**-23 * (np.abs(h) + err) + 2.0**-120 * np.abs(u)
    return h, err + _store_error(np.abs(h) + err, h_dtype)


# ----------------------------------------------------------------------------------------------------------- cases


Expert = collections.namedtuple("Expert", "w_gate w_up w_down b_gate b_up b_down")


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one layer as NumPy arrays in their storage dtypes, quantised weights as `Quantized`."""

    x: np.ndarray  # [T, H]
    ids: np.ndarray  # [T, K]
    weights: np.ndarray  # [T, K] float32
    w_gate: np.ndarray | Quantized | None  # [E, I, H], None without a gate
    w_up: np.ndarray | Quantized  # [E, I, H]
    w_down: np.ndarray | Quantized  # [E, H, I]
    activation: str = "silu"
    b_gate: np.ndarray | None = None  # [E, I]
    b_up: np.ndarray | None = None  # [E, I]
    b_down: np.ndarray | None = None  # [E, H]

    @property
    def act(self):
        return ACTIVATIONS[self.activation]

    @property
    def num_experts(self):
        return len(_part(self.w_up))

    def args(self):
        """(x, Routing, ExpertWeights) as JAX arrays, the first arguments of `moe`."""
        import jax.numpy as jnp

        from jax_warp_decode.experts import ExpertWeights
        from jax_warp_decode.routing import Routing

        def to_jax(w):
            return w.to_jax() if isinstance(w, Quantized) else None if w is None else jnp.asarray(w)

        experts = ExpertWeights(**{name: to_jax(getattr(self, name)) for name in Expert._fields})
        return jnp.asarray(self.x), Routing(jnp.asarray(self.ids), jnp.asarray(self.weights)), experts

    def with_mxfp8_x(self):
        """The same case with x rounded to MXFP8, for paths that quantise activations before the first projection."""
        x = np.where(self.routed().any(-1, keepdims=True), self.x, np.zeros_like(self.x))
        return dataclasses.replace(self, x=decode_mx(*encode_mx(x)).astype(self.x.dtype))

    def routed(self):
        return (self.ids >= 0) & (self.ids < self.num_experts)

    def expert(self, e):
        """The tensors of one expert in float64."""
        tensors = (getattr(self, name) for name in Expert._fields)
        return Expert(*(w.decode(e) if isinstance(w, Quantized) else None if w is None else w[e].astype(np.float64)
                        for w in tensors))

    @functools.cached_property
    def exact(self):
        """y [T, H] in float64. Reads only experts and rows that are routed."""
        return self.solve("float32", UNIT["float32"])[0]

    def solve_hidden(self, h_dtype, unit, rounded=Rounded()):
        """(exact h, bound on its error as stored in h_dtype), float64 [T, K, I]; zero in slots that are not routed."""
        h, err = np.zeros((2, *self.ids.shape, _part(self.w_up).shape[1]))
        for e in np.unique(self.ids[self.routed()]):
            rows, slots = np.nonzero(self.ids == e)
            x = self.x[rows].astype(np.float64)
            h[rows, slots], err[rows, slots] = _hidden(x, self.expert(e), self.act, h_dtype, unit, rounded)
        return h, err

    def solve(self, h_dtype, unit, rounded=Rounded()):
        """(exact y, bound on the error of a float32 computation before it stores y), float64 [T, H]."""
        y, err, size = np.zeros((3, self.x.shape[0], _part(self.w_down).shape[1]))
        for e in np.unique(self.ids[self.routed()]):
            rows, slots = np.nonzero(self.ids == e)
            expert = self.expert(e)
            w_down = expert.w_down
            b_down = np.zeros(len(w_down)) if expert.b_down is None else expert.b_down
            h, h_err = _hidden(self.x[rows].astype(np.float64), expert, self.act, h_dtype, unit, rounded)
            w = self.weights[rows, slots].astype(np.float64)[:, None]
            row, row_size = h @ w_down.T + b_down, _norm(np.abs(h) + h_err, w_down)
            np.add.at(y, rows, w * row)
            # The signs of w_down are random whatever the errors of h are, and so are the roundings of w_down.
            row_err = LAMBDA * _norm(h_err, w_down)
            if rounded.weights != "float32":
                row_err += LAMBDA * UNIT[rounded.weights] * row_size
            np.add.at(err, rows, np.abs(w) * _stored(row, row_err, rounded.rows))
            np.add.at(size, rows, np.abs(w) * np.hypot(row_size, b_down))
        # I products and sums, then K more with the routing weights, which have no random signs.
        err += _sum_error(2 * _part(self.w_up).shape[1] + (self.b_down is not None), size, unit)
        return y, err + 2 * self.ids.shape[1] * unit * (size + np.abs(y))


def _part(w):
    return w[0] if isinstance(w, tuple) else w


PATTERNS = ("uniform", "same", "skipped", "repeated", "none")


def make_ids(rng, tokens, experts, k, pattern="uniform"):
    """ids [T, K] int32.

    "uniform"   distinct random experts per token
    "same"      every token on the same experts
    "skipped"   about a third of the slots not routed: -1, E, and the ends of int32; of two or more never none nor all
    "repeated"  one expert in all slots of a token
    "none"      no slot routed
    """
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)] or [np.zeros(k)]).astype(np.int32)[:tokens]
    if pattern == "same":
        ids = np.broadcast_to(ids[:1], ids.shape).copy()
    elif pattern == "skipped":
        outside = rng.choice(np.array([-1, experts, -(2**31), 2**31 - 1], np.int32), ids.shape)
        skipped = rng.random(ids.shape) < 1 / 3
        if ids.size > 1 and (skipped.all() or not skipped.any()):
            skipped.flat[0] = not skipped.flat[0]
        ids = np.where(skipped, outside, ids)
    elif pattern == "repeated":
        ids = np.broadcast_to(ids[:, :1], ids.shape).copy()
    elif pattern == "none":
        ids = rng.choice(np.array([-1, experts, -(2**31), 2**31 - 1], np.int32), ids.shape)
    elif pattern != "uniform":
        raise ValueError(f"unknown pattern {pattern!r}")
    return ids


DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def make_case(seed, *, tokens, experts, hidden, intermediate, k, x_dtype="bf16", weights="bf16", pattern="uniform",
              poison=True, activation="silu", biases=None):
    """A random case: x standard normal, weights standard normal / 8, routing weights positive with sum 1.

    biases: None, or the dtype of standard normal ones on every projection.

    poison: NaN in everything that must not be read or must not matter: experts and rows without a routed slot, and
    the routing weights of slots that are not routed.
    """
    rng = np.random.default_rng(seed)
    ids = make_ids(rng, tokens, experts, k, pattern)
    x = rng.standard_normal((tokens, hidden)).astype(DTYPES[x_dtype])
    routing = rng.random((tokens, k)) + 0.05
    routing = (routing / routing.sum(-1, keepdims=True)).astype(np.float32)
    routed = (ids >= 0) & (ids < experts)
    idle = np.setdiff1d(np.arange(experts), ids)
    if poison:
        routing[~routed] = np.nan
        x[~routed.any(-1)] = np.nan

    def weight(*shape):
        if weights == "mxfp8":  # also standard normal / 8 on average: 2^5 * 2^(119 - 127) = 1 / 8
            values = (rng.standard_normal(shape, np.float32) * 32).astype(ml_dtypes.float8_e4m3fn)
            scales = rng.integers(117, 122, (*shape[:-1], shape[-1] // BLOCK), np.uint8)
            if poison:
                bytes_of(values)[idle], scales[idle] = 0x7F, 255
            return Quantized(values, scales)
        if weights in FORMATS:
            w = encode(rng.standard_normal(shape, np.float32) / 8, weights)
            if poison:
                for part in (w.scales, w.global_scale):
                    if part is not None:
                        part[idle] = 255 if part.dtype == np.uint8 else np.nan
                if "float8" in w.values.dtype.name:
                    w.values[idle] = np.nan
            return w
        w = (rng.standard_normal(shape, np.float32) / 8).astype(DTYPES[weights])
        if poison:
            w[idle] = np.nan
        return w

    def bias(size):
        b = rng.standard_normal((experts, size), np.float32).astype(DTYPES[biases])
        if poison:
            b[idle] = np.nan
        return b

    gated = ACTIVATIONS[activation].gated
    w_gate = weight(experts, intermediate, hidden) if gated else None
    case = Case(x, ids, routing, w_gate, weight(experts, intermediate, hidden), weight(experts, hidden, intermediate),
                activation)
    if biases is None:
        return case
    return dataclasses.replace(case, b_gate=bias(intermediate) if gated else None, b_up=bias(intermediate),
                               b_down=bias(hidden))


# ------------------------------------------------------------------------------------------------------ comparison


def shared_h_dtype(case) -> str:
    """What shared_decode rounds h to: float16 with a scale of its row before all but bfloat16 weights."""
    return "float16" if isinstance(case.w_up, Quantized) or case.w_up.dtype == np.float16 else "bfloat16"


def assert_close(y, case, *, h_dtype="float32", unit=UNIT["float32"], rounded=Rounded()):
    """Asserts that y [T, H] is the layer's output in x's dtype, within the derived bound of every element.

    The bound holds for any order of summation in float32 and for weights with random signs, as `make_case` draws
    them. Rows without a routed slot must be exactly zero; NaN is expected exactly where the exact output is NaN.

    Args:
      h_dtype: what the intermediate h [T, K, I] is stored in: "float32", "bfloat16", "float16" or "mxfp8".
      unit: unit roundoff of the sums; `TENSOR_CORE_UNIT` where tensor cores may do them.
      rounded: what else the path rounds.

    Returns:
      The largest error relative to its bound, at most 1.
    """
    y = np.asarray(y)
    assert y.dtype == case.x.dtype, f"y is {y.dtype}, x is {case.x.dtype}"
    exact, bound = case.solve(h_dtype, unit, rounded)
    return _compare("y", y, exact, bound + _store_error(np.abs(exact) + bound, y.dtype.name), case)


def assert_rounded_close(y, case, rounded):
    """Asserts the same of y by a path that rounds that much to bfloat16, and the intermediate, with products on tensor
    cores; and where y has many elements that its L2 error is that of so many roundings, uniform ones, which a small
    error of all elements would exceed."""
    assert_close(y, case, h_dtype="bfloat16", unit=TENSOR_CORE_UNIT, rounded=rounded)
    exact = np.nan_to_num(case.exact)
    error = np.linalg.norm(np.nan_to_num(np.asarray(y, np.float64)) - exact)
    limit = UNIT["bfloat16"] * np.sqrt(rounded.count / 3) * np.linalg.norm(exact)
    assert error <= limit or exact.size < MANY, f"L2 error {error}, expected at most {limit}"


def assert_hidden_close(h, case, *, unit=UNIT["float32"]):
    """Asserts the same of the intermediate h [T, K, I], stored in its own dtype; slots not routed are exactly zero."""
    h = np.asarray(h)
    return _compare("h", h, *case.solve_hidden(h.dtype.name, unit), case)


def _compare(name, got, exact, bound, case):
    assert got.shape == exact.shape, f"{name} has shape {got.shape}, expected {exact.shape}"
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact), err_msg=f"{name}: NaN in other places than expected")
    error, bound = (np.where(np.isnan(exact), 0.0, a) for a in (np.abs(got - exact), bound))
    bad = error > bound
    if bad.any():
        worst = np.unravel_index(np.argmax(np.where(bad, error, -1)), error.shape)
        raise AssertionError(
            f"{bad.sum()} of {bad.size} elements of {name} beyond their bound in rows {np.unique(np.nonzero(bad)[0])}; "
            f"worst: {name}{list(map(int, worst))} = {got[worst]}, exact {exact[worst]}, bound {bound[worst]:.3g}, "
            f"ids {case.ids[worst[0]]}")
    return float(np.max(error[bound > 0] / bound[bound > 0], initial=0.0))
