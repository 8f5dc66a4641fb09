"""Bytes of global memory on their way to the L2 cache before anything else: a little PTX.

Loads to registers take registers from the moment they are issued, and the compiler moves them towards their use. A
prefetch takes none and stays where it is. Nobody waits for it.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.kernels.simt import WARPGROUP

LINE = 128  # bytes of a cache line

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


def prefetch_lines(ref, nbytes: int) -> None:
    """A warpgroup asks for `nbytes` bytes from the start of ref on, every thread for a line: for a few, needed soon."""
    starts = range(0, nbytes, WARPGROUP * LINE)
    every = "".join(_LINE.format(left=nbytes - start, start=start) for start in starts)
    code = _LINES.format(last=WARPGROUP - 1, line=LINE, all=every)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, ref):
        mgpu.utils.inline_ptx(code, mgpu.utils.memref_ptr(ref), has_side_effects=True)

    run(ref)
