"""compute-sanitizer over every kernel: memcheck, initcheck, racecheck and synccheck, on small and hostile inputs.

    python -m bench.sanitize --out bench/results [--seconds 170] [--tool memcheck ...] [--filter NAME]

Each tool watches a process of its own that runs the same cases (`cases`), all tools side by side on one GPU. Every
buffer is an allocation of its own there, so that memcheck sees a read beyond any of them, and the results are compared
with the float64 oracle, so that a case which computed nothing cannot pass. The last case of a tool is a kernel with a
planted fault that it must find (synccheck has none).

Writes sanitize.json: per tool the findings by kernel, those in kernels of this package (Mosaic GPU kernels) apart from
those in kernels of XLA and in copies to the host, the outcome of every case, and the end of the log. Exit code 1: a
finding in one of our kernels, a copy of something that was never written, a case that failed, or a planted fault that
went unseen; 2: no compute-sanitizer.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
PLANTED = {"memcheck", "initcheck", "racecheck"}  # tools whose run ends with a fault that they must find
OUR_KERNELS = re.compile(r"moe_|mosaic_gpu|^body")  # body: the grouped GEMM of JAX that expert_centric runs
MOST_PRINTED = 20000  # findings that a tool writes down
# (E, H, I, K): a small layer, and one with sizes off every tile. shared_decode refuses the second odd one.
SHAPES = {"small": (4, 128, 64, 2), "odd": (5, 192, 320, 3), "off": (3, 352, 96, 3)}
TOKENS = (1, 3, 129)
SAME_PLACE = dict(  # for a process under compute-sanitizer
    XLA_PYTHON_CLIENT_ALLOCATOR="platform",  # every buffer from cuMemAlloc, none inside another
    XLA_PYTHON_CLIENT_PREALLOCATE="false",
    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
    JAX_ENABLE_COMPILATION_CACHE="false",
    PYTHONUNBUFFERED="1")


# ------------------------------------------------------------------------------------------ child: the cases, in jax


def cases():
    """(name, function that runs the case and checks its numbers), the most important first; without jax's arrays."""
    from jax_warp_decode import STRATEGIES
    from jax_warp_decode.experts import DENSE_FORMATS
    from jax_warp_decode.formats import FORMATS

    decode = [s for s in STRATEGIES if s not in ("reference", "expert_centric")]
    first = [f for f in ("bf16", "mxfp8") if f in {*DENSE_FORMATS.values(), *FORMATS}]
    others = [f for f in {**dict.fromkeys(DENSE_FORMATS.values()), **FORMATS} if f not in first]
    plan = [(s, f, shape, T) for s in decode for f in first for shape in ("small", "off", "odd") for T in (3,)]
    plan += [(s, f, "odd", T) for s in decode for f in first for T in (1, 129)]
    plan += [("expert_centric", f, shape, T) for f in first for shape, T in (("small", 3), ("odd", 129))]
    for strategy, format, shape, T in plan:
        yield f"{strategy}-{format}-{shape}-T{T}", functools.partial(layer, strategy, format, shape, T)
    yield "router", router
    yield "gradients of expert_centric", gradients
    for strategy in decode:
        yield f"{strategy}-stacked layers", functools.partial(stacked, strategy)
        yield f"{strategy}-biases", functools.partial(biases, strategy)
    for format in others:
        for strategy in decode:
            yield f"{strategy}-{format}-odd-T3", functools.partial(layer, strategy, format, "odd", 3)
    yield "bundled model", bundled_model
    yield "configurations of gate_up and down", configurations
    yield "no tokens", no_tokens


class Skipped(Exception):
    """A strategy that refuses these operands; the message is its reason."""


def _jitted(strategy):
    import jax

    from jax_warp_decode import moe

    return jax.jit(functools.partial(moe, strategy=strategy))


