"""compute-sanitizer over every kernel: memcheck, initcheck, racecheck and synccheck, on small and hostile inputs.

    python -m bench.sanitize --out bench/results [--seconds 300] [--tool memcheck ...] [--filter NAME] [--processes 16]

Each tool watches processes of its own with the same cases (bench.sanitize_cases), all side by side on one GPU; a
process takes the next case that none of its tool has, and where all are taken, another one of a tool that has cases
left begins in its place. Memcheck sees a read beyond any buffer, see ALLOCATOR, and the results are compared with the
float64 oracle, so that a case which computed nothing cannot pass. A case that ends its process, or takes long, has
another try as the first of a new process; the report names it, and a second time is a failure. The first process of a
tool, synccheck left out, runs a kernel with a planted fault which that tool must find; for memcheck, a read just behind
a buffer.

initcheck leaves out kernels whose name contains "fusion", XLA's, see XLA_FUSIONS.

Writes sanitize.json: per tool the findings by kernel, those in kernels of this package (Mosaic GPU kernels) apart from
those in kernels of XLA, in copies to the host, in a control of the tool, and what a tool says about itself, such as
records that it dropped; the outcome of every case, and the end of the log. Exit code 1: a finding in one of our
kernels, a copy of something that was never written, a case that failed, dropped records, or a planted fault that went
unseen; 2: no compute-sanitizer.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from bench import sanitize_cases, sanitize_controls
from bench.report import commit, replace_text

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
# body: the grouped GEMM of JAX that expert_centric runs; the last two are Triton's.
OUR_KERNELS = re.compile(r"moe_|mosaic_gpu|^body|^rms_norm|^decode_attention")
# initcheck takes what TMA stored from a tile for unwritten, as the control shows that runs beside. Of XLA's kernels,
# these read what JAX's ragged dot and our outer product stored so; what comes out is compared with the oracle.
XLA_FUSIONS = "fusion"
CONTROL = "a buffer written by TMA"  # the case
OF_THE_TOOL = re.compile(r"Internal Sanitizer Error|buffer overflow|were skipped")
LINES_KEPT = 12  # of a finding's text
CASE_SECONDS = 240  # most take 2 to 40 on an H200 that 16 processes share, but one under racecheck 142
GRACE_SECONDS = 60  # in which a case under way at the end may finish
START_SECONDS = 15  # a process needs 5 before its first case
PADDING = 1024  # bytes behind a buffer that belong to none
MOST_PRINTED = 20000  # findings that a tool writes down
KILLED = "killed at the time limit"
BEGUN = "begun"
STACK = 512 * 2**20  # bytes, of every thread of a watched process: what a tool does to a kernel runs there too
TRIES = 2  # under the tools, compiling ends a process now and then, but not for the same case in a new one
# With the "platform" allocator a buffer lies in an allocation of 2 MiB, and memcheck sees no read just behind it. With
# the pool of CUDA it does, but initcheck ends there with the first thing it finds.
ALLOCATOR = {"memcheck": "cuda_async"}
# JAX frees a buffer on another stream than the one that used it, after an event that memcheck does not know. What
# racecheck says by default ends it with the first race: "bad optional access".
OPTIONS = {"memcheck": ("--track-stream-ordered-races", "no"), "racecheck": ("--racecheck-report", "hazard")}
SAME_PLACE = dict(  # for a process under compute-sanitizer
    XLA_PYTHON_CLIENT_PREALLOCATE="false",
    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
    JAX_ENABLE_COMPILATION_CACHE="false",
    PYTHONFAULTHANDLER="1",
    PYTHONUNBUFFERED="1")


# -------------------------------------------------------------------------------------------------------------- child


def chosen_cases(filter: str) -> list:
    return [case for case in sanitize_cases.cases() if filter in case[0]]


def take(claims: pathlib.Path, name: str) -> bool:
    """Whether no process of the tool has taken this case yet; it is taken now."""
    try:
        (claims / name.replace("/", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def child(options) -> None:
    """Runs cases that no other process of the tool has taken, and writes two lines of JSON per case."""
    begin = time.monotonic()
    sys.path.insert(0, str(ROOT / "tests"))
    import jax

    tool, path, claims = options.tool[0], pathlib.Path(options.results), pathlib.Path(options.claims)
    cases = chosen_cases(options.filter)
    if options.planted:
        cases = [("planted", functools.partial(sanitize_controls.planted, tool))]
    _, again = outcomes(read_records(path))
    cases.sort(key=lambda case: case[0] not in again)
    with open(path, "a", buffering=1) as results:
        write = lambda **record: results.write(json.dumps(record) + "\n")
        write(device=jax.devices()[0].device_kind, jax=jax.__version__, startup=time.monotonic() - begin)
        for name, run in cases:
            if not take(claims, name) and name not in again:
                continue
            if time.monotonic() - begin > options.seconds and name != "planted":
                write(case=name, outcome="no time left")
                continue
            write(case=name, outcome=BEGUN)
            signal.alarm(CASE_SECONDS)  # its default ends the process, also where a kernel hangs
            start, outcome = time.monotonic(), "ok"
            try:
                run()
            except sanitize_cases.Skipped as reason:
                outcome = f"refused: {reason}"
            except Exception as error:  # the others still run, unless the device is lost
                outcome = f"FAILED {type(error).__name__}: {str(error)[-600:]}"
            signal.alarm(0)
            write(case=name, outcome=outcome, seconds=round(time.monotonic() - start, 2))


def read_records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outcomes(records) -> tuple[dict, set]:
    """The last record of every case that needs no other try, and the names of those that ended their process once."""
    last = {r["case"]: r for r in records if "case" in r}
    tries = collections.Counter(r["case"] for r in records if r.get("outcome") == BEGUN)
    again = {name for name, r in last.items() if r["outcome"] == BEGUN and tries[name] < TRIES}
    return {name: r | dict(tries=tries[name]) for name, r in last.items() if name not in again}, again


# ---------------------------------------------------------------------------------------------- parent: run and read


def parse(lines) -> list[dict]:
    """Findings of a compute-sanitizer log: what it is, in which kernel ("" outside of kernels), how often, and the text
    of the first.

    Example:
      >>> from bench.sanitize import parse
      >>> parse(["========= Invalid __global__ read of size 4 bytes",
      ...        "=========     at moe_down_mosaic_gpu_kernel+0x70", "=========     by thread (0,0,0) in block (1,0,0)",
      ...        "========= ", "========= ERROR SUMMARY: 1 error"])
      [{'what': 'Invalid __global__ read of size 4 bytes', 'kernel': 'moe_down_mosaic_gpu_kernel', 'count': 1,
        'first': ['Invalid __global__ read of size 4 bytes', 'at moe_down_mosaic_gpu_kernel+0x70',
                  'by thread (0,0,0) in block (1,0,0)']}]
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
    """Whose finding: "planted", "control", "ours", "host" (a copy of what nobody wrote), "xla" or "tool"."""
    if found := re.match("(planted|control)_", finding["kernel"]):
        return found[1]
    if OF_THE_TOOL.search(finding["what"]):
        return "tool"
    if OUR_KERNELS.search(finding["kernel"]):
        return "ours"
    return "xla" if finding["kernel"] else "host"


