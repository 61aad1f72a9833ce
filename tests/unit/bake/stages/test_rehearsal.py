"""The rehearsal's comparison of a seeded data root with what the bake's pull has unpacked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.bake.stages.rehearsal.run import _require_equal
from image_builder.errors import ImageBuilderError

HEX = "a" * 64
FOLDERS = {"lab/one:1": ["s/1", "s/2"], "lab/two:1": ["s/1", "s/3"]}


class Seeded:
    """A pull's product, and a data root: a link into the store, one to a further directory of it, and a copy."""

    def __init__(self, base: Path) -> None:
        self.pulled, self.data, self.store = (base / name for name in ("pulled", "data", "store"))
        links = {"s/1": HEX, "s/2": f"{HEX}.1", "s/3": ""}
        for folder, directory in links.items():
            place = self.store / "layers" / directory if directory else self.data / folder
            for tree in (self.pulled / "state" / folder, place):
                (tree / "var").mkdir(parents=True)
                (tree / "var").chmod(0o711 if folder == "s/2" else 0o755)
                (tree / "file").write_text(folder)
            if directory:
                (self.data / "s").mkdir(parents=True, exist_ok=True)
                (self.data / folder).symlink_to(f"/var/lib/preload/layers/{directory}")
        for tree in (self.pulled, self.data, self.store):
            for path in sorted(tree.rglob("*"), reverse=True):
                if not path.is_symlink():
                    _settle(path)
        (self.pulled / "layers.json").write_text(json.dumps(FOLDERS))

    def judge(self, folders: dict[str, list[str]] = FOLDERS) -> None:
        _require_equal(self.pulled, self.data, self.store, folders)


def _settle(path: Path) -> None:
    os.utime(path, (1, 1))


def _rewrite(path: Path) -> None:
    path.write_text("s/0")
    _settle(path)


@pytest.fixture
def seeded(tmp_path: Path) -> Seeded:
    return Seeded(tmp_path)


def test_what_is_equal_passes(seeded: Seeded) -> None:
    seeded.judge()


@pytest.mark.parametrize(
    ("change", "ref"),
    [
        (lambda s: (s.store / "layers" / f"{HEX}.1/var").chmod(0o700), "lab/one:1"),
        (lambda s: _rewrite(s.store / "layers" / HEX / "file"), "lab/one:1"),
        (lambda s: (s.data / "s/3/more").touch(), "lab/two:1"),
    ],
)
def test_a_layer_that_differs_is_named_with_its_image(
    seeded: Seeded, change: Callable[[Seeded], object], ref: str
) -> None:
    change(seeded)
    with pytest.raises(ImageBuilderError, match=f"^{ref}: "):
        seeded.judge()


def test_the_layers_in_another_order_are_another_image(seeded: Seeded) -> None:
    with pytest.raises(ImageBuilderError, match="^lab/one:1: "):
        seeded.judge({"lab/one:1": ["s/2", "s/1"]})