def _make(seed, shape, T, weights="bf16", pattern="skipped", **options):
    import oracle

    E, H, I, K = SHAPES[shape]
    x_dtype = weights if weights in ("f16", "f32") else "bf16"
    return oracle.make_case(seed, tokens=T, experts=E, hidden=H, intermediate=I, k=K, weights=weights, pattern=pattern,
                            x_dtype=x_dtype, **options)


def _check(y, case, strategy):
    import numpy as np
    import oracle

    if strategy == "expert_centric":  # three roundings to bfloat16, see tests/test_gpu.py
        exact, y = case.exact, np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
        clean = ~np.isnan(exact).any(1)
        error = np.linalg.norm((y - exact)[clean])
        assert error <= 2.0**-8 * np.sqrt(4 / 3) * np.linalg.norm(exact[clean]), error
    else:
        oracle.assert_close(y, case, h_dtype="bfloat16", unit=oracle.TENSOR_CORE_UNIT)


def layer(strategy, format, shape, T):
    """One compiled layer: ids that are not routed (-1, E and the ends of int32), NaN in idle experts and rows, all
    tokens on one expert, no slot routed at all, and a routed NaN row beside clean ones."""
    import dataclasses

    import numpy as np

    from jax_warp_decode import UnsupportedError

    run = _jitted(strategy)
    for pattern in ("skipped", "same", "none", "uniform"):
        case = _make(T, shape, T, format, pattern)
        if pattern == "uniform":
            x = case.x.copy()
            x[T // 2] = np.nan
            case = dataclasses.replace(case, x=x)
        try:
            y = run(*case.args())
        except UnsupportedError as error:
            raise Skipped(str(error)) from None
        _check(y, case, strategy)


def stacked(strategy):
    """Two layers with NaN in the one that is not read, and layer numbers outside the stack."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode import moe

    case = _make(7, "odd", 3)
    x, routing, experts = case.args()
    stack = jax.tree.map(lambda w: jnp.stack([jnp.full_like(w, jnp.nan), w]), experts)
    run = jax.jit(functools.partial(moe, strategy=strategy))
    _check(run(x, routing, stack, layer=jnp.int32(1)), case, strategy)
    for outside in (-1, 2, 2**31 - 1, -2**31):
        assert not np.asarray(run(x, routing, stack, layer=jnp.int32(outside)), np.float32).any()


def biases(strategy):
    """Biases of all three projections, NaN in those of idle experts, against the float32 reference."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode import UnsupportedError, moe

    case = _make(8, "odd", 3, activation="clamped_swiglu")
    x, routing, experts = case.args()
    if "b_gate" not in {field.name for field in dataclasses.fields(experts)}:
        raise Skipped("experts have no biases")
    E, H, I, _ = SHAPES["odd"]
    idle = jnp.asarray(np.setdiff1d(np.arange(E), case.ids))
    draw = lambda seed, n: jax.random.normal(jax.random.key(seed), (E, n)).at[idle].set(jnp.nan)
    experts = dataclasses.replace(experts, b_gate=draw(0, I), b_up=draw(1, I), b_down=draw(2, H))
    run = functools.partial(moe, activation="clamped_swiglu")
    try:
        y = np.asarray(jax.jit(functools.partial(run, strategy=strategy))(x, routing, experts), np.float32)
    except UnsupportedError as error:
        raise Skipped(str(error)) from None
    want = np.asarray(run(x, routing, experts, strategy="reference"), np.float32)
    assert np.isfinite(y).all() and np.linalg.norm(y - want) <= 1e-2 * np.linalg.norm(want)


def router():
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode.route_tokens import route_tokens
    from jax_warp_decode.routing import route

    for E, H, K, T in ((16, 256, 4, 3), (128, 352, 8, 1), (64, 2048, 6, 2)):
        keys = jax.random.split(jax.random.key(E), 2)
        x = jax.random.normal(keys[0], (T, H), jnp.bfloat16)
        w = (jax.random.normal(keys[1], (E, H)) / 16).astype(jnp.bfloat16)
        got = route_tokens(x, w, K, strategy="one_launch")
        logits = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32).T, precision="highest")
        want = route(logits, K)
        np.testing.assert_allclose(np.sort(got.weights, -1), np.sort(want.weights, -1), rtol=1e-3)
        hostile = route_tokens(x.at[0].set(jnp.nan), w, K, strategy="one_launch")
        ids = np.asarray(hostile.ids)
        assert all(len(set(row)) == K for row in ids) and (ids >= 0).all() and (ids < E).all()


