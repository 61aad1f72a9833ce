"""A rollout's report as proof: only a green one of this very build is accepted; what it doesn't prove is named."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import PublishError, UsageError
from image_builder.gallery.proof import require
from image_builder.gallery.versions import Version
from image_builder.pool.run.records import Opened
from image_builder.pool.show.report import report
from tests.support.pools.simulated.rollouts import Faults, make, simulate

BUILD = "ab" * 32
VERSION = Version("2026.1125.0", BUILD[:12], False, "", "", "Succeeded", {})


@pytest.fixture(scope="module")
def green() -> dict[str, Any]:
    """Return the report of a simulated rollout in which all goes well."""
    progress, _, records = simulate(make(60), Faults())
    records = [
        record.model_copy(update={"builds": {"worker": BUILD}}) if isinstance(record, Opened) else record
        for record in records
    ]
    document: dict[str, Any] = json.loads(json.dumps(report(progress, records)))
    assert document["builds"] == {"worker": [BUILD]}
    return document


def _write(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document))
    return path


def test_a_green_report_of_the_build_is_a_proof(tmp_path: Path, green: dict[str, Any]) -> None:
    path = _write(tmp_path, green)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert require(path, VERSION) == (
        f"rolled out to 60 hosts, {green['verified']} of them verified: report sha256 {digest}"
    )
    assert len(require(path, VERSION)) <= 256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": "stopped", "reason": "too many failed"}, "the rollout is stopped: too many failed"),
        ({"state": "running"}, "the rollout is running"),
        ({"counts": {"ok": 59, "timeout": 1}}, "not every host is ok: 1 timeout"),
        ({"counts": {"ok": 59}}, "59 of 60 hosts are ok"),
        ({"hosts": 0, "counts": {}}, "it has no host"),
        ({"verified": 0}, "the suite verified no host"),
        ({"builds": {}}, f"its hosts were verified against build (none), not {BUILD[:12]}"),
        (
            {"builds": {"worker": ["cd" * 32, BUILD]}},
            f"its hosts were verified against build {BUILD[:12]}, {'cd' * 6}, not {BUILD[:12]}",
        ),
    ],
)
def test_each_thing_that_is_not_proven_is_a_reason(
    tmp_path: Path, green: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PublishError) as caught:
        require(_write(tmp_path, {**green, **changes}), VERSION)
    assert caught.value.message.splitlines()[1:] == [f"  {reason}"]


def test_all_reasons_are_told_at_once(tmp_path: Path, green: dict[str, Any]) -> None:
    changes = {"state": "interrupted", "counts": {"ok": 1, "unknown": 2}, "verified": 0, "builds": {}}
    with pytest.raises(PublishError) as caught:
        require(_write(tmp_path, {**green, **changes}), VERSION)
    assert len(caught.value.message.splitlines()) == 5


def test_a_version_that_names_no_build_has_no_proof(tmp_path: Path, green: dict[str, Any]) -> None:
    with pytest.raises(PublishError, match="not $"):
        require(_write(tmp_path, {**green, "builds": {}}), replace(VERSION, build=""))


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"hosts": "60"}, {"counts": None}, {"builds": {"worker": "x"}}]
)
def test_another_document_is_no_report(tmp_path: Path, green: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is no report of a rollout"):
        require(_write(tmp_path, {**green, **change}), VERSION)
    with pytest.raises(UsageError, match="No such file"):
        require(tmp_path / "none", VERSION)
    with pytest.raises(UsageError, match="is no report of a rollout"):
        require(_write(tmp_path, "{"), VERSION)
