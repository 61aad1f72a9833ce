"""Shared by all tests: the guard of the unit tests, and a few fixtures.

The tests below tests/unit can't start a process, open a socket or do anything that needs root.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

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
    "tests.selftest.counts",
    "tests.selftest.plugin",
    "tests.selftest.turns",
]
# The machine may be busy, so the time of an example means nothing.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

UNIT = Path(__file__).with_name("unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """Restore signal handlers: a command called in the tests' process sets them as it would in its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _unit_tests_touch_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.path.is_relative_to(UNIT):
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
