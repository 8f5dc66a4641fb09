"""Clusters in the machine that executes PTX (tests/ptx), and the one kernel that has them: the router.

Every launch is repeated under schedules in which warps get far ahead of others and stores land at any time. What is
wrong must be found whatever the schedule, unless a test says otherwise.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_ptx
import test_router_kernel
from ptx.copies import TensorMap
from ptx.machine import Machine, MachineError
from ptx.memory import APART, AccessError, Buffer
from ptx.parse import parse

from jax_warp_decode.kernels import cluster_exchange, router, shared_common
from jax_warp_decode.kernels.cluster_exchange import ClusterExchange
from jax_warp_decode.kernels.router import RouterConfig, moe_router

SCHEDULES = (None, *range(7))

# ------------------------------------------------------------------------------------------------------- the machine

THREADS, MEMORY = 64, 1024  # of a CTA


def launch_of(code, seed=None, *, grid=(4, 1, 1), cluster=(4, 1, 1), words=1):
    """A machine whose threads store %r0 .. in their rows of the result. %next is the next CTA's rank, %own the address
    of the thread's word of shared memory, %bar that of a place for an mbarrier behind all words, %x a value of its own.
    """
    stores = "".join(f"st.global.b32 [%out+{4 * i}], %r{i};\n" for i in range(words))
    program = parse(f""".version 9.0
        .visible .entry kernel(.param .u64 kernel_out, .param .align 64 .b8 kernel_map[128]) {{
        .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>, %out; .reg .b32 %t, %rank, %next, %own, %bar, %x;
        .shared .align 16 .b8 dynamic;
        mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %r9, %cluster_nctarank;
        add.s32 %next, %rank, 1; rem.u32 %next, %next, %r9; ld.param.u64 %out, [kernel_out];
        mov.b32 %bar, dynamic; mad.lo.s32 %own, %t, 4, %bar; add.s32 %bar, %bar, {4 * THREADS};
        mov.u32 %r9, %ctaid.z; mov.u32 %r8, %nctaid.y; mov.u32 %r7, %ctaid.y; mad.lo.s32 %r9, %r9, %r8, %r7;
        mov.u32 %r8, %nctaid.x; mov.u32 %r7, %ctaid.x; mad.lo.s32 %r9, %r9, %r8, %r7;
        mad.lo.s32 %r9, %r9, {THREADS}, %t; mul.wide.u32 %rd8, %r9, {4 * words}; add.s64 %out, %out, %rd8;
        mov.b32 %r0, 0; setp.eq.u32 %p0, %t, 0; mad.lo.s32 %x, %rank, 1000, %t;
        {code}
        {stores} ret; }}""")
    ctas = int(np.prod(grid))
    out = Buffer("out", np.zeros(4 * words * THREADS * ctas, np.uint8), written=False)
    data = Buffer("in", np.arange(64, dtype=np.uint32).view(np.uint8), writable=False)
    maps = [TensorMap(2 << APART, 4, (64,), (1,), (32,), 16)]
    return Machine(program, [1 << APART, maps], [out, data], grid, (THREADS, 1, 1), MEMORY, cluster, seed)


def result(machine):
    """[CTAs, threads, words]"""
    return machine.memory.buffers[0].values.view(np.uint32).reshape(machine.ctas, THREADS, -1)


def found(machine):
    """What the machine says when it runs: kinds of races, an error."""
    errors = []
    try:
        machine.run()
    except (MachineError, AccessError) as error:
        errors.append(str(error))
    return [what for what, *_ in machine.races.found] + errors


INIT = f"""@%p0 mbarrier.init.shared::cta.b64 [%bar], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {4 * THREADS};
    """
MEET = """barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    """
SEND = """mapa.shared::cluster.u32 %r1, %own, %next;
    mapa.shared::cluster.u32 %r2, %bar, %next;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %x, [%r2];
    """
WAIT = """AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%bar], 0;
    @!%p1 bra AGAIN;
    """
READ = """xor.b32 %r3, %own, 128; ld.shared.b32 %r0, [%r3];
    """
EXCHANGE = INIT + MEET + SEND + WAIT + READ
GLANCE = """st.shared.b32 [%own], %x;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    mapa.shared::cluster.u32 %r1, %own, %next; ld.shared::cluster.b32 %r0, [%r1];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """  # at the neighbour's word, in place
ARRIVAL = """@%p0 mbarrier.init.shared::cta.b64 [%bar], 64; @%p0 fence.mbarrier_init.release.cluster;
    """ + MEET + """mapa.shared::cluster.u32 %r1, %own, %next; st.shared::cluster.b32 [%r1], %x;
    mapa.shared::cluster.u32 %r2, %bar, %next; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
    """ + WAIT + READ  # of each thread of the CTA before


def changed(code, *changes):
    for old, new in changes:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


TWICE = INIT.splitlines()[2] + SEND + WAIT.replace("AGAIN", "TWICE").replace(", 0;", ", 1;")  # the second phase
PAIRS = changed(
    EXCHANGE, ("mapa.shared::cluster.u32 %r1, %own", """shl.b32 %r4, %t, 3; add.s32 %r4, %r4, 1536;
    mapa.shared::cluster.u32 %r1, %r4"""), ("[%bar], 256", "[%bar], 512"),
    (".b32 [%r1], %x", ".v2.b32 [%r1], {%t, %x}"), ("xor.b32 %r3, %own, 128; ld.shared.b32 %r0, [%r3]",
                                                    "xor.b32 %r3, %r4, 256; ld.shared.b32 %r0, [%r3+4]"))
GENERIC = changed(GLANCE, ("mapa.shared::cluster.u32 %r1, %own, %next; ld.shared::cluster.b32 %r0, [%r1]",
                           "cvt.u64.u32 %rd1, %own; cvta.shared.u64 %rd1, %rd1; mapa.u64 %rd1, %rd1, %next; "
                           "ld.b32 %r0, [%rd1]"))
ONE_WAITS = changed(WAIT, ("AGAIN:", "mov.u32 %r5, %laneid; setp.ne.u32 %p3, %r5, 0; AGAIN: @%p3 bra PAST;")
                    ) + "PAST: bar.warp.sync -1;"  # for its warp


def sent(lane):
    """What lane of each CTA has got from the CTA before."""
    return (np.arange(4)[:, None] - 1) % 4 * 1000 + lane


LANE = np.arange(THREADS)
NEXT = (np.arange(4)[:, None] + 1) % 4 * 1000 + LANE
EARLY = "read after write|asynchronous write after read|has exited"  # or the reader is there before the store starts
LEFT = "exit before a write is over|exit before another CTA's use is over|has exited"


@pytest.mark.parametrize("code, want", [
    (EXCHANGE, sent(LANE ^ 32)), (PAIRS, sent(LANE ^ 32)), (ARRIVAL, sent(LANE ^ 32)),
    (GLANCE, NEXT), (GENERIC, NEXT),
    (changed(GLANCE, ("barrier.cluster.arrive.release", "fence.sc.cluster; barrier.cluster.arrive.relaxed")), NEXT),
    (changed(EXCHANGE, (WAIT, ONE_WAITS)), sent(LANE ^ 32)),
    # Bytes that land before they are announced.
    (changed(EXCHANGE, (INIT + MEET, INIT.replace("@%p0 mbarrier.arrive", "// ") + MEET),
             (SEND, SEND + INIT.splitlines()[2])), sent(LANE ^ 32)),
    # The same words twice, by way of two phases: whoever sends the second time knows that the first was read.
    (changed(EXCHANGE, (READ, READ + MEET.replace("relaxed", "release") + TWICE.replace("%x", "%own") + READ)),
     np.broadcast_to(1024 + 4 * (LANE ^ 32), (4, THREADS))),
])
def test_an_exchange_is_right_whatever_the_schedule(code, want):
    for seed in SCHEDULES:
        machine = launch_of(code, seed)
        assert not found(machine) and not machine.memory.unwritten
        np.testing.assert_array_equal(result(machine)[..., 0], want)


@pytest.mark.parametrize("code, words", [
    (changed(EXCHANGE, (WAIT, "")), EARLY),
    (changed(EXCHANGE, (".acquire.cluster", "")), "^read after write"),  # the scope is a CTA
    (changed(EXCHANGE, (WAIT, changed(ONE_WAITS, ("bar.warp.sync -1;", "")))), "^read after write"),
    (changed(EXCHANGE, ("[%bar], 256", "[%bar], 1048576")), "1048576 bytes at a barrier that counts to 1048575"),
    (changed(EXCHANGE, ("[%bar], 256", "[%bar], 252")), "^read after write"),
    (changed(EXCHANGE, ("[%bar], 256", "[%bar], 260")),
     "deadlock.*try_wait.*barrier at 1280 of CTA 0, whose phase 0 lacks 0 arrivals and 4 bytes"),
    (changed(EXCHANGE, ("@%p0 mbarrier.arrive", "// ")), "barrier at 1280 .* lacks 1 arrivals and -256 bytes"),
    (changed(EXCHANGE, ("[%r1], %x", "[%r1 + 4096], %x")), r"store to shared memory: bytes \d+ to \+4 of 2048"),
    (changed(EXCHANGE, ("[%r1], %x", "[%r1 + 2], %x")), "not aligned to 4"),
    (changed(EXCHANGE, ("[%r1], %x", "[%r1 + 4], %x")), "store to an mbarrier"),
    (changed(EXCHANGE, ("mapa.shared::cluster.u32 %r1, %own", "mapa.shared::cluster.u32 %r1, 1024")),
     "^asynchronous write after write"),
    (changed(EXCHANGE, ("%r2, %bar, %next", "%r2, %bar, %rank")), "an mbarrier of another CTA than that of the data"),
    (changed(EXCHANGE, ("mapa.shared::cluster.u32 %r1, %own, %next", "mapa.shared::cluster.u32 %r1, %own, 4")),
     "CTA 4 of a cluster of 4"),
    (changed(EXCHANGE, (WAIT + READ, "")), LEFT),
    (changed(EXCHANGE, ("@%p0 fence.mbarrier_init.release.cluster;", "")),
     "^use of a barrier before it is known to be initialised"),
    (changed(EXCHANGE, (INIT + MEET, MEET + INIT + "bar.sync 0;")),
     "^use of a barrier before it is known to be initialised|no barrier was initialised at 1280"),
    (changed(EXCHANGE, (MEET, "")), "may not have started"),
    (changed(EXCHANGE, (MEET, "setp.ge.u32 %p2, %t, 32; @%p2 bra PAST;" + MEET + "PAST: bar.sync 0;")),
     "deadlock.*the barrier of cluster 0, where 128 of 256 threads have arrived"),
    (changed(EXCHANGE, (MEET, "setp.ge.u32 %p2, %t, 40; @%p2 bra PAST;" + MEET + "PAST: bar.sync 0;")),
     "deadlock.*barrier.cluster.arrive"),  # a part of a warp
    (changed(EXCHANGE, (MEET, MEET.splitlines()[1])), "waits that has not arrived"),
    (changed(EXCHANGE, (MEET, MEET.splitlines()[0] + MEET)), "arrives again before it has waited"),
    # A second time into the same words, without knowing that the first has been read.
    (changed(EXCHANGE, (READ, READ + TWICE)), "^asynchronous write after (read|write)"),
    (changed(GLANCE, ("arrive.release", "arrive.relaxed")), "^read after write"),
    (changed(GLANCE, ("barrier.cluster.arrive.release", "fence.mbarrier_init.release.cluster; "
                      "barrier.cluster.arrive.relaxed")), "^read after write"),
    (GLANCE[:GLANCE.index("barrier.cluster.arrive.aligned")], LEFT),
    (changed(ARRIVAL, ("arrive.release.cluster", "arrive")), "^read after write"),
    (changed(ARRIVAL, (".acquire.cluster", "")), "^read after write"),
    (changed(ARRIVAL, (WAIT + READ, "")), LEFT),
    (changed(ARRIVAL, (WAIT + READ, ""), ("st.shared::cluster.b32 [%r1], %x;", "")), LEFT),
])
def test_faults_are_found_whatever_the_schedule(code, words):
    for seed in SCHEDULES:
        what = found(launch_of(code, seed))
        assert any(re.search(words, w) for w in what), (seed, what)


def test_a_wait_that_is_not_repeated_is_found_by_some_schedule():
    """mbarrier.try_wait may return before the phase has completed."""
    code = changed(EXCHANGE, ("@!%p1 bra AGAIN;", ""))
    assert any("read after write" in found(launch_of(code, seed)) for seed in SCHEDULES)


def test_without_a_cluster_there_are_no_asynchronous_stores():
    with pytest.raises(AccessError, match="st.async.*no cluster"):
        launch_of(EXCHANGE, cluster=(1, 1, 1)).run()


def test_a_grid_is_of_whole_clusters():
    with pytest.raises(AccessError, match="grid"):
        launch_of("", grid=(3, 1, 1), cluster=(2, 1, 1))


def test_a_seed_is_a_schedule():
    def course(seed):
        machine = launch_of(EXCHANGE, seed)
        machine.run()
        return machine.executed

    assert course(3) == course(3) and len(set(map(course, SCHEDULES))) > 4


@pytest.mark.parametrize("code", ["@%p1 ret; " + MEET, "@%p1 bra OUT; " + MEET + "OUT: mov.b32 %r0, 0;"])
def test_an_exited_warp_does_not_hold_up_its_cluster(code):
    """Whether it exits before the others arrive, or after."""
    for seed in SCHEDULES:
        assert not found(launch_of("setp.lt.u32 %p1, %t, 32; " + code, seed))


def test_nobody_uses_the_memory_of_a_cta_that_has_exited():
    code = MEET + """setp.eq.u32 %p1, %rank, 0; @%p1 ret;
        mapa.shared::cluster.u32 %r1, %own, 0; st.shared::cluster.b32 [%r1], %x;"""
    assert "CTA 0, which has exited" in found(launch_of(code))[-1]
    for seed in SCHEDULES:
        assert re.search(LEFT, " ".join(found(launch_of(code, seed))))


def test_where_a_cta_is_in_its_cluster():
    names = [f"{name}.{axis}" for name in ("ctaid", "clusterid", "cluster_ctaid", "nclusterid", "cluster_nctaid")
             for axis in "xyz"] + ["cluster_ctarank", "cluster_nctarank"]
    machine = launch_of("".join(f"mov.u32 %r{i}, %{name};" for i, name in enumerate(names)), grid=(4, 6, 1),
                        cluster=(2, 3, 1), words=len(names))
    machine.run()
    for cta, row in enumerate(result(machine)[:, 0]):
        x, y = cta % 4, cta // 4
        assert row.tolist() == [x, y, 0, x // 2, y // 3, 0, x % 2, y % 3, 0, 2, 2, 1, 2, 3, 1, y % 3 * 2 + x % 2, 6]


@pytest.mark.parametrize("wait, words", [(WAIT, "^$"), ("", f"({EARLY}).*exit before a write is over")])
def test_a_copy_through_a_tensor_map_is_waited_for(wait, words):
    code = changed(INIT, ("256", "128")) + "bar.sync 0;" + """mov.u64 %rd1, kernel_map; mov.b32 %r4, dynamic;
        @%p0 cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd1, {%rank}], [%bar];
        """ + wait + "and.b32 %r3, %t, 31; mad.lo.s32 %r3, %r3, 4, %r4; ld.shared.b32 %r0, [%r3];"
    for seed in SCHEDULES:
        machine = launch_of(code, seed)
        assert re.search(words, " ".join(found(machine)))
        if wait:
            np.testing.assert_array_equal(result(machine)[..., 0], np.arange(4)[:, None] + LANE % 32)


def runs(machine, seeds):
    """Of a launch: the first one and others, which differ in no bit and have no fault."""
    for run in (machine, *map(machine.anew, seeds)):
        assert not (run.races.found if run is machine else found(run))
        for a, b in zip(run.memory.buffers, machine.memory.buffers, strict=True):
            np.testing.assert_array_equal(a.values, b.values)
        yield run


def test_warps_of_a_warpgroup_meet(machines, monkeypatch):
    """For wgmma, whatever the schedule."""
    monkeypatch.setattr(shared_common, "grid_size", lambda config, interpret: 2)
    case = oracle.make_case(3, tokens=5, k=2, weights="bf16", experts=4, hidden=128, intermediate=64)
    test_ptx.check_shared(case, "gate_up", jnp.bfloat16)
    assert len(list(runs(machines[-1], range(4)))) == 5


# -------------------------------------------------------------------------------------------------------- the router


def check_schedules(machine, seeds, padding):
    """Every warp reads this many logits past the last one, which nobody has written, and does not look at them."""
    for run in runs(machine, seeds):
        assert all("ld.shared" in where for where, _ in run.memory.unwritten)
        assert sum(run.memory.unwritten.values()) == padding * run.threads // 32


@pytest.mark.parametrize("tokens, experts, hidden, k, config, renormalize, padding", [
    (2, 16, 256, 3, RouterConfig(2, 1, 1), True, 48),
    (2, 16, 256, 3, RouterConfig(2, 1, 1), False, 48),
    (1, 72, 288, 4, RouterConfig(2, 3, 2), True, 56),  # three experts a warp, H off the step
    (1, 160, 512, 10, RouterConfig(2, 5, 1), False, 96),
    (1, 64, 512, 6, RouterConfig(4, 2, 3), True, 0),
    (1, 96, 256, 32, RouterConfig(8, 1, 8), True, 32),
    (1, 128, 256, 8, RouterConfig(16, 2, 1), True, 0),
    (1, 512, 256, 10, RouterConfig(16, 2, 1), True, 0),
])
def test_the_router(machines, tokens, experts, hidden, k, config, renormalize, padding):
    test_router_kernel.test_matches_the_oracle(False, tokens, experts, hidden, k, config, renormalize)
    seeds = 7 if config.cluster * config.warpgroups < 16 else 2
    check_schedules(machines[-1], range(seeds), padding)


@pytest.mark.parametrize("tokens, experts, hidden, config, x_dtype, w_dtype", [
    (2, 16, 512, RouterConfig(2, 2, 1), "bf16", "bf16"),  # a step for each of four warpgroups
    (1, 32, 768, RouterConfig(4, 1, 2), "f16", "bf16"),
    (1, 64, 288, RouterConfig(8, 1, 3), "bf16", "f32"),
])
def test_the_router_with_its_norm(machines, tokens, experts, hidden, config, x_dtype, w_dtype):
    before = len(machines)
    test_router_kernel.test_the_norm_comes_along(False, tokens, experts, hidden, config, x_dtype, w_dtype)
    normed, plain = machines[before:]
    assert [len(m.memory.buffers) for m in (normed, plain)] == [6, 4]
    assert not plain.races.found
    check_schedules(normed, range(2), 64 - experts)


@pytest.mark.parametrize("check", [
    lambda: test_router_kernel.test_equal_rows_tie_exactly_and_the_lower_id_wins(False),
    lambda: test_router_kernel.test_special_values_do_as_in_route_and_stay_in_their_row(False, True),
    lambda: test_router_kernel.test_special_values_do_as_in_route_and_stay_in_their_row(False, False),
    lambda: test_router_kernel.test_a_bad_token_does_not_reach_its_neighbours(False, np.nan),
    lambda: test_router_kernel.test_dtypes(False, "f16", "f16"),
], ids=["ties", "special values", "special values, not renormalised", "a bad token", "float16"])
def test_values_of_the_router(machines, check):
    before = len(machines)
    check()
    assert len(machines) > before
    for machine in machines[before:]:
        assert list(runs(machine, range(2)))


@pytest.fixture(scope="module")
def healthy(machines):
    """A call of the router, and the contents of its buffers after it."""
    x, w, _ = test_router_kernel.make(16, 1, 16, 256)
    route = functools.partial(moe_router, x, w, 3, config=RouterConfig(2, 1, 1))
    route()
    return route, [b.values.copy() for b in machines[-1].memory.buffers]


def patched(name, *changes):
    return lambda monkeypatch: monkeypatch.setattr(
        cluster_exchange, name, changed(getattr(cluster_exchange, name), *changes))


def announced(*more):
    """The exchanges announce this many values more than they have."""
    def patch(monkeypatch):
        start = ClusterExchange.start
        monkeypatch.setattr(ClusterExchange, "start", lambda self, counts: start(
            self, tuple(n + m for n, m in zip(counts, more, strict=True))))

    return patch


@pytest.mark.parametrize("fault, words", [
    (announced(-1, 0), EARLY), (announced(0, -1), EARLY),
    (announced(1, 0), "deadlock.*barrier at 3072 of CTA 0, whose phase 0 lacks 0 arrivals and 4 bytes"),
    (announced(0, 1), "deadlock.*barrier at 3080 of CTA 0, whose phase 0 lacks 0 arrivals and 4 bytes"),
    (patched("_ARRIVED", ("mbarrier.try_wait", "// "), ("@!done", "// ")), EARLY),
    (patched("_ARRIVED", (".acquire.cluster", "")), "read after write"),
    (patched("_ARRIVED", ("+ {offset}]", "+ 0]")), EARLY),  # the second exchange waits for the first
    (patched("_START", ("@first fence", "// fence")), "use of a barrier before it is known to be initialised"),
    (patched("_START", ("barrier.cluster.arrive.relaxed.aligned;", "")), "waits that has not arrived"),
    (patched("_SHARE", ("mad.lo.u32 there, $1, 4, $0;", "mad.lo.u32 there, $1, 4, $0; add.u32 there, there, 4;")),
     "wrong values"),
    (patched("_SHARE", ("$1, 4, $0", "$1, 256, $0")), "store to (shared memory|an mbarrier)"),
    (patched("_SHARE", ("add.u32 barrier, $3, {offset}", "add.u32 barrier, $3, 0")), "deadlock.*barrier at 3080"),
    (patched("_SHARE", ("@p mapa.shared::cluster.u32 there", "@p sub.u32 lane, {cluster}, lane;\n  @p mapa"
                        ".shared::cluster.u32 there")), "CTA 2 of a cluster of 2"),
    (patched("_SHARE", ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $2, [barrier]",
                        "st.shared::cluster.b32 [there], $2")), "deadlock.*lacks 0 arrivals and 64 bytes"),
])
def test_faults_in_the_router_are_found_whatever_the_schedule(healthy, machines, monkeypatch, fault, words):
    route, want = healthy
    fault(monkeypatch)
    router._build.cache_clear()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        route()
    router._build.cache_clear()
    for seed in SCHEDULES:
        machine = machines[-1].anew(seed)
        what = found(machine)
        if any((a.values != b).any() for a, b in zip(machine.memory.buffers, want, strict=True)):
            what.append("wrong values")
        assert any(re.search(words, w) for w in what), (seed, what)
