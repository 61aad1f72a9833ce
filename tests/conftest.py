"""Shared by all tests: the order of the parts, the guard of the unit tests, the list of allowed skips.

A test is in the directory of its part. Those below tests/unit are unit tests, which can't start a process, open a
socket or do anything that needs root. All others declare by a mark what they need.
"""

from __future__ import annotations

import fnmatch
import json
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# On import, urllib3 tries IPv6 and Ansible runs ldconfig, which no unit test may do, so they are imported here.
import image_builder.bake.lock.fetch
import image_builder.definition.engine  # noqa: F401
from image_builder.bake.store import Store
from image_builder.settings import REPO_ROOT
from tests.support.guard import guarded

pytest_plugins = [
    "tests.support.images.fixtures",
    "tests.support.images.toolkits",
    "tests.support.control_plane.fixtures",
    "tests.selftest.lane_plugin",
]
# The machine may be busy, so the time of an example means nothing.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

TESTS = Path(__file__).parent
# Directories, in the order of a run without lanes.
PARTS = ("unit", "bake", "preload", "pools", "disk", "gpu")
MARKS = ("root", "boot", "gpu")
ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")


def part_of(item: pytest.Item) -> str:
    """Return the part that a test belongs to, by its directory; "" for none."""
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    return folder if folder in PARTS else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
    parser.addoption(
        "--parts",
        metavar="FILE",
        help=f"write each part's seconds; without --lane, stop after the first ({', '.join(PARTS)}) that failed",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(_Parts(config), "image-builder-parts")
    config.pluginmanager.register(_Skips(), "image-builder-skips")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if elsewhere := {item.path for item in items if not part_of(item)}:
        raise pytest.UsageError(f"a test lies in a folder of {', '.join(PARTS)}: {_names(elsewhere)}")
    unmarked = {item.path for item in items if part_of(item) != "unit" and not _is_marked(item)}
    if unmarked:
        raise pytest.UsageError(
            f"tests outside of unit need one of the marks {', '.join(MARKS)}: {_names(unmarked)}"
        )
    items.sort(key=lambda item: PARTS.index(part_of(item)))


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(sorted(path.name for path in paths))


def _is_marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in MARKS)


class _Parts:
    """Counts the seconds of each part and keeps a later one from starting after a failure."""

    def __init__(self, config: pytest.Config) -> None:
        self.report: str | None = config.getoption("--parts")
        # A lane doesn't know about failures in other lanes, so each runs to its end.
        self.stops = bool(self.report) and not config.getoption("--lane")
        self.seconds: dict[str, float] = {}
        self.current = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        part = part_of(item)
        if self.stops and self.current not in ("", part) and item.session.testsfailed:
            item.session.shouldfail = (
                f"the part `{self.current}` failed, `{part}` and what follows is not run"
            )
            raise item.session.Failed(item.session.shouldfail)
        self.current = part

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[self.current] = self.seconds.get(self.current, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if self.report:
            Path(self.report).write_text(json.dumps(self.seconds), encoding="utf-8")


class _Skips:
    """Fails the run for a skip that is not on the list."""

    def __init__(self) -> None:
        lines = ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()
        self.allowed = [line.split("  ", 1) for line in lines if line.strip() and not line.startswith("#")]
        self.refused: list[str] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for pattern, words in self.allowed:
            if fnmatch.fnmatch(report.nodeid, pattern) and words.strip() in reason:
                return
        self.refused.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.refused:
            terminalreporter.section(f"skips that {ALLOWED_SKIPS.name} doesn't allow", red=True, bold=True)
            for line in self.refused:
                terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """Restore signal handlers: a command called in the tests' process sets them as it would in its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _unit_tests_touch_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if part_of(request.node) != "unit":
        yield
        return
    with guarded():
        yield


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return REPO_ROOT


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    made = Store(tmp_path / "store")
    made.prepare()
    return made


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that children run under."""
    return Path(sys.executable)
