"""What the lanes of a warp, or the threads of a CTA, do together (ISA 9.7.9, 9.7.13, 9.7.14).

Most need whole warps, as this repository's kernels use them with a full mask: the machine waits for all lanes of one.
"""

import re

import numpy as np

from ptx import clusters
from ptx.arithmetic import F32, F64, PRED, TYPES, U32
from ptx.memory import AccessError
from ptx.races import largest

LANES = 32


def _whole_warps(m):
    """[warps, 32] of numbers of the lanes at hand."""
    numbers = m.numbers
    if m.lanes is not None:
        if len(numbers) % LANES or ((numbers.reshape(-1, LANES) - numbers[::LANES, None]) != np.arange(LANES)).any() \
                or (numbers[::LANES] % LANES).any():
            raise NotImplementedError(f"{m.where}: lanes of a warp have taken different paths")
    return numbers.reshape(-1, LANES)


def _by_warp(m, operand, dtype):
    """[warps, 32]."""
    return np.broadcast_to(m.read(operand, dtype), (m.active,)).reshape(-1, LANES)


def _full(m, operand):
    if (m.read(operand, U32) != 0xFFFFFFFF).any():
        raise NotImplementedError(f"{m.where}: a part of a warp")


# ------------------------------------------------------------------------------------- 9.7.9.6 shfl.sync, 9.7.13 votes


def _shuffle(modifiers, operands):
    mode = modifiers[1]
    target, value, distance, clamp, mask = operands
    target, valid = target[1] if target[0] == "vector" else (target, ("sink",))

    def run(m):
        _whole_warps(m), _full(m, mask)
        values, lane = _by_warp(m, value, U32), np.arange(LANES)
        b, c = (_by_warp(m, o, U32).astype(int) for o in (distance, clamp))
        segment = c >> 8 & 31
        most, least = lane & segment | c & 31 & ~segment, lane & segment
        source, inside = {
            "up": lambda: (lane - b, lane - b >= most), "down": lambda: (lane + b, lane + b <= most),
            "bfly": lambda: (lane ^ b, (lane ^ b) <= most),
            "idx": lambda: (least | b & ~segment & 31, (least | b & ~segment & 31) <= most)}[mode]()
        source = np.where(inside, source, lane)
        m.write(target, np.take_along_axis(values, source, 1).ravel())
        m.write(valid, inside.ravel())
        return False

    return run


def _elect(modifiers, operands):
    (target, predicate), mask = operands[0][1], operands[1]

    def run(m):
        _whole_warps(m), _full(m, mask)
        m.write(target, np.zeros(1, U32))
        m.write(predicate, m.numbers % LANES == 0)
        return False

    return run


