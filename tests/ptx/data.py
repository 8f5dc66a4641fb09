"""Moving, loading, storing and converting values (ISA 9.7.9), and atomic operations on them (9.7.13)."""

import ml_dtypes
import numpy as np

from ptx import clusters
from ptx.arithmetic import F16, F32, F64, PAIRS, PRED, TYPES, U8, U16, U32, U64, apply, round_down
from ptx.memory import SHARED_WINDOW, UNSIGNED

NARROW = {"e4m3x2": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2x2": np.dtype(ml_dtypes.float8_e5m2)}

def _move(modifiers, operands):
    """mov, also between a vector and the whole."""
    target, source = operands
    if modifiers[-1] == "pred":
        return apply(np.copy, [], operands, [PRED])
    whole = TYPES[modifiers[-1]]
    if source[0] == "vector":
        part = UNSIGNED[whole.itemsize // len(source[1])]

        def run(m):
            result = np.zeros(1, UNSIGNED[whole.itemsize])
            for i, o in enumerate(source[1]):
                result = result | m.read(o, part).astype(result.dtype) << result.dtype.type(8 * part.itemsize * i)
            m.write(target, result)
            return False
    elif target[0] == "vector":
        part = UNSIGNED[whole.itemsize // len(target[1])]

        def run(m):
            bits = m.read(source, UNSIGNED[whole.itemsize])
            for i, o in enumerate(target[1]):
                m.write(o, (bits >> bits.dtype.type(8 * part.itemsize * i)).astype(part))
            return False
    else:
        def run(m):
            m.write(target, m.read(source, UNSIGNED[whole.itemsize]).copy())
            return False

    return run


def _to_generic(modifiers, operands):
    """cvta (9.7.9.20): only shared memory has other generic addresses."""
    offset = np.uint64(SHARED_WINDOW) if any(m.startswith("shared") for m in modifiers) else np.uint64(0)
    if "to" in modifiers:
        offset = np.uint64(0) - offset
    return apply(lambda a: a + offset, [], operands, [TYPES[modifiers[-1]]])


SPACES = ("global", "shared", "param", "local", "const")


def space_of(modifiers) -> str:
    if "shared::cluster" in modifiers:
        return "shared::cluster"
    return next((s for s in SPACES for m in modifiers if m.split("::")[0] == s), "generic")


def _elements(operand):
    return operand[1] if operand[0] == "vector" else (operand,)


def _load(modifiers, operands):
    target, source = operands[:2]
    space, dtype = space_of(modifiers), TYPES[modifiers[-1]]
    targets = _elements(target)
    unused = [i for i, t in enumerate(targets) if t == ("sink",)]

    def run(m):
        if space == "param":
            m.write(target, np.full(1, m.parameter_values[source[1][1]], U64))
            return False
        values = m.memory.load(space, m.address(source), m.mine(m.cta), dtype.itemsize, len(targets), m.where,
                               unused)
        for t, v in zip(targets, values, strict=True):
            m.write(t, v.view(dtype) if dtype.kind == "i" else v)
        return False

    return run


def _store(modifiers, operands):
    if modifiers[0] == "async":
        return clusters.store_later(modifiers, operands)
    target, source = operands[:2]
    space, dtype = space_of(modifiers), UNSIGNED[TYPES[modifiers[-1]].itemsize]
    sources = _elements(source)

    def run(m):
        m.memory.store(space, m.address(target), m.mine(m.cta), [m.read(o, dtype) for o in sources], m.where)
        return False

    return run


_ATOMIC = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor, "exch": lambda a, b: b}


def _atomic(returns):
    def decode(modifiers, operands):
        """One lane after the other, in order."""
        target, place, *values = operands if returns else (("sink",), *operands)
        space, dtype = space_of(modifiers), TYPES[modifiers[-1]]
        bits = UNSIGNED[dtype.itemsize]
        name = next(m for m in modifiers if m in (*_ATOMIC, "cas"))

        def run(m):
            address, cta = m.address(place), m.mine(m.cta)
            given = [np.broadcast_to(m.read(o, dtype), (m.active,)) for o in values]
            found = np.empty(m.active, bits)
            for i in range(m.active):
                one = slice(i, i + 1)
                old = m.memory.load(space, address[one], cta[one], dtype.itemsize, 1, m.where)[0]
                found[i] = old[0]
                new = (np.where(old.view(dtype) == given[0][one], given[1][one], old.view(dtype)) if name == "cas" else
                       _ATOMIC[name](old.view(dtype), given[0][one])).astype(dtype)
                m.memory.store(space, address[one], cta[one], [new.view(bits)], m.where)
            m.write(target, found)
            return False

        return run

    return decode


# --------------------------------------------------------------------------------------------- 9.7.9.21: conversion


def _convert(modifiers, operands):
    to, source = modifiers[-2:]
    target, *sources = operands
    if source in NARROW:
        def run(m):
            m.write(target, m.read(sources[0], U16).view(NARROW[source]).astype(F16).view(U32))
            return False
        return run
    if to in NARROW:
        most = float(ml_dtypes.finfo(NARROW[to]).max)

        def run(m):
            values = ([m.read(o, F32) for o in reversed(sources)] if source == "f32" else
                      np.moveaxis(m.read(sources[0], U32).view(F16).reshape(-1, 2), 1, 0))
            values = [np.clip(v.astype(F32), -most, most) for v in values]  # satfinite; NaN stays
            low, high = np.broadcast_arrays(*(v.astype(NARROW[to]).view(U8).astype(U16) for v in values))
            m.write(target, low | high << np.uint16(8))
            return False
        return run
    if to in PAIRS:  # of two float32; the first is the upper half
        def run(m):
            high, low = (m.read(o, F32).astype(PAIRS[to]).view(U16).astype(U32) for o in sources)
            m.write(target, low | high << np.uint32(16))
            return False
        return run
    return apply(_converter(TYPES[source], TYPES[to], modifiers), [m for m in modifiers if m in ("ftz", "sat")],
                  operands, [TYPES[source]])


def _converter(source, to, modifiers):
    floating = source.kind not in "iu"
    if floating and to.kind in "iu":
        rounding = next((f for name, f in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil))
                         if name in modifiers), np.trunc)
        least, most = np.iinfo(to).min, np.iinfo(to).max

        def convert(a):
            a = rounding(a.astype(F64))
            inside = np.where((a >= least) & (a <= most), a, 0).astype(to)
            clamped = np.where(a > most, most, np.where(a < least, least, 0)).astype(to)
            return np.where((a >= least) & (a <= most), inside, clamped)
        return convert
    if floating:
        rounding = next((f for name, f in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil))
                         if name in modifiers), None)
        if rounding:
            return lambda a: rounding(a.astype(F64)).astype(to)
        if to == F32 and source == F64 and "rm" in modifiers:
            return round_down
    elif to.kind in "iu" and "sat" in modifiers:
        return lambda a: np.clip(a, np.iinfo(to).min, np.iinfo(to).max).astype(to)
    return lambda a: a.astype(to)


OPERATIONS = {"mov": _move, "cvt": _convert, "cvta": _to_generic, "ld": _load, "ldu": _load, "st": _store,
              "atom": _atomic(True), "red": _atomic(False)}
