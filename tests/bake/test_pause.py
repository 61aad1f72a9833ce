"""The pause program as the kernel runs it, also as PID 1, where unhandled signals aren't even delivered."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from image_builder.lab import pause

pytestmark = pytest.mark.root

# Sleeps in rt_sigtimedwait: the number of the system call, as shown in /proc.
_WAITING = "128"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "pause"
    path.write_bytes(pause.program())
    path.chmod(0o755)
    return path


def _await_wait(pid: int) -> None:
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}/syscall").read_text().split()[0] != _WAITING:
        assert time.monotonic() < deadline, "it does not wait for signals"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_status_zero(program: Path, number: signal.Signals) -> None:
    with subprocess.Popen([program], env={}) as child:
        _await_wait(child.pid)
        child.send_signal(signal.SIGCHLD)
        _await_wait(child.pid)
        assert child.poll() is None, "SIGCHLD must not end it"
        child.send_signal(number)
        assert child.wait(10) == 0


def test_as_pid_one_it_hears_sigterm_and_reaps_orphans(program: Path) -> None:
    # The shell starts an orphan-to-be and then becomes the pause program, which is PID 1 of the namespace.
    script = '(sleep 0.3 & exec true) & exec "$0"'
    argv = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", script, str(program)]
    with subprocess.Popen(argv) as outer:
        deadline = time.monotonic() + 120
        inner = None
        while inner is None or Path(f"/proc/{inner}/comm").read_text().strip() != "pause":
            assert time.monotonic() < deadline, "the program did not start"
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            inner = int(children[0]) if children else None
            time.sleep(0.01)
        while Path(f"/proc/{inner}/task/{inner}/children").read_text().split():
            assert time.monotonic() < deadline, "a child that ended was not reaped"
            time.sleep(0.05)
        os.kill(inner, signal.SIGTERM)
        assert outer.wait(10) == 0
