"""The steps of ``node-agent preflight`` after a verdict, and their order; tests/gpu runs real programs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import child, files, status
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.net import reach
from image_builder.node.net.kube import KubeError
from image_builder.node.preflight import checks, command, model, report, smoke
from image_builder.node.preflight.model import FAILED, INCONCLUSIVE, PASSED, Check, Verdict
from image_builder.node.preflight.settings import Settings

BOOT = "11111111-2222-3333-4444-555555555555"
FABRIC = Check(smoke.ID, FAILED, "fabric.state", "why", "reboot")


@pytest.fixture
def places(tmp_path: Path) -> command.Places:
    """Make a node with GPUs that has joined."""
    for name in ("run", "etc"):
        (tmp_path / name).mkdir()
    kubeconfig = tmp_path / "kubelet.conf"
    kubeconfig.write_text("nothing that is understood")
    (tmp_path / "etc/preflight.json").write_text(json.dumps({"kubeconfig": str(kubeconfig)}))
    (tmp_path / "etc/gpu.json").write_text('{"expect": "gpus"}')
    (tmp_path / "boot_id").write_text(f"{BOOT}\n")
    (tmp_path / "release").write_text('IMAGE_BUILD="one"\n')
    return command.Places(
        run=tmp_path / "run",
        etc=tmp_path / "etc",
        release=tmp_path / "release",
        boot_id=tmp_path / "boot_id",
        attempts=tmp_path / "var/preflight.json",
    )


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_node_reports_before_it_starts_itself_again(
    places: command.Places, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    said: list[str] = []

    def send(_settings: Settings, found: Mapping[str, Any], _timeout: float) -> None:
        said.append(f"{found['code']}: {found['action']}")
        if is_refused:
            raise KubeError('nodes "n" not found', 404)

    def start(argv: Sequence[str], **_: object) -> None:
        said.append(" ".join(argv))

    monkeypatch.setattr(report, "_send", send)
    monkeypatch.setattr(child, "run", start)
    monkeypatch.setattr(smoke, "run", lambda *_: FABRIC)
    assert command.run(places) == 1
    assert said == ["fabric.state: reboot", "systemctl --no-block reboot"]
    assert (places.run / model.REPORTED).exists() is not is_refused


def test_a_node_that_has_not_joined_reports_to_nobody(
    places: command.Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    (places.etc / "preflight.json").write_text(json.dumps({"kubeconfig": "/nonexistent/kubelet.conf"}))
    started: list[Sequence[str]] = []
    monkeypatch.setattr(child, "run", lambda argv, **_: started.append(argv))
    monkeypatch.setattr(smoke, "run", lambda *_: FABRIC)
    assert command.run(places) == 1
    assert started == [places.reboot] and not (places.run / model.REPORTED).exists()


def test_the_early_report_has_an_end(
    places: command.Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resolver never answers, and the reboot waits for this report."""
    over = threading.Event()

    def send(*_: object) -> None:
        over.wait(60)
        raise KubeError("too late")

    monkeypatch.setattr(report, "_send", send)
    monkeypatch.setattr(report, "_EARLY_SECONDS", 0.01)
    (places.run / model.FILE).write_text("{}")
    before = set(threading.enumerate())
    try:
        report.try_now(Settings(kubeconfig=str(places.etc / "preflight.json")), places.run)
    finally:
        over.set()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert "no answer within 0.01 s" in "".join(capsys.readouterr())


# -- tested again ----------------------------------------------------------------------------------------------

TAINT = {"key": Settings().taint, "value": "pending", "effect": "NoSchedule"}
OTHERS = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {**TAINT, "effect": "PreferNoSchedule"}]
BUSY = Check(smoke.ID, INCONCLUSIVE, "procs.foreign", "pid 17")


class Api:
    """An API server that only returns the spec of a Node object; None: it doesn't answer."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        self.spec = spec

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def node(self, _name: str) -> dict[str, Any]:
        if self.spec is None:
            raise KubeError("no answer")
        return {"metadata": {"name": "n"}, "spec": self.spec}


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make all GPU tests pass; return those that were run."""
    made: list[str] = []

    def passes(argv: Sequence[str], _seconds: float, _boot_id: str) -> Check:
        made.append(argv[0])
        return Check(smoke.ID, PASSED)

    monkeypatch.setattr(smoke, "run", passes)
    monkeypatch.setattr(child, "run", lambda *_, **__: None)
    return made


