"""Bytes of global memory on their way to the L2 cache before anything else: a little PTX.

Loads to registers take registers from the moment they are issued, and the compiler moves them towards their use. A
prefetch takes none and stays where it is. Nobody waits for it.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

LINE = 128  # bytes of a cache line
THREADS = 128  # of a warpgroup

_LINE = """
  setp.lt.u32 p, offset, {left};
  @p prefetch.global.L2 [there + {start}];"""

_LINES = """{{
  .reg .pred p;
  .reg .b32 offset;
  .reg .b64 there;
  mov.u32 offset, %tid.x;
  and.b32 offset, offset, {last};
  mul.lo.u32 offset, offset, {line};
  cvta.to.global.u64 there, $0;
  mad.wide.u32 there, offset, 1, there;{all}
}}"""

_BULK = """{{
  .reg .pred p;
  .reg .b32 thread;
  .reg .b64 there;
  mov.u32 thread, %tid.x;
  and.b32 thread, thread, {last};
  setp.eq.u32 p, thread, 0;
  cvta.to.global.u64 there, $0;
  @p cp.async.bulk.prefetch.L2.global [there], {nbytes};
}}"""


def prefetch_lines(ref, nbytes: int) -> None:
    """A warpgroup asks for `nbytes` bytes from the start of ref on, every thread for a line: for a few, needed soon."""
    starts = range(0, nbytes, THREADS * LINE)
    every = "".join(_LINE.format(left=nbytes - start, start=start) for start in starts)
    _run(_LINES.format(last=THREADS - 1, line=LINE, all=every), ref)


def prefetch_bulk(ref, nbytes: int) -> None:
    """The same in one instruction of one thread, for many bytes, a multiple of 16."""
    _run(_BULK.format(last=THREADS - 1, nbytes=nbytes), ref)


def _run(code: str, ref) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, ref):
        mgpu.utils.inline_ptx(code, mgpu.utils.memref_ptr(ref), has_side_effects=True)

    run(ref)