class Share:
    """One process after the other, with the planted faults of one tool, or whatever case is not taken."""

    def __init__(self, tool, number, planted, folder, options, end):
        self.tool, self.planted, self.options, self.end = tool, planted, options, end
        self.path, self.claims = folder / f"{tool}-{number}", folder / f"claims-{tool}"
        self.codes, self.process, self.written = [], None, 0
        self.start()

    def start(self):
        name, left = f"{self.path}-{len(self.codes)}", self.end - time.monotonic()
        command = [self.options.sanitizer, "--tool", self.tool, "--log-file", f"{name}.log",
                   "--print-limit", str(MOST_PRINTED), "--show-backtrace", "no"]
        if self.tool == "memcheck":  # jax asks the driver for functions that it may not have
            command += ["--report-api-errors", "no", "--padding", str(PADDING)]
        command += [*self.options.more, *self.options.of_tools.get(self.tool, ())]
        if self.tool == "initcheck":
            command += self.options.exclude
        command += [sys.executable, "-m", "bench.sanitize", "--child", "--tool", self.tool, "--seconds", str(left),
                    "--results", f"{self.path}.jsonl", "--claims", str(self.claims), "--filter", self.options.filter,
                    *["--planted"] * self.planted]
        env = os.environ | SAME_PLACE | dict(XLA_PYTHON_CLIENT_ALLOCATOR=ALLOCATOR.get(self.tool, "platform"))
        with open(f"{name}.out", "w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=env, start_new_session=True)

    def ended(self) -> bool:
        """Whether it is over; begins another process if one ended during a case that has another try."""
        if (code := self.process.poll()) is None:
            return False
        self.codes.append(code)
        records = read_records(pathlib.Path(f"{self.path}.jsonl"))
        before, self.written = self.written, len(records)
        _, again = outcomes(records)
        if not again or self.written <= before + 1 or time.monotonic() > self.end:  # 1: began no case
            return True
        self.start()
        return False

    @property
    def idle(self) -> bool:
        """Whether it is over and began no case."""
        return bool(self.codes) and self.written <= 1

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)  # the tool and the program under it
        self.process.wait()
        self.codes.append(KILLED)


