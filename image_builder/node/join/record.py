"""The record of the join, phase by phase: ``/run/node/provision.json``.

    {"format": 1, "boot_id": "...", "state": "running", "phase": "credentials", "code": 0, "reason": "",
     "class": "", "generation": 7, "config": "3f9a...", "source": "user data", "vm_id": "...",
     "phases": [{"name": "identity", "state": "ok", "seconds": 0.04, "code": 0, "reason": "...", "class": "",
                 "key": "..."}], "seconds": 0.9}

``state`` is ``running``, ``ok`` or ``failed``; that of a phase may also be ``skipped`` or ``degraded``. A run on a node
that has joined rewrites the record only if something has changed: each phase has a ``key`` that stays the same while
the phase's subject stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node import files, status
from image_builder.node.join.codes import CODES

FORMAT = 1
FILE = "provision.json"
RUNNING, OK, FAILED, SKIPPED, DEGRADED = "running", "ok", "failed", "skipped", "degraded"
# The codes of failures that only repeat the preflight's verdict.
OF_PREFLIGHT = frozenset({51, 52, 94})


@dataclass(frozen=True)
class Done:
    """A phase's result. ``key`` stays the same while the phase's subject stays the same.

    ``number`` other than 0: something is wrong, but doesn't keep the node from joining.
    """

    key: str
    reason: str = ""
    is_skipped: bool = False
    number: int = 0


def digest(*parts: str) -> str:
    """Return a short digest of these parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Ended:
    """How a phase ended. ``code`` is one of CODES, 0 for none."""

    name: str
    state: str
    seconds: float
    code: int = 0
    reason: str = ""
    key: str = ""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3), "class": kind(self.code)}


def kind(code: int) -> str:
    """Return the kind of failure of a code; empty for no failure."""
    return CODES[code].kind if code else ""


@dataclass
class Record:
    """The record while a node joins. ``clock`` returns the seconds since the run began."""

    directory: Path
    boot_id: str
    clock: Callable[[], float]
    about: dict[str, Any] = field(default_factory=dict)
    phases: list[Ended] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = read(self.directory)
        self._is_quiet = self._before.get("boot_id") == self.boot_id and self._before.get("state") == OK

    @property
    def failure(self) -> Ended | None:
        """Return the first phase that failed; None if none did."""
        return next((phase for phase in self.phases if phase.state == FAILED), None)

    def begin(self, name: str) -> None:
        """Record that a phase has begun. The record of a node that has joined stays until a problem is found."""
        if not self._is_quiet:
            self._write(RUNNING, name)

    def end(self, phase: Ended) -> None:
        """Record how a phase ended."""
        self.phases.append(phase)
        code = f" {phase.code}" if phase.code else ""
        reason = f": {phase.reason}" if phase.reason else ""
        status.tell(f"join: {phase.name} {phase.state}{code}{reason} ({phase.seconds:.1f} s)")

    def close(self) -> bool:
        """Write the final state, and return whether the node has joined."""
        failure = self.failure
        keys = {phase["name"]: phase["key"] for phase in self._before.get("phases", [])}
        if self._is_quiet and not failure and keys == {phase.name: phase.key for phase in self.phases}:
            return True
        self._write(FAILED if failure else OK, failure.name if failure else "")
        return failure is None

    def _write(self, state: str, phase: str) -> None:
        failure = self.failure
        code = failure.code if failure else 0
        value = {
            "format": FORMAT,
            "boot_id": self.boot_id,
            "state": state,
            "phase": phase,
            "code": code,
            "reason": failure.reason if failure else "",
            "class": kind(code),
            **self.about,
            "phases": [ended.as_json() for ended in self.phases],
            "seconds": round(self.clock(), 3),
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        files.write_json(self.directory / FILE, value)


def read(directory: Path) -> dict[str, Any]:
    """Return the record; empty if there is none, or it can't be read."""
    return files.read_json(directory / FILE)
