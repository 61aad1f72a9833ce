"""The verification suite on the hosts of a pool: one pytest process per host, several at once.

The checks are those of ``image-builder verify ssh://…``. The connection stays in this process, so a host that was
probed is verified over the same login. pytest sends each command through its standard input, a socket, as one JSON
message; the reply is a message with the status, and one for each stream.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from image_builder.errors import HostError, ImageBuilderError, VerifyError
from image_builder.machine.shell import ShellEndedError
from image_builder.machine.ssh import SshAddress
from image_builder.pool.plan.model import OK, Host, Outcome, failed
from image_builder.pool.reach.reach import Reach
from image_builder.pool.reach.session import NotReachedError, Session
from image_builder.settings import SUITE
from image_builder.system import process
from image_builder.system.process import Arg
from image_builder.system.trees import remove_tree
from image_builder.text import short_list
from image_builder.verify.result import SuiteResult
from image_builder.verify.runner import (
    ENVIRONMENT,
    clear_records,
    read_results,
    record_options,
    suite_arguments,
)

# Failure numbers of `verify`.
CHECKS, NO_RESULT = 1, 2
# The session outlives the suite's timeout by this much, so that the suite's end is what is reported.
_SPARE_SECONDS = 60.0
_STATUS_BYTES = 16
# For each stream of a command: the listing of a whole system has a few megabytes.
_MOST_BYTES = 1 << 27
# For hundreds of hosts: no line for each check, no log, no traceback, no comparison of long values. `image-builder
# verify` on one host shows all of that. Without capturing, standard input stays the socket.
_TERSE = ("-s", "-q", "--tb=line", "--override-ini=verbosity_assertions=1", "-p", "no:logging")
# The checks are compiled once for all hosts.
_ENVIRONMENT = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
    name: os.environ[name] for name in ("PYTHONPYCACHEPREFIX",) if name in os.environ
}


@dataclass(frozen=True)
class Suite:
    """The suite that hosts must pass. ``facts`` are facts.json files by image, ``reports`` gets a directory per host.

    ``checks`` is the directory of the user's own checks.
    """

    facts: Mapping[str, Path]
    reports: Path
    python: Path
    folder: Path = SUITE
    checks: Path | None = None

    @property
    def builds(self) -> dict[str, str]:
        """Return the id of the build that hosts of each image must have; raises OSError, ValueError."""
        return {image: str(json.loads(path.read_bytes())["build_id"]) for image, path in self.facts.items()}


class Runs:
    """Runs of a suite on hosts; a context manager. ``run`` may be called from many threads at once."""

    def __init__(self, suite: Suite, reach: Reach) -> None:
        self._suite = suite
        self._reach = reach
        self._log = suite.reports / "worker.log"
        self._guard = threading.Lock()
        self._worker: socket.socket | None = None
        self._open = ExitStack()
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all runs that haven't finished."""
        with self._guard:
            self._over = True
            self._open.close()
        if self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()

    def run(self, host: Host, seconds: float) -> Outcome:
        """Run the suite on one host; ``seconds`` covers all but the login. Raises HostError about this machine."""
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
            remove_tree(reports)  # nobody reads the report of one passing host among thousands
        return judge(result)

    def _observe(self, host: Host, out: Path, seconds: float) -> SuiteResult:
        log = out / "suite.log"
        log.unlink(missing_ok=True)
        clear_records(out)
        argv = [*self._arguments(self._suite.facts[host.image]), *record_options(out.absolute())]
        started = time.monotonic()
        with self._reach.session(host, root=True, seconds=seconds + _SPARE_SECONDS) as session:
            status = self._run(argv, log, session, seconds)
        return read_results(
            out,
            status,
            target=SshAddress(self._reach.login(host).user, host.address, host.port).url,
            marker="booted",
            seconds=time.monotonic() - started,
            output=process.tail(log),
            log=log,
        )

    def _arguments(self, facts: Path) -> list[Arg]:
        folder, checks = self._suite.folder, self._suite.checks
        arguments = suite_arguments(folder, facts, "stdin:", "booted", *_TERSE)
        return [*arguments, folder, *([checks] if checks else [])]

    def _run(self, argv: Sequence[Arg], log: Path, session: Session, seconds: float) -> int:
        """Run pytest on a host; return its status, below 0 for a signal.

        Raises VerifyError if it doesn't end in time, and what the session raises if that is lost.
        """
        ours, theirs = socket.socketpair()
        end, its_end = socket.socketpair()
        with Connection(ours.detach()) as requests, end:
            with theirs, its_end, log.open("ab") as sink:
                self._begin(argv, theirs.fileno(), sink.fileno(), its_end.fileno())
            watch = _Watch(end, session, seconds)
            watch.start()
            try:
                serve(requests, session)
            except Exception:
                # If pytest has ended, its end cut the session, and its status says more. Otherwise the session is lost.
                if not watch.has_ended:
                    requests.close()
                    watch.join()  # ends soon: no command gets a reply
                    raise
            watch.join()
        if watch.is_late:
            raise VerifyError(f"the suite did not end within {seconds:.0f} s")
        if watch.status is None:
            raise VerifyError(f"the suite's worker ended: {process.tail(self._log)}")
        return watch.status

    def _begin(self, argv: Sequence[Arg], *descriptors: int) -> None:
        """Have a copy of the worker run pytest with these descriptors: standard input, log, and socket for its end."""
        message = json.dumps([os.fspath(argument) for argument in argv]).encode()
        with self._guard:
            if self._over:
                raise VerifyError("given up")
            try:
                self._worker = self._worker or self._start()
                socket.send_fds(self._worker, [message], descriptors)
            except ConnectionError:  # the worker was killed, with all of its runs
                self._worker = self._start()
                socket.send_fds(self._worker, [message], descriptors)

    def _start(self) -> socket.socket:
        """Start the worker, whose copies have all imports of pytest and the checks."""
        suite = self._suite
        module = ("-P", "-m", "image_builder.pool.steps.suite_worker")
        argv = [suite.python, *module, *self._arguments(next(iter(suite.facts.values())))]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = process.conversation(argv, stdin=theirs.fileno(), log=self._log, env=_ENVIRONMENT)
            self._open.enter_context(child)
        return self._open.enter_context(ours)