def _vote(modifiers, operands):
    target, predicate, mask = operands
    mode = modifiers[1]

    def run(m):
        _whole_warps(m), _full(m, mask)
        votes = _by_warp(m, predicate, PRED)
        result = {"ballot": lambda: (votes.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum(1).astype(U32),
                  "any": lambda: votes.any(1), "all": lambda: votes.all(1),
                  "uni": lambda: votes.all(1) | ~votes.any(1)}[mode]()
        m.write(target, np.repeat(result, LANES))
        return False

    return run


def _match(modifiers, operands):
    target, value, mask = operands

    def run(m):
        _whole_warps(m), _full(m, mask)
        values = _by_warp(m, value, TYPES[modifiers[-1]])
        same = values[:, :, None] == values[:, None]
        m.write(target, (same.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum(2).astype(U32).ravel())
        return False

    return run


def _reduce(modifiers, operands):
    target, value, mask = operands
    function = {"min": np.min, "max": np.max, "add": np.sum, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce,
                "xor": np.bitwise_xor.reduce}[modifiers[1]]

    def run(m):
        _whole_warps(m), _full(m, mask)
        dtype = TYPES[modifiers[-1]]
        m.write(target, np.repeat(function(_by_warp(m, value, dtype), axis=1).astype(dtype), LANES))
        return False

    return run


def _active_mask(modifiers, operands):
    def run(m):
        bits = np.zeros(-(-m.threads // LANES), np.uint64)
        np.bitwise_or.at(bits, m.numbers // LANES, np.uint64(1) << (m.numbers % LANES).astype(np.uint64))
        m.write(operands[0], bits[m.numbers // LANES].astype(U32))
        return False

    return run


# --------------------------------------------------------------------------------------------- 9.7.13.1: bar, barrier


def _barrier(modifiers, operands):
    """bar.sync and bar.arrive count threads; for bar.warp.sync the machine has waited already."""
    if modifiers[0] == "cluster":
        return clusters.barrier(modifiers)
    if modifiers[0] == "warp":
        return _sync_warps
    kind = next(k for k in modifiers if k != "cta")
    if kind not in ("sync", "arrive"):
        raise NotImplementedError(".".join(modifiers))
    number, *count = operands

    def run(m):
        numbers, cta = m.numbers, m.mine(m.cta)
        which = np.broadcast_to(m.read(number, U32), (m.active,))
        expected = np.broadcast_to(m.read(count[0], U32) if count else np.full(1, m.per_cta, U32), (m.active,))
        if kind == "sync":
            m.wait(numbers, m.here + 1)
        for key in set(zip(cta.tolist(), which.tolist(), expected.tolist(), strict=True)):
            mine = (cta == key[0]) & (which == key[1])
            row = m.races.send(numbers[mine])
            entry = m.waiting.setdefault(key[:2], [0, [], m.here, row])
            entry[0] += int(mine.sum())
            entry[3] = largest(entry[3], row)
            if kind == "sync":
                entry[1].append(numbers[mine])
                if key[1] == 0 and entry[2] != m.here:  # what synccheck calls divergent; other numbers are for roles
                    raise AccessError(f"{m.where}: other threads wait for barrier 0 at another instruction")
            if entry[0] > key[2]:
                raise NotImplementedError(f"{m.where}: {entry[0]} threads at a barrier for {key[2]}")
            if entry[0] == key[2]:
                for lanes in entry[1]:
                    m.races.receive(lanes, entry[3])
                    m.release(lanes)
                del m.waiting[key[:2]]
        return kind == "sync"

    return run


def _sync_warps(m):
    for warp in m.numbers.reshape(-1, LANES):
        m.races.receive(warp, m.races.send(warp))
    return False


# -------------------------------------------------------------------------- 9.7.14: fragments of matrices, and products


def _load_matrix(modifiers, operands):
    """ldmatrix .m8n8 .b16: lane l gives row l % 8 of matrix l / 8 and gets elements 2 (l % 4) of row l / 4."""
    count = int(next(x for x in modifiers if x in ("x1", "x2", "x4"))[1:])
    turned = "trans" in modifiers
    targets = operands[0][1] if operands[0][0] == "vector" else (operands[0],)

    def run(m):
        _whole_warps(m)
        rows = m.address(operands[1]).reshape(-1, LANES)[:, :8 * count]
        cta = m.mine(m.cta).reshape(-1, LANES)[:, :8 * count]
        words = m.memory.load("shared", rows.ravel(), cta.ravel(), 4, 4, m.where)
        values = np.stack(words, -1).view(np.uint16).reshape(-1, count, 8, 8)
        if turned:
            values = values.swapaxes(2, 3)
        for i, target in enumerate(targets):
            m.write(target, np.ascontiguousarray(values[:, i]).view(U32).ravel())
        return False

    return run


def _store_matrix(modifiers, operands):
    """stmatrix, the same the other way."""
    count = int(next(x for x in modifiers if x in ("x1", "x2", "x4"))[1:])
    turned = "trans" in modifiers
    sources = operands[1][1] if operands[1][0] == "vector" else (operands[1],)

    def run(m):
        _whole_warps(m)
        rows = m.address(operands[0]).reshape(-1, LANES)[:, :8 * count]
        cta = m.mine(m.cta).reshape(-1, LANES)[:, :8 * count]
        values = np.stack([np.ascontiguousarray(_by_warp(m, o, U32)).view(np.uint16).reshape(-1, 8, 8)
                           for o in sources], 1)
        if turned:
            values = values.swapaxes(2, 3)
        words = np.ascontiguousarray(values).view(U32).reshape(-1, 4)
        m.memory.store("shared", rows.ravel(), cta.ravel(), [words[:, i] for i in range(4)], m.where)
        return False

    return run


def _multiply_matrices(modifiers, operands):
    """mma.sync m16n8k16 of float16 or bfloat16 with float32 sums (9.7.14.5.8)."""
    shape, kind = modifiers[2], modifiers[-2]
    if shape != "m16n8k16" or modifiers[-1] != "f32" or kind not in ("f16", "bf16"):
        raise NotImplementedError(".".join(modifiers))
    d, a, b, c = (o[1] for o in operands)
    row, column = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2

    def spread(m, registers, size, places):
        """Registers of two elements to [warps, *size]; places: of the first one, of the second."""
        matrix = None
        for register, (r, k, along) in zip(registers, places, strict=True):
            pair = np.ascontiguousarray(_by_warp(m, register, U32)).view(TYPES[kind]).reshape(-1, LANES, 2)
            if matrix is None:
                matrix = np.zeros((len(pair), *size), F64)
            for i in range(2):
                matrix[:, r + i * (along == 0), k + i * (along == 1)] = pair[:, :, i].astype(F64)
        return matrix

    def run(m):
        _whole_warps(m)
        left = spread(m, a, (16, 16), [(row + 8 * (i % 2), column + 8 * (i // 2), 1) for i in range(4)])
        right = spread(m, b, (16, 8), [(column + 8 * i, row, 0) for i in range(2)])
        product = left @ right
        for i, target in enumerate(d):
            here = product[:, row + 8 * (i // 2), column + i % 2]
            m.write(target, (here + _by_warp(m, c[i], F32)).astype(F32).ravel())
        return False

    return run


# ------------------------------------------------------------------------------------------------------- 9.7.15: wgmma

_WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a swizzled row, by the last bits of a descriptor
WARPGROUP = 128


def _described(m, descriptor: int, cta: int, rows: int, kind) -> np.ndarray:
    """A K-major operand [rows, 16] in shared memory (9.7.15.5): blocks of 8 rows, 16-byte units swizzled by address."""
    start, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 32))
    width = _WIDTHS[descriptor >> 62]
    if width == 16:
        raise NotImplementedError(f"{m.where}: an operand without swizzle")
    row, word = np.arange(rows)[:, None], np.arange(8)
    at = start + row // 8 * stride + row % 8 * width + word * 4
    at = at ^ ((at >> 7 & (width // 16 - 1)) << 4)
    words = m.memory.load("shared", at.ravel().astype(np.uint64), np.full(at.size, cta), 4, 1, m.where)[0]
    return words.view(TYPES[kind]).reshape(rows, 16).astype(F64)


def _warpgroup(modifiers, operands):
    """wgmma.mma_async m64nNk16, carried out at once."""
    if modifiers[0] != "mma_async":
        return lambda m: bool(_whole_warps(m) is None)
    shape, kind = modifiers[3], modifiers[-1]
    columns = int(shape[4:-3])
    if modifiers[4] != "f32" or not shape.endswith("k16") or any(o != ("imm", 0) for o in operands[6:]):
        raise NotImplementedError(".".join(modifiers))
    d, a, b, keep = operands[0][1], *operands[1:4]
    if any(o != ("imm", 1) for o in operands[4:6]):
        raise NotImplementedError("wgmma with a negated operand")
    lane = np.arange(WARPGROUP)
    row, column = lane // LANES * 16 + lane % LANES // 4, lane % 4 * 2

    def run(m):
        groups = _whole_warps(m).reshape(-1, WARPGROUP)
        kept = np.broadcast_to(m.read(keep, PRED), (m.active,)).reshape(groups.shape)[:, 0]
        right = np.broadcast_to(m.read(b, np.dtype(np.uint64)), (m.active,)).reshape(groups.shape)[:, 0]
        sums = np.stack([np.broadcast_to(m.read(o, F32), (m.active,)) for o in d], -1)
        sums = sums.reshape(*groups.shape, len(d)).copy()
        if a[0] == "vector":
            left = np.zeros((len(groups), 64, 16))
            for i, o in enumerate(a[1]):
                pair = np.ascontiguousarray(np.broadcast_to(m.read(o, U32), (m.active,))).view(TYPES[kind])
                pair = pair.reshape(*groups.shape, 2).astype(F64)
                for k in range(2):
                    left[:, row + 8 * (i % 2), column + 8 * (i // 2) + k] = pair[..., k]
        else:
            places = np.broadcast_to(m.read(a, np.dtype(np.uint64)), (m.active,)).reshape(groups.shape)[:, 0]
            left = [_described(m, int(p), int(m.cta[g[0]]), 64, kind) for p, g in zip(places, groups, strict=True)]
        for g, numbers in enumerate(groups):
            product = left[g] @ _described(m, int(right[g]), int(m.cta[numbers[0]]), columns, kind).T
            for i in range(len(d)):
                here = product[row + 8 * (i % 4 // 2), column + i // 4 * 8 + i % 2]
                sums[g, :, i] = here + (sums[g, :, i] if kept[g] else 0)
        for i, target in enumerate(d):
            m.write(target, sums[:, :, i].ravel())
        return False

    return run


TOGETHER = ("shfl", "elect", "vote", "match", "redux", "ldmatrix", "stmatrix", "mma", "wgmma", "bar.warp")


def together(opcode: str) -> int:
    """How many threads next to each other execute this instruction as one; 0: any."""
    if opcode.startswith("wgmma.mma_async"):
        return WARPGROUP
    return LANES if opcode.startswith(TOGETHER) or re.match(r"barrier\.cluster.*aligned", opcode) else 0


OPERATIONS = {"wgmma": _warpgroup, "shfl": _shuffle, "elect": _elect, "vote": _vote, "match": _match, "redux": _reduce,
              "activemask": _active_mask, "bar": _barrier, "barrier": _barrier, "ldmatrix": _load_matrix,
              "stmatrix": _store_matrix, "mma": _multiply_matrices}