def watch(tools, folder, options) -> dict[str, list[Share]]:
    """Runs the shares of all tools to their end, the planted faults first."""
    begin, names = time.monotonic(), [name for name, _ in chosen_cases(options.filter)]
    end = begin + options.seconds
    shares: dict[str, list[Share]] = {tool: [] for tool in tools}
    running: list[Share] = []

    def start(tool, planted=False):
        share = Share(tool, len(shares[tool]), planted, folder, options, end)
        shares[tool].append(share)
        running.append(share)

    def waiting(tool) -> float:
        """Cases for each process of the tool, if it had one more."""
        taken = sum(path.name != "planted" for path in (folder / f"claims-{tool}").iterdir())
        if any(share.idle for share in shares[tool]):
            return 0
        return (len(names) - taken) / (1 + sum(share.tool == tool for share in running))

    for tool in tools:
        (folder / f"claims-{tool}").mkdir()
        if tool in sanitize_controls.PLANTED:
            start(tool, planted=True)
    while time.monotonic() < end + GRACE_SECONDS:
        running[:] = [share for share in running if not share.ended()]
        while len(running) < max(options.processes, len(tools)) and time.monotonic() < end - START_SECONDS:
            if waiting(most := max(tools, key=waiting)) < 1:
                break
            start(most)
        if not running:
            break
        time.sleep(0.5)
    for share in running:
        share.kill()
    return shares


