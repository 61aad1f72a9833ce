"""The verification suite on the hosts of a pool: one run for each host, some at once, the checks collected once.

The checks are those of ``image-builder verify ssh://…``, made in a process of the host's own; the connection stays
here, where hosts are reached, so that a host which is asked and then verified is logged in to once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from image_builder.errors import HostError, ImageBuilderError, VerifyError
from image_builder.machine.ssh import SshAddress
from image_builder.pool.plan.model import OK, Host, Outcome, failed
from image_builder.pool.reach.reach import Reach
from image_builder.pool.reach.session import NotReachedError
from image_builder.pool.steps.suite_process import SuiteProcess
from image_builder.system.process import tail
from image_builder.system.trees import remove_tree
from image_builder.verify.report import SuiteResult
from image_builder.verify.runner import ENVIRONMENT, SUITE, read_results, suite_argv

# What a facts.json has; the suite refuses one without, host by host (tests/image/suite.py).
FACTS = ("image", "build_id", "variables", "packages")
# What failed in `verify`.
CHECKS, NO_RESULT = 1, 2
_NAMED = 5
# A run that is over its time ends by itself, and with it the connection. When it began its process knows alone, which
# may have to collect the checks first.
_BEGIN_SECONDS = 60.0
# Without what nobody reads of hundreds of hosts: a line for each check, its log, what two values differ in. Of one host
# `image-builder verify` tells all that.
_TERSE = ("-q", "--override-ini=verbosity_assertions=1", "-p", "no:logging")


@dataclass(frozen=True)
class Suite:
    """What hosts are held to. ``facts`` are facts.json by image, ``reports`` gets a directory for each host."""

    facts: Mapping[str, Path]
    reports: Path
    python: Path
    folder: Path = SUITE


class Runs:
    """Runs of a suite on hosts; a context manager. ``run`` may be called from many threads at once."""

    def __init__(self, suite: Suite, reach: Reach) -> None:
        self._suite = suite
        self._reach = reach
        self._guard = threading.Lock()
        self._stack = ExitStack()
        self._processes: dict[str, SuiteProcess] = {}
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all that still run."""
        with self._guard:
            self._over = True
        self._stack.close()

    def run(self, host: Host, seconds: float) -> Outcome:
        """Run it on one host; ``seconds`` is for all of it but the login. Raises HostError, of this machine."""
        reports = self._suite.reports / host.name
        try:
            reports.mkdir(parents=True, exist_ok=True)
            result = self._observe(host, reports, seconds)
        except NotReachedError as error:
            return error.outcome
        except HostError:
            raise
        except (ImageBuilderError, OSError) as error:
            return failed("verify", NO_RESULT, str(error))
        if not result.not_passed:
            remove_tree(reports)  # of thousands that are fine nobody reads a report
        return judge(result)

    def _observe(self, host: Host, out: Path, seconds: float) -> SuiteResult:
        for stale in ("suite.jsonl", "suite.log"):
            (out / stale).unlink(missing_ok=True)
        started = time.monotonic()
        with self._reach.session(host, root=True, seconds=seconds + _BEGIN_SECONDS) as session:
            status = self._process(host.image).run(session, out, seconds)
        if status == -signal.SIGALRM:
            raise VerifyError(f"the suite did not end within {seconds:.0f} s")
        log = out / "suite.log"
        return read_results(
            out,
            status,
            target=SshAddress(self._reach.user, host.address, host.port).url,
            marker="booted",
            seconds=time.monotonic() - started,
            said=tail(log),
            log=log,
            by_pytest=False,
        )

    def _process(self, image: str) -> SuiteProcess:
        """Return the process for the hosts of an image: another one where the last has ended."""
        suite = self._suite
        with self._guard:
            if self._over:
                raise VerifyError("given up")
            if (found := self._processes.get(image)) and not found.ended:
                return found
            options = ("--each", "-s", *_TERSE, suite.folder)
            argv = suite_argv(suite.python, suite.folder, suite.facts[image], "booted", *options)
            self._processes[image] = self._stack.enter_context(SuiteProcess(argv, ENVIRONMENT))
            return self._processes[image]


def judge(result: SuiteResult) -> Outcome:
    """Return the outcome of a run: `failed` names the checks."""
    names = [check.name for check in result.not_passed]
    if not names and result.checks:
        return OK
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return failed("verify", CHECKS, f"{', '.join(names[:_NAMED])}{more}" if names else "no check ran")
