"""While an emulated machine boots, the other processes of the run start no test.

The machine's two processors are threads of the host's: beside tests that compute, its systemd gives up on units that
take longer than 90 seconds. Tests that already run go on. Without the variable, nobody waits for anybody.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

DIRECTORY = "IMAGE_BUILDER_TEST_TURNS"  # names a directory that the processes of a run share
_mine: list[bool] = []


@contextmanager
def machine_boots() -> Iterator[None]:
    """Keep other processes from starting a test, and from booting a machine of their own, until the block ends."""
    with _locked(fcntl.LOCK_EX):
        _mine.append(True)
        try:
            yield
        finally:
            _mine.pop()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Wait while another process boots a machine."""
    if not _mine:
        with _locked(fcntl.LOCK_SH):
            pass


@contextmanager
def _locked(how: int) -> Iterator[None]:
    directory = os.environ.get(DIRECTORY)
    with Path(directory, "boot").open("a") if directory else nullcontext() as file:
        if file:
            fcntl.flock(file, how)
        yield
