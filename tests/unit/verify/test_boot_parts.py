"""The steps of a boot on a machine that answers as told, in simulated time; what a run of the suite leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from image_builder.bake.verification import passed_verification
from image_builder.errors import BootError, UsageError, VerifyError
from image_builder.events import Monitor
from image_builder.machine.ssh import SshTarget
from image_builder.machine.vm import Vm
from image_builder.settings import Settings
from image_builder.system import process
from image_builder.verify import boot as booting
from image_builder.verify import runner
from image_builder.verify.boot import POD_SECONDS, SYSTEM_SECONDS
from image_builder.verify.result import Check, SuiteResult
from image_builder.verify.stage import run as stage
from tests.unit.verify.test_verification_report import PASSED, junit, lines


class Machine:
    """A machine that gives its answers one after the other, the last again and again; each takes ``seconds``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str, seconds: float = 5.0) -> None:
        self.now, self.seconds, self.answers = 0.0, seconds, list(answers)
        self.ran: list[Sequence[str]] = []
        self.files: dict[str, tuple[bytes, int]] = {}
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(booting, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, argv: Sequence[str], **_: object) -> SimpleNamespace:
        self.ran.append(argv)
        self.now += self.seconds
        return SimpleNamespace(stdout=self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    def put(self, data: bytes, path: str, mode: int = 0o644) -> None:
        self.files[path] = data, mode

    @property
    def ssh(self) -> SshTarget:
        return cast(SshTarget, self)


@pytest.mark.parametrize(
    ("answers", "state", "looks"),
    [(["running\n"], "running", 1), (["", "", "degraded\n"], "degraded", 3), ([""], "starting", 241)],
)
def test_a_system_that_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], state: str, looks: int
) -> None:
    machine, waits = Machine(monkeypatch, *answers), list[int]()
    assert booting.wait_for_system(machine.ssh, lambda: waits.append(1)) == state
    assert len(machine.ran) == looks and len(waits) == looks - 1
    assert machine.now <= SYSTEM_SECONDS + 5


VARIABLES: dict[str, Any] = {
    "image_layers": ["system", "container_runtime", "kubernetes"],
    "container_runtime_pause_image": "pause:1",
    "container_runtime_engine": "containerd",
    "kubelet_static_pod_path": "/etc/pods",
}


def _start(machine: Machine, **variables: Any) -> float | None:
    vm = cast(Vm, SimpleNamespace(seconds=12.34))
    return booting.start_pod(vm, machine.ssh, {**VARIABLES, **variables}, Monitor(), lambda ref: ref.encode())


@pytest.mark.parametrize(
    ("layers", "is_given", "has_pod"),
    [
        (["system"], False, False),
        (["system", "container_runtime"], True, False),
        (VARIABLES["image_layers"], True, True),
    ],
)
@pytest.mark.parametrize("preload", [[], [{"ref": "other"}], [{"ref": "pause:1"}]])
def test_a_node_gets_a_pod_and_the_image_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
    layers: list[str],
    is_given: bool,
    has_pod: bool,
    preload: list[dict[str, str]],
) -> None:
    machine = Machine(monkeypatch, "7 8\n")
    seconds = _start(machine, image_layers=layers, image_preload=preload)
    assert (seconds == 12.3) is has_pod and (seconds is None) is not has_pod
    pod = f"/etc/pods/{booting.POD_NAME}.json"
    is_given = is_given and {"ref": "pause:1"} not in preload
    assert set(machine.files) == {*(["/var/tmp/pause.tar"] * is_given), *([pod] * has_pod)}
    if has_pod:
        data, mode = machine.files[pod]
        assert b"pause:1" in data and mode == 0o600
    if is_given:
        assert ["rm", "/var/tmp/pause.tar"] in machine.ran


@pytest.mark.parametrize(
    ("answers", "is_up"), [(["", "7\n", "7 8\n"], True), (["", "7 8 9\n"], True), (["7\n"], False)]
)
def test_a_pod_has_two_processes_in_time(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], is_up: bool
) -> None:
    machine = Machine(monkeypatch, *answers, seconds=0.0)
    if is_up:
        _start(machine, image_preload=[{"ref": "pause:1"}])
        assert machine.now == len(answers) - 1
        return
    with pytest.raises(BootError):
        _start(machine, image_preload=[{"ref": "pause:1"}])
    assert machine.now == POD_SECONDS + 1


@pytest.mark.parametrize(("answer", "is_on"), [("6 0 0 0 1\n", True), ("6 0 0 0 0\n", False), ("", False)])
def test_secure_boot_is_as_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, answer: str, is_on: bool
) -> None:
    machine = Machine(monkeypatch, answer)
    booting._require_secure_boot(machine.ssh, is_on)
    with pytest.raises(BootError):
        booting._require_secure_boot(machine.ssh, not is_on)


