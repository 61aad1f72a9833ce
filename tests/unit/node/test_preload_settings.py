"""The settings of preload and promotion, in ``preload.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import preload_settings
from image_builder.node.errors import NodeError
from image_builder.node.preload_settings import BYTES_PER_SECOND, Preload, Promotion, Settings, load_all

NODE = {"engine": "docker", "data_root": "/mnt/local/docker", "mount_point": "/mnt/local"}


def loaded(folder: Path, value: Any) -> Settings:
    (folder / "preload.json").write_text(json.dumps({**NODE, **value}))
    return load_all(folder)


def test_defaults(tmp_path: Path) -> None:
    settings = loaded(tmp_path, {})
    assert settings == Settings(Preload("docker", Path("/mnt/local/docker"), Path("/mnt/local")), Promotion())
    promotion = settings.promotion
    assert (promotion.bytes_per_second, promotion.reserve_percent, promotion.enabled) == (
        BYTES_PER_SECOND,
        15,
        True,
    )
    assert settings.staging == Path("/mnt/local/.node/staging/promote")


def test_everything_can_be_set(tmp_path: Path) -> None:
    promote = {
        "enabled": False,
        "bytes_per_second": 0,
        "workers": 3,
        "reserve_percent": 20.5,
        "settle_seconds": 1,
        "wait_seconds": 2,
    }
    settings = loaded(
        tmp_path,
        {
            "engine": "containerd",
            "data_root": "/disk/c",
            "mount_point": "/disk",
            "pause": "p:1",
            "verity": "off",
            "kubelet_healthz": "",
            "promote": promote,
        },
    )
    assert settings.promotion == Promotion(False, 0, 3, 20.5, 1, 2)
    assert settings.preload == Preload(
        "containerd",
        Path("/disk/c"),
        Path("/disk"),
        verity=False,
        pause="p:1",
        promote=promote,
        kubelet_healthz="",
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"promote": {"workers": 0}}, "promote.workers must be 1 to 64, not 0"),
        ({"promote": {"workers": "many"}}, 'promote.workers must be an integer, not "many"'),
        ({"promote": {"bytes_per_second": -1}}, "promote.bytes_per_second must be at least 0"),
        ({"promote": {"reserve_percent": 100}}, "promote.reserve_percent must be at least 0 and below 100"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(NodeError, match=f"preload.json: {message}") as caught:
        loaded(tmp_path, value)
    assert caught.value.code == "settings"


def test_the_preload_does_not_depend_on_the_promotions_settings(tmp_path: Path) -> None:
    (tmp_path / "preload.json").write_text(json.dumps({**NODE, "promote": {"workers": "many"}}))
    assert preload_settings.load(tmp_path).engine == "docker"
