"""The pytest plugin of a lane: with ``--lane``, a run takes files from the queue that it shares with others.

It skips the files that earlier runs have proven, and records those that it has proven itself.
Session fixtures last for the whole run, regardless of the next file, so a lane bakes an image only once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.selftest.file_queue import BOOT, HOSTS, UNKNOWN_SECONDS, Lane, Queue, TestFile
from tests.selftest.proofs import Proofs

# Baked once: the images of the session fixtures, and the programs of the lab's control plane.
IMAGES = frozenset(
    {
        *("minimal", "worker", "pulled_worker", "whole_worker"),
        *("worker_current", "worker_current_docker", "worker_gpu"),
        "control_plane",
    }
)
SECONDS_FILE = "seconds.json"
_STEP_SECONDS = 0.5


def argument(directory: Path, lane: Lane) -> str:
    """Return the option that makes a pytest run a lane of the queue in a directory."""
    return f"--lane={directory}:{lane.number}{':light' if lane.light else ''}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lane",
        metavar="DIRECTORY:NUMBER[:light]",
        help="take files from the queue in this directory, beside the runs with other numbers",
    )


def pytest_configure(config: pytest.Config) -> None:
    if option := config.getoption("--lane"):
        directory, number, *light = str(option).split(":")
        config.pluginmanager.register(_Runner(Path(directory), Lane(int(number), bool(light))))


@dataclass(eq=False)  # pytest keeps plugins in sets
class _Runner:
    """Runs the tests of the files that a lane takes from the queue."""

    directory: Path
    lane: Lane
    failed: set[str] = field(default_factory=set)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.getoption("collectonly"):
            return None  # pytest's own loop handles these
        proofs = Proofs.read(self.directory)
        items: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            if _name(item.nodeid) not in proofs.days:
                items.setdefault(_name(item.nodeid), []).append(item)
        seconds = _expected_seconds(self.directory)
        files = [_describe(name, tests, seconds) for name, tests in items.items()]
        queue = Queue(self.directory)
        between = _BetweenFiles.from_parent(session, name="between files")
        while file := self._next(queue, files):
            for item, following in pairwise([*items[file.name], between]):
                _run(session, item, following)
            queue.end(file.name)
            if file.name not in self.failed:
                proofs.add(file.name)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(_name(report.nodeid))

    def _next(self, queue: Queue, files: Sequence[TestFile]) -> TestFile | None:
        while True:
            file, is_over = queue.take(files, self.lane)
            if file or is_over:
                return file
            time.sleep(_STEP_SECONDS)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        value = yield
        if fixturedef.argname in IMAGES:
            Queue(self.directory).have_image(fixturedef.argname)
        return value


class _BetweenFiles(pytest.Item):
    """The next item that pytest sees after the last test of a file, so that it keeps only the session fixtures."""

    def runtest(self) -> None:
        """Do nothing: this item is never run."""


def _run(session: pytest.Session, item: pytest.Item, following: pytest.Item | None) -> None:
    """Run a test the way pytest's own loop does."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _describe(name: str, tests: Sequence[pytest.Item], seconds: Mapping[str, float]) -> TestFile:
    """Return the queue's description of a file, from the marks and fixtures of its tests."""
    marks = {mark.name for test in tests for mark in test.iter_markers()}
    fixtures = {fixture for test in tests for fixture in getattr(test, "fixturenames", ())}
    turn = BOOT if "boot" in marks else HOSTS if "hosts" in marks else ""
    images = fixtures | {mark.args[0] for test in tests for mark in test.iter_markers("image")}
    light = all(test.get_closest_marker("process") for test in tests)
    return TestFile(name, seconds.get(name, UNKNOWN_SECONDS), turn, "alone" in marks, light, IMAGES & images)


def _expected_seconds(directory: Path) -> Mapping[str, float]:
    path = directory / SECONDS_FILE
    seconds: dict[str, float] = json.loads(path.read_bytes()) if path.exists() else {}
    return seconds
