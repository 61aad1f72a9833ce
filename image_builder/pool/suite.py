"""The verification suite on the hosts of a pool: one run for each host, some at once, the checks collected once.

A run is that of ``image-builder verify ssh://…``, in a process of its own. It gets a known_hosts file with the keys of
its host alone, as the probe found them to be right: the suite's paramiko checks no certificates.
"""

from __future__ import annotations

import base64
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from image_builder.errors import ImageBuilderError, VerifyError
from image_builder.pool.hostkeys import Entry, known_as, parse
from image_builder.pool.model import OK, Host, Outcome, failed
from image_builder.pool.reach import Access
from image_builder.pool.suite_process import SuiteProcess
from image_builder.process import tail
from image_builder.report.verification import TOLD, SuiteResult
from image_builder.stages.verify import ENVIRONMENT, SUITE, read_results, suite_argv
from image_builder.store import remove_tree
from image_builder.target.ssh import SshAddress

# What a facts.json has; the suite refuses one without, host by host (tests/image/suite.py).
FACTS = ("image", "build_id", "variables", "packages")
# What failed in `verify`.
CHECKS, NO_RESULT = 1, 2
_NAMED = 5
# Without what nobody reads of hundreds of hosts: a line for each check, its log, what two values differ in. Of one host
# `image-builder verify` tells all that.
_TERSE = ("-q", "--override-ini=verbosity_assertions=1", "-p", "no:logging")
# Where sshd keeps the public halves of its keys, in images of ours as in Debian.
READ_KEYS = ("sh", "-c", "cat /etc/ssh/ssh_host_*_key.pub")


@dataclass(frozen=True)
class Suite:
    """What hosts are held to. ``facts`` are facts.json by image, ``reports`` gets a directory for each host."""

    facts: Mapping[str, Path]
    reports: Path
    python: Path
    folder: Path = SUITE


class Runs:
    """Runs of a suite on hosts; a context manager. ``run`` may be called from many threads at once."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
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

    def run(self, host: Host, access: Access, keys: str, seconds: float) -> Outcome:
        """Run it on one host, whose public keys are ``keys`` (lines of known_hosts); ``seconds`` is for all of it."""
        reports = self._suite.reports / host.name
        try:
            reports.mkdir(parents=True, exist_ok=True)
            known = reports / "known_hosts"
            known.write_text(keys, encoding="utf-8")
            address = SshAddress(access.user, host.address, host.port, access.key, known)
            result = self._observe(host.image, address.url, reports, seconds)
        except (ImageBuilderError, OSError) as error:
            return failed("verify", NO_RESULT, str(error))
        if not result.not_passed:
            remove_tree(reports)  # of thousands that are fine nobody reads a report
        return judge(result)

    def _observe(self, image: str, target: str, out: Path, seconds: float) -> SuiteResult:
        for stale in (TOLD.file, "suite.jsonl", "suite.log"):
            (out / stale).unlink(missing_ok=True)
        started = time.monotonic()
        status = self._process(image).run(target, out, seconds)
        if status == -signal.SIGALRM:
            raise VerifyError(f"the suite did not end within {seconds:.0f} s")
        log = out / "suite.log"
        result = read_results(
            out,
            status,
            target=target,
            marker="booted",
            seconds=time.monotonic() - started,
            said=tail(log),
            log=log,
            by_pytest=TOLD,
        )
        (out / TOLD.file).unlink()
        return result

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


def known_lines(host: Host, keys: Iterable[Entry]) -> str:
    """Return lines of a known_hosts file for a host's keys, under the address that it is connected to."""
    where = host.address if host.port == 22 else f"[{host.address}]:{host.port}"
    return "".join(f"{where} {key.kind} {base64.b64encode(key.blob).decode()}\n" for key in keys)


def own_lines(host: Host, shown: str) -> str:
    """Return the same from what a host showed over a connection that was proven: its public key files."""
    lines = [
        f"{known_as(host)} {' '.join(line.split()[:2])}\n" for line in shown.splitlines() if line.strip()
    ]
    return known_lines(host, parse("".join(lines), "known_hosts"))
