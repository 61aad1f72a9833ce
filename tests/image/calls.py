"""The checks of a machine, called one after the other without what pytest does around each of them.

For each check of each of thousands of machines that takes longer than the check does. Nothing of it is needed here:
a check is a function of the target and of what its image is meant to be. One that asks for more is refused before any
is called. What is recorded is what a run by pytest records (conftest.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from inspect import signature
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
from suite import Facts, check_name, list_tree, title
from targets import Target, open_target

_VALUES = frozenset(("facts", "v", "host", "tree"))
# By what pytest makes these.
_BEHIND = frozenset(("pytestconfig", "request"))
# The marks for which pytest would do more than call a function.
_HEEDED = frozenset(("filterwarnings", "parametrize", "skip", "skipif", "usefixtures", "xfail"))


class Calls:
    """The collected checks, to be called for any number of machines."""

    def __init__(self, items: Iterable[pytest.Item], facts: Facts, selection: Mapping[str, Any]) -> None:
        """``selection`` is recorded first. Raises UsageError for a check that is more than such a function."""
        self._facts = facts
        self._selection = selection
        self._calls = [_Call(item) for item in items]

    def __call__(self, target: Target, out: Path) -> int:
        """Call them for a target, and write ``suite.jsonl`` to a directory; return what pytest would end with.

        Which of them did not pass, and why, goes to standard output.
        """
        status = int(pytest.ExitCode.OK)
        with (
            closing(_Values(self._facts, target)) as values,
            (out / "suite.jsonl").open("w", buffering=1, encoding="utf-8") as report,
        ):
            report.write(json.dumps(self._selection) + "\n")
            for call in self._calls:
                event = call.make(values)
                report.write(json.dumps(event) + "\n")
                if event["outcome"] != "passed":
                    status = int(pytest.ExitCode.TESTS_FAILED)
            report.write(json.dumps({"event": "finished", "status": status}) + "\n")
        return status


class _Values:
    """What checks ask for, made for a target once; what making it raised is raised again."""

    def __init__(self, facts: Facts, target: Target) -> None:
        self._made: dict[str, Any] = {"facts": facts, "v": facts.variables}
        self._raised: dict[str, Exception] = {}
        self._makers: Mapping[str, Callable[[], Any]] = {
            "host": lambda: open_target(target),
            "tree": lambda: list_tree(self["host"], facts, booted=target.booted),
        }

    def __getitem__(self, name: str) -> Any:
        if name in self._raised:
            raise self._raised[name]
        if name not in self._made:
            try:
                self._made[name] = self._makers[name]()
            except Exception as error:  # the check's that asked, and of each that asks later
                self._raised[name] = error
                raise
        return self._made[name]

    def close(self) -> None:
        """Ask the target nothing more."""
        if host := self._made.get("host"):
            host.backend.close()


class _Call:
    """A check, and the values that it asks for."""

    def __init__(self, item: pytest.Item) -> None:
        if not isinstance(item, pytest.Function):
            raise pytest.UsageError(f"{item.nodeid}: no function")
        self._function: Callable[..., object] = item.function
        self._asks = tuple(signature(self._function).parameters)
        fixtures = {*self._asks, *(set(item.fixturenames) - _BEHIND)}
        more = sorted((_HEEDED & {mark.name for mark in item.iter_markers()}) | (fixtures - _VALUES))
        if more:
            raise pytest.UsageError(f"{item.nodeid} is more than a function of its target: {', '.join(more)}")
        self._file = os.fspath(item.path)
        self._check = {"event": "check", "name": check_name(item.nodeid)}
        self._title = title(item)

    def make(self, values: _Values) -> dict[str, Any]:
        """Make the check; return what is recorded of it."""
        found = {"outcome": "error"}
        started = time.monotonic()
        try:
            asked = {name: values[name] for name in self._asks}
            found["outcome"] = "failed"
            self._function(**asked)
            found["outcome"] = "passed"
        # Whatever a check raises is its outcome, and told; what pytest's own functions raise is no Exception.
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            if isinstance(error, pytest.skip.Exception):
                found["outcome"] = "skipped"  # which no result may be
            self._tell(found, pytest.ExceptionInfo.from_exception(error))
        return {**self._check, **found, "seconds": time.monotonic() - started, "title": self._title}

    def _tell(self, found: dict[str, str], raised: pytest.ExceptionInfo[BaseException]) -> None:
        """Say where it failed, and why, and record that: to look through all on the way there takes longer."""
        why = raised.exconly()
        found["message"] = why.removeprefix("AssertionError: ")
        found["exception"] = raised.typename
        lines = [line for frame, line in walk_tb(raised.tb) if frame.f_code.co_filename == self._file]
        where = f"{Path(self._file).name}:{[0, *lines][-1]}"
        print(f"{found['outcome'].upper()} {self._check['name']}\n{where}: {why}", flush=True)
