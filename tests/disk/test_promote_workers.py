"""The processes that copy layers: none outlives its parent."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest

from image_builder.node.data_root import Link
from image_builder.node.promote.plan import REST, Item
from image_builder.node.promote.workers import Job, running

pytestmark = pytest.mark.root


def test_none_is_left_where_another_can_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tmp_path / "layer"
    os.mkfifo(layer)  # opening it blocks, as on a disk that hangs
    item = Item(Link(tmp_path / "link", layer, "", directory=False), 0, REST)
    job = Job([item, item], tmp_path / "staging", 0.0, flush=False)
    job.staging.mkdir()
    fork, started = os.fork, list[int]()

    def fork_once() -> int:
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(child := fork())
        return child

    monkeypatch.setattr(os, "fork", fork_once)
    files = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(BlockingIOError), running(job, 2, 0):
            raise AssertionError("half of them are there")
        with pytest.raises(ChildProcessError):
            os.waitpid(started[0], os.WNOHANG)
        assert len(os.listdir("/proc/self/fd")) == files
    finally:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(started[0], os.WNOHANG) == (0, 0):
                os.kill(started[0], signal.SIGKILL)
                os.waitpid(started[0], 0)
