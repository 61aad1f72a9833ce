"""The outcome of one run of the verification suite (``image_builder/suite``).

A run by pytest leaves two records, which must agree: its JUnit XML, and the JSON lines that the suite itself writes
as each check ends; where the suite calls the checks itself, on the hosts of a pool, there are only the lines. A check
in only one of two records, an outcome other than passed, failed or error, a run without an end or without checks: any
of these makes the whole run worthless and raises VerifyError.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rich.markup import escape
from rich.table import Table

from image_builder.canonical import JSON
from image_builder.errors import VerifyError

Outcome = Literal["passed", "failed", "error"]
_OUTCOMES: tuple[str, ...] = get_args(Outcome)
_NAMED_FAILURES = 20

Outcomes = Mapping[tuple[str, str], str]
"""The outcome of each check by its module and its name, as JUnit files tell checks apart."""


@dataclass(frozen=True)
class Check:
    """One check that ran.

    ``name`` is its node id below ``image_builder/suite`` (``test_kernel.py::test_held``) or, if ``is_own``, below the
    user's ``checks``; ``title`` is the first line of its docstring, ``message`` why it isn't green, ``exception`` the
    class of the exception it raised, ``seconds`` its wall time with setup and teardown. ``only_booted`` marks one that
    isn't run on sealed trees.
    """

    name: str
    outcome: Outcome
    seconds: float
    title: str = ""
    message: str = ""
    exception: str = ""
    is_own: bool = False
    only_booted: bool = False


@dataclass(frozen=True)
class NotApplicable:
    """A check that the image's definition excludes, and the condition that excluded it."""

    name: str
    reason: str


@dataclass(frozen=True)
class SuiteResult:
    """One run of the suite on one target. ``marker`` is ``offline`` or ``booted``."""

    target: str
    marker: str
    checks: tuple[Check, ...]
    not_applicable: tuple[NotApplicable, ...]
    seconds: float

    @property
    def passed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome == "passed")

    @property
    def not_passed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome != "passed")

    @property
    def own(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.is_own)

    def summary(self) -> str:
        """Return one line: ``98 checks: 97 passed, 1 failed; 12 not applicable``."""
        counts = [f"{len(self.passed)} passed"]
        for outcome in _OUTCOMES[1:]:
            number = sum(check.outcome == outcome for check in self.checks)
            if number:
                counts.append(f"{number} {outcome}")
        of_which = f", {len(self.own)} of your own" if self.own else ""
        text = f"{len(self.checks)} checks{of_which}: {', '.join(counts)}"
        return f"{text}; {len(self.not_applicable)} not applicable" if self.not_applicable else text

    def as_json(self) -> dict[str, JSON]:
        """Return the result as stored in verify.json."""
        return {
            "target": self.target,
            "marker": self.marker,
            "verdict": "failed" if self.not_passed or not self.checks else "passed",
            "seconds": round(self.seconds, 3),
            "counts": {
                **{outcome: sum(c.outcome == outcome for c in self.checks) for outcome in _OUTCOMES},
                "not_applicable": len(self.not_applicable),
                "own": len(self.own),
            },
            "checks": [{**asdict(check), "seconds": round(check.seconds, 3)} for check in self.checks],
            "not_applicable": [asdict(check) for check in self.not_applicable],
        }


