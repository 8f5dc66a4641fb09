"""`moe_down_3d_batched` for weights of a byte or less, with its dots on the tensor cores.

Ownership: a CTA owns 16 * `tiles` output dimensions of one token, the rows of a product (`row_products`). Its warps
share out the token's routed slots, each cut into `parts` of its row, so that enough loads are under way even for one
token. Each folds the routing weights into its float32 sums; they meet in shared memory and are added in the order of
the warps. Which warp has what depends on the token's own ids alone, and so does the result.

Grid: (row tile, token), tokens fastest.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jax_warp_decode.device import H200_SMS
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks, row_activations, row_products, simt, tile
from jax_warp_decode.kernels.expert_index import ExpertIndex, take
from jax_warp_decode.kernels.row_products import FORMATS, QUAD, ROWS, NarrowFormat, Walk
from jax_warp_decode.kernels.simt import LANES, WARPGROUP, Int

MOST_SLOTS = LANES  # of a token: a lane looks each up
# Bytes of h, which every CTA has in shared memory: of a bfloat16 one, so that a multiprocessor has room for three CTAs;
# of a float32 one, so that filling it stays cheap (bench/NOTES.md).
MOST_SHARED, MOST_SPLIT = 72 * 1024, 32 * 1024
ENTRY = 12  # bytes of a routed slot in the table: its number, expert and weight
REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class DownTensorConfig:
    """How the kernel uses a CTA.

    Attributes:
      tiles: output dimensions of a CTA, in sixteens; they share the loads of h.
      unroll: groups of 256 columns (128 if h is float32) whose loads are issued together.
      warps: 4, 8 or 16.
      parts: that a slot's rows are cut into.

    Example:
      >>> DownTensorConfig.heuristic(T=1, K=8, H=2048, I=768, format="mxfp8")
      DownTensorConfig(tiles=1, unroll=1, warps=16, parts=2)
    """

    tiles: int
    unroll: int
    warps: int
    parts: int

    @classmethod
    def heuristic(cls, T: int, K: int, H: int, I: int, format: str) -> "DownTensorConfig | None":
        """Where it beats `DownConfig` or lets h be float32 at its speed, or None."""
        split = jnp.float32 in checks.h_dtypes(format)  # then `warp_decode.intermediate_dtype` takes it
        def affordable(tiles, warps, may_pad):
            config = cls(tiles, unroll=1, warps=warps, parts=-(-warps // K))
            if not checks.fits(config, H, I, K, format):
                return None
            walk = config.walk(I, FORMATS[format], split)
            values, factors = walk.shared(K)
            small = 2 * values + 4 * factors <= (MOST_SPLIT if split else MOST_SHARED)
            return config if small and (may_pad or walk.padded == walk.cols) else None

        # Where every SM has one CTA, twice the warps shorten its chain of loads, unless they would multiply zeros. Two
        # tiles share the loads of h, once there are CTAs enough without. Both: "Fourth round" in bench/NOTES.md.
        one_each = range(3 * H200_SMS // 4, H200_SMS + 1)
        for tiles in (1, 2) if split else ():
            if T * H // (ROWS * tiles) in one_each and (config := affordable(tiles, 16, may_pad=False)):
                return config
        return affordable(1 if T * H < 8192 else 2, 8, may_pad=True)

    def check(self, H: int, I: int, K: int, format: str) -> None:
        """Raises `ArgumentError` if it does not fit."""
        checks.positive_integers(self)
        if self.warps not in (4, 8, 16) or K > MOST_SLOTS:
            raise ArgumentError(f"config: got {self} with K = {K}, expected 4, 8 or 16 warps and at most {MOST_SLOTS} "
                                "slots")
        row_products.check(self, format, I, H, ROWS * self.tiles,
                           lambda: self.walk(I, FORMATS[format], split=True).shared(K))

    def walk(self, I: int, spec: NarrowFormat, split: bool) -> Walk:
        return Walk(spec, I, self.tiles, ROWS, self.unroll, self.parts, split)


@functools.cache
def build(T: int, K: int, H: int, I: int, spec: NarrowFormat, index: ExpertIndex, bias_dtype, h_dtype, out_dtype,
          config: DownTensorConfig):
    """The kernel: (ids [T K], weights [T K], h [T K, I], layer, values and scales, bias [E, H]) -> y [T, H]."""
    rows, warps, threads = ROWS * config.tiles, config.warps, config.warps * LANES
    walk = config.walk(I, spec, h_dtype == jnp.float32)

    def code(_ctx, ids, weights, h, *refs):
        *operands, y, h_s, factors_s, table_s, sums_s, token, row_tile = refs
        layer_refs, (values, scales), bias = take(operands, index.num_operands), take(operands, 2), operands
        token, row_tile = (Int(a.registers.item()) for a in (token, row_tile))
        lane, warp = simt.thread() % LANES, simt.thread() // LANES
        first, shared, f32 = row_tile * rows, (h_s, factors_s), ir.F32Type.get()
        table = Int(simt.address(table_s)) + warp * (MOST_SLOTS * ENTRY)
        count = _tabulate(ids, weights, layer_refs, token, lane, table)

        def entry(slot: Int, field: int) -> Int:
            """Of the table; 0 if nothing is routed, as the first load and the last product always happen."""
            return simt.select(Int(0) < count, _load_shared(table + slot * ENTRY + 4 * field), Int(0))

        def place(step: Int):
            """The routed slot of a step, and the first group of its batch."""
            unit = step // walk.batches * warps + warp
            slot = (unit // config.parts).min(count - 1).max(0)
            return slot, (unit % config.parts * walk.batches + step % walk.batches) * config.unroll

        def load(step):
            slot, group = place(step)
            expert = entry(slot, 1)
            own, block = expert * H + first + lane // QUAD, expert * -(-H // 128) + first // 128
            per_row = spec.scale_bytes == 1
            return walk.load([walk.value_address(values, own + half) for half in (0, 8)],
                             [walk.scale_address(scales, own + half if per_row else block) for half in (0, 8)], group)

        def multiply(step, words, scale_words, totals):
            slot, group = place(step)
            return walk.multiply(words, scale_words, totals, shared, K, entry(slot, 0), group, entry(slot, 2).float())

        def fill():
            row_activations.fill(walk, h, h_dtype, token * K, K, threads, shared)
            simt.meet(threads)

        units = (count * config.parts + (warps - 1) - warp) // warps  # of this warp
        zero = arith.constant(f32, 0.0)
        totals = row_products.pipelined(units * walk.batches, load, multiply, [zero] * (2 * config.tiles), fill)
        sums = Int(simt.address(sums_s))
        for i, total in enumerate(totals):
            simt.put(sums_s, warp * rows + i * 8 + lane // QUAD, Int(arith.bitcast(
                simt.i32(), row_products.over_quads(total))))
        simt.meet(threads)
        row = simt.thread()
        with mgpu.when(row < rows):
            total = zero
            for w in range(warps):
                total = arith.addf(total, _load_shared(sums + (row + w * rows) * 4).float())
            if bias:
                def add(slot, carried):
                    added = _load(bias_dtype, simt.address(bias[0]), entry(Int(slot), 1) * H + first + row)
                    return [llvm.intr_fma(entry(Int(slot), 2).float(), added, carried[0])]

                (total,) = mgpu.fori(count.v, [total])(add).results
            _store(out_dtype, simt.address(y), token * H + first + row, total)

    def _tabulate(ids, weights, layer_refs, token: Int, lane: Int, table: Int) -> Int:
        """Writes the warp's table of the token's routed slots, in order; returns how many there are."""
        at = token * K + lane.min(K - 1)
        expert = simt.at(ids, at)
        routed = arith.andi(arith.andi(expert >= 0, expert < index.num_experts), lane < K)
        if layer_refs:
            layer = simt.at(layer_refs[0], Int(0))
            routed = arith.andi(routed, arith.andi(layer >= 0, layer < index.layers))
            expert = layer * index.num_experts + expert
        weight = Int(arith.bitcast(simt.i32(), _load("float32", simt.address(weights), at)))
        mask = Int(utils.inline_ptx(_BALLOT, arith.extui(simt.i32(), routed), result_types=simt.i32(),
                                    has_side_effects=True, convergent=True))
        to = table + simt.population(mask & ((Int(1) << lane) - 1)) * ENTRY
        with mgpu.when(routed):
            for field, value in enumerate((lane, expert, weight)):
                utils.inline_ptx("st.shared.b32 [$0], $1;", (to + 4 * field).v, value.v, has_side_effects=True)
        utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True, convergent=True)
        return simt.population(mask)

    def body(*refs):
        plgpu.inline_mgpu(arg_types=(*[REF] * len(refs), SCALAR, SCALAR))(code)(
            *refs, lax.axis_index("token"), lax.axis_index("row_tile"))

    scratch = [*zip(walk.shared(K), (jnp.float16, jnp.float32)), (warps * MOST_SLOTS * ENTRY // 4, jnp.int32),
               (warps * rows, jnp.int32)]
    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, H), out_dtype),
        grid=(H // rows, T),
        grid_names=("row_tile", "token"),
        num_threads=threads // WARPGROUP,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((size,), dtype) for size, dtype in scratch],
        kernel_name="moe_down_tensor",
        compiler_params=tile.COMPILER_PARAMS,
    )), f"moe_down_3d_batched: {checks.NO_GRADIENT}")


_BALLOT = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
_LOADS = {"float32": "ld.global.f32 $0, [$1];",
          "bfloat16": "{ .reg .b16 a; ld.global.b16 a, [$1]; cvt.f32.bf16 $0, a; }",
          "float16": "{ .reg .b16 a; ld.global.b16 a, [$1]; cvt.f32.f16 $0, a; }"}
_STORES = {"float32": "st.global.f32 [$0], $1;",
           "bfloat16": "{ .reg .b16 a; cvt.rn.bf16.f32 a, $1; st.global.b16 [$0], a; }",
           "float16": "{ .reg .b16 a; cvt.rn.f16.f32 a, $1; st.global.b16 [$0], a; }"}


def _load(dtype, base, i: Int):
    return utils.inline_ptx(_LOADS[str(dtype)], simt.global_offset(base, i, jnp.dtype(dtype).itemsize, Int(0)),
                            result_types=ir.F32Type.get(), has_side_effects=True)


def _load_shared(address: Int) -> Int:
    return Int(utils.inline_ptx("ld.shared.b32 $0, [$1];", address.v, result_types=simt.i32(), has_side_effects=True))


def _store(dtype, base, i: Int, value) -> None:
    at = simt.global_offset(base, i, jnp.dtype(dtype).itemsize, Int(0))
    utils.inline_ptx(_STORES[str(dtype)], at, value, has_side_effects=True)
