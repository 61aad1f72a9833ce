"""The preload benchmark's decisions before and after it measures."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from tests.bench import preload, software
from tests.bench.preload import DISK_PER_BYTE, PARTS, fitting, goal_of, is_met, parts_of

_Usage = namedtuple("_Usage", "total used free")


def test_a_size_that_does_not_fit_becomes_the_largest_that_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(0, 0, 3.35 * DISK_PER_BYTE * 1e9))
    assert fitting(3.3, Path("/")) == 3.3
    assert capsys.readouterr().err == ""
    assert fitting(10.0, Path("/")) == 3.3
    assert "10 GB need 55 GB of disk, 18 are free: measured with 3.3 GB" in capsys.readouterr().err


def test_loading_has_a_goal_for_each_engine_from_three_gigabytes_on() -> None:
    def one(engine: str, size: float, ratio: float = 30.0) -> dict[str, Any]:
        return {"engine": engine, "image_gb": size, "load_ratio": ratio}

    assert goal_of(one("docker", 3.3), "load_ratio") == (">=", 20)
    assert goal_of(one("containerd", 3.3), "load_ratio") == (">=", 60)
    assert goal_of(one("docker", 0.3), "load_ratio") is None
    assert is_met(one("docker", 3.3), "load_ratio")
    assert not is_met(one("containerd", 3.3), "load_ratio")


def test_an_engine_and_a_size_have_their_parts() -> None:
    assert parts_of(PARTS, "docker_28", 3.3) == [
        "seed",
        "first_run",
        "peers",
        "cold_read",
        "promote",
        "reader",
    ]
    assert parts_of(PARTS, "docker", 0.3) == ["seed", "first_run", "peers", "cold_read", "promote"]
    assert parts_of(PARTS, "containerd", 10.0) == ["seed", "first_run", "peers"]
    assert parts_of(["promote", "many"], "containerd", 3.3) == []


def test_only_what_is_compared_or_has_a_goal_counts() -> None:
    one = {"engine": "docker", "ours_total": 1.5, "seed_seconds": 0.31, "podman_store_excess": 2.4}
    assert preload.ratios(one) == {"seed_seconds": 0.31, "podman_store_excess": 2.4}
    assert not is_met(one, "seed_seconds")
    assert is_met(one, "podman_store_excess")


@pytest.mark.parametrize("number", [0, 3])
def test_a_layer_has_its_bytes_and_no_file_twice(number: int) -> None:
    files = [(Path(f"/{name}"), 10) for name in range(20)]
    taken = list(software._take(files, number, 95))
    assert len(taken) == 10
    assert len({path for _, path in taken}) == 10
    assert len(list(software._take(files, number, 1000))) == 20
