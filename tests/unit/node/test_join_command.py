"""A join that meets something unexpected (one that succeeds: tests/pools)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from image_builder.node.join import kubelet, record
from image_builder.node.join.codes import JoinError
from image_builder.node.join.command import FINAL, Joining, Places, _is_member, run
from image_builder.node.join.identity import Identity
from image_builder.node.net.kubeconfig import Access
from image_builder.node.net.retry import Deadline


def test_what_nobody_expected_is_recorded_as_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = Places(
        run=tmp_path / "run", etc=tmp_path, boot_id=tmp_path / "boot_id", firmware=tmp_path / "none"
    )
    places.boot_id.write_text("11111111-2222-3333-4444-555555555555\n")
    # No port has this number, and nothing checks that before the request.
    settings = {"imds": "http://127.0.0.1:99999", "custom_data": "/nonexistent", "file": "/nonexistent"}
    (tmp_path / "join.json").write_text(json.dumps(settings))
    assert run(places) == 1
    found = record.read(places.run)
    assert (found["state"], found["phase"], found["code"]) == ("failed", "identity", 1)
    assert found["reason"].startswith("ValueError, a bug")
    told = capsys.readouterr().err
    assert "in ask" in told and "99999" not in told  # where it failed, but no values


def test_settings_that_are_wrong_are_the_images_fault(tmp_path: Path) -> None:
    places = Places(run=tmp_path / "run", etc=tmp_path, boot_id=tmp_path / "boot_id")
    places.boot_id.write_text("11111111-2222-3333-4444-555555555555\n")
    (tmp_path / "join.json").write_text('{"speed": 1}')
    assert run(places) == FINAL
    found = record.read(places.run)
    assert (found["phase"], found["code"]) == ("identity", 16)
    assert found["reason"] == "join.json: speed is not a known key"


@pytest.mark.parametrize(("server", "node"), [("https://other", "us"), ("https://api", "another")])
def test_a_certificate_of_another_cluster_or_node_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, node: str
) -> None:
    joining = Joining(Places(run=tmp_path, etc=tmp_path), "boot", 0.0)
    config: Any = SimpleNamespace(server="https://api", ca="")
    joining.identity_ = cast(Identity, SimpleNamespace(name="us", config=config))
    monkeypatch.setattr(
        kubelet, "membership", lambda _: cast(Access, SimpleNamespace(server=server, node=node))
    )
    with pytest.raises(JoinError) as refused:
        _is_member(joining, Deadline(0.0))
    assert refused.value.number == 65
