"""compute-sanitizer over every kernel: memcheck, initcheck, racecheck and synccheck, on small and hostile inputs.

    python -m bench.sanitize --out bench/results [--seconds 170] [--tool memcheck ...] [--filter NAME] [--processes 4]

Each tool watches processes of its own with the same cases (bench.sanitize_cases), all side by side on one GPU; the
processes of a tool take turns in the cases, most of whose time is compiling. Every buffer is an allocation of its own
there, so that memcheck sees a read beyond any of them, and the results are compared with the float64 oracle, so that a
case which computed nothing cannot pass. The last case of a tool is a kernel with a planted fault that it must find
(synccheck has none).

Writes sanitize.json: per tool the findings by kernel, those in kernels of this package (Mosaic GPU kernels) apart from
those in kernels of XLA and in copies to the host, the outcome of every case, and the end of the log. Exit code 1: a
finding in one of our kernels, a copy of something that was never written, a case that failed, or a planted fault that
went unseen; 2: no compute-sanitizer.
"""

import argparse
import collections
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

from bench import sanitize_cases
from bench.report import commit, replace_text

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
PLANTED = {"memcheck", "initcheck", "racecheck"}  # tools whose run ends with a fault that they must find
# body: the grouped GEMM of JAX that expert_centric runs; the last two are Triton's.
OUR_KERNELS = re.compile(r"moe_|mosaic_gpu|^body|^rms_norm|^decode_attention")
LINES_KEPT = 12  # of a finding's text
MOST_PRINTED = 20000  # findings that a tool writes down
KILLED = "killed at the time limit"
SAME_PLACE = dict(  # for a process under compute-sanitizer
    XLA_PYTHON_CLIENT_ALLOCATOR="platform",  # every buffer from cuMemAlloc, none inside another
    XLA_PYTHON_CLIENT_PREALLOCATE="false",
    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
    JAX_ENABLE_COMPILATION_CACHE="false",
    PYTHONUNBUFFERED="1")


# -------------------------------------------------------------------------------------------------------------- child


def child(options) -> None:
    """Runs the cases under one tool and writes a line of JSON per case."""
    begin = time.monotonic()
    sys.path.insert(0, str(ROOT / "tests"))
    import jax

    with open(options.results, "w", buffering=1) as results:
        write = lambda **record: results.write(json.dumps(record) + "\n")
        chosen = [case for case in sanitize_cases.cases() if options.filter in case[0]]
        chosen = chosen[options.share::options.processes]
        planted = ["planted"] if options.tool[0] in PLANTED and options.share == 0 else []
        write(device=jax.devices()[0].device_kind, jax=jax.__version__, startup=time.monotonic() - begin,
              planned=[name for name, _ in chosen] + planted)
        for name, run in chosen:
            if time.monotonic() - begin > options.seconds:
                write(case=name, outcome="no time left")
                continue
            start, outcome = time.monotonic(), "ok"
            try:
                run()
            except sanitize_cases.Skipped as reason:
                outcome = f"refused: {reason}"
            except Exception as error:  # the others still run, unless the device is lost
                outcome = f"FAILED {type(error).__name__}: {str(error)[-600:]}"
            write(case=name, outcome=outcome, seconds=round(time.monotonic() - start, 2))
        if planted:
            write(case="planted", outcome="started")
            try:
                sanitize_cases.planted(options.tool[0])
            except Exception as error:  # memcheck takes the context away
                write(case="planted", outcome=f"{type(error).__name__}: {str(error)[:200]}")


# ---------------------------------------------------------------------------------------------- parent: run and read


def parse(lines) -> list[dict]:
    """Findings of a compute-sanitizer log: what it is, in which kernel ("" outside of kernels), how often, and the text
    of the first.

    Example:
      >>> from bench.sanitize import parse
      >>> parse(["========= Invalid __global__ read of size 4 bytes",
      ...        "=========     at moe_down_mosaic_gpu_kernel+0x70", "=========     by thread (0,0,0) in block (1,0,0)",
      ...        "========= ", "========= ERROR SUMMARY: 1 error"])
      [{'what': 'Invalid __global__ read of size 4 bytes', 'kernel': 'moe_down_mosaic_gpu_kernel', 'count': 1, \
'first': ['Invalid __global__ read of size 4 bytes', 'at moe_down_mosaic_gpu_kernel+0x70', 'by thread (0,0,0) in block (1,0,0)']}]
    """
    banner = re.compile(r"COMPUTE-SANITIZER|SUMMARY|Target application|Error: process didn't|Saved host|print limit")
    found, first, what, kernel, text_of = collections.Counter(), {}, "", "", []
    for line in [*lines, "========= end"]:
        if not (text := line.removeprefix("=========")) or text == line:
            continue
        if not text.startswith("  "):  # a new finding, or the end of one
            if what:
                found[what, kernel] += 1
                first.setdefault((what, kernel), text_of)
            text_of = [text.strip()]
            what, kernel = "" if banner.search(text) else text.strip(), ""
            if what == "end":
                break
        elif len(text_of) < LINES_KEPT:
            text_of.append(text.strip())
        if what and not kernel and (at := re.search(r"\b(?:at|in) (?:0x[0-9a-f]+ in )?([A-Za-z_]\w*)(?:\(.*\))?\+0x|"
                                                     r"\bat 0x[0-9a-f]+ in ([A-Za-z_]\w*)", text)):
            kernel = at.group(1) or at.group(2)
            what = re.sub(r" (?:at|between) .*", "", what)
    return [dict(what=what, kernel=kernel, count=n, first=first[what, kernel]) for (what, kernel), n in found.items()]


