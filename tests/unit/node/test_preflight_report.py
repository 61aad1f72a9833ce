"""The report on a boot: how long it waits for the kubelet, and when it is made again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.net import fetch
from image_builder.node.net.fetch import Response
from image_builder.node.net.kube import KubeError, condition
from image_builder.node.net.retry import Deadline
from image_builder.node.preflight import model, report
from image_builder.node.preflight.settings import Settings


@pytest.mark.parametrize(
    ("has_kubeconfig", "answer"), [(False, 200), (True, 503), (True, 0)], ids=["not joined", "ill", "down"]
)
def test_a_kubelet_that_never_answers_is_not_waited_for_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_kubeconfig: bool, answer: int
) -> None:
    hours = itertools.count()

    def ask(_url: str, **_: object) -> Response:
        if not answer:
            raise ConnectionRefusedError("down")
        return Response(answer, b"")

    monkeypatch.setattr(fetch, "ask", ask)
    kubeconfig = tmp_path / "kubelet.conf"
    if has_kubeconfig:
        kubeconfig.touch()
    slept: list[float] = []
    with pytest.raises(NodeError, match="did not answer within 3600 s"):
        report._await_kubelet(
            Settings(kubeconfig=str(kubeconfig)),
            Deadline(3600.0, clock=lambda: next(hours) * 600.0, sleep=slept.append),
        )
    assert len(slept) == 6


BOOT = "11111111-2222-3333-4444-555555555555"


class Api:
    """An API server with one Node object; None: it has been deleted, and is registered before the next request."""

    def __init__(self) -> None:
        self.conditions: list[dict[str, str]] | None = []
        self.requests: list[str] = []

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _answer(self, method: str) -> list[dict[str, str]]:
        self.requests.append(method)
        if self.conditions is None:
            self.conditions = []
            raise KubeError("there is no such node", 404)
        return self.conditions

    def node(self, _name: str) -> dict[str, Any]:
        # A kubelet has just registered: its Node object may have no conditions yet.
        conditions = self._answer("GET")
        return {"status": {"conditions": conditions} if conditions else {}}

    def patch_condition(
        self, _node: str, kind: str, status: str, reason: str, message: str, labels: dict[str, str]
    ) -> None:
        assert labels
        self._answer("PATCH").append(condition(kind, status, reason, message))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api()
    monkeypatch.setattr(report, "connect", lambda *_: (api, "n"))
    monkeypatch.setattr(fetch, "ask", lambda *_, **__: Response(200, b"ok"))
    return api


def verdict(reason: str, started: str = "then") -> dict[str, Any]:
    failed = model.Verdict(model.FAILED, "gpu.lost", reason)
    return model.document(failed, [], boot_id=BOOT, image_build="one", started=started, seconds=1)


def node(tmp_path: Path, document: dict[str, Any]) -> report.Places:
    """Return the places of a node that has joined, with this verdict."""
    run, etc = tmp_path / "run", tmp_path / "etc"
    for folder in (run, etc):
        folder.mkdir()
    (run / model.FILE).write_text(json.dumps(document))
    (tmp_path / "boot_id").write_text(BOOT)
    (tmp_path / "kubelet.conf").touch()
    settings = {"kubeconfig": str(tmp_path / "kubelet.conf"), "jitter_seconds": 0}
    (etc / "preflight.json").write_text(json.dumps(settings))
    return report.Places(run, etc, boot_id=tmp_path / "boot_id", sleep=lambda _: None)


@pytest.mark.parametrize("reason", ["why", "a long reason " * 100], ids=["short", "cut"])
def test_verdict_is_reported_again_only_to_a_new_node_object(tmp_path: Path, api: Api, reason: str) -> None:
    places = node(tmp_path, verdict(reason))
    assert report.run(places) == 0 and api.requests == ["PATCH"]
    assert report.run(places) == 0 and api.requests == ["PATCH", "GET"]
    api.conditions = None
    assert report.run(places) == 0
    assert api.requests == ["PATCH", "GET", "GET", "GET", "PATCH"]
    assert api.conditions and api.conditions[0]["type"] == model.CONDITION


def test_verdict_of_a_retest_is_not_overwritten_by_an_earlier_report(
    tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server is away; while the report waits for it, the GPUs are tested again."""
    places = node(tmp_path, verdict("before"))
    later = verdict("after", "later")

    def refuse(*_: object) -> None:
        (places.run / model.FILE).write_text(json.dumps(later))
        monkeypatch.setattr(report, "connect", lambda *_: (api, "n"))
        raise KubeError("no answer", 503)

    monkeypatch.setattr(report, "connect", refuse)
    assert report.run(places) == 0
    assert api.conditions and [each["message"] for each in api.conditions] == [model.message(later)]
    assert json.loads((places.run / model.REPORTED).read_bytes())["started"] == "later"
