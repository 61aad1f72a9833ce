"""A data root: its links into the store and its layers, counted. Its users: test_seed_command.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from image_builder.node import files
from image_builder.node.data_root import BLOBS, SNAPSHOTS, Links, find_links, is_new, scan

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
    (tmp_path / folder / "l").mkdir()  # Docker's short names, not a layer
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


def _start(root: Path) -> None:
    """Make what the first starts of containerd 1.7 and 2.1 leave behind."""
    for folder in (
        SNAPSHOTS,
        BLOBS,
        BLOBS.parents[1] / "ingest",
        "tmpmounts/a",
        "io.containerd.runtime.v2.task",
    ):
        (root / folder).mkdir(parents=True)
    for file in ("io.containerd.metadata.v1.bolt/meta.db", SNAPSHOTS.with_name("metadata.db")):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_bytes(b"x")


def test_a_root_is_new_after_containerds_first_start(tmp_path: Path) -> None:
    _start(tmp_path)
    assert is_new(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        BLOBS / "ab",
        BLOBS.with_name("sha512") / "ab",
        BLOBS.parents[1] / "ingest/ab",
        SNAPSHOTS / "1",
        "io.containerd.snapshotter.v1.native/snapshots/1",
        "io.containerd.snapshotter.v1.btrfs/active/1",
        "io.containerd.snapshotter.v1.devmapper/metadata.db",
        "io.containerd.grpc.v1.cri/containers/c",
        "io.containerd.runtime.v2.task/default/c",
        "tmpmounts/file",
        "io.containerd.file",
        "mine",
    ],
    ids=str,
)
def test_a_root_with_anything_of_value_is_not_new(tmp_path: Path, place: str | Path) -> None:
    _start(tmp_path)
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".db" or path.name == "file" or path.suffix == ".file":
        path.write_bytes(b"x")
    else:
        path.mkdir()
    assert not is_new(tmp_path)