def where(finding) -> str:
    """Whose finding: "planted", "ours", "host" (a copy of memory that nobody wrote) or "xla"."""
    if finding["kernel"].startswith("planted_"):
        return "planted"
    if OUR_KERNELS.search(finding["kernel"]):
        return "ours"
    return "xla" if finding["kernel"] else "host"


def start(sanitizer, tool, share, folder, options):
    name = f"{tool}-{share}"
    command = [sanitizer, "--tool", tool, "--log-file", str(folder / f"{name}.log"), "--print-limit", str(MOST_PRINTED),
               "--show-backtrace", "no"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # jax asks the driver for functions that it may not have
    command += [sys.executable, "-m", "bench.sanitize", "--child", "--tool", tool, "--seconds", str(options.seconds),
                "--results", str(folder / f"{name}.jsonl"), "--filter", options.filter,
                "--processes", str(options.processes), "--share", str(share)]
    with open(folder / f"{name}.out", "w") as out:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | SAME_PLACE, start_new_session=True)


def finish(process, seconds):
    """Its exit code. A case under way, and the planted one, may still finish."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the program under it
        process.wait()
        return KILLED


def collect(tool, folder, codes) -> dict:
    """The report of one tool, from what its processes wrote."""
    def read(share, suffix):
        path = folder / f"{tool}-{share}.{suffix}"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    shares = range(len(codes))
    logs, printed = [read(n, "log") for n in shares], [read(n, "out") for n in shares]
    written = [[json.loads(line) for line in read(n, "jsonl")] for n in shares]
    outcomes = {r["case"]: r for records in written for r in records if "case" in r}
    found: dict[tuple, dict] = {}
    for finding in (finding for log in logs for finding in parse(log)):
        same = found.setdefault((finding["what"], finding["kernel"]), finding | dict(count=0, where=where(finding)))
        same["count"] += finding["count"]
    findings = list(found.values())
    count = {place: sum(f["count"] for f in findings if f["where"] == place)
             for place in ("ours", "host", "xla", "planted")}
    problems = [f"{name}: {r['outcome']}" for name, r in outcomes.items() if r["outcome"].startswith("FAILED")]
    if count["ours"] or count["host"]:
        problems.append(f"{count['ours']} findings in our kernels, {count['host']} outside of kernels")
    ran = sum(r["outcome"] == "ok" for r in outcomes.values())
    if not ran:
        problems.append("no case ran")
    for n, records in enumerate(written):  # each comes to its last case, if only to say that no time is left
        planned = records[0]["planned"] if records else ["every case"]
        if lost := [name for name in planned if name not in outcomes]:
            problems.append(f"process {n} ended ({codes[n]}) before {', '.join(lost)}: " + " | ".join(printed[n][-3:]))
    if "planted" in outcomes and not count["planted"]:
        problems.append("the planted fault was not found")
    return dict(
        tool=tool, exit_codes=codes, findings_by_place=count, problems=problems, findings=findings[:200],
        cases_run=ran, cases=list(outcomes.values()), processes=[records[:1] for records in written],
        log_tail=[log[-12:] for log in logs], output_tail=[out[-12:] for out in printed])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--seconds", type=float, default=170.0, help="after so many a tool starts no new case")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; default: all, side by side")
    parser.add_argument("--filter", default="", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--processes", type=int, help="of each tool; default: as many as there are cores for")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    tools = options.tool or TOOLS
    options.processes = options.processes or max(1, min(4, (os.cpu_count() or 1) // len(tools)))
    if options.child:
        child(options)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer: not found on PATH or in /usr/local/cuda/bin, it comes with the CUDA toolkit",
              file=sys.stderr)
        return 2
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1:]
    begin, reports = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        running = {tool: [start(sanitizer, tool, share, folder, options) for share in range(options.processes)]
                   for tool in tools}
        for tool, processes in running.items():
            codes = [finish(p, max(1.0, options.seconds + 25 - (time.monotonic() - begin))) for p in processes]
            reports.append(collect(tool, folder, codes))
    report = dict(
        meta=dict(command="python -m bench.sanitize --out OUT", commit=commit(),
                  sanitizer=version, seconds=round(time.monotonic() - begin, 1), environment=SAME_PLACE),
        tools=reports)
    replace_text(options.out / "sanitize.json", json.dumps(report, indent=1) + "\n")
    for r in reports:
        late = sum(c["outcome"] == "no time left" for c in r["cases"])
        refused = sum(c["outcome"].startswith("refused") for c in r["cases"])
        print(f"{r['tool']:10} {r['cases_run']} cases ok, {refused} refused, {late} without time; "
              f"findings {r['findings_by_place']}")
        for problem in r["problems"]:
            print(f"   <- {problem[:400]}")
        for finding in [f for f in r["findings"] if f["where"] != "planted"][:8]:
            print(f"      {finding['count']} x {finding['what'][:110]} in {finding['kernel'] or 'no kernel'}")
            print(*(f"         {line[:150]}" for line in finding["first"][:4]), sep="\n")
    return 1 if any(r["problems"] for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
