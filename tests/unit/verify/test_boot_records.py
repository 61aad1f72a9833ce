"""The records of a booted verification: they exist only together, and only if all of it passed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from image_builder.errors import BootError, ImageBuilderError, UsageError, VerifyError
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.verify import boot as booting
from image_builder.verify.boot import boot
from image_builder.verify.result import Check, SuiteResult
from image_builder.verify.runner import clear_records

SUITE = SuiteResult("ssh://x", "booted", (Check("test_a.py::test_a", "passed", 1.0),), (), 1.0)
FACTS = {"image": "worker", "build_id": "0" * 64, "variables": {}, "packages": []}


class _Vm:
    """A machine that is up at once and powers itself off."""

    running = False
    accelerator = "none"
    seconds = seconds_to_ssh = 1.0
    start: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, options: object, work: Path, _kept: Path) -> None:
        self.options, self.console_log = options, work / "console.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_for_ssh(self, **_: object) -> object:
        return SimpleNamespace(address=SimpleNamespace(command=[]))

    def problems(self) -> list[str]:
        return []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build's directory, and a program whose machine passes every check."""

    def run_suite(_ssh: object, _facts: Path, out: Path, *_: object) -> SuiteResult:
        (out / "verify.json").write_text(json.dumps(SUITE.as_json()))
        return SUITE

    monkeypatch.setattr(booting, "Vm", _Vm)
    monkeypatch.setattr(booting, "_require_secure_boot", lambda *_: None)
    monkeypatch.setattr(booting, "wait_for_system", lambda *_, **__: "running")
    monkeypatch.setattr(booting, "start_pod", lambda *_: None)
    monkeypatch.setattr(booting, "_run_suite", run_suite)
    monkeypatch.setattr(booting, "_prove", lambda *_: None)
    (tmp_path / "worker.raw").touch()
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    return tmp_path


def _boot(place: Path, *, verify: bool = True, facts: Path | None = None, keep: bool = False) -> None:
    settings = Settings(store=place / "store", checks=None)
    more: dict[str, Any] = {"settings": settings, "monitor": Monitor(), "pause_archive": lambda _: b""}
    boot(place / "worker.raw", verify=verify, out_dir=place / "out", facts=facts, keep=keep, **more)


def _records(place: Path) -> set[str]:
    return {path.name for path in (place / "out").glob("*.json")}


def _raise(error: ImageBuilderError) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_boot_that_passed_has_the_suites_result_in_both_records(place: Path) -> None:
    _boot(place)
    record = json.loads((place / "out/boot.json").read_text())
    assert record["suite"] == json.loads((place / "out/verify.json").read_text())


def test_a_plain_boot_takes_an_earlier_verification_away(place: Path) -> None:
    _boot(place)
    _boot(place, verify=False)
    assert _records(place) == {"boot.json"}


def test_a_boot_that_fails_takes_an_earlier_verification_away(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _boot(place)
    monkeypatch.setattr(_Vm, "start", staticmethod(_raise(BootError("QEMU didn't start"))))
    with pytest.raises(BootError):
        _boot(place)
    assert _records(place) == set()


def test_a_boot_whose_own_checks_are_unproven_has_no_record(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(booting, "_prove", _raise(VerifyError("nothing shows that they can fail")))
    with pytest.raises(VerifyError, match="can fail"):
        _boot(place)
    assert _records(place) == {"verify.json"}


@pytest.mark.parametrize(
    ("verify", "keep", "proven"), [(True, False, [SUITE]), (True, True, []), (False, False, [])]
)
def test_a_verified_machine_is_broken_unless_it_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch, verify: bool, keep: bool, proven: list[SuiteResult]
) -> None:
    suites: list[SuiteResult] = []
    monkeypatch.setattr(booting, "_prove", lambda _ssh, suite, *_: suites.append(suite))
    _boot(place, verify=verify, keep=keep)
    assert suites == proven


def test_clearing_leaves_no_record_of_an_earlier_run(tmp_path: Path) -> None:
    for name in ("verify.json", "junit.xml", "suite.jsonl", "suite.log"):
        (tmp_path / name).touch()
    clear_records(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["suite.log"]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        ("{ torn", "not JSON"),
        ("[]", "it lacks image"),
        (b"\xff", "not JSON"),
        ('{"image": "worker"}', "it lacks build_id, variables, packages"),
    ],
)
def test_facts_that_are_none_are_a_mistake_of_the_command_line(
    place: Path, content: str | bytes | None, reason: str, verify: bool
) -> None:
    facts = place / "other.json"
    if content is not None:
        facts.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=rf"other\.json: .*{reason}"):
        _boot(place, facts=facts, verify=verify)


def test_a_torn_file_next_to_the_disk_is_named(place: Path) -> None:
    (place / "facts.json").write_text("{ torn")
    with pytest.raises(UsageError, match=r"facts\.json: not JSON"):
        _boot(place, verify=False)
    (place / "facts.json").unlink()
    _boot(place, verify=False)
    with pytest.raises(BootError, match="says what"):
        _boot(place)
