"""What ``node-agent preflight`` does with a verdict, and in which order; real programs are in tests/integration."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import programs
from image_builder.node.kube import KubeError
from image_builder.node.preflight import command, model, report, smoke
from image_builder.node.preflight.model import FAILED, Check
from image_builder.node.preflight.settings import Settings

BOOT = "11111111-2222-3333-4444-555555555555"
FABRIC = Check(smoke.ID, FAILED, "fabric.state", "why", "reboot")


@pytest.fixture
def places(tmp_path: Path) -> command.Places:
    """A node with GPUs that has joined."""
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
    monkeypatch.setattr(programs, "run", start)
    monkeypatch.setattr(smoke, "run", lambda *_: FABRIC)
    assert command.run(places) == 1
    assert said == ["fabric.state: reboot", "systemctl --no-block reboot"]
    assert (places.run / model.REPORTED).exists() is not is_refused


def test_a_node_that_has_not_joined_reports_to_nobody(
    places: command.Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    (places.etc / "preflight.json").write_text(json.dumps({"kubeconfig": "/nonexistent/kubelet.conf"}))
    started: list[Sequence[str]] = []
    monkeypatch.setattr(programs, "run", lambda argv, **_: started.append(argv))
    monkeypatch.setattr(smoke, "run", lambda *_: FABRIC)
    assert command.run(places) == 1
    assert started == [places.reboot] and not (places.run / model.REPORTED).exists()


def test_the_early_report_has_an_end(
    places: command.Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resolver that never answers; the reboot waits for this."""
    over = threading.Event()

    def send(*_: object) -> None:
        over.wait(60)
        raise KubeError("too late")

    monkeypatch.setattr(report, "_send", send)
    monkeypatch.setattr(report, "_EARLY_SECONDS", 0.01)
    (places.run / model.FILE).write_text("{}")
    try:
        report.try_now(Settings(kubeconfig=str(places.etc / "preflight.json")), places.run)
    finally:
        over.set()
    assert "no answer within 0.01 s" in "".join(capsys.readouterr())
