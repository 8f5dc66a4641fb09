"""The bound of the fuzz: the largest error that the arithmetic of a path allows, for any values.

It is the textbook one of a sum in any order (Higham, Accuracy and Stability, 2002, section 4.2):

    |fl(sum of n products) - sum| <= n u / (1 - n u) * sum |products|,    u = 2^-24 for float32

with u = 2^-8 for what a path stores in bfloat16, and absolute terms for what may be flushed below 2^-126. It goes
through the layer once: gate and up (length H, and one more with a bias), the activation (its slope, and the roundings
that exp inherits from its argument), the stored intermediate, down (length I, and one more with a bias) and the combine
(length K). Where a sum of absolute values passes 2^127 float32 may overflow, and any result is taken; so it is where a
weight does, 6 * 2^127 in MXFP4. What follows from an infinite weight, a byte of E5M2, is one of those; NaN must be NaN.

The result itself is rounded once: with e the error so far, it must lie between fl(y - e) and fl(y + e). Rounding is
monotonic, so that holds for any float32 number within e of y, and needs no term for the half steps of a format, for the
subnormals of float16, 2^-24 apart, or for its overflow: from 65520 on the result must be infinite.

Weights. Dense ones are exact, but `expert_centric` rounds float32 ones to bfloat16 operands, u = 2^-8. An element
times an exponent is exact. Where a scale is a number (per channel, tensor, block or group, float32 or bfloat16), a path
that widens weights rounds the product, once more with a global scale: 2 u, and 2^-8 as bfloat16 operands. int8 and int4
elements are integers, exact in float32. A scale below 2^-126 may be flushed, and the weight is then its own error.

`warp_decode` multiplies sums of a few elements by their scale, so that the unit of what is flushed is the scale's:
2 * 2^-126 max(1, scale) global scale for each product (E2M1 as its 64th). And sums of |x element| may overflow before a
small scale makes them ordinary. On tensor cores (only executed) rows are float16 numbers relative to the largest value
M of their 32: 2^-39 M more for each value, where M counts as 2^-112 at least; float32 ones are split in two, 2^-22 of
the value and 2^-50 M, and keep the first part only (2^-11) where M is below 2^-100. The factor of a block times a
routing weight may be subnormal: 2^-150 of a sum of float16 rows, at most 2^15 |elements|, so 2^-130 |weights|.

`shared_decode` keeps rows as float16 relative to their largest value M unless weights are bfloat16, see
`kernels.shared_half`: 2^-39 M more for each value, M at least 2^-112, and u = 2^-11 for those of the intermediate. Its
sums have a unit of 2^-22 of the result, and of 2^14 / M of the rows: a term that is flushed counts 2^-118 M, a scale
below 2^-103 may be flushed to zero, and sums of |weights| of 2^134 overflow. Where the PTX of a kernel is executed,
tensor cores may truncate instead of rounding: u = 2^-23.
"""

import numpy as np
import oracle
from fuzz_layers import U
from oracle import BLOCK, SUBNORMAL, UNIT

TINY = 2.0**-126  # what a CPU flushes to zero lies below
HUGE = 2.0**127
LEAST = 2.0**-112  # of a row's largest value: the power of two that makes it 2^14 has no inverse below


def sum_error(n, size, unit=U):
    """Of n roundings in a sum, or product, whose terms have absolute values that add up to `size`; with flushing."""
    return n * unit / (1 - n * unit) * size + n * TINY * (size > 0)


def _largest(weight):
    """Of each row of a weight, with its error."""
    return np.nan_to_num(np.abs(weight.exact) + weight.error).max(1)