def unsettled(places: command.Places, *checks: Check) -> None:
    verdict = Verdict(INCONCLUSIVE, checks[0].code, checks[0].reason)
    told = model.document(verdict, checks, boot_id=BOOT, image_build="one", started="then", seconds=1)
    (places.run / model.FILE).write_text(json.dumps(told))


@pytest.mark.parametrize("repeat", [command.run, command.again])
@pytest.mark.parametrize(("boot", "nonce"), [(BOOT, "0123456789abcdef"), (BOOT.replace("1", "0"), "")])
def test_a_verdict_after_a_retest_keeps_its_number(
    places: command.Places,
    monkeypatch: pytest.MonkeyPatch,
    tests: list[str],
    repeat: Callable[[command.Places], int],
    boot: str,
    nonce: str,
) -> None:
    """Or the gate would take the re-test for unanswered, and count it as failed."""
    monkeypatch.setattr(report, "connect", lambda *_: (Api({"taints": [TAINT]}), "n"))
    unsettled(places, BUSY)
    before = json.loads((places.run / model.FILE).read_bytes())
    (places.run / model.FILE).write_text(
        json.dumps({**before, "boot_id": boot, "retest": "0123456789abcdef"})
    )
    if repeat is command.again and not nonce:
        with pytest.raises(NodeError, match="the verdict is of boot"):
            repeat(places)
        return
    assert repeat(places) == 0 and tests and verdict_of(places) == (PASSED, "")
    found = json.loads((places.run / model.FILE).read_bytes())
    assert model.retest_of(model.message(found)) == nonce


def test_a_retests_number_survives_a_preflight_that_is_killed(
    places: command.Places, monkeypatch: pytest.MonkeyPatch, tests: list[str]
) -> None:
    unsettled(places, BUSY)
    before = json.loads((places.run / model.FILE).read_bytes())
    (places.run / model.FILE).write_text(json.dumps({**before, "retest": "0123456789abcdef"}))

    def killed(*_: object) -> Check:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smoke, "run", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                command.run(places)
            assert not (places.run / model.FILE).exists()
    assert command.run(places) == 0 and tests
    assert json.loads((places.run / model.FILE).read_bytes())["retest"] == "0123456789abcdef"


def verdict_of(places: command.Places) -> tuple[str, str]:
    found = json.loads((places.run / model.FILE).read_bytes())
    return found["state"], found["code"]


@pytest.mark.parametrize(
    ("spec", "is_tested"),
    [
        ({"taints": [*OTHERS, TAINT]}, True),
        ({"taints": OTHERS}, False),
        ({}, False),
        (None, False),
    ],
    ids=["out", "other taints", "admitted", "no answer"],
)
def test_gpus_are_not_put_under_load_again_where_pods_may_have_them(
    places: command.Places,
    monkeypatch: pytest.MonkeyPatch,
    tests: list[str],
    spec: dict[str, Any] | None,
    is_tested: bool,
) -> None:
    monkeypatch.setattr(report, "connect", lambda *_: (Api(spec), "n"))
    unsettled(places, BUSY)
    assert command.again(places) == 0
    assert bool(tests) is is_tested
    assert verdict_of(places) == ((PASSED, "") if is_tested else (INCONCLUSIVE, BUSY.code))


def test_gpus_of_a_node_that_has_not_joined_are_tested_again(
    places: command.Places, tests: list[str]
) -> None:
    (places.etc / "preflight.json").write_text(json.dumps({"kubeconfig": "/nonexistent/kubelet.conf"}))
    unsettled(places, BUSY)
    assert command.again(places) == 0
    assert tests and verdict_of(places) == (PASSED, "")


def test_a_gpu_that_a_person_must_look_at_is_not_acquitted_by_a_second_try(
    places: command.Places, tests: list[str]
) -> None:
    (places.etc / "preflight.json").write_text(json.dumps({"kubeconfig": "/nonexistent/kubelet.conf"}))
    unsettled(places, Check(smoke.ID, INCONCLUSIVE, "answer.wrong", "kat.mma", "inspect"))
    assert command.again(places) == 0
    assert not tests and verdict_of(places) == (INCONCLUSIVE, "answer.wrong")


