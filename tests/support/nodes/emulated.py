"""A build on an emulated machine, booted and verified as ``boot --verify`` does it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from image_builder.events import Monitor
from image_builder.lab import pause
from image_builder.machine.ssh import SshTarget
from image_builder.settings import Settings
from image_builder.verify import boot as booting
from image_builder.verify.boot import BootResult
from image_builder.verify.runner import observe_suite
from tests.selftest.turns import machine_boots


class _Booting(Monitor):
    """Calls ``done`` once the machine has started."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done

    def stage_finished(self, stage: str, seconds: float, cached: bool) -> None:  # noqa: ARG002
        if stage == "boot":
            self.done()


def boot_and_verify(
    artefact: Path, folder: Path, then: Callable[[SshTarget], None], *, select: tuple[str, ...]
) -> BootResult:
    """Boot a build, run the selected checks (all if there are none) and hand the machine to ``then``.

    Until the machine has started, no other process of the run starts a test. The records are in ``folder/records``.
    """
    settings = Settings(store=folder / "store", python=Path(sys.executable))
    with ExitStack() as turn, pytest.MonkeyPatch.context() as patch:
        patch.setattr(booting, "observe_suite", functools.partial(observe_suite, select=select))
        turn.enter_context(machine_boots())
        result = booting.boot(
            artefact,
            verify=True,
            out_dir=folder / "records",
            settings=settings,
            monitor=_Booting(turn.close),
            pause_archive=pause.archive,
            then=then,
        )
    assert not list((settings.store / "staging").iterdir()), "the machine left files behind"
    return result
