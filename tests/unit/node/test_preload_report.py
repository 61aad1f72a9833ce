"""``node-agent status``: what is reported about a node, from its status file and the names in its data root."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import report
from image_builder.node.data_root import Links, scan
from image_builder.node.status import Places
from image_builder.node.store import Image, chain
from tests.unit.node.stores import manifest

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
OK = {"state": "ok", "images": 1, "seeded": 1, "there": 0, "loaded": {}, "problems": [], "seconds": 0.07}
STATUS: dict[str, Any] = {
    "format": 1,
    "ready": True,
    "disk": {
        "state": "degraded",
        "code": "disk.foreign",
        "reason": "an ext4 filesystem that is not ours",
        "action": "none",
        "mount_point": "/mnt/local",
        "members": [],
        "seconds": 0.2,
    },
    "preload": OK,
    "promotion": {"state": "ok", "done": 3, "total": 9, "bytes": 1_500_000_000, "seconds": 12},
}
IMAGE = Image("two:1", "", "", "", False, (f"sha256:{A}", f"sha256:{B}"), mode="reference")


def links(*served: str, broken: tuple[str, ...] = ()) -> Links:
    return Links(frozenset(served), frozenset(broken), 5)


def test_layers_of_docker_are_looked_for_one_by_one(tmp_path: Path) -> None:
    chains = [layer.chain.removeprefix("sha256:") for layer in chain(IMAGE.diff_ids)]
    for number, name in enumerate(chains):
        record = tmp_path / "image/overlay2/layerdb/sha256" / name
        record.mkdir(parents=True)
        (record / "cache-id").write_text(f"cache{number}")
        (tmp_path / f"overlay2/cache{number}/diff").mkdir(parents=True)
    assert report.serve(IMAGE, scan(tmp_path, "docker"), OK).source == "local disk"
    (tmp_path / "overlay2/cache1/diff").rename(tmp_path / "overlay2/cache1/elsewhere")
    served = report.serve(IMAGE, scan(tmp_path, "docker"), OK)
    assert (served.source, served.local) == ("MISSING: 1 layers are nowhere", 1)


@pytest.mark.parametrize("engine", ["docker", "containerd"])
def test_an_image_of_which_nothing_is_anywhere_is_missing(tmp_path: Path, engine: str) -> None:
    served = report.serve(IMAGE, scan(tmp_path, engine), OK)
    assert (served.source, served.local) == ("MISSING: 2 layers are nowhere", 0)


@pytest.mark.parametrize(
    ("found", "preload", "source", "from_store"),
    [
        pytest.param(links(A, B, C), OK, "preload store", 2, id="all of it linked"),
        pytest.param(links(A), OK, "local disk and preload store", 1, id="half promoted"),
        pytest.param(links(C), OK, "local disk", 0, id="promoted"),
        pytest.param(links(), {**OK, "loaded": {"two:1": "is missing"}}, "archive", 0, id="loaded"),
        pytest.param(links(), {**OK, "problems": ["two:1 is missing"]}, "MISSING", 0, id="missing"),
        pytest.param(links(), {**OK, "problems": ["two:10 is missing"]}, "local disk", 0, id="another is"),
        pytest.param(links(A, B, broken=(B,)), OK, "LOST: 1 layers lead nowhere", 2, id="no store"),
        pytest.param(links(), {}, "not looked at yet", 0, id="before the engine"),
    ],
)
def test_image_is_served_from(found: Links, preload: dict[str, Any], source: str, from_store: int) -> None:
    served = report.serve(IMAGE, found, preload)
    assert (served.source, served.store, served.local) == (source, from_store, 2 - from_store)


def test_report_for_people() -> None:
    text = report.text(report.report(STATUS, [IMAGE], links(A)))
    assert text == (
        "ready\n"
        "\n"
        "           state     seconds  what and why\n"
        "disk       degraded  0.2      disk.foreign: an ext4 filesystem that is not ours; none /mnt/local\n"
        "preload    ok        0.07     1 images: 1 seeded, 0 there already, 0 from the archive\n"
        "promotion  ok        12       3 of 9 copied to the local disk, 1.50 GB\n"
        "nothing is known yet of: seed\n"
        "\n"
        "image  mode       from the store  from the disk  served from\n"
        "two:1  reference  1               1              local disk and preload store\n"
        "\n"
        "layers in the data root: 1 links into the preload store (0 lead nowhere), 5 directories\n"
        "pods with hostUsers: false are not supported before the promotion is done\n"
    )


def test_user_namespaces_wait_for_the_promotion() -> None:
    assert report.report(STATUS, [IMAGE], links(A))["user_namespaces"] is False
    promoted = report.report(STATUS, [IMAGE], links())
    assert promoted["user_namespaces"] is True
    assert "hostUsers" not in report.text(promoted)


def test_report_names_the_disks() -> None:
    disk = {
        "state": "ok",
        "action": "format",
        "filesystem": "xfs",
        "mount_point": "/mnt/local",
        "members": [{"serial": "S1", "bytes": 1_920_000_000_000}],
    }
    text = report.text(report.report({"ready": False, "disk": disk}, [], links()))
    assert text.startswith("NOT READY\n")
    assert "format xfs /mnt/local S1 (1920 GB)\n" in text


@pytest.mark.parametrize("ready", [True, False])
def test_status_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str], ready: bool) -> None:
    (tmp_path / "status.json").write_text(json.dumps({**STATUS, "ready": ready}))
    (tmp_path / "store.json").write_text(json.dumps(manifest(images=[{**asdict(IMAGE), "bytes": 0}])))
    store, places = tmp_path / "store.json", Places(tmp_path, tmp_path)
    assert report.run(as_json=True, store=store, places=places) == (0 if ready else 1)
    known = json.loads(capsys.readouterr().out)
    assert known["ready"] is ready
    assert known["disk"] == STATUS["disk"]
    assert known["images"][0]["ref"] == "two:1"
    assert report.run(as_json=False, store=store, places=places) == (0 if ready else 1)
    assert capsys.readouterr().out.startswith("ready\n" if ready else "NOT READY\n")


def test_node_of_which_nothing_is_known_is_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.run(as_json=False, store=tmp_path / "none", places=Places(tmp_path, tmp_path)) == 1
    assert "nothing is known yet of: disk, seed, preload, promotion" in capsys.readouterr().out