def test_gpus_that_were_never_tested_let_no_admitted_node_pass(
    places: command.Places, monkeypatch: pytest.MonkeyPatch, tests: list[str]
) -> None:
    """The settings couldn't be read at boot; a person corrected them and admitted the node."""
    monkeypatch.setattr(report, "connect", lambda *_: (Api({}), "n"))
    unsettled(places, Check("settings", INCONCLUSIVE, "settings", "no JSON"))
    assert command.again(places) == 0
    assert not tests and verdict_of(places) == (INCONCLUSIVE, "gpu.untested")


def test_a_node_whose_disk_is_retried_is_judged_when_that_has_ended(
    places: command.Places, monkeypatch: pytest.MonkeyPatch, tests: list[str]
) -> None:
    """The engine waits for the disk: neither is a failure until the third attempt, and a fourth one still counts."""
    (places.etc / "disk.json").write_text("{}")
    (places.etc / "preflight.json").write_text('{"kubeconfig": "", "engine": "docker", "wait_seconds": 1}')
    answers = [ProgramError("no answer", 1, "")] * 3

    def ask(*_: object, **__: object) -> None:
        if answers:
            raise answers.pop()

    monkeypatch.setattr(child, "run", ask)
    verdicts = []
    for look in (command.run, command.again, command.again, command.again):
        section = {"state": "failed", "code": "disk.failed", "reason": "EIO"} if answers else {"state": "ok"}
        status.update("disk", section, places)
        assert look(places) == 0
        document = model.read_verdict(places)
        verdicts.append((document["state"], document["code"]))
        assert (places.run / model.UNSETTLED).exists() is (document["state"] != PASSED)
    retried = (INCONCLUSIVE, "disk.failed")
    assert verdicts == [retried, retried, (FAILED, "disk.failed"), (PASSED, "")]


def test_a_disk_that_fails_in_two_boots_condemns_the_machine(
    places: command.Places, monkeypatch: pytest.MonkeyPatch, tests: list[str]
) -> None:
    """A section is judged after its third attempt, when the node no longer reboots itself: somebody else does."""
    (places.etc / "disk.json").write_text("{}")
    (places.etc / "preflight.json").write_text('{"kubeconfig": "", "wait_seconds": 1}')
    actions = []
    for boot in (BOOT, BOOT.replace("1", "2"), BOOT.replace("1", "3")):
        places.boot_id.write_text(boot)
        files.remove_tree(places.run)
        places.run.mkdir()
        for look in (command.run, command.again, command.again, command.again):
            section = {"state": "failed", "code": "disk.failed", "reason": "EIO"}
            status.update("disk", section if boot != BOOT.replace("1", "3") else {"state": "ok"}, places)
            look(places)
        actions.append(model.read_verdict(places)["action"])
    assert actions == ["reboot", "replace", "none"]
    reboots = json.loads(places.attempts.read_bytes())["reboots"]
    assert [(reboot["code"], reboot["helped"]) for reboot in reboots] == [("disk.failed", True)]


@pytest.mark.parametrize(("wait_seconds", "asked"), [(10.0, 3), (3.0, 2), (1.0, 1)])
def test_what_does_not_answer_is_asked_again_as_long_as_there_is_time(
    monkeypatch: pytest.MonkeyPatch, wait_seconds: float, asked: int
) -> None:
    """The engine comes up after the second question, two seconds after the first."""
    clock, questions = [0.0], list[float]()

    def run(*_: object, **__: object) -> None:
        questions.append(clock[0])
        if len(questions) < 3:
            raise ProgramError("no answer", 1, "")

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    monkeypatch.setattr(reach, "together", lambda works, _: [work() for work in works.values()])
    monkeypatch.setattr(child, "run", run)
    (found,) = checks.reach_all(Settings(engine="docker", wait_seconds=wait_seconds))
    assert (found.state, len(questions)) == (PASSED if asked == 3 else FAILED, asked)
