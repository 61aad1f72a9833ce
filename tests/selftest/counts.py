"""What a run's tests start that costs minutes, counted by file: numbers that a busy machine can't change.

The golden file tests/selftest/counts.txt has them, so that a change that adds a boot shows in its diff. What a fixture
of the whole session starts is counted once, under the fixture's name, whichever process starts it and however often.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("counts.txt")
_COMMANDS = {"build": "builds", "boot": "machines booted"}
# A control plane has a process of its own, which imports its module.
_PROGRAMS = {
    "qemu-system-x86_64": "machines booted",
    "from tests.support.control_plane import": "control planes",
}
# Kills at moments that it draws decide how often it builds again.
_AT_RANDOM = {"tests/bake/test_interrupted_builds.py"}
_KEY = "started"
STARTED = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    counts = _Counts(config)
    config.stash[STARTED] = counts.started
    config.pluginmanager.register(counts)
    sys.addaudithook(counts.see)


class _Counts:
    """Counts the programs that the tests of this process start; the controlling process adds them up."""

    def __init__(self, config: pytest.Config) -> None:
        self.output: dict[str, Any] = getattr(config, "workeroutput", {})
        self.started: dict[str, int] = Counter()
        self.place = ""

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count the program that is being started, if it is one of those."""
        if event == "subprocess.Popen" and self.place and (what := _kind(arguments[1])):
            self.started[f"{self.place}  {what}"] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.place = item.nodeid.partition("::")[0]
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        before = self.place
        if fixturedef.scope == "session":
            self.place = f"fixture {fixturedef.argname}"
        try:
            return (yield)
        finally:
            self.place = before

    def pytest_sessionfinish(self) -> None:
        self.output[_KEY] = dict(self.started)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for key, number in getattr(node, "workeroutput", {}).get(_KEY, {}).items():
            self.started[key] = max(self.started[key], number)


def _kind(argv: Sequence[object]) -> str:
    """Return what a command starts; "" for what isn't counted."""
    words = [str(word) for word in argv]
    if "probe" in words:  # of the processor: once a process, if the host may have KVM
        return ""
    for text, what in _PROGRAMS.items():
        if any(text in word for word in words):
            return what
    names = [Path(word).name for word in words]
    following = names[names.index("image-builder") + 1 :] if "image-builder" in names else []
    return _COMMANDS.get(following[0], "") if following else ""


def lines(started: Mapping[str, int]) -> list[str]:
    """Return the lines of the golden file."""
    return [f"{key}  {n}" for key, n in sorted(started.items()) if key.split("  ")[0] not in _AT_RANDOM]


def numbers(lines: Sequence[str]) -> Counter[str]:
    """Return the numbers of the golden file's lines."""
    return Counter({key: int(number) for key, _, number in (line.rpartition("  ") for line in lines)})