class _Watch(threading.Thread):
    """Ends a run at its timeout, and cuts the session once the run has ended, since a command may still be running.

    ``status`` is pytest's exit status, None if there is none because the worker has ended.
    """

    def __init__(self, end: socket.socket, session: Session, seconds: float) -> None:
        super().__init__(name="suite-watch")
        self._end, self._session, self._seconds = end, session, seconds
        self.has_ended = self.is_late = False
        self.status: int | None = None

    def run(self) -> None:
        self._end.settimeout(self._seconds)
        try:
            message = self._end.recv(_STATUS_BYTES)
        except TimeoutError:
            self.is_late = True
            self._end.settimeout(None)
            self._end.shutdown(socket.SHUT_WR)
            message = self._end.recv(_STATUS_BYTES)
        self.status = int(message) if message else None
        self.has_ended = True
        self._session.cut()


def serve(requests: Connection, session: Session) -> None:
    """Run the commands that pytest sends until it ends; raises what the session raises if that is lost."""
    while True:
        try:
            command, seconds = json.loads(requests.recv_bytes())
        except (EOFError, OSError):
            return
        out = err = b""
        try:
            status, out, err = session.run(command, seconds, _MOST_BYTES)
            reply: dict[str, int | str] = {"status": status}
        except (TimeoutError, ShellEndedError) as error:
            reply = {"error": type(error).__name__, "message": str(error)}
        with suppress(OSError):  # pytest has ended
            for part in (json.dumps(reply).encode(), out, err):
                requests.send_bytes(part)


def judge(result: SuiteResult) -> Outcome:
    """Return the outcome of a run: `failed` names the checks."""
    names = [check.name for check in result.not_passed]
    if not names and result.checks:
        return OK
    return failed("verify", CHECKS, short_list(names) or "no check ran")
