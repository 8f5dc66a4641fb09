"""A pytest plugin for bench.gpu_report: the outcome of every test, in a JSON that is whole after each of them."""

import collections
import json
import os
import pathlib
import re
import time

import pytest

from bench.report import Report

# A CUDA context that is lost: everything after it fails too in the same process.
LOST = re.compile(r"CUDA_ERROR_(ILLEGAL|MISALIGNED|LAUNCH|HARDWARE|INVALID_PC|ASSERT|UNKNOWN)|"
                  r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction")
MOST_TEXT = 3000  # of a failure, its end


def pytest_addoption(parser):
    parser.addoption("--outcomes", metavar="FILE", type=pathlib.Path)
    parser.addoption("--outcomes-fill", action="store_true", help="leave out what FILE says has passed")


def pytest_configure(config):
    if not (path := config.getoption("--outcomes")):
        return
    fill, meta = config.getoption("--outcomes-fill"), json.loads(os.environ["OUTCOMES_META"])
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(set(config.workerinput["outcomes_done"])))
        return
    report = Report(path, meta, fill=fill, running=[], count={})
    done = {row["test"] for row in report.rows}
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(Selection(done))
    config.pluginmanager.register(Controller(config, report, done))


class Selection:
    """Leaves out the tests that are done."""

    def __init__(self, done: set[str]):
        self.done = done

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        out = [item for item in items if item.nodeid in self.done]
        items[:] = [item for item in items if item.nodeid not in self.done]
        config.hook.pytest_deselected(items=out)


class Worker(Selection):
    """A process of pytest-xdist. It ends with its CUDA context, so that only one test fails of it."""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed and LOST.search(report.longreprtext):
            time.sleep(1)  # the report is on its way
            os._exit(1)


class Controller:
    """Writes the report; with pytest-xdist in the process that runs no test itself."""

    def __init__(self, config, report: Report, done: set[str]):
        self.config, self.report, self.done = config, report, sorted(done)
        self.waiting, self.started = {}, {}  # ids, as ordered sets

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["outcomes_done"] = self.done

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.collected(ids)

    def pytest_collection_finish(self, session):
        self.collected([item.nodeid for item in session.items])

    def collected(self, ids):
        if not self.waiting and not self.started:
            self.waiting = dict.fromkeys(ids)
            self.write()

    def pytest_runtest_logstart(self, nodeid):
        self.started[nodeid] = True
        self.write()  # or nobody would know which test never ended

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.outcome(report)

    def outcome(self, report):
        known = next((row for row in self.report.rows if row["test"] == report.nodeid), None)
        if known and "error" in known:
            return  # such as the end of the process, after the failure that caused it
        outcome = report.outcome if report.when in ("call", "setup") or not report.failed else "error"
        row = dict(test=report.nodeid, outcome=outcome, seconds=round(getattr(report, "duration", 0.0), 2))
        if report.failed:
            row["error"] = str(report.longreprtext)[-MOST_TEXT:] or "no text"
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid}: {row['error'].strip().splitlines()[-1][:300]}")
        if known:
            self.report.rows.remove(known)
        self.report.rows.append(row)
        self.waiting.pop(report.nodeid, None)
        self.started.pop(report.nodeid, None)
        self.write()

    def write(self):
        self.report.facts["running"] = list(self.started)
        self.report.facts["count"] = dict(collections.Counter(row["outcome"] for row in self.report.rows))
        self.report.missing = list(self.waiting)
        self.report.write()

    def pytest_sessionfinish(self):
        self.report.finished = True
        self.write()
