"""Options, fixtures and the report of the verification suite.

    pytest -p image_builder.suite.plugin image_builder/suite --facts facts.json --target TARGET

TARGET is sandbox:/path/of/a/mounted/root, ssh://user@host:22?key=/path&known_hosts=/path, or stdin: for a host of a
pool (targets.py). A check below the suite's own folder belongs to this program; one from elsewhere is the user's.

Two things decide which checks run: a sandbox gets those marked ``offline``, a machine those marked
``booted``; and checks of what the image's definition doesn't have (``suite.needs``) are left out. Both are
counted; no check is ever skipped while it runs.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from suite import Facts, applicability, check_name, title
from targets import TARGET, open_target, parse_target

_REPORT = pytest.StashKey["_Report"]()
_FACTS = pytest.StashKey[Facts]()
_NOT_APPLICABLE = pytest.StashKey[list[tuple[pytest.Item, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("image", "image verification")
    group.addoption(
        "--target", metavar="URL", help="sandbox:/path, ssh://user@host:port?key=…&known_hosts=… or stdin:"
    )
    group.addoption("--facts", metavar="FILE", help="facts.json: what the image is meant to be")
    group.addoption("--mutations", metavar="NAME", help="what breaks each check: a file, or a module")
    group.addoption("--report", metavar="FILE", help="write one JSON line per check to this file")


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.target or not config.option.facts:
        raise pytest.UsageError("the suite verifies an image: give --target and --facts")
    try:
        config.stash[TARGET] = parse_target(config.option.target)
        config.stash[_FACTS] = Facts(json.loads(Path(config.option.facts).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    # The fixtures ``host`` and ``tree``; runs that test the checks themselves use different ones.
    fixtures = {"mutant": "mutant_fixtures", "broken": "broken_fixtures"}
    config.pluginmanager.import_plugin(fixtures.get(config.stash[TARGET].kind, "target_fixtures"))
    config.stash[_NOT_APPLICABLE] = []
    if config.option.report:
        config.stash[_REPORT] = _Report(Path(config.option.report))
        config.pluginmanager.register(config.stash[_REPORT])


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Log in to a machine first: if that fails, the run ends before anything is collected."""
    target = session.config.stash[TARGET]
    if target.address and not session.config.option.collectonly:
        open_target(target).run(":")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select what the target and the definition call for; deselect the rest, and record why a check doesn't apply."""
    side = "booted" if config.stash[TARGET].booted else "offline"
    selected, deselected = [], []
    not_applicable = config.stash[_NOT_APPLICABLE]
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"offline", "booted"}:
            raise pytest.UsageError(f"{item.nodeid} is marked neither offline nor booted")
        reason = applicability(item, config.stash[_FACTS])
        if side not in marks:
            deselected.append(item)
        elif reason:
            not_applicable.append((item, reason))
        else:
            selected.append(item)
    left_out = deselected + [item for item, _ in not_applicable]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = selected


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Record the final selection, after -m and -k have been applied."""
    if report := session.config.stash.get(_REPORT, None):
        report.write(_selection(session))


def _selection(session: pytest.Session) -> dict[str, Any]:
    """Return the record of the collection."""
    return {
        "event": "collected",
        "selected": [check_name(item.nodeid) for item in session.items],
        "not_applicable": [
            {"name": check_name(item.nodeid), "reason": reason}
            for item, reason in session.config.stash[_NOT_APPLICABLE]
        ],
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    phase = yield
    report = item.config.stash.get(_REPORT, None)
    if report:
        report.phase(item, call, phase)
    return phase


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    report = session.config.stash.get(_REPORT, None)
    if report:
        report.write({"event": "finished", "status": int(exitstatus)})
        report.stream.close()


class _Report:
    """The suite's own record: one JSON object per line, written as things happen."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("w", buffering=1, encoding="utf-8")  # closed in pytest_sessionfinish
        self.running: dict[str, Any] = {}

    def write(self, event: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(event) + "\n")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record why pytest.exit ended the run."""
        if isinstance(excinfo.value, pytest.exit.Exception):
            self.write({"event": "ended", "reason": str(excinfo.value.msg)})

    def phase(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Add setup, call or teardown to the check's record; write it after teardown."""
        if report.when == "setup":
            self.running = {
                "name": check_name(item.nodeid),
                "is_own": not item.path.is_relative_to(item.config.rootpath),
                "only_booted": item.get_closest_marker("offline") is None,
                "outcome": "passed",
                "seconds": 0.0,
                "title": title(item),
            }
        self.running["seconds"] += report.duration
        outcome: str = report.outcome
        if outcome == "failed" and report.when != "call":
            outcome = "error"
        if hasattr(report, "wasxfail"):
            outcome = "x" + outcome
        # As in pytest's own record, an error in teardown takes precedence over an earlier failure.
        better = ("passed", "failed") if outcome == "error" else ("passed",)
        if outcome != "passed" and self.running["outcome"] in better:
            error = call.excinfo
            self.running["outcome"] = outcome
            self.running["message"] = error.exconly().removeprefix("AssertionError: ") if error else ""
            self.running["exception"] = error.typename if error else ""
        if report.when == "teardown":
            self.write({"event": "check", **self.running})


@pytest.fixture(scope="session")
def facts(pytestconfig: pytest.Config) -> Facts:
    """What the image should be."""
    return pytestconfig.stash[_FACTS]


@pytest.fixture(scope="session")
def v(facts: Facts) -> dict[str, Any]:
    """The role and builder variables that the image was baked with, resolved."""
    return facts.variables
