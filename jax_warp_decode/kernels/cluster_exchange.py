"""Single values from every warp of a cluster to all its CTAs, in what Pallas has no words for: a little PTX.

Every lane of a warp holds the values of the warp's rows, the same in all lanes. Lane l sends them to CTA l with an
asynchronous store that counts its bytes at a barrier there, so that the receiver waits for the data and for nothing
else: no fence, no barrier of the whole cluster.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

# Two mbarriers, one for each exchange, each used once. They are made before a kernel's first load and needed after its
# last, so that nobody waits for the cluster to have made them.
_START = """{{
  .reg .pred first;
  .reg .b32 thread;
  mov.u32 thread, %tid.x;
  setp.eq.u32 first, thread, 0;
  @first mbarrier.init.shared::cta.b64 [$0], 1;
  @first mbarrier.init.shared::cta.b64 [$0 + 8], 1;
  @first fence.mbarrier_init.release.cluster;
  @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {bytes[0]};
  @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + 8], {bytes[1]};
  barrier.cluster.arrive.relaxed.aligned;
}}"""

_STARTED = "barrier.cluster.wait.acquire.aligned;"

# Lane l writes to CTA l.
_SHARE = """{{
  .reg .pred p;
  .reg .b32 lane, there, barrier;
  mov.u32 lane, %laneid;
  setp.lt.u32 p, lane, {cluster};
  setp.lt.and.u32 p, $1, {limit}, p;
  mad.lo.u32 there, $1, 4, $0;
  add.u32 barrier, $3, {offset};
  @p mapa.shared::cluster.u32 there, there, lane;
  @p mapa.shared::cluster.u32 barrier, barrier, lane;
  @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $2, [barrier];
}}"""

_ARRIVED = """{{
  .reg .pred done;
  again:
  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0 + {offset}], 0;
  @!done bra again;
}}"""

_STORE = """{{
  .reg .pred p;
  .reg .b32 lane;
  .reg .b64 there;
  mov.u32 lane, %laneid;
  setp.eq.u32 p, lane, 0;
  setp.lt.and.u32 p, $1, {limit}, p;
  mad.wide.u32 there, $1, 4, $0;
  @p st.b32 [there], $2;
}}"""


def _ptx(code: str, *refs) -> None:
    """Runs PTX on the addresses of refs, in all threads together."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def run(_, *refs):
        mgpu.utils.inline_ptx(code, *map(mgpu.utils.memref_ptr, refs), has_side_effects=True, convergent=True)

    run(*refs)


def _scatter_ptx(code: str, layout, positions, values, ref, *refs) -> None:
    """Runs PTX once for every row of a warp, on the address of ref, a position, four bytes, and more addresses."""

    @plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType(), *(plgpu.RefType(),) * len(refs)))
    def run(_, positions, values, ref, *refs):
        i32 = ir.IntegerType.get_signless(32)
        base, *more = map(mgpu.utils.memref_ptr, (ref, *refs))
        for position, value in zip(positions.registers.flat, values.registers.flat, strict=True):
            position, value = (mgpu.utils.bitcast(register, i32) for register in (position, value))
            mgpu.utils.inline_ptx(code, base, position, value, *more, has_side_effects=True)

    run(positions, values, ref, *refs)


class ClusterExchange:
    """The exchange through distributed shared memory.

    Args:
      cluster: CTAs.
      layout: of the positions and values, one register a row.
      barriers_ref: 16 bytes of shared memory, int32 [4].
    """

    def __init__(self, cluster: int, layout, barriers_ref):
        self.cluster, self.layout, self.barriers_ref = cluster, layout, barriers_ref

    def start(self, counts: tuple[int, int]) -> None:
        """Says how many values the two exchanges have."""
        _ptx(_START.format(bytes=[4 * n for n in counts]), self.barriers_ref)

    def share(self, exchange: int, shared_ref, positions, values, limit: int) -> None:
        """shared_ref[positions[i]] = values[i] in every CTA, for positions below limit; then waits for all of them."""
        if exchange == 0:
            _ptx(_STARTED)
        code = _SHARE.format(cluster=self.cluster, limit=limit, offset=8 * exchange)
        _scatter_ptx(code, self.layout, positions, values, shared_ref, self.barriers_ref)
        _ptx(_ARRIVED.format(offset=8 * exchange), self.barriers_ref)

    def load(self, shared_ref, shape, layout) -> jax.Array:
        """All of shared_ref as an array of this shape."""
        return plgpu.load(shared_ref.reshape(shape), layout=layout, optimized=False)

    def store(self, ref, positions, values, limit: int) -> None:
        """ref[positions[i]] = values[i] for positions below limit."""
        _scatter_ptx(_STORE.format(limit=limit), self.layout, positions, values, ref)


class InterpretedExchange:
    """The same for the interpreter, which has neither PTX nor the memory of another CTA: one global array for all.

    Args:
      barrier: a `plgpu.ClusterBarrier` at which every warpgroup of the cluster arrives.
    """

    def __init__(self, barrier):
        self.barrier = barrier

    def start(self, counts) -> None:
        """The barrier needs no counts."""

    def share(self, exchange: int, shared_ref, positions, values, limit: int) -> None:
        if exchange == 0:  # neighbours; one store instead of many
            shared_ref[pl.ds(positions[0], values.shape[0])] = values
        else:
            self.store(shared_ref, positions, values, limit)
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)

    def load(self, shared_ref, shape, layout) -> jax.Array:
        return shared_ref[...].reshape(shape)

    def store(self, ref, positions, values, limit: int) -> None:
        for slot in range(limit):
            mine = positions == slot

            @pl.when(jnp.any(mine))
            def _(slot=slot, mine=mine):
                ref[slot] = jnp.sum(jnp.where(mine, values, jnp.zeros_like(values)))
