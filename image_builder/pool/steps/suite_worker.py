"""A process that has pytest and the checks imported, and forks a copy of itself for each run of the suite.

    python -m image_builder.pool.steps.suite_worker ARGUMENT...

It collects the suite once with pytest's arguments, so that each copy has its modules loaded. Standard input is a
socket. Each message on it contains the arguments of a run, as JSON, with three descriptors: the run's standard input,
its log, and a socket for its end. pytest's exit status is written to that socket, below 0 for a signal; shutting down
the other side ends the run. When standard input ends, so do all runs.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import pytest

from image_builder.system.process import die_with_parent

# A message with arguments has a few hundred bytes.
_MOST_BYTES = 1 << 16
_BUG = 70


@dataclass(frozen=True)
class _Run:
    """A running copy: ``process`` is its pidfd, ``end`` the socket for its end."""

    pid: int
    process: int
    end: socket.socket

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with suppress(OSError):  # nothing waits for it any longer
            self.end.sendall(str(status).encode())
        self.end.close()
        os.close(self.process)


def main(argv: Sequence[str]) -> int:
    """Serve until standard input ends."""
    requests = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    # Each run reports faults of the checks in its own log.
    os.dup2(null, 1)
    pytest.main([*argv, "--collect-only"])
    # Otherwise each copy's garbage collector would touch, and thereby copy, all of these objects.
    gc.freeze()
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        try:
            _serve(requests, selector)
        finally:
            for run in {key.data for key in selector.get_map().values() if key.data}:
                run.kill()
                run.reap()
    return 0


def _serve(requests: socket.socket, selector: selectors.BaseSelector) -> None:
    while True:
        # One event at a time: the next may belong to the same run, which has ended by then.
        (key, _), *_ = selector.select()
        run: _Run | None = key.data
        if run is None:
            message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
            if not message:
                return
            run = _start(json.loads(message), *descriptors)
            selector.register(run.process, selectors.EVENT_READ, run)
            selector.register(run.end, selectors.EVENT_READ, run)
        elif key.fileobj is run.end:
            run.kill()
            selector.unregister(run.end)
        else:
            selector.unregister(run.process)
            with suppress(KeyError):  # it was killed
                selector.unregister(run.end)
            run.reap()


def _start(arguments: Sequence[str], stdin: int, log: int, end: int) -> _Run:
    pid = os.fork()
    if not pid:
        _run(arguments, stdin, log)
    os.setpgid(pid, pid)  # the copy does it too: whichever comes first, the group can be killed from now on
    os.close(stdin)
    os.close(log)
    return _Run(pid, os.pidfd_open(pid), socket.socket(fileno=end))


def _run(arguments: Sequence[str], stdin: int, log: int) -> NoReturn:
    status = _BUG
    try:
        os.setpgid(0, 0)
        die_with_parent()
        for target, source in ((0, stdin), (1, log), (2, log)):
            os.dup2(source, target)
        status = int(pytest.main(list(arguments)))
        sys.stdout.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
