"""The worker that runs the suite on a pool's hosts: a forked copy for each run, and every way in which one can end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from image_builder.pool.reach.reach import Reach
from image_builder.pool.steps.suite import Runs, Suite
from image_builder.settings import REPO_ROOT
from image_builder.system import process

pytestmark = pytest.mark.root

CHECKS = """\
import os
import signal
import sys
import time

LOADED = os.getpid()

def fate():
    return os.read(0, 1)

def test_fate():
    print(f"is a copy: {os.getpid() != LOADED}", flush=True)
    kind = fate()
    assert kind != b"f"
    if kind == b"k":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == b"h":
        time.sleep(600)
"""


class Worker:
    """A running worker: ``begin`` starts a run, and returns the socket that signals its end, and its log."""

    def __init__(self, folder: Path, requests: socket.socket) -> None:
        self.folder, self.requests = folder, requests

    def begin(self, fate: bytes, name: str = "log") -> tuple[socket.socket, Path]:
        log, (end, its_end), (ours, theirs) = self.folder / name, socket.socketpair(), socket.socketpair()
        arguments = [*_arguments(self.folder), "-s"]
        with ours, theirs, its_end, log.open("wb") as sink:
            ours.sendall(fate)
            descriptors = [theirs.fileno(), sink.fileno(), its_end.fileno()]
            socket.send_fds(self.requests, [json.dumps(arguments).encode()], descriptors)
        end.settimeout(60)
        return end, log


def _arguments(folder: Path) -> list[str]:
    return ["-p", "no:cacheprovider", f"--rootdir={folder}", "-c", os.devnull, os.fspath(folder)]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with _worker(tmp_path, CHECKS) as started:
        yield started


@contextmanager
def _worker(folder: Path, checks: str) -> Iterator[Worker]:
    (folder / "test_checks.py").write_text(checks)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-P", "-m", "image_builder.pool.steps.suite_worker", *_arguments(folder)]
    environment = {"PYTHONPATH": os.fspath(REPO_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with theirs:
        child = process.conversation(argv, stdin=theirs.fileno(), log=folder / "worker.log", env=environment)
        with child, ours:
            theirs.close()
            yield Worker(folder, ours)
    assert (folder / "worker.log").read_text() == ""


def end_of(end: socket.socket) -> str:
    with end:
        return end.recv(16).decode()


def test_each_run_is_a_copy_with_an_end_of_its_own(worker: Worker) -> None:
    runs = {fate: worker.begin(fate, fate.decode()) for fate in (b"o", b"f", b"k")}
    assert {fate: end_of(end) for fate, (end, _) in runs.items()} == {
        b"o": "0",
        b"f": "1",
        b"k": str(-signal.SIGKILL),
    }
    logs = {fate: log.read_text() for fate, (_, log) in runs.items()}
    assert all("is a copy: True\n" in text for text in logs.values())
    assert "1 passed" in logs[b"o"] and "1 failed" in logs[b"f"]


def test_shutting_the_socket_down_ends_a_run_and_no_other(worker: Worker) -> None:
    (hangs, _), (other, _) = worker.begin(b"h", "a"), worker.begin(b"h", "b")
    hangs.shutdown(socket.SHUT_WR)
    assert end_of(hangs) == str(-signal.SIGKILL)
    other.settimeout(0.2)
    with pytest.raises(TimeoutError):
        other.recv(16)
    other.close()
    assert end_of(worker.begin(b"o")[0]) == "0"


def test_a_run_can_be_ended_as_soon_as_it_is_begun(worker: Worker) -> None:
    assert end_of(worker.begin(b"o")[0]) == "0", "it collects first"
    for _ in range(5):
        end, _log = worker.begin(b"h")
        end.shutdown(socket.SHUT_WR)
        assert end_of(end) == str(-signal.SIGKILL)


def test_all_runs_end_with_the_requests(tmp_path: Path) -> None:
    with _worker(tmp_path, CHECKS) as worker:
        end, _ = worker.begin(b"h")
        assert end_of(worker.begin(b"o", "o")[0]) == "0"
    assert end_of(end) == str(-signal.SIGKILL)


def test_a_worker_that_dies_with_unread_requests_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports that as a reset; for a worker that has read everything, as a broken pipe."""
    started, python = tmp_path / "started", tmp_path / "python"
    os.mkfifo(started)
    python.write_text(f'#!/bin/sh\necho $$ > "{started}"\nexec sleep 600\n')
    python.chmod(0o700)
    monkeypatch.setattr(process, "_STOP_SECONDS", 0.1)  # it doesn't read its input
    suite = Suite({"image": tmp_path / "facts.json"}, tmp_path, python)
    with Runs(suite, cast("Reach", None)) as runs:  # no host is contacted
        for _ in range(2):
            runs._begin(["-q"], 0, 1, 2)
            worker = int(started.read_text())
            os.kill(worker, signal.SIGKILL)
            os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)


def test_checks_that_can_not_be_imported_are_told_by_each_run(tmp_path: Path) -> None:
    with _worker(tmp_path, "import nothing_of_that_name\n") as worker:
        end, log = worker.begin(b"o")
        assert end_of(end) == "2"
        assert "nothing_of_that_name" in log.read_text()
