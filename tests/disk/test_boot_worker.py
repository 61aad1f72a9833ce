"""A worker's published disk, switched on once: it starts, seeds its blank local disk and runs a pod; then everything
that the checks of a booted machine cover is broken, one after another.

On every commit it is today's worker, with containerd; without today's programs, the worker from Debian's archive. The
checks that a sealed tree passes as well were made by its bake. Only `--slow`, with Docker, makes all of them again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.machine.ssh import SshTarget
from image_builder.system.trees import sha256
from image_builder.verify.boot import BootResult, find_disk
from image_builder.verify.result import SuiteResult, blind
from tests.boot.node import SHELL_SECONDS
from tests.support.images import mutants, programs
from tests.support.images.builds import Workplace
from tests.support.images.fixtures import WHOLE
from tests.support.nodes.emulated import boot_and_verify

pytestmark = [pytest.mark.boot, pytest.mark.root]

IMAGES = (
    pytest.param(WHOLE),
    pytest.param("worker_current_docker", marks=[pytest.mark.slow, programs.needs_programs]),
)
# The checks that must precede the breakages, since these leave traces in units and in the journal.
FIRST = tuple(
    f"test_boot.py::{name}"
    for name in (
        "test_system_is_running",
        "test_no_unit_failed",
        "test_no_unit_was_restarted",
        "test_journal_has_no_trouble",
    )
)
# Which checks a boot makes (empty: all) and their number; and how many are broken, those that no sealed tree can have:
# a missing check shows up here.
CHECKS = {
    "worker_current": (FIRST, 4, 52),
    "worker_current_docker": ((), 200, 54),
    "worker": (FIRST, 4, 54),
}


@dataclass(frozen=True)
class Booted:
    """One boot: its result, where its records are, the disk and its digest before, the agent's status and when the
    promotion's unit was started, as systemd reports it, and the checks on the machine as it was and broken."""

    result: BootResult
    records: Path
    disk: Path
    digest: str
    status: dict[str, Any]
    promotion: str
    broken: SuiteResult


@pytest.fixture(scope="module", params=IMAGES)
def booted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Booted:
    """Nothing is tried again here: should a kernel panic, as QEMU's emulation of several processors makes it before
    8.1, once in several hundred boots, the run names this file as flaky."""
    built: Workplace = request.getfixturevalue(request.param)
    folder, disk = tmp_path_factory.mktemp("boot"), find_disk(built.artefact)
    digest = sha256(disk)
    seen: dict[str, Any] = {}

    def break_it(ssh: SshTarget) -> None:
        told = ssh.run(["node-agent", "status", "--json"], timeout=SHELL_SECONDS).stdout
        seen["status"] = json.loads(told)
        seen["promotion"] = _stop_promotion(ssh)
        (folder / "broken").mkdir()
        seen["broken"] = mutants.observe_broken(ssh.url, built.artefact / "facts.json", folder / "broken", ())

    result = boot_and_verify(built.artefact, folder, break_it, select=CHECKS[built.image][0])
    return Booted(result, folder / "records", disk, digest, **seen)


def _stop_promotion(ssh: SshTarget) -> str:
    """End the promotion, which writes to the status that is broken next; return when it was started."""
    unit = "preload-promote.service"
    shown = ssh.run(["systemctl", "show", "--property=ExecMainStartTimestamp", "--value", unit])
    ssh.run(["systemctl", "stop", unit], timeout=SHELL_SECONDS)
    return shown.stdout.strip()


def test_the_machine_starts_and_runs_a_pod(booted: Booted) -> None:
    result = booted.result
    assert (result.system_state, result.console_problems) == ("running", ())
    assert result.pod_seconds is not None and result.pod_seconds > result.ssh_seconds > 0
    result.require_passed()
    assert result.suite is not None
    assert len(result.suite.checks) == CHECKS[result.image][1]
    names = {path.name for path in booted.records.iterdir()}
    assert names >= {"boot.json", "console.log", "junit.xml", "verify.json"}
    assert sha256(booted.disk) == booted.digest


def test_images_were_seeded_and_not_loaded(booted: Booted) -> None:
    disk, seed, preload = (booted.status[name] for name in ("disk", "seed", "preload"))
    assert (disk["state"], disk["action"], seed["state"], seed["action"]) == ("ok", "format", "ok", "seeded")
    assert preload["state"] == "ok" and preload["loaded"] == {} and preload["seeded"] > 0


def test_promotion_was_started(booted: Booted) -> None:
    """tests/disk/test_promote*.py have the rest of it, up to the unmounted store."""
    assert booted.promotion


def test_every_booted_check_sees_its_mutation(booted: Booted) -> None:
    """Each machine-only check passes before its mutation, and fails with its own assertion after it."""
    assert blind(booted.broken) == {}
    assert len(booted.broken.checks) == 2 * CHECKS[booted.result.image][2]
