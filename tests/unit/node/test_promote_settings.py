"""What promotion takes from ``preload.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.errors import NodeError
from image_builder.node.promote.settings import BYTES_PER_SECOND, Places, Settings, load

NODE = {"engine": "docker", "data_root": "/mnt/local/docker", "mount_point": "/mnt/local"}


def told(folder: Path, value: Any) -> Settings:
    (folder / "preload.json").write_text(json.dumps({**NODE, **value}))
    return load(Places(settings=folder))


def test_defaults(tmp_path: Path) -> None:
    found = told(tmp_path, {})
    assert found == Settings("docker", Path("/mnt/local/docker"), Path("/mnt/local"))
    assert (found.bytes_per_second, found.reserve_percent, found.enabled) == (BYTES_PER_SECOND, 15, True)
    assert found.state == Path("/mnt/local/.node")


def test_everything_can_be_set(tmp_path: Path) -> None:
    promote = {
        "enabled": False,
        "bytes_per_second": 0,
        "workers": 3,
        "reserve_percent": 20.5,
        "settle_seconds": 1,
        "wait_seconds": 2,
    }
    found = told(
        tmp_path,
        {
            "engine": "containerd",
            "data_root": "/disk/c",
            "mount_point": "/disk",
            "pause": "p:1",
            "kubelet_healthz": "",
            "promote": promote,
        },
    )
    assert found == Settings(
        "containerd",
        Path("/disk/c"),
        Path("/disk"),
        pause="p:1",
        enabled=False,
        bytes_per_second=0,
        workers=3,
        reserve_percent=20.5,
        settle_seconds=1,
        wait_seconds=2,
        healthz="",
    )


@pytest.mark.parametrize(
    "value",
    [
        {"promote": []},
        {"promote": {"workers": 0}},
        {"promote": {"workers": "many"}},
        {"promote": {"bytes_per_second": -1}},
        {"promote": {"reserve_percent": 100}},
        {"engine": "podman"},
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(NodeError) as caught:
        told(tmp_path, value)
    assert caught.value.code == "settings"
