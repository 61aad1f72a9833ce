"""While one process boots a machine, the others wait before their next test, and it doesn't wait for itself."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.selftest import turns


def _is_free(directory: Path, how: int) -> bool:
    with (directory / "boot").open("a") as other:
        try:
            fcntl.flock(other, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_others_wait_until_the_machine_has_booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turns.DIRECTORY, str(tmp_path))
    with turns.machine_boots():
        turns.pytest_runtest_setup()
        assert not _is_free(tmp_path, fcntl.LOCK_SH)
    turns.pytest_runtest_setup()
    assert _is_free(tmp_path, fcntl.LOCK_EX)


def test_without_a_directory_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.DIRECTORY, raising=False)
    monkeypatch.chdir(tmp_path)
    with turns.machine_boots():
        turns.pytest_runtest_setup()
    assert list(tmp_path.iterdir()) == []
