"""Runs ``image_builder/suite`` on a tree or a machine; only a complete, green run is trusted."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_builder.bake import identity
from image_builder.canonical import JSON
from image_builder.errors import CommandError, UsageError, VerifyError
from image_builder.settings import MUTATIONS, REPO_ROOT, SUITE
from image_builder.system import process
from image_builder.text import json_lines
from image_builder.verify.result import SuiteResult, blind, junit_outcomes, read_run

if TYPE_CHECKING:
    from image_builder.definition import ImageDefinition

_JUNIT, _REPORT, _RESULT = "junit.xml", "suite.jsonl", "verify.json"
# Required keys of a facts.json; the suite refuses a file without them (image_builder/suite/suite.py).
FACTS = ("image", "build_id", "variables", "packages")
_PROGRESS = re.compile(r"^(\S+::\S.*?) (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) *\[ *(\d+)/(\d+)\]")
# Every exit of pytest is judged here, including one by a signal.
_ANY_STATUS = range(-64, 256)

OnProgress = Callable[[str, int, int], None]
"""Called with a check's name, how many are done, how many there are."""


def definition_facts(
    definition: ImageDefinition, build_id: str, packages: JSON, preload: JSON
) -> dict[str, JSON]:
    """Return the facts that drive the suite, for an image that was built as ``build_id``.

    ``packages`` are those of the lock, as objects with name, version and architecture; ``preload`` has the items
    of ``image_preload`` that are in the lock; others were left out. The facts contain only variables that a role or
    the builder owns, and nothing secret: the file is published.
    """
    from image_builder.definition import published_variables

    return {
        "image": definition.name,
        "build_id": build_id,
        "variables": {
            **published_variables(definition),
            "image_preload": preload,
        },
        "packages": packages,
        "partitions": {
            "root": identity.partition_uuid(build_id, "root"),
            "esp": identity.partition_uuid(build_id, "esp"),
        },
    }


def read_facts(path: Path) -> dict[str, Any]:
    """Return the content of a facts.json. Raises UsageError, naming the file, if it isn't that of a build."""
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: not JSON") from None
    if missing := [key for key in FACTS if not isinstance(facts, dict) or key not in facts]:
        raise UsageError(f"{path}: not a facts.json of a build: it lacks {', '.join(missing)}")
    return dict(facts)


def write_facts(path: Path, facts: Mapping[str, JSON]) -> None:
    """Write facts.json."""
    path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


ENVIRONMENT = {
    # No plugins except pytest's own: whatever else is installed must not change a verdict.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The plugin is imported before pytest adds the suite's folder.
    "PYTHONPATH": f"{REPO_ROOT}:{SUITE}",
    # Commands in the tree get it too, and the tree has no staging area.
    "TMPDIR": "/tmp",
}


def observe_suite(
    target: str,
    facts: Path,
    out_dir: Path,
    *,
    marker: str,
    python: Path,
    log: Path,
    suite: Path = SUITE,
    checks: Path | None = None,
    mutations: str | Path | None = None,
    select: tuple[str, ...] = (),
    timeout: float | None = None,
    niceness: int = 0,
    on_progress: OnProgress | None = None,
) -> SuiteResult:
    """Run the suite in a child process and return its results, including failed checks.

    ``marker`` is ``offline`` or ``booted``; ``python`` is the interpreter that has pytest and testinfra. ``checks`` is
    the folder of the user's own checks, ``mutations`` what breaks the checks of a mutant (suite/mutant_fixtures.py);
    ``select`` limits the run to checks by name. ``timeout`` is in seconds for the whole run; ``niceness`` is how far
    it yields to other programs (nice(1)). Writes ``junit.xml`` and ``verify.json`` to ``out_dir``. Raises VerifyError
    if the run proves nothing.
    """
    out_dir = out_dir.resolve()
    clear_records(out_dir)
    argv: list[process.Arg] = [
        *("nice", "-n", str(niceness)),
        *(python, "-m", "pytest", *suite_arguments(suite, facts, target, marker), *record_options(out_dir)),
        *(("--mutations", mutations) if mutations else ()),
        *([suite / name for name in select] or [suite, *([checks] if checks else [])]),
    ]
    started = time.monotonic()
    done = _run_pytest(argv, out_dir, log, timeout, on_progress)
    return read_results(
        out_dir,
        done.returncode,
        target=target,
        marker=marker,
        seconds=time.monotonic() - started,
        output=done.stdout,
        log=log,
    )


