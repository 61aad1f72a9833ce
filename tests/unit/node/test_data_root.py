"""A data root: its links into the store and its layers, counted. Who uses one: test_seed_command.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from image_builder.node import files
from image_builder.node.data_root import BLOBS, SNAPSHOTS, Links, find_links, holds_nothing, scan

A, B = ("a" * 64, "b" * 64)


def test_a_link_that_leads_elsewhere_is_none_of_the_stores(tmp_path: Path) -> None:
    store = tmp_path / "store"
    targets = {"ours": store / "layers/a", "elsewhere": tmp_path / "layers/a", "alike": tmp_path / "store2/a"}
    for name, target in targets.items():
        (tmp_path / "overlay2" / name).mkdir(parents=True)
        (tmp_path / "overlay2" / name / "diff").symlink_to(target)
    found = find_links("docker", tmp_path, store)
    assert [link.path.parent.name for link in found] == ["ours"]


@pytest.mark.parametrize(
    ("engine", "folder", "name"),
    [
        ("docker", "overlay2", "diff"),
        ("containerd", "io.containerd.snapshotter.v1.overlayfs/snapshots", "fs"),
    ],
)
def test_links_of_a_data_root_are_counted(tmp_path: Path, engine: str, folder: str, name: str) -> None:
    store = tmp_path / "store"
    (store / A).mkdir(parents=True)
    for number, layer in enumerate((A, B)):
        (tmp_path / folder / str(number)).mkdir(parents=True)
        (tmp_path / folder / str(number) / name).symlink_to(store / layer)
    (tmp_path / folder / "2" / name).mkdir(parents=True)
    (tmp_path / folder / "l").mkdir()  # Docker's short names: no layer
    local = frozenset[str]() if engine == "docker" else None
    assert scan(tmp_path, engine) == Links(frozenset({A, B}), frozenset({B}), 1, local)


def _exchange(one: Path, other: Path, times: int) -> None:
    for _ in range(times):
        files.exchange(one, other)


def test_a_layer_may_be_promoted_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "store" / A).mkdir(parents=True)
    (tmp_path / "overlay2/0").mkdir(parents=True)
    place, copy = tmp_path / "overlay2/0/diff", tmp_path / "copy"
    place.symlink_to(tmp_path / "store" / A)
    copy.mkdir()
    with ThreadPoolExecutor(1) as pool:
        promotion = pool.submit(_exchange, copy, place, 20_000)
        found = set()
        while not promotion.done():
            found.add(scan(tmp_path, "docker"))
    assert promotion.exception() is None
    assert {entry.served for entry in found} == {frozenset({A}), frozenset()}
    assert {entry.directories for entry in found} == {0, 1} and not any(entry.broken for entry in found)


def test_there_may_be_no_data_root(tmp_path: Path) -> None:
    assert scan(tmp_path / "none", "docker") == Links(frozenset(), frozenset(), 0, frozenset())


def test_a_root_that_only_containerds_start_has_written_to_holds_nothing(tmp_path: Path) -> None:
    snapshots, blobs = tmp_path / SNAPSHOTS, tmp_path / BLOBS
    for folder in (snapshots, blobs.parent.parent / "ingest", tmp_path / "tmpmounts"):
        folder.mkdir(parents=True)
    (tmp_path / "io.containerd.metadata.v1.bolt").mkdir()
    (tmp_path / "io.containerd.metadata.v1.bolt/meta.db").write_bytes(b"x")
    assert holds_nothing(tmp_path)
    for place in (
        blobs / "ab",
        snapshots / "1",
        tmp_path / "io.containerd.snapshotter.v1.native/snapshots/1",
        tmp_path / "mine",
    ):
        place.mkdir(parents=True)
        assert not holds_nothing(tmp_path), place
        place.rmdir()
    assert holds_nothing(tmp_path)
