"""bfloat16 weights times rows without wgmma, for the shared-expert kernels on other GPUs than Hopper.

A warp multiplies 16 rows of a stage with all slots of the group by mma.sync. Both operands lie in shared memory as
wgmma takes them, K-major in tiles of 8 rows by 64 columns with 128-byte swizzle; `ldmatrix` brings them to registers.
"""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from jax_warp_decode.kernels import simt
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int

ATOM = 8 * 128  # bytes of a tile


def multiply(tokens: int, chunk: int):
    """A stage [64, chunk] times part `part` of the operand [columns / 64, tokens, 64], plus `total` [64, tokens]."""
    groups = tokens // 8

    def body(_ctx, values, operand, part, total):
        t = simt.thread() % WARPGROUP
        warp, matrix, row = t // LANES, t % LANES // 8, t % 8
        part = Int(part.registers.item())
        totals = [[vector.extract(v, [], [i]) for i in range(2)] for v in total.registers.flat]
        # Matrices of a: rows 0 and 8, then the same 8 columns further; of b: 4 times 8 columns of 8 slots.
        a_from = Int(simt.address(values)) + (warp * 2 + matrix % 2) * (chunk // 64 * ATOM) + row * 128
        b_from = Int(simt.address(operand)) + part * (chunk // 64 * groups * ATOM) + row * 128
        a_places = [a_from + (((matrix // 2 + 2 * step) ^ row) << 4) for step in range(4)]  # of 16 columns
        b_places = [b_from + (((matrix + 4 * half) ^ row) << 4) for half in range(2)]  # of 32 columns
        for half in range(chunk // 32):
            tile, odd = half // 2, half % 2
            b = [simt.load_matrices(b_places[odd], (tile * groups + g) * ATOM) for g in range(groups)]
            for step in range(2):
                a = simt.load_matrices(a_places[2 * odd + step], tile * ATOM)
                for g in range(groups):  # registers: columns by 8, then rows 0 and 8
                    pairs = simt.multiply_add("bf16", a, b[g][2 * step:2 * step + 2], totals[2 * g] + totals[2 * g + 1])
                    totals[2 * g:2 * g + 2] = pairs[:2], pairs[2:]
        pair_type = ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(total.registers.shape, object)
        registers.flat[:] = [vector.from_elements(pair_type, list(pair)) for pair in totals]
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return body