class Weight:
    """One expert's matrix [m, n] in float64, its error as the path multiplies it, and what its scales do to sums.

    Attributes:
      unit: [m, n] of what is flushed before the scales, per product.
      unscaled: [m, n] magnitudes of what sums have before the scales, or float16 rows leave of them.
    """

    def __init__(self, layer, w, e):
        self.unit = self.unscaled = None
        quantised = isinstance(w, oracle.Quantized)
        self.exact = w.decode(e) if quantised else w[e].astype(np.float64)
        size = np.abs(self.exact)
        self.error = layer.weight_unit * size + np.where(size < TINY, size, 0)
        if not quantised:
            return
        rule = oracle.FORMATS[w.format]
        scales = oracle.E8M0[w.scales[e]] if rule.emax is not None else w.scales[e].astype(np.float64)
        scales, whole = oracle.spread(scales, size.shape, rule.block), 1.0
        if w.global_scale is not None:
            whole = w.global_scale[e].astype(np.float64)
        if rule.emax is None:
            self.error += TINY  # a product
        least = 2.0**-103 if layer.float16_rows else TINY
        self.error = np.where((np.abs(scales) < least) | (np.abs(whole) < TINY), size, self.error)
        if layer.float16_rows:
            self.unscaled = size / 128
        if layer.strategy == "warp_decode":
            gain = 64 if rule.packed else 1
            self.unit = 2 * TINY * gain * np.maximum(np.abs(scales), 1) * np.abs(whole)
            elements = w._replace(scales=np.full_like(w.scales, 127 if rule.emax is not None else 1), global_scale=None)
            self.unscaled = np.abs(elements.decode(e)) * np.maximum(np.abs(scales), 1)


