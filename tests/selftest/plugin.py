"""The pytest plugin of a run: which tests share a process, when a run is given up, and what it leaves out.

The tests of a file share a process, one after another, and so do all files that boot a machine, and all that hold a
pool of real hosts: a machine occupies a processor, and a pool fills the memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

from tests.selftest.counts import STARTED

ALLOWED_SKIPS = Path(__file__).parent.with_name("allowed_skips.txt")
# Directories, in the order of a run: what takes longest begins first.
PARTS = ("unit", "bake", "disk", "pools", "gpu", "preload")
MARKS = ("root", "boot", "gpu")
GROUPS = ("boot", "hosts")
# As many files may fail and run once more.
FAILED_FILES = 3


@dataclass
class Result:
    """What a run of pytest leaves for the program that started it.

    ``failed`` are files with a failed test, ``skipped`` the number of tests for each reason, ``refused`` the skips that
    no line of the list allows, ``seconds`` those of each file, setup of shared fixtures included, and ``started`` what
    tests/selftest/counts.py has counted.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return the result of a run; an empty one if the run ended before it had any."""
        if not path.exists():
            return cls()
        fields = json.loads(path.read_bytes())
        return cls(**fields | {name: Counter(fields[name]) for name in ("outcomes", "skipped")})


class _Files(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands each process one file after another, or all files of a group."""

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--result", metavar="FILE", help="write what the run found, for the program that started it"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        result = config.getoption("--result")
        config.pluginmanager.register(_Run(config, Path(result) if result else None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _Files(config, log)


def part_of(item: pytest.Item) -> str:
    """Return the folder below ``tests`` that a test is in."""
    return item.path.relative_to(ALLOWED_SKIPS.parent).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _refuse_unmarked(items)
    groups = {
        item.path: group for group in reversed(GROUPS) for item in items if item.get_closest_marker(group)
    }
    for item in items:
        if group := groups.get(item.path):
            item.add_marker(pytest.mark.xdist_group(group))
    order = [*GROUPS, ""]
    items.sort(key=lambda item: (order.index(groups.get(item.path, "")), PARTS.index(part_of(item))))


def _refuse_unmarked(items: Sequence[pytest.Item]) -> None:
    """Refuse tests outside of the folders, and those that need root without a mark that says so."""
    if elsewhere := {item.path.name for item in items if part_of(item) not in PARTS}:
        raise pytest.UsageError(
            f"a test lies in a folder of {', '.join(PARTS)}: {', '.join(sorted(elsewhere))}"
        )
    others = [item for item in items if part_of(item) != "unit"]
    if unmarked := {i.path.name for i in others if not any(map(i.get_closest_marker, MARKS))}:
        raise pytest.UsageError(
            f"these need one of the marks {', '.join(MARKS)}: {', '.join(sorted(unmarked))}"
        )


def allowed_skips(text: str) -> list[tuple[str, str]]:
    """Return the pattern of test ids and the words of the reason in each line of the list."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(pattern, words.strip()) for pattern, _, words in (line.partition("  ") for line in lines)]


class _Run:
    """Gathers the result of a run, refuses skips that aren't on the list, and ends the run at a fourth failing file."""

    def __init__(self, config: pytest.Config, result: Path | None) -> None:
        self.config = config
        self.path = result
        self.allowed = allowed_skips(ALLOWED_SKIPS.read_text(encoding="utf-8"))
        self.result = Result()
        self.begun: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.begun.add(report.nodeid)
        file = report.nodeid.partition("::")[0]
        self.result.seconds[file] = self.result.seconds.get(file, 0.0) + report.duration
        if report.failed:
            self.result.outcomes["failed" if report.when == "call" else "errors"] += 1
            self.config.get_terminal_writer().line(
                f"\n{report.nodeid}: failed after {report.duration:.1f} s", red=True
            )
            self._fail(file)
        elif report.skipped:
            self._skip(report)
        elif report.when == "call":
            self.result.outcomes["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.result.outcomes["errors"] += 1
            self._fail(report.nodeid)
        elif report.skipped:
            self._skip(report)

    def _fail(self, file: str) -> None:
        if file in self.result.failed:
            return
        self.result.failed.append(file)
        dsession = self.config.pluginmanager.get_plugin("dsession")
        if len(self.result.failed) > FAILED_FILES and dsession and dsession.sched:
            # The files that a process has end; nothing else begins.
            dsession.sched.workqueue.clear()

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        self.result.outcomes["skipped"] += 1
        self.result.skipped[reason] += 1
        if not is_allowed(report.nodeid, reason, self.allowed):
            self.result.refused.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.result.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if dsession := self.config.pluginmanager.get_plugin("dsession"):
            # A process can end without a word before its first test, or while others collect theirs.
            collected = dsession.sched.collection or () if dsession.sched else ()
            self.result.outcomes["not run"] = len(collected) - len(self.begun)
            if session.exitstatus == pytest.ExitCode.OK and len(self.begun) < max(1, len(collected)):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.result.started = self.config.stash[STARTED]
        if self.path:
            self.path.write_text(json.dumps(vars(self.result)), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.result.refused:
            terminalreporter.section(f"skips that {ALLOWED_SKIPS.name} doesn't allow", red=True, bold=True)
            for line in self.result.refused:
                terminalreporter.line(line)


def is_allowed(nodeid: str, reason: str, allowed: Sequence[tuple[str, str]]) -> bool:
    """Return whether a line of the list allows a test to be skipped for a reason."""
    return any(fnmatch(nodeid, pattern) and words in reason for pattern, words in allowed)
