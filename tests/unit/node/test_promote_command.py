"""The effect of ``node-agent promote`` when there is nothing to promote (an actual promotion: tests/disk)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import status
from image_builder.node.data_root import Link
from image_builder.node.preload_settings import load_all
from image_builder.node.promote import command
from image_builder.node.promote.command import Places, _mark_damaged, _no_promotion, run
from image_builder.node.promote.plan import Item
from image_builder.node.promote.workers import ItemResult


def _node(tmp_path: Path, disk: dict[str, Any], **promote: Any) -> Places:
    """Make a node with one layer in the store, and a data root that the seed has set aside."""
    places = Places(store=tmp_path / "store", run=tmp_path / "run", etc=tmp_path / "etc")
    link = tmp_path / "disk/docker/overlay2/one/diff"
    aside = tmp_path / "disk/.node/trash/docker.0/overlay2/two"
    for folder in (link.parent, aside, places.etc):
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
    (places.etc / "preload.json").write_text(json.dumps(document))
    status.update("disk", disk, places)
    return places


@pytest.mark.parametrize(
    ("disk", "promote", "code"),
    [
        ({"state": "ok"}, {"enabled": False}, None),
        (
            {"state": "degraded", "code": "disk.none", "reason": "none", "action": "none"},
            {},
            "promote.no-disk",
        ),
        ({"state": "failed", "code": "program", "reason": "none"}, {}, "promote.no-disk"),
    ],
    ids=["switched off", "no local disk", "no decision"],
)
def test_what_was_set_aside_goes_also_where_nothing_is_promoted(
    disk: dict[str, Any], promote: dict[str, Any], code: str | None, tmp_path: Path
) -> None:
    places = _node(tmp_path, disk, **promote)
    assert run(places) == 0
    assert list((tmp_path / "disk/.node/trash").iterdir()) == []
    assert (tmp_path / "disk/docker/overlay2/one/diff").is_symlink()
    section = status.read(places.run)["promotion"]
    assert section.get("code") == code and "trash" not in section


def test_a_disk_that_is_used_beside_others_is_one_to_promote_to(tmp_path: Path) -> None:
    disk = {"state": "degraded", "code": "disk.more", "reason": "nvme7n1: not used", "action": "reuse"}
    places = _node(tmp_path, disk)
    assert _no_promotion(load_all(places.etc), places) == {}


@pytest.mark.parametrize("reads", [True, False], ids=["it stalled once", "it is damaged"])
def test_a_layer_is_read_again_before_the_store_is_condemned(reads: bool, tmp_path: Path) -> None:
    places = _node(tmp_path, {"state": "ok"})
    layer = tmp_path / "store/layers/abc"
    if reads:
        (layer / "usr").mkdir(parents=True)
        (layer / "usr/file").write_bytes(bytes(3 << 20))
        (layer / "usr/link").symlink_to("/nowhere")
        os.mkfifo(layer / "usr/fifo")
    item = Item(Link(tmp_path / "link", layer, "sha256:abc", True), 1, 0)
    _mark_damaged(
        load_all(places.etc),
        "feed",
        item,
        ItemResult(0, "promote.store", "usr/file: Input/output error", True),
    )
    mark = tmp_path / "disk/.node/store-damaged.json"
    assert mark.exists() is not reads
    if not reads:
        assert json.loads(mark.read_text()) == {
            "store": "feed",
            "layer": "sha256:abc",
            "path": str(layer),
            "reason": "usr/file: Input/output error",
        }


def test_trash_is_kept_by_a_boot_whose_kubelet_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = _node(tmp_path, {"state": "ok"}, enabled=False)
    monkeypatch.setattr(command, "_wait", lambda *_: False)
    assert run(places) == 0
    kept = tmp_path / "disk/.node/trash/docker.0"
    assert (kept / "overlay2/two/file").read_bytes() == b"x"
    section = status.read(places.run)["promotion"]
    assert section["trash"] == [f"{kept}: kept, since this boot's kubelet did not answer"]
