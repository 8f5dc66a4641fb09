"""Runs the PTX of compiled kernels on the CPU: CI has no GPU, and Pallas' interpreter does not know inline PTX.

    parse       PTX text -> instructions with resolved registers and labels
    memory      global buffers with bounds, shared memory, what was written
    machine     threads, divergence, barriers: the loop that executes blocks of instructions
    arithmetic  what a thread computes by itself: a table of arithmetic, logic, comparisons, jumps
    data        loads, stores, conversions, atomic operations
    warp        what lanes of a warp do together: shuffles, votes, matrix fragments
    copies      asynchronous copies, tensor maps and their barriers
    clusters    CTAs that reach each other's shared memory, their barrier, asynchronous stores
    races       what two warps do to the same word of shared memory without an order between the two
    schedule    whose turn it is, and when asynchronous stores and copies land
    host        the host side of a Mosaic GPU kernel: its grid, its parameters, its tensor maps
    launch      compiles `plgpu.kernel` ahead of time and runs it here instead of on a device

Section numbers in comments are those of NVIDIA's "Parallel Thread Execution ISA" 9.0.

What it finds: what does not compile, wrong values, access out of bounds or misaligned, deadlocks, reads of memory that
nobody wrote or of copies that nobody waited for, many races in shared memory, use of a CTA's memory before it starts or
after it exits. What it does not: races in global memory or of asynchronous reads, missing fences between proxies, what
ptxas makes of the PTX, speed. It has no copies to several CTAs of a cluster.
"""
