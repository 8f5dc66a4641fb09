"""Integers, loops and addresses per thread, for inline Mosaic GPU code that Pallas cannot say."""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

WARPGROUP = 128
LANES = 32
FULL_WARP = -1  # lane mask


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


class Int:
    """A 32-bit integer per thread with the operators of Python; division and remainder are unsigned."""

    def __init__(self, value):
        self.v = arith.constant(i32(), value) if isinstance(value, int) else value

    def _binary(self, op, other):
        return Int(op(self.v, (other if isinstance(other, Int) else Int(other)).v))

    def __add__(self, other):
        return self._binary(arith.addi, other)

    def __sub__(self, other):
        return self._binary(arith.subi, other)

    def __mul__(self, other):
        return self._binary(arith.muli, other)

    def __floordiv__(self, other):
        return self._binary(arith.divui, other)

    def __mod__(self, other):
        return self._binary(arith.remui, other)

    def __xor__(self, other):
        return self._binary(arith.xori, other)

    def __and__(self, other):
        return self._binary(arith.andi, other)

    def __or__(self, other):
        return self._binary(arith.ori, other)

    def __lshift__(self, other):
        return self._binary(arith.shli, other)

    def __rshift__(self, other):
        return self._binary(arith.shrui, other)

    def float(self) -> ir.Value:
        """The same bits as float32."""
        return arith.bitcast(ir.F32Type.get(), self.v)

    def _compare(self, how, other):
        return arith.cmpi(how, self.v, (other if isinstance(other, Int) else Int(other)).v)

    def __lt__(self, other):
        return self._compare(arith.CmpIPredicate.slt, other)

    def __ge__(self, other):
        return self._compare(arith.CmpIPredicate.sge, other)

    def equals(self, other):
        return self._compare(arith.CmpIPredicate.eq, other)

    def min(self, other):
        return self._binary(arith.minsi, other)

    def max(self, other):
        return self._binary(arith.maxsi, other)


def at(ref, i: Int) -> Int:
    return Int(memref.load(ref, [arith.index_cast(ir.IndexType.get(), i.v)]))


def put(ref, i: Int, value: Int) -> None:
    memref.store(value.v, ref, [arith.index_cast(ir.IndexType.get(), i.v)])


def select(condition, a: Int, b: Int) -> Int:
    return Int(arith.select(condition, a.v, b.v))


def loop(count, carry: Int | None = None):
    """`for i in range(count)` with at most one carried integer."""
    bound = (count if isinstance(count, Int) else Int(count)).v

    def decorate(body):
        def inner(i, carried):
            out = body(Int(i), *map(Int, carried))
            return [] if out is None else [out.v]

        results = mgpu.fori(bound, [] if carry is None else [carry.v])(inner).results
        return Int(results[0]) if results else None

    return decorate


def thread() -> Int:
    return Int(mgpu.thread_idx())


def meet(threads: int) -> None:
    """A barrier among all threads of the CTA."""
    # Convergent: else LLVM may copy it into the branches before it, and threads of a CTA meet at two barriers.
    utils.inline_ptx(f"bar.sync 0, {threads};", has_side_effects=True, convergent=True)


def address(ref) -> ir.Value:
    """Address in memory of a reference: 64 bits for global memory, 32 for shared memory."""
    shared = utils.is_smem_ref(ref)
    return llvm.ptrtoint(ir.IntegerType.get_signless(32 if shared else 64), utils.memref_ptr(ref))


def global_offset(base, row: Int, row_bytes: int, offset: Int) -> ir.Value:
    wide = ir.IntegerType.get_signless(64)
    start = arith.muli(arith.extui(wide, row.v), arith.constant(wide, row_bytes))
    return arith.addi(base, arith.addi(start, arith.extui(wide, offset.v)))


def shuffle(x: Int, lane: int, clamp: int, kind) -> Int:
    return Int(nvvm.shfl_sync(Int(FULL_WARP).v, x.v, Int(lane).v, Int(clamp).v, kind))


def last_lane(x: Int) -> Int:
    """The value of the warp's last lane, in all lanes."""
    return shuffle(x, LANES - 1, 31, nvvm.ShflKind.idx)


def scan(x: Int, lane: Int) -> Int:
    """Sum over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        x = select(lane < distance, x, x + shuffle(x, distance, 0, nvvm.ShflKind.up))
    return x


def population(x: Int) -> Int:
    """How many bits are set."""
    return Int(utils.inline_ptx("popc.b32 $0, $1;", x.v, result_types=i32()))


def load_matrices(address: Int, offset: int) -> list:
    """ldmatrix: lane l names 16 bytes of shared memory, row l % 8 of matrix l // 8; four registers, one per matrix."""
    return utils.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];", address.v,
        result_types=[i32()] * 4, has_side_effects=True, convergent=True)


def multiply_add(kind: str, a: list, b: list, sums: list) -> list:
    """mma.m16n8k16 of "f16" or "bf16" fragments with float32 sums: 4 registers times 2, plus 4."""
    return utils.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        *a, *b, *sums, result_types=[ir.F32Type.get()] * 4, convergent=True)
