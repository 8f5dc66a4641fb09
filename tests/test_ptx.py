"""Kernels whose inline PTX Pallas' interpreter does not know: compiled as for a GPU, their PTX executed by tests/ptx.

The kernels need the pinned compiler packages (dependency group "aot"), as tests/test_aot.py does; the machine itself is
tested with PTX written here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_kernel_formats
import test_shared
from ptx.machine import Machine, MachineError
from ptx.memory import APART, AccessError, Buffer
from ptx.parse import parse

from jax_warp_decode.activations import get_activation
from jax_warp_decode.kernels import moe_down_3d_batched, shared_common
from jax_warp_decode.kernels.grouped_config import GroupedConfig
from jax_warp_decode.kernels.shared_down import moe_down_shared
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
from jax_warp_decode.paths import grouped_layer, grouped_plan

# ------------------------------------------------------------------------------------------------------- the machine


def run(code, operand, *, words=1, threads=32, ctas=1, shared=0):
    """A kernel of these instructions on uint32 `operand`, at %in; every thread stores %r0 .. at its place of %out."""
    stores = "".join(f"st.global.b32 [%out+{4 * i}], %r{i};\n" for i in range(words))
    program = parse(f""".version 9.0
        .target sm_90a
        .visible .entry kernel(.param .u64 kernel_in, .param .u64 kernel_out) {{
        .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>, %in, %out; .reg .b32 %t, %c, %n;
        .shared .align 16 .b8 dynamic;
        mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x;
        ld.param.u64 %in, [kernel_in]; ld.param.u64 %out, [kernel_out];
        mad.lo.s32 %r98, %c, %n, %t; mul.wide.u32 %rd8, %r98, {4 * words}; add.s64 %out, %out, %rd8;
        {code}
        {stores} ret; }}""")
    out = Buffer("out", np.zeros(4 * words * threads * ctas, np.uint8), written=False)
    buffers = [Buffer("in", np.asarray(operand, np.uint32).view(np.uint8), writable=False), out]
    machine = Machine(program, [1 << APART, 2 << APART], buffers, (ctas, 1, 1), (threads, 1, 1), shared)
    machine.run()
    return out.values.view(np.uint32).reshape(ctas, threads, words), machine


LOAD = "mul.wide.u32 %rd0, %t, 4; add.s64 %rd0, %rd0, %in; ld.global.b32 %r1, [%rd0];\n"


def test_lanes_part_and_meet_again():
    """Steps of Collatz, different in every lane, then a sum over the warp."""
    values = np.arange(1, 33)
    got, _ = run(LOAD + """mov.b32 %r0, 0;
        LOOP: setp.le.u32 %p0, %r1, 1; @%p0 bra DONE;
        and.b32 %r2, %r1, 1; setp.eq.b32 %p1, %r2, 0; @%p1 bra EVEN;
        mad.lo.s32 %r1, %r1, 3, 1; bra NEXT;
        EVEN: shr.u32 %r1, %r1, 1;
        NEXT: add.s32 %r0, %r0, 1; bra LOOP;
        DONE: mov.b32 %r1, %r0;""" + "".join(
        f"shfl.sync.bfly.b32 %r2, %r1, {d}, 31, -1; add.s32 %r1, %r1, %r2;" for d in (1, 2, 4, 8, 16)),
        values, words=2)

    def steps(n):
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    want = [steps(int(n)) for n in values]
    np.testing.assert_array_equal(got[0, :, 0], want)
    np.testing.assert_array_equal(got[0, :, 1], sum(want))


A, B = 0x80F1C3A7, 0x7FFFFFFD  # as signed numbers one below zero, one above
SIGNED = A - (1 << 32)


@pytest.mark.parametrize("code,want", [
    ("prmt.b32 %r0, %r1, %r2, 0x9f40", 0xFF000000 | (B & 0xFF) << 8 | A & 0xFF),  # sign of byte 1 is set, of 7 is not
    ("shr.s32 %r0, %r1, 40", 0xFFFFFFFF), ("shr.u32 %r0, %r1, 40", 0), ("shl.b32 %r0, %r1, 32", 0),
    ("bfe.s32 %r0, %r1, 4, 4", 0xFFFFFFFA), ("bfe.u32 %r0, %r1, 4, 4", 0xA),
    ("shf.l.wrap.b32 %r0, %r1, %r2, 8", (B << 8 | A >> 24) & 0xFFFFFFFF),
    ("lop3.b32 %r0, %r1, %r2, 255, 0x96", A ^ B ^ 255), ("mul.hi.s32 %r0, %r1, %r2", SIGNED * B >> 32 & 0xFFFFFFFF),
    ("mul.hi.u32 %r0, %r1, %r2", A * B >> 32), ("div.s32 %r0, %r1, 7", -(-SIGNED // 7) & 0xFFFFFFFF),
    ("min.s32 %r0, %r1, %r2", A), ("max.u32 %r0, %r1, %r2", A), ("popc.b32 %r0, %r1", A.bit_count()),
    ("cvt.rn.bf16x2.f32 %r0, 0f3F808000, 0f3F818000", 0x3F803F82),  # ties, to even
    ("fma.rn.f32 %r0, 0f00800000, 0f3F000000, 0f00000001", 0x00400001),  # subnormal numbers
    ("max.f32 %r0, 0f7FC00000, 0fBF800000", 0xBF800000), ("min.NaN.f32 %r0, 0f7FC00000, 0fBF800000", 0x7FC00000),
    ("cvt.rzi.s32.f32 %r0, 0fC0200000", 0xFFFFFFFE),
    ("sub.rn.f16x2 %r0, 0x64FF6400, 0x64806480", 0x57F0D800),  # 127 and -128
])
def test_arithmetic(code, want):
    got, _ = run(f"mov.b32 %r1, {A}; mov.b32 %r2, {B}; {code};", [0])
    assert hex(got[0, 0, 0]) == hex(want)


def test_every_fp8_byte_becomes_its_float16():
    for kind, table in (("e4m3x2", oracle.E4M3), ("e5m2x2", np.arange(256, dtype=np.uint8).view(jnp.float8_e5m2))):
        got, _ = run(f"cvt.u16.u32 %h0, %t; cvt.rn.f16x2.{kind} %r0, %h0;", [0], threads=256)
        np.testing.assert_array_equal(got.view(np.float16)[0, :, 0], np.asarray(table, np.float16))


def test_fragments_are_where_tensor_cores_want_them():
    """A [16, 16] and B [8, 16] through ldmatrix and mma.sync."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)
    quarters = [a[i % 2 * 8:i % 2 * 8 + 8, i // 2 * 8:i // 2 * 8 + 8] for i in range(4)] + [b[:, :8], b[:, 8:]]
    rows = np.concatenate([q.reshape(-1) for q in quarters]).view(np.uint32)  # 8 rows of 16 bytes each
    copy = "".join(f"ld.global.v2.b32 {{%r1, %r2}}, [%rd1+{i}]; st.shared.v2.b32 [%r9+{i}], {{%r1, %r2}};"
                   for i in (0, 8, 16))
    got, _ = run(f"""mul.lo.s32 %r9, %t, 24; mov.b32 %r10, dynamic; add.s32 %r9, %r9, %r10;
        mul.wide.u32 %rd1, %t, 24; add.s64 %rd1, %rd1, %in; {copy}""" + """
        bar.sync 0; shl.b32 %r9, %t, 4; add.s32 %r9, %r9, %r10;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r9];
        and.b32 %r8, %t, 15; shl.b32 %r8, %r8, 4; add.s32 %r9, %r8, %r10;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r15, %r16}, [%r9+512];
        mov.b32 %r0, 0; mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r0, %r1, %r2, %r3}, {%r11, %r12, %r13, %r14}, {%r15, %r16},
        {%r0, %r1, %r2, %r3};""", rows, words=4, shared=1024)
    lane = np.arange(32)
    product = np.zeros((16, 8), np.float32)
    for i in range(4):
        product[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = got.view(np.float32)[0, :, i]
    np.testing.assert_allclose(product, a.astype(np.float64) @ b.T.astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("code,error,words", [
    ("ld.global.b32 %r0, [%in+32];", AccessError, r"load from in: bytes 32 to \+4 of 32"),
    ("ld.global.v2.b32 {%r0, %r1}, [%in+4];", AccessError, "not aligned to 8"),
    ("ld.global.b32 %r0, [%out+1099511627776];", AccessError, "is in no operand"),
    ("mov.b32 %r0, 0; st.global.b32 [%in], %r0;", AccessError, "store to in, an input"),
    ("ld.shared.b32 %r0, [%r98+4096];", AccessError, "shared memory"),
    ("setp.lt.u32 %p0, %t, 32; @%p0 bra OUT; bar.sync 0; OUT: bar.sync 1, 64; mov.b32 %r0, 0;", MachineError,
     "deadlock.*bar.sync 0.*bar.sync 1"),
    ("setp.lt.u32 %p0, %t, 32; @%p0 bra OUT; bar.sync 0; bra END; OUT: bar.sync 0; END: mov.b32 %r0, 0;", AccessError,
     "barrier 0 at another instruction"),
    ("setp.lt.u32 %p0, %t, 7; @%p0 bra OUT; vote.sync.ballot.b32 %r0, %p0, 0xffffffff; OUT: mov.b32 %r0, 0;",
     MachineError, "deadlock.*vote"),
    ("madd.u32 %r0, %t, %t;", MachineError, "unknown instruction madd"),
])
def test_what_is_wrong_is_an_error(code, error, words):
    with pytest.raises(error, match=words):
        run(code, np.zeros(8), threads=64, shared=64)


def test_reads_of_what_nobody_wrote_are_poison_and_counted():
    got, machine = run("mov.b32 %r1, dynamic; ld.shared.b32 %r0, [%r1];", [0], shared=16)
    assert (got == 0xFFFFFFFF).all() and list(machine.memory.unwritten.values()) == [32]


@pytest.mark.parametrize("first,second,found", [
    ("", "", ["read after write", "write after read"]), ("bar.sync 0;", "", ["write after read"]),
    ("", "bar.sync 0;", ["read after write"]), ("bar.sync 0;", "bar.sync 0;", [])])
def test_missing_barriers_are_found(first, second, found):
    """A word for each thread, which one of the other warp reads before it is written again."""
    _, machine = run(f"""mov.b32 %r9, dynamic; shl.b32 %r8, %t, 2; add.s32 %r7, %r8, %r9; st.shared.b32 [%r7], %t;
        {first} xor.b32 %r8, %r8, 128; add.s32 %r6, %r8, %r9; ld.shared.b32 %r0, [%r6];
        {second} st.shared.b32 [%r7], %r8;""", [0], threads=64, shared=256)
    assert [what for what, *_ in machine.races.found] == found


# ------------------------------------------------------------------------------------------------------- the kernels


@pytest.fixture
def few_ctas(monkeypatch):
    monkeypatch.setattr(shared_common, "grid_size", lambda config, interpret: 2)


@pytest.mark.parametrize("format,lanes", [("mxfp4", 4), ("int4_group32", 4), ("fp8_block128", 8)])
def test_every_byte(machines, format, lanes):
    """What inline code decodes; and lanes that cover one block of scales in a step."""
    test_kernel_formats.check_value_bytes(format, lanes)


def test_rows_of_one_block(machines):
    """32 columns, fewer than four lanes usually load."""
    case = oracle.make_case(1, tokens=2, experts=3, hidden=64, intermediate=32, k=2, weights="mxfp8", pattern="skipped")
    x, routing, experts = case.args()
    h = jnp.asarray(case.solve_hidden("bfloat16", oracle.UNIT["float32"])[0], jnp.bfloat16)
    y = moe_down_3d_batched(h, routing.ids, routing.weights, experts.w_down, out_dtype=x.dtype)
    oracle.assert_close(y, case, h_dtype="bfloat16")


@pytest.mark.parametrize("format,kernels", [
    ("bf16", "gate_up"), ("f16", "down"), ("mxfp8_e5m2", "down"), ("mxfp4", "both"), ("nvfp4", "both"),
    ("fp8_block128", "down"), ("fp8_channel", "down"), ("fp8_tensor", "gate_up"), ("int8_channel", "gate_up"),
    ("int4_group32", "both")])
def test_shared_experts(machines, few_ctas, format, kernels):
    """With tensor cores; experts and slots that are not routed are poisoned."""
    sizes = dict(experts=12, hidden=512, intermediate=256) if format == "fp8_block128" else dict(
        experts=4, hidden=128, intermediate=64)
    case = oracle.make_case(3, tokens=5, k=2, weights=format, pattern="skipped", biases="bf16", **sizes)
    check_shared(case, kernels, jnp.bfloat16 if format == "bf16" else jnp.float32)
    assert not any(m.races.found for m in machines)


def test_shared_experts_without_wgmma(machines, few_ctas):
    """As on Blackwell: three groups of eight slots share a pass, of 20 tokens that take the same experts."""
    case = oracle.make_case(3, tokens=20, k=2, experts=4, hidden=256, intermediate=128, pattern="same")
    check_shared(case, "both", jnp.bfloat16, shared_common.SharedConfig(24, 128, 2, 1, 1, wgmma=False))
    assert not any(m.races.found for m in machines)


def test_passes_of_shared_experts(machines, few_ctas):
    """Ten tokens on the same two experts, eight slots at a time: each pass selects its own."""
    case = oracle.make_case(4, tokens=10, k=2, experts=3, hidden=128, intermediate=64, pattern="same")
    check_shared(case, "gate_up", jnp.bfloat16, shared_common.SharedConfig(8, 64, 2, 1, 1))
    assert not any(m.races.found for m in machines)


def test_a_row_of_shared_experts_near_the_largest_float32(machines, few_ctas):
    test_shared.check_down(*test_shared.large_row())


@pytest.mark.parametrize("weights, kernels", [
    ("fp8_channel", "both"), ("fp8_tensor", "down"), ("nvfp4", "both"), ("fp8_block128", "gate_up")])
def test_scales_and_biases_of_stacked_layers_and_two_warpgroups(machines, few_ctas, weights, kernels):
    """Of rows, experts and blocks, those of FP8 blocks in bfloat16; NaN in other layers."""
    blocks = weights == "fp8_block128"
    sizes = dict(experts=16, hidden=256, intermediate=256) if blocks else dict(experts=3, hidden=128, intermediate=128)
    case = oracle.make_case(9, tokens=3, k=2, weights=weights, pattern="skipped", biases="f32", **sizes)
    if blocks:
        scaled = {name: w._replace(scales=w.scales.astype(jnp.bfloat16))
                  for name in ("w_gate", "w_up", "w_down") if (w := getattr(case, name)) is not None}
        case = dataclasses.replace(case, **scaled)
    config = shared_common.SharedConfig(8, 128 if blocks else 64, 2, 2 if not blocks else 1, 1)
    check_shared(case, kernels, jnp.float32, config, layer=1)
    assert not any(m.races.found for m in machines)


@pytest.mark.parametrize("part, column", test_shared.EVERY_BYTE)
def test_every_byte_of_shared_experts(machines, few_ctas, part, column):
    test_shared.check_every_byte(part, column)


def check_shared(case, kernels, h_dtype, config=None, layer=None):
    """gate_up, or down from the exact intermediate, or both, against their bounds; with `layer`, in a stack."""
    x, routing, experts = case.args()
    if layer is not None:
        experts = experts.map(lambda w: test_shared.stacked(w, layer))
    exact, bound = case.solve_hidden(jnp.dtype(h_dtype).name, oracle.TENSOR_CORE_UNIT)
    h = jnp.asarray(exact, h_dtype)
    if kernels != "down":
        h = moe_gate_up_shared(x, routing.ids, experts.w_gate, experts.w_up, b_gate=experts.b_gate, b_up=experts.b_up,
                               out_dtype=h_dtype, config=config, layer=layer)
        assert np.all((np.abs(np.asarray(h, np.float64) - exact) <= bound)[case.routed()])
    if kernels != "gate_up":
        y = moe_down_shared(h, routing.ids, routing.weights, experts.w_down, b_down=experts.b_down, out_dtype=x.dtype,
                            config=config, layer=layer)
        oracle.assert_close(y, case, h_dtype=oracle.shared_h_dtype(case), unit=oracle.TENSOR_CORE_UNIT)


@pytest.mark.parametrize("tokens", [50, 700])
def test_the_plan_kernel_equals_its_plain_form(machines, tokens):
    """With one CTA, and with three, the last of which has few slots."""
    ids = np.random.default_rng(0).integers(-1, 10, (tokens, 3)).astype(np.int32)
    got, want = (jax.tree.map(np.asarray, plan(ids, 9, 16)) for plan in (grouped_plan.plan_on_gpu, grouped_plan.plan))
    routed = (ids >= 0) & (ids < 9)
    rows = want.position[routed]
    np.testing.assert_array_equal(got.position[routed], rows)
    np.testing.assert_array_equal(got.token[rows], want.token[rows])
    assert got.token.min() >= 0 and got.token.max() < tokens and got.total == want.total
    np.testing.assert_array_equal(got.tiles[:5 * got.total[0]], want.tiles[:5 * got.total[0]])
    assert not machines[-1].memory.unwritten and not machines[-1].races.found


def test_grouped_kernels(machines):
    """Gathered rows, scales in registers, products of different widths, stores through stmatrix and TMA."""
    case = oracle.make_case(7, tokens=40, experts=3, hidden=128, intermediate=64, k=2, weights="mxfp8",
                            pattern="skipped")
    config = GroupedConfig((16, 48), 3, ctas=2)
    x, routing, experts = case.args()
    y = grouped_layer.op(get_activation("silu"), (config, config))(x, routing, experts)
    oracle.assert_rounded_close(y.astype(x.dtype), case, oracle.Rounded(rows="bfloat16"))
    assert not any(m.memory.unwritten or m.races.found for m in machines[-2:])
