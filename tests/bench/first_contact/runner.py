"""Runs the steps one by one, each as a process with a deadline, and records how each ended.

Nothing here waits longer than promised: a step that is stuck in the driver is left behind. Each outcome is on disk
before the next step begins, so that nothing known by then is lost if this process dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from image_builder.node import files
from image_builder.node.gpu.smoke import program
from tests.bench.first_contact.context import Context, checkout, step_argv

FORMAT = 1
SUMMARY = "summary.json"
REAP_SECONDS = 3.0
_POLL_SECONDS = 0.02
_ENDINGS = (signal.SIGINT, signal.SIGTERM)
# Exit statuses: all steps were done; some weren't; the command was used wrongly.
DONE, PARTLY, USAGE = 0, 1, 2


@dataclass(frozen=True)
class Step:
    """One step. ``seconds`` is its deadline; with less than ``least`` left it isn't started.

    ``least`` is reserved for it whatever comes before it, unless it is ``spare``.
    """

    name: str
    teaches: str
    work: Callable[[Context], dict[str, Any]]
    seconds: float
    least: float
    spare: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    ``state``: planned, running, done, failed (with a reason), died (of a signal), late (killed at its deadline),
    unkillable (at its deadline, but still running), skipped, interrupted.
    """

    step: str
    state: str = "planned"
    why: str = ""
    started: str = ""
    seconds: float = 0.0
    deadline_seconds: float = 0.0
    exit_status: int | None = None
    signal: int | None = None


class Log:
    """The outcomes of all steps, on disk."""

    def __init__(self, context: Context, steps: Sequence[Step]) -> None:
        self._out = context.out
        self._began = time.monotonic()
        self._head = {
            "format": FORMAT,
            "agent": program.digest(),
            "python": sys.version.split()[0],
            "started": _now(),
            "total_seconds": round(context.left(), 1),
            "pace": round(context.pace, 4),
            "argv": sys.argv,
        }
        self.outcomes = {step.name: Outcome(step.name) for step in steps}
        for step in steps:
            (self._out / "steps" / step.name).mkdir(parents=True)
            self._write(step.name)
        self._summarise()

    def set(self, outcome: Outcome) -> None:
        """Write a step's outcome, and the summary."""
        self.outcomes[outcome.step] = outcome
        self._write(outcome.step)
        self._summarise()

    def _write(self, name: str) -> None:
        files.write_json(self._out / "steps" / name / "outcome.json", asdict(self.outcomes[name]))

    def _summarise(self) -> None:
        spent = {"seconds": round(time.monotonic() - self._began, 3)}
        steps = [asdict(outcome) for outcome in self.outcomes.values()]
        files.write_json(self._out / SUMMARY, {**self._head, **spent, "steps": steps})


def run(context: Context, steps: Sequence[Step], share: float, say: Callable[[str], None]) -> int:
    """Run all steps within the context's time; return the exit status. Raises OSError if OUT can't be written.

    ``share`` is the fraction of the usual deadlines that each step gets.
    """
    # The session that started this may end, as an SSH session does; the rest of the ten minutes must not be lost.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts: list[int] = []
    for ending in _ENDINGS:
        signal.signal(ending, lambda number, _: interrupts.append(number))
    log = Log(context, steps)
    for number, step in enumerate(steps):
        reserved = sum(later.least for later in steps[number + 1 :] if not later.spare) * share
        remaining = context.left() - reserved - REAP_SECONDS
        if interrupts:
            outcome = Outcome(step.name, "skipped", f"interrupted by {signal.Signals(interrupts[0]).name}")
        elif remaining < step.least * share:
            outcome = Outcome(step.name, "skipped", f"no time: {max(remaining, 0):.1f} s were left")
        else:
            seconds = min(step.seconds * share, remaining)
            here = replace(context, name=step.name, end=time.monotonic() + seconds)
            say(f"{step.name}: {step.teaches} (at most {seconds:.0f} s)")
            outcome = _one(here, seconds, log, interrupts)
        log.set(outcome)
        say(f"  {outcome.state} after {outcome.seconds:.1f} s {outcome.why}".rstrip())
    if interrupts:
        return 128 + interrupts[0]
    return DONE if all(outcome.state == "done" for outcome in log.outcomes.values()) else PARTLY


def _one(context: Context, seconds: float, log: Log, interrupts: Sequence[int]) -> Outcome:
    """Run one step to its end, its deadline or an interrupt; return the outcome."""
    outcome = Outcome(context.name, "running", "", _now(), deadline_seconds=round(seconds, 1))
    log.set(outcome)
    began = time.monotonic()
    with (
        (context.directory / "stdout").open("wb") as output,
        (context.directory / "stderr").open("wb") as errors,
    ):
        try:
            child = subprocess.Popen(
                step_argv(context),
                stdin=subprocess.PIPE,  # lets a step notice that this process died first
                stdout=output,
                stderr=errors,
                cwd=checkout(),
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            return replace(outcome, state="failed", why=f"could not be started: {error.strerror}")
        try:
            status = _ended(child, began + seconds, interrupts)
        finally:
            _kill(child)
    outcome = replace(outcome, seconds=round(time.monotonic() - began, 3))
    if status is None and interrupts:
        return replace(outcome, state="interrupted", why=signal.Signals(interrupts[0]).name)
    return replace(outcome, **_ending(context, child, status))


def _environment() -> dict[str, str]:
    # Kernels compiled in an earlier run must not be reused, and GPUs are numbered as in NVML.
    fixed = {"CUDA_CACHE_DISABLE": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **fixed}


def _ended(child: subprocess.Popen[bytes], end: float, interrupts: Sequence[int]) -> int | None:
    """Wait for a step; return its status, None at its deadline or an interrupt."""
    while time.monotonic() < end and not interrupts:
        if child.poll() is not None:
            return child.returncode
        time.sleep(_POLL_SECONDS)
    return None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a step, including its workers. Don't wait for what can't be killed."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    end = time.monotonic() + REAP_SECONDS
    while child.poll() is None and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    if child.poll() is None:
        child.returncode = -int(signal.SIGKILL)  # or Python would warn that it was never waited for


def _ending(context: Context, child: subprocess.Popen[bytes], status: int | None) -> dict[str, Any]:
    if status is None:
        is_there = Path("/proc", str(child.pid)).exists()
        return {"state": "unkillable" if is_there else "late", "why": "it did not end in time"}
    if status < 0:
        return {"state": "died", "signal": -status, "why": f"signal {-status}"}
    if status:
        return {"state": "failed", "exit_status": status, "why": _last_line(context.directory / "stderr")}
    return {"state": "done", "exit_status": 0}


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "(no output)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def teller(stream: Any) -> Callable[[str], None]:
    """Return a function that prints a line. It ignores a reader that is gone."""

    def say(text: str) -> None:
        with suppress(OSError, ValueError):
            stream.write(text + "\n")
            stream.flush()

    return say


def shown(summary: dict[str, Any]) -> str:
    """Return a run's summary in human-readable form."""
    rows = [
        f"{step['step']:24}{step['state']:12}{step['seconds']:>8.1f} s  {step['why']}"
        for step in summary.get("steps", [])
    ]
    return "\n".join([f"{summary.get('seconds', 0):.0f} s of {summary.get('total_seconds', 0):.0f} s", *rows])
