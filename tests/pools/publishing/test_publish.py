"""`publish` with Azure's real SDK against the simulated service and its import host: from a build to a version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.arm.place import Place
from tests.support.arm.publisher import Publisher

pytestmark = [pytest.mark.root, pytest.mark.process]


def test_a_build_becomes_a_version_by_the_calls_of_its_plan(
    azure: Place, publish: Publisher, tmp_path: Path
) -> None:
    planned = publish("plan")
    assert azure.changes() == []
    result = publish("run")
    assert result["version"] == planned["version"]
    calls = [call for call in planned["calls"] if call["step"] not in ("pages", "footer")]
    assert [(c["method"], c["path"], c["body"]) for c in calls] == [
        (entry.method, entry.path, entry.body) for entry in azure.arm.log
    ]
    ranges = [tuple(r) for c in planned["calls"] if c["step"] in ("pages", "footer") for r in c["ranges"]]
    assert sorted((page.start, page.start + page.length) for page in azure.host.log) == sorted(ranges)
    assert azure.host.log[-1].length == 512
    properties = azure.arm.resources[result["version"].lower()].content["properties"]
    assert properties["publishingProfile"]["excludeFromLatest"] is True
    assert properties["safetyProfile"]["blockDeletionBeforeEndOfLife"] is True
    versions = publish("status")["versions"]
    assert [(v["name"], v["in_latest"], set(v["regions"].values())) for v in versions] == [
        (result["version"].rsplit("/", 1)[1], False, {"Completed"})
    ]
    before = azure.changes()
    assert publish("run")["version"] == result["version"]
    assert azure.changes() == before
