"""The bake's record of the driver, combined with what a pool says about its GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.gpu import settings

BAKED = {"driver": "535.261.03", "flavour": "open", "kernel": "6.1.0-50-cloud-amd64", "modules": {}}


def write(directory: Path, **files: Any) -> None:
    for name, content in files.items():
        (directory / f"{name.replace('_', '-')}.json").write_text(json.dumps(content))


def test_the_driver_is_the_baked_one(tmp_path: Path) -> None:
    write(tmp_path, gpu_driver=BAKED)
    loaded = settings.load(tmp_path)
    assert (loaded.driver_version, loaded.driver_flavour, loaded.kernel) == (
        BAKED["driver"],
        "open",
        BAKED["kernel"],
    )


def test_a_pool_has_the_last_word(tmp_path: Path) -> None:
    write(tmp_path, gpu_driver=BAKED, gpu={"driver_version": "580.1", "mig": "enabled"})
    loaded = settings.load(tmp_path)
    assert (loaded.driver_version, loaded.driver_flavour, loaded.mig) == ("580.1", "open", "enabled")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"gpu_driver": BAKED}, True),
        ({"gpu": {}}, True),
        ({"gpu_driver": BAKED, "gpu": {"expect": "none"}}, False),
    ],
)
def test_gpus_are_expected_where_there_is_a_driver(
    tmp_path: Path, files: dict[str, Any], expected: bool
) -> None:
    write(tmp_path, **files)
    assert settings.are_expected(tmp_path) is expected
