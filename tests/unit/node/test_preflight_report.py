"""How long the report on a boot waits for the kubelet."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.net import fetch
from image_builder.node.net.fetch import Response
from image_builder.node.net.retry import Deadline
from image_builder.node.preflight import report
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
