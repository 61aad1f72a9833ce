"""The published worker disk, booted once with a blank local disk: the verification suite, a static pod, a clean
console, promotion to its end; then everything broken that the suite's booted checks are about, and the suite again.

``IMAGE_BUILDER_ARTEFACT`` names the directory of one build (by default the worker is built).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.events import Monitor
from image_builder.lab import pause
from image_builder.machine.ssh import SshTarget
from image_builder.settings import Settings
from image_builder.verify.boot import BootResult, boot, find_disk
from image_builder.verify.result import SuiteResult
from tests import mutants
from tests.boot.node import SHELL_SECONDS
from tests.builds import Workplace

pytestmark = [pytest.mark.boot, pytest.mark.root, pytest.mark.image("worker")]

PROMOTION_SECONDS = 1200.0
# The suite's checks of a booted `worker`, and those of them that a sealed tree can't be asked: a check that is lost is
# seen here.
CHECKS = 199
BOOTED_CHECKS = 53


@dataclass(frozen=True)
class Booted:
    """One boot: its result, where its records are, the disk's digest before, and the run on the broken machine.

    ``promoted`` is what the agent told when promotion had ended, ``links`` what led into the preload store then.
    """

    result: BootResult
    records: Path
    digest: str
    broken: SuiteResult
    promoted: dict[str, Any]
    links: list[str]


@pytest.fixture(scope="module")
def artefact(request: pytest.FixtureRequest) -> Path:
    if "IMAGE_BUILDER_ARTEFACT" in os.environ:
        return Path(os.environ["IMAGE_BUILDER_ARTEFACT"]).resolve()
    built: Workplace = request.getfixturevalue("worker")
    return built.artefact


@pytest.fixture(scope="module")
def booted(artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> Booted:
    records, digest = tmp_path_factory.mktemp("boot"), _sha256(find_disk(artefact))
    settings = Settings(store=tmp_path_factory.mktemp("store"), python=Path(sys.executable))
    again = tmp_path_factory.mktemp("broken")
    broken: list[SuiteResult] = []
    promoted: dict[str, Any] = {}
    links: list[str] = []

    def break_and_verify(ssh: SshTarget) -> None:
        promoted.update(_wait_for_promotion(ssh))
        links.extend(ssh.run(["find", "/mnt/local/docker", "-lname", "/var/lib/preload/*"]).stdout.split())
        broken.append(mutants.observe_broken(ssh.url, artefact / "facts.json", again, ()))

    result = boot(
        artefact,
        verify=True,
        out_dir=records,
        settings=settings,
        monitor=Monitor(),
        pause_archive=pause.archive,
        then=break_and_verify,
    )
    assert not list((settings.store / "staging").iterdir()), "the machine left files behind"
    return Booted(result, records, digest, broken[0], promoted, links)


def _wait_for_promotion(ssh: SshTarget) -> dict[str, Any]:
    """Return the agent's status when it has copied all it can; raises AssertionError when that takes too long."""
    deadline = time.monotonic() + PROMOTION_SECONDS
    while True:
        told = ssh.run(["node-agent", "status", "--json"], ok=(0, 1), timeout=SHELL_SECONDS).stdout
        found: dict[str, Any] = json.loads(told)
        section = found.get("promotion", {"waiting": True})
        if not section.get("running") and "waiting" not in section:
            return found
        assert time.monotonic() < deadline, told
        time.sleep(5)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_every_check_passes(booted: Booted) -> None:
    booted.result.require_passed()
    assert booted.result.suite is not None and len(booted.result.suite.checks) == CHECKS
    names = {p.name for p in booted.records.iterdir()}
    assert names >= {"boot.json", "console.log", "junit.xml", "verify.json"}


def test_system_is_running(booted: Booted) -> None:
    assert booted.result.system_state == "running"


def test_static_pod_ran(booted: Booted) -> None:
    result = booted.result
    assert result.pod_seconds is not None and result.pod_seconds > result.ssh_seconds > 0


def test_console_is_clean(booted: Booted) -> None:
    assert booted.result.console_problems == ()


def test_images_were_seeded_and_not_loaded(booted: Booted) -> None:
    console = (booted.records / "console.log").read_text(errors="replace")
    assert "node-agent: disk: ok: format: " in console
    assert re.search(r"node-agent: seed: docker: seeded, \d+ layers in ", console)
    preload = booted.promoted["preload"]
    assert preload["state"] == "ok" and preload["loaded"] == {} and preload["seeded"] > 0


def test_promotion_leaves_nothing_that_leads_into_the_store(booted: Booted) -> None:
    section = booted.promoted["promotion"]
    assert (section["state"], section["layers_left"]) == ("ok", []) and section["done"] > 0
    assert booted.promoted["layers"]["links"] == 0 and booted.links == []
    assert {image["source"] for image in booted.promoted["images"]} == {"local disk"}


def test_every_booted_check_sees_its_mutation(booted: Booted) -> None:
    """Each check of a machine alone passes before its mutation, and fails by its own assertion after it."""
    assert mutants.unproven(booted.broken) == {}
    assert booted.result.suite is not None
    checked = {check.name.partition("::")[2] for check in booted.result.suite.checks}
    mutated = checked & mutants.booted_mutations()
    assert {name.partition("::")[2] for name in mutants.names(booted.broken)} == mutated
    assert len(booted.broken.checks) == 2 * len(mutated) == 2 * BOOTED_CHECKS


def test_artefact_is_untouched(booted: Booted, artefact: Path) -> None:
    assert _sha256(find_disk(artefact)) == booted.digest
