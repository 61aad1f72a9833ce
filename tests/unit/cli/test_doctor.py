"""``doctor``: everything that a host lacks is reported at once, under the commands that can't run without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder.cli import doctor
from image_builder.cli.main import app
from image_builder.errors import HostError, StoreError
from image_builder.system import host, namespace

CHECKS = (
    "root",
    "machine",
    "system",
    "packages",
    "capabilities",
    "writable",
    "cgroups",
    "store",
    "kernel",
    "azure",
)


@pytest.fixture(autouse=True)
def _good_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHECKS:
        monkeypatch.setattr(host, f"check_{name}", lambda *_: None)
    monkeypatch.setattr(namespace, "check", lambda: None)


def _doctor(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *options])
    return done.exit_code, done.stdout


def test_a_good_host_is_ready_for_everything() -> None:
    assert _doctor() == (0, f"ready: {', '.join(doctor.COMMANDS)}\n")
    assert json.loads(_doctor("--json")[1]) == {"lacks": [], "ready": list(doctor.COMMANDS)}


def test_everything_is_reported_at_once_with_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def packages(command: str) -> None:
        if command == "boot":
            raise HostError("qemu is missing", hint="apt-get install qemu")

    def rights() -> None:
        raise HostError("no root", hint="be root")

    def store(_path: Path) -> None:
        raise StoreError("on an overlay", hint="elsewhere")

    monkeypatch.setattr(host, "check_packages", packages)
    monkeypatch.setattr(host, "check_root", rights)
    monkeypatch.setattr(host, "check_store", store)
    status, text = _doctor()
    assert status == HostError.exit_code
    assert text.splitlines() == [
        "build, verify DIR, lab, store: no root",
        "  be root",
        "boot: qemu is missing",
        "  apt-get install qemu",
        "build, boot: on an overlay",
        "  elsewhere",
        "ready: lock, plan, pool, pool snapshot, publish",
    ]
    report = json.loads(_doctor("--json")[1])
    assert report["ready"] == ["lock", "plan", "pool", "pool snapshot", "publish"]
    assert [lack["kind"] for lack in report["lacks"]] == ["HostError", "HostError", "StoreError"]
    assert report["lacks"][1]["commands"] == ["boot"]


def test_without_root_the_other_rights_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def root() -> None:
        raise HostError("no root", hint="be root")

    def never() -> None:
        pytest.fail("an ordinary user was asked for a capability")

    monkeypatch.setattr(host, "check_root", root)
    monkeypatch.setattr(host, "check_capabilities", never)
    assert len(doctor.lacks(Path("/store"))) == 1


def test_what_nothing_mends_has_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine() -> None:
        raise HostError("this is another machine")

    monkeypatch.setattr(host, "check_machine", machine)
    _, text = _doctor()
    assert text.splitlines()[0] == "build, boot, lab: this is another machine" and "None" not in text
