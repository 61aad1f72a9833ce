"""A join that meets something unexpected (one that succeeds: tests/pools)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from image_builder.node.join import record
from image_builder.node.join.command import FINAL, Places, run


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