def gradients():
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode import Routing, moe

    case = _make(9, "odd", 33)
    x, routing, experts = case.args()

    def loss(x, weights, experts):
        return jnp.sum(moe(x, Routing(routing.ids, weights), experts, strategy="expert_centric").astype(jnp.float32)**2)

    dx, dw, d_experts = jax.jit(jax.grad(loss, (0, 1, 2)))(x, routing.weights, experts)
    routed = case.routed()
    assert np.isfinite(np.asarray(dx, np.float32)).all() and np.isfinite(dw).all()
    assert not np.asarray(dw)[~routed].any()
    for d in jax.tree.leaves(d_experts):
        assert np.isfinite(np.asarray(d, np.float32)).all()


def configurations():
    """The two warp-decode kernels with every width of a row, and unrolls that leave steps over."""
    import oracle

    from jax_warp_decode.kernels import DownConfig, GateUpConfig, moe_down_3d_batched, moe_gate_up_3d_batched

    for format in ("bf16", "mxfp8"):
        for lanes in (32, 16, 8, 4):
            case = oracle.make_case(lanes, tokens=2, experts=3, hidden=704, intermediate=768, k=2, weights=format)
            x, routing, experts = case.args()
            h = moe_gate_up_3d_batched(
                x, routing.ids, experts.w_gate, experts.w_up, config=GateUpConfig(lanes, 1, 3))
            y = moe_down_3d_batched(h, routing.ids, routing.weights, experts.w_down, config=DownConfig(lanes, 1, 5))
            oracle.assert_close(y, case)


def bundled_model():
    """Prefill and decode steps, through whatever kernels the decode loop has besides those of the layer."""
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode import demo
    from jax_warp_decode.checkpoints import load_qwen3_moe
    from jax_warp_decode.models.generate import generate

    model = load_qwen3_moe(demo.bundled_model("mxfp8"), dtype=jnp.bfloat16)
    prompt = np.frombuffer(b'The "for" statement', np.uint8)[None]
    generation = generate(model, prompt, 4)
    tokens, logits = [], []
    for ids in generation:
        tokens.append(int(ids[0]))
        logits.append(np.asarray(generation.logits, np.float32)[0])
    want = demo.reference_logits(model, np.concatenate([prompt[0], tokens[:-1]]))[prompt.shape[1] - 1:]
    assert demo.compare(np.array(logits), want).cosine > 0.99


def no_tokens():
    from jax_warp_decode import STRATEGIES

    for strategy in STRATEGIES:
        y = _jitted(strategy)(*_make(0, "small", 0).args())
        assert y.shape == (0, SHAPES["small"][1])