def from_json(data: dict[str, Any]) -> SuiteResult:
    """Rebuild a result from verify.json. Raises VerifyError if it isn't one."""
    try:
        checks = data["checks"]
        for check in checks:
            _known_outcome(check["name"], check["outcome"])
        return SuiteResult(
            target=data["target"],
            marker=data["marker"],
            checks=tuple(Check(**check) for check in checks),
            not_applicable=tuple(NotApplicable(**each) for each in data["not_applicable"]),
            seconds=data["seconds"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise VerifyError(f"not a verification result: {error}") from error


def read_run(
    lines: Iterable[str],
    recorded: Outcomes,
    exit_status: int,
    *,
    target: str,
    marker: str,
    seconds: float,
) -> SuiteResult:
    """Return the result of a run from the suite's lines, the outcomes pytest itself ``recorded``, and its exit status.

    Failed checks are part of a result; anything that makes the result untrustworthy raises VerifyError.
    """
    collected: dict[str, Any] | None = None
    finished: dict[str, Any] | None = None
    checks: dict[str, Check] = {}
    for event in _events(lines):
        match event.get("event"):
            case "collected":
                collected = event
            case "check":
                check = _check(event)
                if check.name in checks:
                    raise VerifyError(f"the suite reported {check.name} twice")
                checks[check.name] = check
            case "finished":
                finished = event
            case "ended":
                raise VerifyError(f"the suite ended early: {event['reason']}")
            case other:
                raise VerifyError(f"the suite's report has an unknown event {other!r}")
    if collected is None or finished is None:
        raise VerifyError(f"the suite did not come to its end (pytest's exit status {exit_status})")
    result = SuiteResult(
        target=target,
        marker=marker,
        checks=tuple(checks.values()),
        not_applicable=tuple(NotApplicable(n["name"], n["reason"]) for n in collected["not_applicable"]),
        seconds=seconds,
    )
    _require_consistent(result, collected["selected"], recorded, (finished["status"], exit_status))
    return result


def _events(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise VerifyError(f"line {number} of the suite's report is not JSON: {line[:80]!r}") from error
        if not isinstance(event, dict):
            raise VerifyError(f"line {number} of the suite's report is not an object: {line[:80]!r}")
        yield event


def _check(event: dict[str, Any]) -> Check:
    name = event["name"]
    return Check(
        name=name,
        outcome=_known_outcome(name, event["outcome"]),
        seconds=float(event["seconds"]),
        title=event.get("title", ""),
        message=event.get("message", ""),
        exception=event.get("exception", ""),
        is_own=event.get("is_own", False),
        only_booted=event.get("only_booted", False),
    )


def _known_outcome(name: str, outcome: str) -> Outcome:
    for outcome_name in get_args(Outcome):
        if outcome == outcome_name:
            return outcome_name  # type: ignore[no-any-return]
    raise VerifyError(
        f"{name} ended as {outcome!r}, which is neither passed nor failed",
        hint="a check that can't be made on this image must not be collected",
    )


def _require_consistent(
    result: SuiteResult, selected: Sequence[str], recorded: Outcomes, statuses: tuple[int, int]
) -> None:
    """Raise VerifyError unless the selection, the reported checks, pytest's record and the exit statuses agree."""
    if not selected:
        raise VerifyError("the suite collected no check, so nothing was verified")
    ran = {check.name: check.outcome for check in result.checks}
    missing = sorted(set(selected) - set(ran))
    if missing:
        raise VerifyError(f"{len(missing)} selected checks gave no result, the first is {missing[0]}")
    if set(ran) - set(selected):
        raise VerifyError(f"a check ran that was not selected: {min(set(ran) - set(selected))}")
    _require_same(ran, recorded)
    expected = 1 if result.not_passed else 0
    if statuses != (expected, expected):
        raise VerifyError(
            f"pytest ended with status {statuses[1]} (and reported {statuses[0]}) after: {result.summary()}"
        )


def _require_same(ran: Mapping[str, str], recorded: Outcomes) -> None:
    """Raise VerifyError unless the checks that ran ended as pytest recorded."""
    reported: dict[tuple[str, str], set[str]] = {}
    for name, outcome in ran.items():
        reported.setdefault(_key(name), set()).add(outcome)
    for key in sorted({*recorded, *reported}):
        outcomes = reported.get(key, set())
        if outcomes != {recorded.get(key)}:
            raise VerifyError(
                f"the two records of {'.'.join(key)} disagree: "
                f"{', '.join(sorted(outcomes)) or 'nothing'} in the suite's report, "
                f"{recorded.get(key) or 'nothing'} in pytest's"
            )


def _key(name: str) -> tuple[str, str]:
    module, _, function = name.partition("::")
    return module.removesuffix(".py").replace("/", "."), function


def junit_outcomes(junit: str) -> Outcomes:
    """Return the outcomes in a JUnit file. Raises VerifyError if it can't be parsed."""
    try:
        root = ElementTree.fromstring(junit)  # noqa: S314 (our own child wrote it)
    except ElementTree.ParseError as error:
        raise VerifyError(f"the JUnit file is damaged: {error}") from error
    outcomes: dict[tuple[str, str], str] = {}
    for case in root.iter("testcase"):
        key = (case.get("classname", ""), case.get("name", ""))
        tags = {child.tag for child in case}
        outcome = "failed" if "failure" in tags else "error" if "error" in tags else "passed"
        if "skipped" in tags:
            outcome = "skipped"
        # A check whose teardown fails has two entries: the worse one counts.
        if outcomes.get(key, "passed") == "passed" or outcome == "error":
            outcomes[key] = outcome
    return outcomes


def require_passed(result: SuiteResult) -> None:
    """Raise VerifyError, naming the failed checks, unless checks ran and all of them passed."""
    bad = result.not_passed
    if not result.checks:
        raise VerifyError("the suite collected no check, so nothing was verified")
    if not bad:
        return
    lines = [f"{len(bad)} of {len(result.checks)} checks failed on {result.target}"]
    for check in bad[:_NAMED_FAILURES]:
        first = check.message.strip().splitlines()[0] if check.message.strip() else check.outcome
        lines.append(f"  {check.name}: {first}")
    if len(bad) > _NAMED_FAILURES:
        lines.append(f"  and {len(bad) - _NAMED_FAILURES} more")
    raise VerifyError("\n".join(lines))


def blind(mutants: SuiteResult) -> dict[str, str]:
    """Return the checks that didn't turn red through their own assertion, with what they reported instead.

    An error in a mutation, or a check that trips over it, proves nothing. On a machine, which is broken by one mutation
    after another, each check must also pass before its own mutation (suite/broken_fixtures.py).
    """
    return {
        check.name: f"{check.outcome}: {check.message}" if check.message else check.outcome
        for check in mutants.checks
        if (
            check.outcome != "passed"
            if mutants.marker == "booted" and check.name.endswith("-sound]")
            else (check.outcome, check.exception) != ("failed", "AssertionError")
        )
    }


def table(result: SuiteResult) -> Table:
    """Return the result as a table: one row per module and per check that isn't green."""
    shown = Table(title=escape(f"{result.target}: {result.summary()}"), title_justify="left", box=None)
    shown.add_column("check", overflow="fold")
    shown.add_column("outcome")
    shown.add_column("s", justify="right")
    shown.add_column("what", overflow="fold")
    modules: dict[str, list[Check]] = {}
    for check in result.checks:
        modules.setdefault(check.name.partition("::")[0], []).append(check)
    for module, checks in modules.items():
        bad = [check for check in checks if check.outcome != "passed"]
        verdict = f"{len(checks) - len(bad)} of {len(checks)} passed"
        shown.add_row(escape(module), verdict, f"{sum(c.seconds for c in checks):.1f}", "")
        for check in bad:
            name, text = check.name.partition("::")[2], check.message or check.title
            shown.add_row(
                f"  {escape(name)}", f"[red]{check.outcome}[/]", f"{check.seconds:.1f}", escape(text)
            )
    return shown
