"""Many machines with one collection: their checks are called in processes that each have one machine at a time.

Requests come on standard input, a socket, as a packet of JSON each: ``{"id": …, "out": DIRECTORY, "seconds": N}``.
With it comes the socket by which its machine is asked (targets.py). A runner, a copy of the process that collected,
takes it: the records go to ``suite.jsonl`` in the directory, what failed and anything that is said to ``suite.log``.
When it ended, a line tells: ``{"ended": ID, "status": N}``, with N below 0 for the signal that ended the runner with
it; after its seconds that is SIGALRM. A runner that has come to the end of a machine is the next one's. At the end of
standard input all are killed.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from image_builder.system.process import die_with_parent

Run = Callable[[socket.socket, Path], int]
"""Makes the checks of a machine, by what asks it, with the directory of its records; returns a status."""
_PACKET_BYTES = 1 << 16


def serve(run: Run) -> None:
    """Serve requests to the end."""
    # What is here by now stays: no copy need look through it, which would make it a copy's own.
    gc.collect()
    gc.freeze()
    sys.stdout.flush()  # else each copy would say what pytest has said
    requests = socket.socket(fileno=0)
    runners: dict[int, _Runner] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if runner := runners.get(fd):
                name, status = runner.end()
                if name is not None:
                    _say({"ended": name, "status": status})
                if runner.gone:
                    poll.unregister(fd)
                    runners.pop(fd).close()
                continue
            packet, fds, _, _ = socket.recv_fds(requests, _PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                requests.detach()  # standard input is not ours to close
                for runner in runners.values():
                    runner.kill()
                return
            idle = next((runner for runner in runners.values() if runner.name is None), None)
            if not idle:
                idle = _Runner(run, fds)
                runners[idle.fileno()] = idle
                poll.register(idle, select.POLLIN)
            idle.begin(packet, fds[0])
            os.close(fds[0])


class _Runner:
    """A process that has one machine at a time; ``name`` is the id of what it has."""

    def __init__(self, run: Run, not_its: Iterable[int]) -> None:
        """Make it, without the descriptors that are others'."""
        self.name: str | None = None
        self.gone = False
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        server = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            for fd in not_its:
                os.close(fd)
            self._socket.close()
            _become(theirs, run, server)
        theirs.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, request: bytes, machine: int) -> None:
        """Let it take a machine."""
        self.name = json.loads(request)["id"]
        with suppress(OSError):  # it has ended, which is yet to be read
            socket.send_fds(self._socket, [request], [machine])

    def end(self) -> tuple[str | None, int]:
        """Read what it has to tell: the end of what it had, or its own."""
        name, self.name = self.name, None
        try:
            told = self._socket.recv(_PACKET_BYTES)
        except ConnectionError:
            told = b""
        if told:
            return name, int(told)
        self.gone = True
        return name, os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self.close()

    def close(self) -> None:
        self._socket.close()


def _become(requests: socket.socket, run: Run, server: int) -> NoReturn:
    """Turn this process, a copy of the one that collected, into a runner."""
    try:
        die_with_parent()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, 0)
        warnings.simplefilter("error")
        while os.getppid() == server:
            packet, fds, _, _ = socket.recv_fds(requests, _PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                break
            with socket.socket(fileno=fds[0]) as machine:
                status = _run(json.loads(packet), machine, run)
            requests.send(b"%d" % status)
    except BaseException:
        traceback.print_exc()
    finally:
        # At once: to take apart what was copied would first copy it.
        sys.stderr.flush()
        os._exit(os.EX_SOFTWARE)


def _run(request: Mapping[str, Any], machine: socket.socket, run: Run) -> int:
    """Make the checks of a machine in the time that there is for it."""
    out = Path(request["out"])
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    with (out / "suite.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    status = run(machine, out)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return status


def _say(line: Mapping[str, Any]) -> None:
    # At once, for who waits, and for the copies.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
