"""The published worker disk, booted: the verification suite, a static pod, a clean console.

``IMAGE_BUILDER_ARTEFACT`` names the directory of one build (by default the worker is built).
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

from image_builder.boot import BootResult, boot, find_disk
from image_builder.events import NullMonitor
from image_builder.settings import Settings
from tests.builds import Workplace

pytestmark = [pytest.mark.boot, pytest.mark.root]


@pytest.fixture(scope="module")
def artefact(request: pytest.FixtureRequest) -> Path:
    if "IMAGE_BUILDER_ARTEFACT" in os.environ:
        return Path(os.environ["IMAGE_BUILDER_ARTEFACT"]).resolve()
    built: Workplace = request.getfixturevalue("worker")
    return built.artefact


@pytest.fixture(scope="module")
def booted(artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[BootResult, Path, str]:
    """The result of one boot, where its records are, and the disk's digest before it."""
    out_dir = tmp_path_factory.mktemp("boot")
    digest = _sha256(find_disk(artefact))
    settings = Settings(store=tmp_path_factory.mktemp("store"), python=Path(sys.executable))
    result = boot(artefact, verify=True, out_dir=out_dir, settings=settings, monitor=NullMonitor())
    assert not list((settings.store / "staging").iterdir()), "the machine left files behind"
    return result, out_dir, digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_every_check_passes(booted: tuple[BootResult, Path, str]) -> None:
    result, out_dir, _ = booted
    result.require_passed()
    assert result.suite is not None and len(result.suite.checks) >= 30
    assert {p.name for p in out_dir.iterdir()} >= {"boot.json", "console.log", "junit.xml", "verify.json"}


def test_system_is_running(booted: tuple[BootResult, Path, str]) -> None:
    assert booted[0].system_state == "running"


def test_static_pod_ran(booted: tuple[BootResult, Path, str]) -> None:
    assert booted[0].pod_seconds is not None and booted[0].pod_seconds > booted[0].ssh_seconds > 0


def test_console_is_clean(booted: tuple[BootResult, Path, str]) -> None:
    assert booted[0].console_problems == ()


def test_artefact_is_untouched(booted: tuple[BootResult, Path, str], artefact: Path) -> None:
    assert _sha256(find_disk(artefact)) == booted[2]