def test_the_size_of_a_disk_is_the_machines(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"QFI\xfa".ljust(77, b"\1"))
    (tmp_path / "qcow2").write_bytes(b"QFI\xfb".ljust(24, b"\1") + (5 << 30).to_bytes(8, "big") + b"more")
    assert [booting.virtual_size(tmp_path / name) for name in ("raw", "qcow2")] == [77, 5 << 30]


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    facts: dict[str, Any] = dict.fromkeys(runner.FACTS, "x")
    runner.write_facts(tmp_path / "facts.json", facts)
    assert runner.read_facts(tmp_path / "facts.json") == facts
    runner.write_facts(tmp_path / "facts.json", {"image": "x"})
    with pytest.raises(UsageError):
        runner.read_facts(tmp_path / "facts.json")


def test_a_run_without_records_shows_the_end_of_its_output(tmp_path: Path) -> None:
    output = "".join(f"line {number}\n" for number in range(100))
    with pytest.raises(VerifyError) as error:
        runner.read_results(
            tmp_path, 3, target="t", marker="offline", seconds=1.0, output=output, log=tmp_path / "log"
        )
    shown = error.value.message.splitlines()
    assert len(shown) == 1 + process.TAIL_LINES and shown[-1] == "  line 99"


def test_a_run_leaves_its_result_and_no_report(tmp_path: Path) -> None:
    (tmp_path / "suite.jsonl").write_text("\n".join(lines(PASSED)))
    (tmp_path / "junit.xml").write_text(junit(PASSED))
    found = runner.read_results(
        tmp_path, 0, target="sandbox:/x", marker="offline", seconds=1.0, output="", log=tmp_path / "log"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"junit.xml", "verify.json"}
    assert json.loads((tmp_path / "verify.json").read_text()) == found.as_json()
    assert (found.target, len(found.passed)) == ("sealed tree", 2)


def test_a_stage_has_the_suites_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SuiteResult("t", "offline", (Check("test_a.py::test_a", "passed", 1.0),) * 3, (), 1.2345)
    options = {"build_id": "b", "packages": [], "preload": []}
    ctx: Any = SimpleNamespace(
        lowers=[],
        work=tmp_path,
        product=tmp_path,
        log=tmp_path / "log",
        plan=SimpleNamespace(options=options),
    )
    ctx.definition, ctx.settings = SimpleNamespace(checks=None), Settings(store=tmp_path)
    monkeypatch.setattr(stage, "open_root", lambda *_: nullcontext(SimpleNamespace(path=tmp_path)))
    monkeypatch.setattr(stage, "definition_facts", lambda *_: dict.fromkeys(runner.FACTS, "x"))
    monkeypatch.setattr(stage, "observe_suite", lambda *_, **__: found)
    assert stage.run(ctx) == {"checks": 3, "not_applicable": 0}
    assert runner.read_facts(tmp_path / "facts.json")["image"] == "x"
    found_verdict = passed_verification(tmp_path)
    assert (found_verdict.passed, found_verdict.seconds) == (3, 1.234)
    monkeypatch.setattr(stage, "observe_suite", lambda *_, **__: replace(found, checks=()))
    with pytest.raises(VerifyError):
        stage.run(ctx)


OWN = Check("test_own.py::test_banner", "passed", 1.0, is_own=True, only_booted=True)
BLIND = Check("test_own.py::test_banner[0-broken]", "passed", 1.0)
RED = replace(BLIND, outcome="failed", exception="AssertionError")


def _prove(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *checks: Check,
    broken: Check = RED,
    has_checks: bool = True,
) -> list[tuple[object, ...]]:
    """Prove the checks of a machine on which ``broken`` is how a broken one's check ends; return the runs of it."""
    runs: list[tuple[object, ...]] = []

    def observe(target: str, _: Path, records: Path, *, marker: str, **options: Any) -> SuiteResult:
        assert records.is_dir()
        runs.append((target, marker, records, options["mutations"].parent))
        return SuiteResult(target, marker, (broken,), (), 1.0)

    monkeypatch.setattr(runner, "observe_suite", observe)
    settings = Settings(store=folder, checks=folder / "checks" if has_checks else None)
    ssh = cast(SshTarget, SimpleNamespace(url="ssh://node"))
    suite = SuiteResult("t", "booted", checks, (), 1.0)
    booting._prove(ssh, suite, folder / "facts.json", folder, settings, Monitor())
    return runs


def test_a_booted_machine_is_broken_for_the_users_own_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("broken:ssh://node", "booted", tmp_path / "mutants", tmp_path / "checks")
    sealed = replace(OWN, name="test_own.py::test_sealed", only_booted=False)
    assert _prove(tmp_path, monkeypatch, sealed, OWN) == [run]
    with pytest.raises(VerifyError) as error:
        _prove(tmp_path, monkeypatch, OWN, broken=BLIND)
    assert BLIND.name in error.value.message


@pytest.mark.parametrize(
    ("checks", "has_checks"),
    [
        ([replace(OWN, is_own=False)], True),
        ([replace(OWN, only_booted=False)], True),
        ([OWN, replace(OWN, name="test_a.py::test_a", outcome="failed", is_own=False)], True),
        ([OWN], False),
    ],
    ids=["none of their own", "none for booted machines", "one failed", "no folder of checks"],
)
def test_a_booted_machine_is_broken_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: list[Check], has_checks: bool
) -> None:
    assert _prove(tmp_path, monkeypatch, *checks, broken=BLIND, has_checks=has_checks) == []