class Bound:
    """Exact y [T, H] and between what each element must lie; `any` where float32 may have overflowed."""

    def __init__(self, layer, case):
        self.layer, self.case = layer, case
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self._solve()

    def _as_operands(self, rows, err, matrix):
        """Error of rows [N, n] as they are multiplied, and the largest value of each if they are float16."""
        layer = self.layer
        if layer.float16_rows:
            largest = np.max(np.abs(rows) + err, 1, keepdims=True)
            if matrix == "down":
                err = err + UNIT["float16"] * (np.abs(rows) + err)
            return err + 2.0**-39 * np.maximum(largest, LEAST), np.maximum(largest, LEAST)
        if layer.on_tensor_cores(matrix):
            size = np.abs(rows) + err
            largest = np.repeat(size.reshape(len(rows), -1, BLOCK).max(2), BLOCK, 1)
            once = 2.0**-39 * np.maximum(largest, LEAST)
            if matrix == "down" and layer.h_dtype == "float32":
                return err + np.where(largest < 2.0**-100, UNIT["float16"] * size + once,
                                      2.0**-22 * size + 2.0**-50 * largest), 0.0
            return err + once, 0.0
        return err, 0.0

    def _product(self, rows, row_err, weight, b, matrix):
        """rows [N, n] times a weight [m, n] plus b: exact, error, sum of absolute values, and whether sums overflow."""
        terms = rows.shape[1] + 2
        row_err, largest = self._as_operands(rows, row_err, matrix)
        w_size = np.abs(weight.exact) + weight.error
        size = (np.abs(rows) + row_err) @ w_size.T
        err = row_err @ w_size.T + np.abs(rows) @ weight.error.T + terms * 2.0**-118 * largest
        wild = np.zeros(size.shape, bool)
        if weight.unit is not None:
            err = err + weight.unit.sum(1)
            if self.layer.on_tensor_cores(matrix):
                err = err + 2.0**-130 * w_size.sum(1)
            wild = (np.abs(rows) + row_err) @ weight.unscaled.T >= HUGE
        elif weight.unscaled is not None:
            wild = wild | (weight.unscaled.sum(1) >= HUGE)
        exact = rows @ weight.exact.T
        if b is not None:
            terms, exact, size = terms + 1, exact + b, size + np.abs(b)
        return exact, err + sum_error(terms, size, self.layer.unit), size, wild | (size >= HUGE)

    def _solve(self):
        layer, case = self.layer, self.case
        T, K = case.ids.shape
        y, err, size, clear = np.zeros((4, T, layer.hidden))
        self.any = np.zeros((T, layer.hidden), bool)
        for e in np.unique(case.ids[case.routed()]):
            rows, slots = np.nonzero(case.ids == e)
            h, h_err, wild = self._hidden(rows, e)
            w_down = Weight(layer, case.w_down, e)
            b = None if case.b_down is None else case.b_down[e].astype(np.float64)
            out, out_err, out_size, out_wild = self._product(h, h_err, w_down, b, "down")
            if layer.row_dtype != "float32":
                out_err += UNIT[layer.row_dtype] * (np.abs(out) + out_err) + SUBNORMAL[layer.row_dtype]
            weights = case.weights[rows, slots].astype(np.float64)[:, None]
            w = np.where(np.abs(weights) < TINY, 0, np.abs(weights))
            flushed = np.abs(weights) - w
            # y's own rounding counts K terms; a slot's share also errs by what its weight lost.
            np.add.at(y, rows, weights * out)
            np.add.at(err, rows, w * out_err + flushed * (np.abs(out) + out_err))
            np.add.at(size, rows, (w + flushed) * (np.abs(out) + out_err))
            np.add.at(clear, rows, w * (np.abs(h) @ np.abs(w_down.exact).T + (0 if b is None else np.abs(b))))
            if layer.on_tensor_cores("down"):  # flushed with the routing weight, and not times it
                np.add.at(err, rows, w_down.unit.sum(1) + 2.0**-130 * np.abs(w_down.exact).sum(1))
            np.logical_or.at(self.any, rows, wild | out_wild | (out_size * (1 + w) >= HUGE)
                             | (_largest(w_down) >= HUGE))
        # The decode strategies multiply by the routing weight inside the sum over I.
        err += sum_error(K + 2, size, layer.unit) + sum_error(layer.intermediate + 3, size, layer.unit)
        err += TINY * (size > 0)  # y itself is flushed
        self.exact, self.error = y, err
        self.any |= np.isinf(err) | np.isnan(err) & ~np.isnan(y) | (size + err >= HUGE / 2)
        self.low, self.high = self._stored(y - err), self._stored(y + err)
        # A bound tells something where it is a fraction of what is added up.
        self.close = err <= clear / 4 + 2.0**-100

    def _hidden(self, rows, e):
        """The intermediate of rows, its error as stored, and [N, 1] where it may be anything."""
        layer, case, act = self.layer, self.case, self.case.act
        x = case.x[rows].astype(np.float64)
        x_err = np.where(np.abs(x) < TINY, np.abs(x), 0)
        b_gate, b_up = (None if b is None else b[e].astype(np.float64) for b in (case.b_gate, case.b_up))
        w_gate = w_up = Weight(layer, case.w_up, e)
        up, up_err, _, wild = self._product(x, x_err, w_up, b_up, "up")
        gate, gate_err = up, up_err
        if act.gated:
            w_gate = Weight(layer, case.w_gate, e)
            gate, gate_err, _, wild_gate = self._product(x, x_err, w_gate, b_gate, "gate")
            wild = wild | wild_gate
        f, u = act.f(gate), act.u(up)
        h = f * u
        h_err = act.slope * gate_err * np.abs(u) + (np.abs(f) + act.slope * gate_err) * up_err
        # As in oracle._hidden: exp inherits the roundings of its argument z, and is flushed below 2^-126. Of a sigmoid,
        # or a tail of the normal distribution, that is less than a rounding where the gate is positive: z exp(-z) < 1.
        argument = np.where(gate > gate_err, 1.0, act.argument(np.abs(gate) + gate_err))
        h_err += (argument + 16) * 2 * U * (np.abs(h) + h_err)
        h_err += 2.0**-120 * (1 + np.abs(gate)) * (1 + np.abs(u))
        size = np.abs(h) + h_err
        wild |= (size >= HUGE) | ((np.abs(u) + up_err) * (np.abs(gate) + gate_err + 1) * 8 >= HUGE)
        wild |= (_largest(w_gate) >= HUGE) | (_largest(w_up) >= HUGE)
        return h, h_err + UNIT[layer.h_dtype] * size + SUBNORMAL[layer.h_dtype], wild.any(1)[:, None]

    def _stored(self, y):
        """float64 rounded to the dtype of the result."""
        return y.astype(next(d for d in oracle.DTYPES.values() if np.dtype(d).name == self.layer.stored)).astype(float)

    def check(self, got):
        """Asserts that `got` is y; returns the share of its elements that have a bound."""
        assert got.dtype == self.layer.stored and got.shape == self.exact.shape
        got = np.asarray(got, np.float64)
        idle = ~self.case.routed().any(1)
        assert not got[idle].any(), "a row without a routed slot is not zero"
        nan = np.isnan(self.exact)
        assert (np.isnan(got) | self.any)[nan].all(), "NaN is missing"
        checked = ~(nan | self.any)
        bad = ~((self.low <= got) & (got <= self.high)) & checked
        assert not bad.any(), [(i, got[i], self.exact[i], self.error[i]) for i in map(tuple, np.argwhere(bad)[:3])]
        return float((checked & self.close).mean()) if got.size else 1.0
