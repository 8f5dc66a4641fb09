"""Arithmetic, logic, comparisons and jumps (ISA 9.7.1 to 9.7.8 and 9.7.12): what each thread computes by itself.

An operation is a function (modifiers, operands) -> (machine -> whether it jumped), called once per instruction.

Precision: float32 arithmetic is IEEE, denormals included, but for `fma`, whose sum is rounded to float64 before it is
rounded to float32, and for the `approx` functions, which here are correct to the last place; hardware is allowed 1 to
2 ulp (ISA 9.7.3). `.ftz` flushes.
"""

import ml_dtypes
import numpy as np

from ptx.memory import UNSIGNED

U8, U16, U32, U64 = UNSIGNED.values()
S16, S32, S64 = (np.dtype(f"i{n}") for n in (2, 4, 8))
F16, F32, F64, BF16 = (np.dtype(t) for t in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16))
PRED = np.dtype(bool)
TYPES = {"u8": U8, "s8": np.dtype("i1"), "b8": U8, "u16": U16, "s16": S16, "b16": U16, "u32": U32, "s32": S32,
         "b32": U32, "u64": U64, "s64": S64, "b64": U64, "f16": F16, "f32": F32, "f64": F64, "bf16": BF16, "pred": PRED}
PAIRS = {"f16x2": F16, "bf16x2": BF16}

# ------------------------------------------------------------------------------------------- 9.7.1 to 9.7.4, 9.7.8


def _wide_multiply(a, b):
    double = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(double) * b.astype(double)


def _high(a, b):
    if a.dtype.itemsize == 8:  # rare
        whole = np.broadcast_arrays(a, b)
        return np.array([int(x) * int(y) >> 64 for x, y in zip(*whole, strict=True)], a.dtype)
    return (_wide_multiply(a, b) >> (8 * a.dtype.itemsize)).astype(a.dtype)


def _shift_left(a, n):
    bits = 8 * a.dtype.itemsize
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def _shift_right(a, n):
    bits = 8 * a.dtype.itemsize
    inside = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return inside if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), inside)


def _divide(a, b):
    """Towards zero."""
    if a.dtype.kind == "u":
        return a // b
    q = np.abs(a.astype(S64)) // np.abs(b.astype(S64))
    return np.where((a < 0) != (b < 0), -q, q).astype(a.dtype)


def _remainder(a, b):
    return a - _divide(a, b) * b if a.dtype.kind == "i" else a % b


def _minimum(a, b):
    return np.fmin(a, b) if a.dtype.kind not in "iu" else np.minimum(a, b)  # of a number and NaN, the number


def _maximum(a, b):
    return np.fmax(a, b) if a.dtype.kind not in "iu" else np.maximum(a, b)


def _permute(a, b, selector):
    """prmt (9.7.9.7), the mode without a name."""
    both = a.astype(U64) | b.astype(U64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(a.shape, selector.shape), U32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (nibble & 7).astype(U64)) & np.uint64(255)).astype(U32)
        sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
        result |= np.where(nibble & 8, sign, byte) << np.uint32(8 * i)
    return result


def _logic3(a, b, c, table):
    result, table = np.uint32(0), int(table[0])
    for i in range(8):
        if table >> i & 1:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return result + np.zeros(1, U32)


def _extract(a, position, length):
    """bfe (9.7.1.19)."""
    position, length = (v & np.uint32(255) for v in (position, length))
    bits = 8 * a.dtype.itemsize
    wide = _shift_right(a.view(f"u{a.dtype.itemsize}"), position.astype(f"u{a.dtype.itemsize}"))
    mask = _shift_left(np.ones(1, wide.dtype), length.astype(wide.dtype)) - wide.dtype.type(1)
    found = wide & mask
    if a.dtype.kind == "i":
        last = np.minimum(position + length - np.uint32(1), np.uint32(bits - 1)).astype(wide.dtype)
        sign = (a.view(wide.dtype) >> last & wide.dtype.type(1)).astype(bool) & (length > 0)
        found = np.where(sign, found | ~mask, found)
    return found.view(a.dtype)


