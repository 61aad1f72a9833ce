"""The interface to other programs: ending one also ends everything that it started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.errors import CommandError
from image_builder.system import process

pytestmark = pytest.mark.root


@pytest.mark.parametrize("on_line", [None, lambda _line: None], ids=["at the end", "line by line"])
def test_a_timeout_does_not_wait_for_a_grandchild(on_line: Callable[[str], None] | None) -> None:
    with pytest.raises(CommandError, match="timed out after 0.5 s"):
        process.run(["sh", "-c", "sleep 3600 & wait"], timeout=0.5, on_line=on_line)


@pytest.mark.parametrize("on_line", [None, print])
def test_a_program_is_ended_with_what_it_started_once_it_is_to_stop(
    on_line: Callable[[str], None] | None,
) -> None:
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with process.stopped_by(stop), pytest.raises(CommandError, match="exit status -9"):
        process.run(["sh", "-c", "sleep 3600 & wait"], on_line=on_line)
    assert process.run(["true"]).returncode == 0


def test_what_outlives_its_caller_has_nothing_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab's registry keeps running for days, and the shell that started it may hold a registry's password."""
    monkeypatch.setenv("IMAGE_BUILDER_REGISTRY_AUTH", "s3cret-canary")
    assert process.detach(["env"], log=tmp_path / "log").wait(30) == 0
    told = (tmp_path / "log").read_text()
    assert "PATH=" in told and "LANG=C.UTF-8" in told
    assert "s3cret-canary" not in told and "IMAGE_BUILDER" not in told