def planted(tool):
    """Kernels with the fault that the tool must find; named so that they are told from the others."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    kernel = functools.partial(plgpu.kernel, compiler_params=params, kernel_name=f"planted_{tool}")
    one = jax.ShapeDtypeStruct((512,), jnp.float32)
    rows, quads = plgpu.Layout.WG_STRIDED((512,), 1), plgpu.Layout.WG_STRIDED((512,), 4)
    x = jnp.arange(512, dtype=jnp.float32)
    if tool == "memcheck":
        def read_beyond(x_ref, at_ref, y_ref):
            value = x_ref[at_ref[0]]
            y_ref[...] = plgpu.load(x_ref.at[:], layout=rows, optimized=False) + value

        jax.block_until_ready(kernel(read_beyond, out_type=one)(x, jnp.array([100_000], jnp.int32)))
    elif tool == "initcheck":
        def write_one(x_ref, y_ref):
            y_ref[0] = x_ref[1]

        def read_all(x_ref, y_ref):
            y_ref[...] = plgpu.load(x_ref.at[:], layout=rows, optimized=False) + 1.0

        unwritten = plgpu.kernel(write_one, out_type=one, compiler_params=params, kernel_name="planted_writer")(x)
        jax.block_until_ready(kernel(read_all, out_type=one)(unwritten))
    elif tool == "racecheck":
        def no_barrier(x_ref, y_ref, shared):
            shared[...] = plgpu.load(x_ref.at[:], layout=rows, optimized=False)
            y_ref[...] = plgpu.load(shared.at[:], layout=quads, optimized=False)

        jax.block_until_ready(kernel(
            no_barrier, out_type=one, scratch_types=[plgpu.SMEM((512,), jnp.float32)])(x))


def child(options) -> None:
    """Runs the cases under one tool and writes a line of JSON per case."""
    begin = time.monotonic()
    sys.path.insert(0, str(ROOT / "tests"))
    import jax

    with open(options.results, "w", buffering=1) as results:
        write = lambda **record: results.write(json.dumps(record) + "\n")
        write(device=jax.devices()[0].device_kind, jax=jax.__version__, startup=time.monotonic() - begin)
        for name, run in cases():
            if options.filter not in name:
                continue
            if time.monotonic() - begin > options.seconds:
                write(case=name, outcome="no time left")
                continue
            start, outcome = time.monotonic(), "ok"
            try:
                run()
            except Skipped as reason:
                outcome = f"refused: {reason}"
            except Exception as error:  # the others still run, unless the device is lost
                outcome = f"FAILED {type(error).__name__}: {str(error)[-600:]}"
            write(case=name, outcome=outcome, seconds=round(time.monotonic() - start, 2))
        if options.tool[0] in PLANTED:
            write(case="planted", outcome="started")
            try:
                planted(options.tool[0])
            except Exception as error:  # memcheck takes the context away
                write(case="planted", outcome=f"{type(error).__name__}: {str(error)[:200]}")


# ---------------------------------------------------------------------------------------------- parent: run and read


def parse(lines) -> list[dict]:
    """Findings of a compute-sanitizer log: what it is, in which kernel ("" outside of kernels), how often.

    Example:
      >>> from bench.sanitize import parse
      >>> parse(["========= Invalid __global__ read of size 4 bytes",
      ...        "=========     at moe_down_mosaic_gpu_kernel+0x70", "=========     by thread (0,0,0) in block (1,0,0)",
      ...        "========= ", "========= ERROR SUMMARY: 1 error"])
      [{'what': 'Invalid __global__ read of size 4 bytes', 'kernel': 'moe_down_mosaic_gpu_kernel', 'count': 1}]
    """
    banner = re.compile(r"COMPUTE-SANITIZER|SUMMARY|Target application|Error: process didn't|Saved host|print limit")
    found, what, kernel = collections.Counter(), "", ""
    for line in [*lines, "========= end"]:
        if not (text := line.removeprefix("=========")) or text == line:
            continue
        if not text.startswith("  "):  # a new finding, or the end of one
            if what:
                found[what, kernel] += 1
            what, kernel = "" if banner.search(text) else text.strip(), ""
            if what == "end":
                break
        if what and not kernel and (at := re.search(r"\b(?:at|in) (?:0x[0-9a-f]+ in )?([A-Za-z_]\w*)(?:\(.*\))?\+0x|"
                                                     r"\bat 0x[0-9a-f]+ in ([A-Za-z_]\w*)", text)):
            kernel = at.group(1) or at.group(2)
            what = re.sub(r" (?:at|between) .*", "", what)
    return [dict(what=what, kernel=kernel, count=n) for (what, kernel), n in found.items()]


def where(finding) -> str:
    """Whose finding: "planted", "ours", "host" (a copy of memory that nobody wrote) or "xla"."""
    if finding["kernel"].startswith("planted_"):
        return "planted"
    if OUR_KERNELS.search(finding["kernel"]):
        return "ours"
    return "xla" if finding["kernel"] else "host"


def start(sanitizer, tool, folder, options):
    command = [sanitizer, "--tool", tool, "--log-file", str(folder / f"{tool}.log"), "--print-limit", str(MOST_PRINTED),
               "--show-backtrace", "no"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # jax asks the driver for functions that it may not have
    command += [sys.executable, "-m", "bench.sanitize", "--child", "--tool", tool, "--seconds", str(options.seconds),
                "--results", str(folder / f"{tool}.jsonl"), "--filter", options.filter]
    with open(folder / f"{tool}.out", "w") as out:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | SAME_PLACE, start_new_session=True)


def collect(tool, folder, code) -> dict:
    read = lambda suffix: (folder / f"{tool}.{suffix}").read_text(errors="replace").splitlines() \
        if (folder / f"{tool}.{suffix}").exists() else []
    log, records = read("log"), [json.loads(line) for line in read("jsonl")]
    findings = [finding | {"where": where(finding)} for finding in parse(log)]
    count = {place: sum(f["count"] for f in findings if f["where"] == place)
             for place in ("ours", "host", "xla", "planted")}
    outcomes = {r["case"]: r for r in records if "case" in r}
    failed = [name for name, r in outcomes.items() if r["outcome"].startswith("FAILED")]
    ran = [name for name, r in outcomes.items() if r["outcome"] == "ok"]
    problems = [f"{name}: {outcomes[name]['outcome']}" for name in failed]
    if count["ours"] or count["host"]:
        problems.append(f"{count['ours']} findings in our kernels, {count['host']} outside of kernels")
    if not ran:
        problems.append("no case ran: " + " | ".join(read("out")[-5:]))
    if "planted" not in outcomes and tool in PLANTED:
        problems.append("the process ended before its planted fault: " + " | ".join(read("out")[-3:]))
    elif tool in PLANTED and not count["planted"]:
        problems.append("the planted fault was not found")
    return dict(
        tool=tool, exit_code=code, findings_by_place=count, problems=problems, findings=findings[:200],
        cases_run=len(ran), cases=[r for r in records if "case" in r],
        process=next((r for r in records if "device" in r), {}), log_tail=log[-12:], output_tail=read("out")[-12:])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--seconds", type=float, default=170.0, help="after so many a tool starts no new case")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; default: all, side by side")
    parser.add_argument("--filter", default="", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer: not found on PATH or in /usr/local/cuda/bin, it comes with the CUDA toolkit",
              file=sys.stderr)
        return 2
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1:]
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    begin, reports = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        running = {tool: start(sanitizer, tool, folder, options) for tool in options.tool or TOOLS}
        for tool, process in running.items():
            try:  # a case under way, and the planted one, may still finish
                code = process.wait(max(1.0, options.seconds + 25 - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the tool and the program under it
                process.wait()
                code = "killed at the time limit"
            reports.append(collect(tool, folder, code))
    report = dict(
        meta=dict(command="python -m bench.sanitize --out OUT", commit=os.environ.get("GIT_COMMIT") or git,
                  sanitizer=version, seconds=round(time.monotonic() - begin, 1), environment=SAME_PLACE),
        tools=reports)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sanitize.json").write_text(json.dumps(report, indent=1) + "\n")
    for r in reports:
        late = sum(c["outcome"] == "no time left" for c in r["cases"])
        refused = sum(c["outcome"].startswith("refused") for c in r["cases"])
        print(f"{r['tool']:10} {r['cases_run']} cases ok, {refused} refused, {late} without time; "
              f"findings {r['findings_by_place']}")
        for problem in r["problems"]:
            print(f"   <- {problem[:400]}")
        for finding in [f for f in r["findings"] if f["where"] != "planted"][:8]:
            print(f"      {finding['count']} x {finding['what'][:110]} in {finding['kernel'] or 'no kernel'}")
    return 1 if any(r["problems"] for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
