"""What is equal in two unpacked layers, and what is taken out of one that has just been unpacked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.bake import layer_tree
from image_builder.bake.layer_tree import difference, fingerprint, settle
from image_builder.bake.stages.kind import FIXED_EPOCH


def _tree(tree: Path) -> Path:
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/one").write_text("one")
    os.link(tree / "etc/one", tree / "etc/two")
    (tree / "etc/link").symlink_to("one")
    os.mkfifo(tree / "pipe")
    for path in (*tree.rglob("*"), tree):
        os.utime(path, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
    return tree


def _content(tree: Path) -> None:
    (tree / "etc/one").write_text("two")
    os.utime(tree / "etc/one", (1_500_000_000, 1_500_000_000))


def _copied(tree: Path) -> None:
    (tree / "etc/two").unlink()
    (tree / "etc/two").write_text("one")
    for path in (tree / "etc/two", tree / "etc"):
        os.utime(path, (1_500_000_000, 1_500_000_000))


def _led_elsewhere(tree: Path) -> None:
    (tree / "etc/link").unlink()
    (tree / "etc/link").symlink_to("two")
    for path in (tree / "etc/link", tree / "etc"):
        os.utime(path, (1_500_000_000, 1_500_000_000), follow_symlinks=False)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a directory's mode": lambda tree: (tree / "etc").chmod(0o700),
    "the top's mode": lambda tree: tree.chmod(0o700),
    "a time": lambda tree: os.utime(tree / "etc/one", (1, 1)),
    "an attribute": lambda tree: os.setxattr(tree / "etc", "user.mark", b"y"),
    "a file more": lambda tree: (tree / "new").touch(),
    "a hard link": _copied,
    "a target": _led_elsewhere,
}


@pytest.fixture
def of_a_mount(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let an attribute that needs no privileges stand for those that overlayfs writes into an upper directory."""
    assert "trusted.overlay.origin" in layer_tree._OF_A_MOUNT
    monkeypatch.setattr(layer_tree, "_OF_A_MOUNT", frozenset({"user.of-a-mount"}))
    return "user.of-a-mount"


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_container_sees_counts(change: str, tmp_path: Path) -> None:
    one, other = _tree(tmp_path / "one"), _tree(tmp_path / "other")
    assert fingerprint(one) == fingerprint(other) and difference(one, other) == ""
    CHANGES[change](other)
    assert fingerprint(one) != fingerprint(other)
    assert difference(one, other) and difference(other, one)


def test_content_counts_where_it_is_read(tmp_path: Path) -> None:
    one, other = _tree(tmp_path / "one"), _tree(tmp_path / "other")
    _content(other)
    assert "etc/one" in difference(one, other)


def test_what_the_mount_of_a_layer_left_in_it_does_not_count(of_a_mount: str, tmp_path: Path) -> None:
    one, other = _tree(tmp_path / "one"), _tree(tmp_path / "other")
    os.setxattr(other, of_a_mount, b"here")
    assert difference(one, other) == ""


def test_the_clock_and_the_marks_of_a_mount_are_taken_out_and_nothing_else(
    of_a_mount: str, tmp_path: Path
) -> None:
    since = time.time_ns()
    tree = _tree(tmp_path / "tree")
    os.utime(tree / "etc/link", (4_300_000_000, 4_300_000_000), follow_symlinks=False)  # of the year 2106
    (tree / "var").mkdir()
    os.utime(tree, (1_500_000_000, 1_500_000_000))
    os.setxattr(tree, of_a_mount, b"here")
    os.setxattr(tree, "user.mark", b"y")
    settle(tree, since)
    times = {path.name: int(path.lstat().st_mtime) for path in (tree, *tree.rglob("*"))}
    others = dict.fromkeys(("tree", "etc", "one", "two", "pipe"), 1_500_000_000)
    assert times == {**others, "link": 4_300_000_000, "var": FIXED_EPOCH}
    assert os.listxattr(tree) == ["user.mark"]
