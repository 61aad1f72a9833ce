"""What ``node-agent promote`` does where nothing is to be promoted (a promotion itself: tests/integration)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import status
from image_builder.node.promote.command import run
from image_builder.node.promote.settings import Places


def _node(tmp_path: Path, disk: dict[str, Any], **promote: Any) -> Places:
    """Make a node with one layer in the store, and a data root that the seed has set aside."""
    places = Places(store=tmp_path / "store", status=tmp_path / "run", settings=tmp_path / "etc")
    link = tmp_path / "disk/docker/overlay2/one/diff"
    aside = tmp_path / "disk/.node/trash/docker.0/overlay2/two"
    for folder in (link.parent, aside, places.settings):
        folder.mkdir(parents=True)
    link.symlink_to(tmp_path / "store/layers/abc")
    (aside / "file").write_bytes(b"x")
    document = {
        "engine": "docker",
        "data_root": str(tmp_path / "disk/docker"),
        "mount_point": str(tmp_path / "disk"),
        "kubelet_healthz": "",
        "promote": {"settle_seconds": 0, "wait_seconds": 0, **promote},
    }
    (places.settings / "preload.json").write_text(json.dumps(document))
    status.update("disk", disk, directory=places.status, settings=places.settings)
    return places


@pytest.mark.parametrize(
    ("disk", "promote", "code"),
    [
        ({"state": "ok"}, {"enabled": False}, None),
        ({"state": "degraded", "code": "disk.none", "reason": "none"}, {}, "promote.no-disk"),
    ],
    ids=["switched off", "no local disk"],
)
def test_what_was_set_aside_goes_also_where_nothing_is_promoted(
    disk: dict[str, Any], promote: dict[str, Any], code: str | None, tmp_path: Path
) -> None:
    places = _node(tmp_path, disk, **promote)
    assert run(places) == 0
    assert list((tmp_path / "disk/.node/trash").iterdir()) == []
    assert (tmp_path / "disk/docker/overlay2/one/diff").is_symlink()
    section = status.read(places.status)["promotion"]
    assert section.get("code") == code and "trash" not in section
