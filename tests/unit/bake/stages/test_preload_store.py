"""The metadata and links that a store is packed from, and the kernels that it is not packed for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from image_builder.bake.lock.model import Image, LockedLayer
from image_builder.bake.stages.preload_store.run import (
    _metadata,
    _modules,
    _raise_error,
    _trees,
    require_kernel,
)
from image_builder.errors import ImageBuilderError
from tests.unit.node.stores import digest


def _kernel(tree: Path, *modules: str, builtin: tuple[str, ...] = ()) -> Path:
    folder = tree / "usr/lib/modules/6.12.0"
    folder.mkdir(parents=True)
    (folder / "modules.dep").write_text("".join(f"{path}.ko.xz: kernel/lib/crc.ko.xz\n" for path in modules))
    (folder / "modules.builtin").write_text("".join(f"{path}.ko\n" for path in builtin))
    return tree


EROFS, VERITY = "kernel/fs/erofs/erofs", "kernel/drivers/md/dm-verity"


def test_a_kernel_with_both_is_taken(tmp_path: Path) -> None:
    require_kernel((_kernel(tmp_path / "modules", EROFS, VERITY),), verity=True)
    require_kernel((_kernel(tmp_path / "builtin", builtin=(EROFS, VERITY)),), verity=True)


def test_names_are_those_of_the_modules_whatever_their_compression(tmp_path: Path) -> None:
    folder = _kernel(tmp_path, EROFS, "kernel/drivers/md/dm_verity") / "usr/lib/modules/6.12.0"
    assert _modules(folder) == {"erofs", "dm-verity"}


def test_a_kernel_without_erofs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageBuilderError, match="6.12.0 has no EROFS"):
        require_kernel((_kernel(tmp_path, VERITY),), verity=False)


def test_a_kernel_without_verity_is_refused_unless_declared(tmp_path: Path) -> None:
    tree = _kernel(tmp_path, EROFS)
    with pytest.raises(ImageBuilderError, match="no dm-verity") as caught:
        require_kernel((tmp_path / "none", tree), verity=True)
    assert caught.value.hint and "image_preload_verity" in caught.value.hint
    require_kernel((tree,), verity=False)


def test_an_error_of_mkfs_ends_it(tmp_path: Path) -> None:
    _raise_error("mkfs.erofs 1.8.6")
    _raise_error("<W> erofs: a warning")
    with pytest.raises(
        ImageBuilderError, match=r"^mkfs.erofs: erofs_io: failed to write: No space left on device$"
    ):
        _raise_error("<E> erofs_io: failed to write: No space left on device")


def test_metadata_is_shared_and_layers_become_links(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "overlay2/abc/diff/usr").mkdir(parents=True)
    (state / "overlay2/unknown/diff").mkdir(parents=True)
    (state / "overlay2/l").mkdir()
    (state / "overlay2/l/SHORT").symlink_to("../abc/diff")
    (state / "overlay2/abc/link").write_text("SHORT")
    (state / "image").mkdir(mode=0o700)
    _metadata(state, {"overlay2/abc/diff": "1" * 64}, tmp_path / "pack/docker")
    target = tmp_path / "pack/docker"
    assert os.readlink(target / "overlay2/abc/diff") == f"../../../layers/{'1' * 64}"
    (tmp_path / "pack/layers" / ("1" * 64)).mkdir(parents=True)
    assert (target / "overlay2/abc/diff").is_dir() and not (target / "overlay2/unknown/diff").exists()
    assert os.readlink(target / "overlay2/l/SHORT") == "../abc/diff"
    assert (target / "overlay2/abc/link").samefile(state / "overlay2/abc/link")
    assert (target / "image").stat().st_mode & 0o777 == 0o700


def test_snapshots_lead_as_deep(tmp_path: Path) -> None:
    name = "io.containerd.snapshotter.v1.overlayfs/snapshots/3/fs"
    (tmp_path / "state" / name).mkdir(parents=True)
    _metadata(tmp_path / "state", {name: "2" * 64}, tmp_path / "pack/containerd")
    (tmp_path / "pack/layers" / ("2" * 64)).mkdir(parents=True)
    assert (tmp_path / "pack/containerd" / name).resolve() == tmp_path / "pack/layers" / ("2" * 64)


def _image(ref: str, *layers: str) -> Image:
    locked = [LockedLayer(digest=digest(name), size=1, diff_id=digest(name)) for name in layers]
    return Image(
        ref=ref,
        digest=digest(ref),
        manifest=digest(ref),
        config=digest(ref),
        platform="linux/amd64",
        layers=locked,
        pin=False,
        required=True,
        mode="reference",
    )


def _unpacked(state: Path, chain: str, modes: Mapping[str, int]) -> str:
    """Unpack a layer of an image; ``modes`` are those of its directories, as the engine made them."""
    (state / chain).mkdir()
    for name, mode in modes.items():
        (state / chain / name).mkdir()
        (state / chain / name).chmod(mode)
        os.utime(state / chain / name, (1, 1))
    os.utime(state / chain, (1, 1))
    return chain


def _groups(state: Path, folders: Mapping[str, list[str]], *images: Image) -> dict[str, list[list[str]]]:
    found = _trees({"containerd": state}, {"containerd": folders}, images)
    return {
        diff_id: [[tree.name for tree in group] for group in groups]
        for diff_id, groups in found
        if len(groups) > 1 or len(groups[0]) > 1
    }


def test_a_layer_is_shared_only_where_its_unpacked_tree_is_equal(tmp_path: Path) -> None:
    images = [_image(name, name, "shared") for name in ("one", "two", "three")]
    folders = {
        image.ref: [_unpacked(tmp_path, f"{image.ref}-0", {}), _unpacked(tmp_path, f"{image.ref}-1", modes)]
        for image, modes in zip(images, ({"var": 0o755}, {"var": 0o700}, {"var": 0o755}), strict=True)
    }
    assert _groups(tmp_path, folders, *images) == {digest("shared"): [["one-1", "three-1"], ["two-1"]]}


def test_a_layer_twice_in_one_image_gets_a_directory_for_each_time(tmp_path: Path) -> None:
    deep, wide = _image("deep", "p", "e", "d", "e", "d", "e"), _image("wide", "e", "d", "e")
    folders = {
        image.ref: [_unpacked(tmp_path, f"{image.ref}-{n}", {}) for n, _ in enumerate(image.layers)]
        for image in (deep, wide)
    }
    assert _groups(tmp_path, folders, deep, wide) == {
        digest("e"): [["deep-1", "wide-0"], ["deep-3", "wide-2"], ["deep-5"]],
        digest("d"): [["deep-2", "wide-1"], ["deep-4"]],
    }