def collect(tool, folder, codes, planned) -> dict:
    """The report of one tool, from what its processes wrote.

    Args:
      codes: exit codes of each share, one after the other.
      planned: names of all cases.
    """
    def read(share, suffix):
        paths = sorted(folder.glob(f"{tool}-{share}-*.{suffix}"))
        text = "\n".join(path.read_text(errors="replace") for path in paths)
        return text.replace(f"{ROOT}/", "").splitlines()  # a report says nothing of the machine's folders

    shares = range(len(codes))
    logs, printed = [read(n, "log") for n in shares], [read(n, "out") for n in shares]
    written = [read_records(folder / f"{tool}-{n}.jsonl") for n in shares]
    cases = {name: r for records in written for name, r in outcomes(records)[0].items()}
    again = sorted(name for name, r in cases.items() if r["tries"] > 1)
    found: dict[tuple, dict] = {}
    for finding in (finding for log in logs for finding in parse(log)):
        same = found.setdefault((finding["what"], finding["kernel"]), finding | dict(count=0, where=where(finding)))
        same["count"] += finding["count"]
    findings = list(found.values())
    count = {place: sum(f["count"] for f in findings if f["where"] == place)
             for place in ("ours", "host", "xla", "tool", "planted", "control")}
    problems = [f"{name}: {r['outcome']}" for name, r in cases.items()
                if r["outcome"].startswith("FAILED") and name != "planted"]
    if count["ours"] or count["host"]:
        problems.append(f"{count['ours']} findings in our kernels, {count['host']} outside of kernels")
    problems += [f"the tool: {f['what']}" for f in findings if f["where"] == "tool"]
    if tool == "initcheck" and CONTROL in cases and not count["control"]:
        problems.append("the control found nothing: this tool knows what TMA stores, check XLA's fusions, too")
    if not any(r["outcome"] == "ok" for r in cases.values()):
        problems.append("no case ran")
    planted = {f["kernel"] for f in findings if f["where"] == "planted"}
    for n, records in enumerate(written):
        said = f" (exit codes {codes[n]}): " + " | ".join(printed[n][-3:])
        ends = [name for name, r in outcomes(records)[0].items() if r["outcome"] == BEGUN]
        problems += [f"{name}: ended its process{said}" for name in ends if not (name == "planted" and planted)]
    if lost := [name for name in planned if name not in cases]:
        problems.append(f"no process finished {', '.join(lost)}")
    if tool in sanitize_controls.PLANTED and not any(kernel.startswith(f"planted_{tool}") for kernel in planted):
        problems.append("the planted fault was not found")
    return dict(
        tool=tool, exit_codes=codes, findings_by_place=count, problems=problems, findings=findings[:200],
        cases_run=sum(r["outcome"] == "ok" for r in cases.values()), cases=list(cases.values()),
        tried_again=again,
        processes=[records[:1] for records in written], log_tail=[log[-12:] for log in logs],
        output_tail=[out[-12:] for out in printed])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results"))
    parser.add_argument("--seconds", type=float, default=300.0, help="after so many no new case begins")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; default: all, side by side")
    parser.add_argument("--filter", default="", metavar="NAME", help="only cases whose name contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="of all tools; default: of cores")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("--claims", help=argparse.SUPPRESS)
    parser.add_argument("--planted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    tools = options.tool or TOOLS
    if options.child:
        child(options)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer: not found on PATH or in /usr/local/cuda/bin, it comes with the CUDA toolkit",
              file=sys.stderr)
        return 2
    options.sanitizer = sanitizer
    ask = lambda what: subprocess.run([sanitizer, what], capture_output=True, text=True).stdout.strip()
    version = ask("--version").splitlines()[-1:]
    known = ask("--help")  # older tools lack these
    options.more = ["--check-tensor-ops", "yes"] if "--check-tensor-ops" in known else []
    options.of_tools = {tool: words for tool, words in OPTIONS.items() if words[0] in known}
    options.exclude = ["--kernel-name-exclude", f"regex={XLA_FUSIONS}"] if "--kernel-name-exclude" in known else []
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK if most == resource.RLIM_INFINITY else min(STACK, most), most))
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        names = [name for name, _ in chosen_cases(options.filter)]
        reports = [collect(tool, folder, [share.codes for share in of_tool], names)
                   for tool, of_tool in watch(tools, folder, options).items()]
    report = dict(
        meta=dict(command="python -m bench.sanitize --out OUT", commit=commit(),
                  sanitizer=version, seconds=round(time.monotonic() - begin, 1), processes=options.processes,
                  options=options.more, options_of_tools=options.of_tools, allocators=ALLOCATOR,
                  environment=SAME_PLACE),
        tools=reports)
    replace_text(options.out / "sanitize.json", json.dumps(report, indent=1) + "\n")
    for r in reports:
        late = sum(c["outcome"] == "no time left" for c in r["cases"])
        refused = sum(c["outcome"].startswith("refused") for c in r["cases"])
        print(f"{r['tool']:10} {r['cases_run']} cases ok, {refused} refused, {late} without time; "
              f"findings {r['findings_by_place']}")
        if r["tried_again"]:
            print(f"   ended their process and were tried again: {', '.join(r['tried_again'])}")
        for problem in r["problems"]:
            print(f"   <- {problem[:400]}")
        for finding in [f for f in r["findings"] if f["where"] != "planted"][:8]:
            print(f"      {finding['count']} x {finding['what'][:110]} in {finding['kernel'] or 'no kernel'}")
            print(*(f"         {line[:150]}" for line in finding["first"][:4]), sep="\n")
    return 1 if any(r["problems"] for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
