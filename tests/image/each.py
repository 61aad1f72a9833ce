"""Many machines with one collection: each gets a process that begins where the checks would run, and ends by itself.

Requests come on standard input, a socket, as a packet of JSON each: ``{"id": …, "out": DIRECTORY, "seconds": N}``.
With it comes the socket by which its machine is asked (targets.py). The process of one has the collected checks, and
runs them there as a run of its own: its records go to ``suite.jsonl`` and ``outcomes.json`` in its directory, what
failed and anything it says to ``suite.log``. When it ended, a line tells: ``{"ended": ID, "status": N}``, with N below
0 for a signal; after its seconds that is SIGALRM. At the end of standard input whatever still runs is killed.

What pytest does for whoever looks on is left out: for each check of each machine it takes longer than most checks.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest
from suite import check_name

from image_builder.process import die_with_parent

Begin = Callable[[socket.socket, Path], None]
"""Called in a machine's process with what asks it, and its directory."""
_REQUEST_BYTES = 1 << 16


def serve(session: pytest.Session, begin: Begin) -> bool | None:
    """Serve requests to the end. Returns as ``pytest_runtestloop`` does: nothing in a machine's process: it goes on."""
    for item in session.items:
        _ = item.location  # is worked out once
        item.repr_failure = partial(_failure, item)  # type: ignore[method-assign]
    # What is here by now stays: no copy need look through it, which would make it a copy's own.
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, str]] = {}
    poll = select.poll()
    requests = socket.socket(fileno=0)
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                poll.unregister(fd)
                _tell_end(fd, *running.pop(fd))
                continue
            packet, fds, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                _kill(running)
                return True
            request = json.loads(packet)
            with socket.socket(fileno=fds[0]) as machine:
                server = os.getpid()
                pid = os.fork()
                if pid == 0:
                    requests.detach()  # 0 is something else there
                    _become(session, request, machine.dup(), begin, server)
                    return None
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, request["id"])
            poll.register(pidfd, select.POLLIN)


def _become(
    session: pytest.Session, request: Mapping[str, Any], machine: socket.socket, begin: Begin, server: int
) -> None:
    """Turn this process, a copy of the one that collected, into a machine's own run."""
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)  # it ended before it could take us along
    gc.disable()  # it ends before there is much to be had
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    out = Path(request["out"])
    log = os.open(out / "suite.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Machine(out), "machine")
    begin(machine, out)


def _failure(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> str:
    """Say where a check failed, and why: to look through all on the way there takes longer than the check."""
    file = os.fspath(item.path)
    lines = [line for frame, line in walk_tb(error.tb) if frame.f_code.co_filename == file]
    return f"{item.path.name}:{[0, *lines][-1]}: {error.exconly()}"


class _Machine:
    """In a machine's process: tells what failed as it fails, keeps what pytest reports, and ends it."""

    def __init__(self, out: Path) -> None:
        self._file = out / "outcomes.json"
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = check_name(report.nodeid)
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        if self._outcomes.setdefault(name, outcome) == "passed":
            self._outcomes[name] = outcome
        if report.failed:
            print(
                f"{report.outcome.upper()} {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """End at once, all being written: to take apart what was copied would first copy it."""
        self._file.write_text(json.dumps(self._outcomes), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(exitstatus))


def _tell_end(pidfd: int, pid: int, name: str) -> None:
    os.close(pidfd)
    _say({"ended": name, "status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def _kill(running: Mapping[int, tuple[int, str]]) -> None:
    for pidfd, (pid, _) in running.items():
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


def _say(line: Mapping[str, Any]) -> None:
    # Nothing of it may be left here when a copy of this process is made.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