def require_red(
    target: str,
    facts: Path,
    work: Path,
    checks: Path,
    *,
    marker: str,
    python: Path,
    log: Path,
    timeout: float,
    niceness: int = 0,
) -> None:
    """Break ``target`` in each way recorded for the user's own checks. Raises VerifyError if one stays green.

    ``target`` is a ``mutant:`` or a ``broken:`` machine (suite/targets.py); the records in ``work`` are of no use.
    """
    result = observe_suite(
        target,
        facts,
        work,
        marker=marker,
        python=python,
        log=log,
        select=(os.fspath(checks),),
        mutations=checks / MUTATIONS,
        timeout=timeout,
        niceness=niceness,
    )
    if unproven := blind(result):
        lines = [f"{name}: {seen}" for name, seen in unproven.items()]
        raise VerifyError(
            "\n  ".join(["nothing shows that these checks of your own can fail:", *lines]),
            hint=f"each command in {checks / MUTATIONS} must turn its check red; on a machine, `mend` must undo that",
        )


def clear_records(out_dir: Path) -> None:
    """Remove the records of an earlier run, so that they can't pass for those of the next one."""
    for name in (_JUNIT, _REPORT, _RESULT):
        (out_dir / name).unlink(missing_ok=True)


def suite_arguments(
    suite: Path, facts: Path, target: str, marker: str, *options: process.Arg
) -> list[process.Arg]:
    """Return pytest's arguments for the suite; the check files must follow."""
    return [
        *("-p", "image_builder.suite.plugin", "-v", "--tb=short", "-m", marker, *options),
        f"--target={target}",
        *(f"--facts={facts.resolve()}", f"--rootdir={suite}", "-c", suite / "pytest.ini"),
    ]


def record_options(out_dir: Path) -> tuple[str, ...]:
    """Return pytest's arguments that send the records of a run to ``out_dir``."""
    return f"--junitxml={out_dir / _JUNIT}", f"--report={out_dir / _REPORT}"


def read_results(
    out_dir: Path,
    status: int,
    *,
    target: str,
    marker: str,
    seconds: float,
    output: str,
    log: Path,
) -> SuiteResult:
    """Return the results of a run that ended with ``status`` from its records in ``out_dir``; write ``verify.json``.

    ``output`` is what pytest printed, which is also in ``log``. Raises VerifyError if the run proves nothing.
    """
    junit, report = out_dir / _JUNIT, out_dir / _REPORT
    if not report.exists() or not junit.exists():
        raise VerifyError(f"pytest ended with status {status} and no results:\n{_tail(output)}")
    try:
        result = read_run(
            report.read_text(encoding="utf-8").splitlines(),
            junit_outcomes(junit.read_text(encoding="utf-8")),
            status,
            target=_shown(target),
            marker=marker,
            seconds=seconds,
        )
    except VerifyError as error:
        raise VerifyError(
            f"{error.message}\n{_tail(output)}", hint=error.hint or f"pytest's output is in {log}"
        ) from error
    report.unlink()
    (out_dir / _RESULT).write_text(json_lines(result.as_json()), encoding="utf-8")
    return result


def _run_pytest(
    argv: list[process.Arg], cwd: Path, log: Path, timeout: float | None, on_progress: OnProgress | None
) -> process.Completed:
    """Run the suite's process to completion, whatever its status. Raises VerifyError if it doesn't end in time."""
    try:
        return process.run(
            argv,
            env=ENVIRONMENT,
            ok=_ANY_STATUS,
            cwd=cwd,
            timeout=timeout,
            log=log,
            on_line=lambda line: _tell(line, on_progress),
        )
    except CommandError as error:
        raise VerifyError(
            f"the suite did not end: {error.message}", hint=f"its output is in {log}"
        ) from error


def _tail(text: str) -> str:
    """Return the last lines of pytest's output, indented."""
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()[-process.TAIL_LINES :])


def _shown(target: str) -> str:
    """Return a target for people to read, without this run's paths."""
    return "sealed tree" if target.startswith(("sandbox:", "mutant:")) else target.partition("?")[0]


def _tell(line: str, on_progress: OnProgress | None) -> None:
    match = _PROGRESS.match(line)
    if on_progress and match:
        on_progress(match[1].rpartition("/")[2], int(match[2]), int(match[3]))