def _insert(a, b, position, length):
    mask = _shift_left(_shift_left(np.ones(1, b.dtype), length) - b.dtype.type(1), position)
    return b & ~mask | _shift_left(a, position) & mask


def _funnel_left(a, b, n):
    n = (n & np.uint32(31)).astype(U64)
    return ((a.astype(U64) | b.astype(U64) << np.uint64(32)) << n >> np.uint64(32)).astype(U32)


def _funnel_right(a, b, n):
    n = (n & np.uint32(31)).astype(U64)
    return ((a.astype(U64) | b.astype(U64) << np.uint64(32)) >> n).astype(U32)


def _fma(a, b, c):
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(a.dtype)


def round_down(exact):
    """float64 to float32, towards minus infinity."""
    near = exact.astype(F32)
    return np.where(near.astype(F64) > exact, np.nextafter(near, np.float32(-np.inf)), near)


def _exact(function):
    return lambda a: function(a.astype(F64)).astype(a.dtype)


def _leading_zeros(a):
    bits = 8 * a.dtype.itemsize
    return np.array([bits - int(v).bit_length() for v in a.ravel()], U32)


# Name -> function of operands of the instruction's type.
_PLAIN = {
    "add": np.add, "sub": np.subtract, "min": _minimum, "max": _maximum, "neg": np.negative, "abs": np.abs,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "div": _divide,
    "rem": _remainder, "cnot": lambda a: (a == 0).astype(a.dtype), "copysign": lambda a, b: np.copysign(b, a),
}
_APPROXIMATE = {"rcp": lambda a: 1 / a, "rsqrt": lambda a: 1 / np.sqrt(a), "sqrt": np.sqrt, "ex2": np.exp2,
                "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh}


def _flush(a):
    return np.where(np.abs(a) < np.finfo(F32).tiny, np.copysign(F32.type(0), a), a) if a.dtype == F32 else a


def apply(function, modifiers, operands, types, out=None):
    """(machine) -> False: the result of function of operands of these types."""
    target, *sources = operands
    ftz, saturate = "ftz" in modifiers, "sat" in modifiers

    def run(m):
        values = [m.read(o, t) for o, t in zip(sources, types, strict=True)]
        if ftz:
            values = [_flush(v) for v in values]
        result = function(*values)
        if saturate and result.dtype.kind == "f":
            result = np.where(np.isnan(result), result.dtype.type(0), np.clip(result, 0, 1)).astype(result.dtype)
        if ftz:
            result = _flush(result)
        m.write(target, result if out is None else result.astype(out))
        return False

    return run


def _pairs(function, kind, operands):
    """Of both halves of 32 bits."""
    target, *sources = operands

    def run(m):
        values = [m.read(o, U32).view(kind) for o in sources]
        size = max(len(v) for v in values)
        values = [np.tile(v, size // len(v)) for v in values]
        m.write(target, function(*values).astype(kind).view(U32))
        return False

    return run


def _plain(name):
    def decode(modifiers, operands):
        kind, function = modifiers[-1], _PLAIN[name]
        if "NaN" in modifiers:
            function = {"min": np.minimum, "max": np.maximum}[name]
        if kind in PAIRS:
            return _pairs(function, PAIRS[kind], operands)
        if name == "div" and TYPES[kind].kind == "f":
            function = np.divide
        return apply(function, modifiers, operands, [TYPES[kind]] * (len(operands) - 1))

    return decode


def _multiply(modifiers, operands):
    kind = modifiers[-1]
    if kind in PAIRS:
        return _pairs(np.multiply, PAIRS[kind], operands)
    function = _wide_multiply if "wide" in modifiers else _high if "hi" in modifiers else np.multiply
    return apply(function, modifiers, operands, [TYPES[kind]] * 2)


def _multiply_add(modifiers, operands):
    kind = modifiers[-1]
    if kind in PAIRS:
        return _pairs(lambda a, b, c: a.astype(F64) * b.astype(F64) + c.astype(F64), PAIRS[kind], operands)
    dtype = TYPES[kind]
    if dtype.kind not in "iu":
        if "rm" in modifiers:
            return apply(lambda a, b, c: round_down(a.astype(F64) * b + c), modifiers, operands, [dtype] * 3)
        return apply(_fma, modifiers, operands, [dtype] * 3)
    if "wide" in modifiers:
        double = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return apply(lambda a, b, c: _wide_multiply(a, b) + c, modifiers, operands, [dtype, dtype, double])
    product = _high if "hi" in modifiers else np.multiply
    return apply(lambda a, b, c: product(a, b) + c, modifiers, operands, [dtype] * 3)


def _approximate(name):
    return lambda modifiers, operands: apply(
        _exact(_APPROXIMATE[name]), modifiers, operands, [TYPES[modifiers[-1]]])


def _typed(function, *types, out=None):
    """Operands of given types; None is the instruction's."""
    def decode(modifiers, operands):
        own = TYPES[modifiers[-1]]
        return apply(function, [], operands, [own if t is None else t for t in types], out)

    return decode


# -------------------------------------------------------------------------------------------- 9.7.6 and 9.7.7: setp

_COMPARE = {"eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
            "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
            "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
            "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b)}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _set_predicate(modifiers, operands):
    compare, dtype = _COMPARE[modifiers[0]], TYPES[modifiers[-1]]
    combine = next((_COMBINE[m] for m in modifiers[1:-1] if m in _COMBINE), None)
    target, a, b, *rest = operands
    both = target[1] if target[0] == "vector" else (target,)

    def run(m):
        result = compare(m.read(a, dtype), m.read(b, dtype))
        results = [result, ~result]
        if combine:
            other = m.read(rest[0], PRED)
            results = [combine(r, other) for r in results]
        for t, r in zip(both, results, strict=False):
            m.write(t, r)
        return False

    return run


def _select(modifiers, operands):
    return apply(lambda a, b, p: np.where(p, a, b), [], operands, [TYPES[modifiers[-1]]] * 2 + [PRED])


# ----------------------------------------------------------------------------------------------------- 9.7.12: jumps


def _branch(modifiers, operands):
    position = operands[0][1]
    return lambda m: m.jump(position)


def _ignored(modifiers, operands):
    """Hints."""
    return lambda m: False


OPERATIONS = {
    **{name: _plain(name) for name in _PLAIN}, **{name: _approximate(name) for name in _APPROXIMATE},
    "mul": _multiply, "mad": _multiply_add, "fma": _multiply_add, "setp": _set_predicate, "selp": _select,
    "shl": _typed(_shift_left, None, U32), "shr": _typed(_shift_right, None, U32),
    "bfe": _typed(_extract, None, U32, U32), "bfi": _typed(_insert, None, None, U32, U32),
    "prmt": _typed(_permute, U32, U32, U32), "lop3": _typed(_logic3, U32, U32, U32, U32),
    "popc": _typed(lambda a: np.bitwise_count(a), None, out=U32), "clz": _typed(_leading_zeros, None),
    "brev": _typed(lambda a: np.array([int(f"{v:032b}"[::-1], 2) for v in a], U32), U32),
    "shf": lambda modifiers, operands: apply(
        _funnel_left if modifiers[0] == "l" else _funnel_right, [], operands, [U32] * 3),
    "bra": _branch,
    "ret": lambda modifiers, operands: lambda m: m.finish(), "exit": lambda modifiers, operands: lambda m: m.finish(),
    **dict.fromkeys(("prefetch", "prefetchu", "griddepcontrol", "setmaxnreg", "nanosleep",
                     "applypriority", "createpolicy"), _ignored),
}
