"""The contents that a Docker data root, blank or in use, gets from the store."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import files
from image_builder.node.data_root import find_links, scan
from image_builder.node.errors import NodeError
from image_builder.node.seed.docker import fill, lacking
from image_builder.node.seed.records import NAME
from image_builder.node.store import chain
from tests.unit.node.stores import digest, docker_store, edit_records, stored

ONE, TWO = stored("one", "base", "a"), stored("two", "other", "base")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return docker_store(tmp_path / "store", [ONE, TWO])


def _names(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "image/overlay2/repositories.json").read_text())[
        "Repositories"
    ]
    return found


def _place(root: Path, number: int, image: Any = ONE) -> Path:
    """Return the directory of an image's layer, by its number counted from the bottom."""
    record = root / "image/overlay2/layerdb/sha256" / list(chain(image.diff_ids))[number].chain[7:]
    return root / "overlay2" / (record / "cache-id").read_text()


def test_chain_ids_are_those_of_the_specification() -> None:
    a, b, c = digest("a"), digest("b"), digest("c")
    ab = "sha256:" + hashlib.sha256(f"{a} {b}".encode()).hexdigest()
    abc = "sha256:" + hashlib.sha256(f"{ab} {c}".encode()).hexdigest()
    assert [(layer.chain, layer.parent) for layer in chain([a, b, c])] == [(a, ""), (ab, a), (abc, ab)]


def test_a_blank_root_gets_everything(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    made = fill([ONE, TWO], root, store=store)
    assert made.images == (ONE.ref, TWO.ref)
    # `base` on top of `other` is a different layer of the chain from `base` by itself, with the same files.
    assert made.layers == 4
    base, again = _place(root, 0), _place(root, 1, TWO)
    assert base != again
    assert os.readlink(base / "diff") == os.readlink(again / "diff") == f"{store}/layers/{digest('base')[7:]}"
    assert _names(root)["lab/one"] == {ONE.ref: ONE.id, f"lab/one@{ONE.digest}": ONE.id}
    assert (root / "image/overlay2/distribution/diffid-by-digest/sha256/abc").read_text() == "sha256:def"
    assert (root / f"image/overlay2/imagedb/metadata/sha256/{ONE.id[7:]}/lastUpdated").exists()
    assert lacking([ONE, TWO], root) == []


def test_every_layer_leads_to_those_below_it_and_is_complete(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE, TWO], root, store=store)
    for image in (ONE, TWO):
        below, above = _place(root, 0, image), _place(root, 1, image)
        link = (below / "link").read_text()
        assert (above / "lower").read_text() == f"l/{link}" and not (below / "lower").exists()
        assert os.readlink(root / "overlay2/l" / link) == f"../{below.name}/diff"
        assert (above / "work").is_dir()
        # Without it, Docker would treat the store as a directory to write to when it saves the image.
        assert (below / "committed").exists() and (above / "committed").exists()


def test_a_second_time_adds_nothing(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE, TWO], root, store=store)
    before = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    assert fill([ONE, TWO], root, store=store).images == ()
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == before


def test_what_was_deleted_comes_back_beside_what_is_there(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE], root, store=store)
    path = root / "image/overlay2/repositories.json"
    names = json.loads(path.read_text())
    names["Repositories"]["mine"] = {"mine:1": digest("mine")}
    path.write_text(json.dumps(names))
    assert lacking([ONE, TWO], root) == [TWO.ref]
    assert fill([ONE, TWO], root, store=store).images == (TWO.ref,)
    assert set(_names(root)) == {"mine", "lab/one", "lab/two"}


def test_a_layer_whose_parent_was_pulled_again_leads_to_that(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE], root, store=store)
    old = _place(root, 0)
    record = root / "image/overlay2/layerdb/sha256"
    new = root / "overlay2" / ("f" * 64)
    (new / "diff").mkdir(parents=True)
    (new / "link").write_text("PULLED")
    (record / digest("base")[7:] / "cache-id").write_text(new.name)
    shutil.rmtree(old)
    shutil.rmtree(record / list(chain(ONE.diff_ids))[1].chain[7:])
    assert fill([ONE], root, store=store).layers == 1
    assert (_place(root, 1) / "lower").read_text() == "l/PULLED"
    assert (new / "committed").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"Repositories": null}'])
def test_names_that_are_no_names_are_written_anew(text: str, store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE, TWO], root, store=store)
    (root / "image/overlay2/repositories.json").write_text(text)
    assert lacking([ONE, TWO], root) == [ONE.ref, TWO.ref]
    assert fill([ONE, TWO], root, store=store).images == (ONE.ref, TWO.ref)
    assert set(_names(root)) == {"lab/one", "lab/two"}


def test_files_that_are_gone_are_linked_again(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE], root, store=store)
    shutil.rmtree(_place(root, 1))
    assert lacking([ONE], root) == [ONE.ref]
    assert fill([ONE], root, store=store).images == (ONE.ref,)
    assert (_place(root, 1) / "diff/name").read_text() == digest("a")


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def test_a_copied_image_has_no_link(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([stored("one", "base", "a", mode="copy"), TWO], root, store=store, copy=_copy)
    for number in (0, 1):
        assert not (_place(root, number) / "diff").is_symlink()
        assert (_place(root, number) / "diff/name").is_file()
    assert (_place(root, 0, TWO) / "diff").is_symlink()


def test_a_copy_that_was_cut_short_is_made_again(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    image = stored("one", "base", "a", mode="copy")
    fill([image], root, store=store, copy=_copy)
    place = _place(root, 1)
    shutil.rmtree(root / "image/overlay2/layerdb/sha256" / list(chain(ONE.diff_ids))[1].chain[7:])
    (place / "diff/name").unlink()
    (place / ".diff.new").mkdir()
    (place / ".diff.new/half").write_text("x")
    fill([image], root, store=store, copy=_copy)
    assert os.listdir(place / "diff") == ["name"] and not (place / ".diff.new").exists()


@pytest.mark.parametrize("name", ["repositories.json", "layerdb/sha256", "imagedb/content/sha256"])
def test_what_the_store_lacks_is_its_damage(name: str, store: Path, tmp_path: Path) -> None:
    def lose(found: dict[str, Any]) -> None:
        for kind in found.values():
            for path in [p for p in kind if p.startswith(f"image/overlay2/{name}")]:
                del kind[path]

    edit_records(store / "docker", lose)
    with pytest.raises(NodeError) as caught:
        fill([ONE], tmp_path / "root", store=store)
    assert caught.value.code == "store.damaged" and str(store) in caught.value.message


@pytest.mark.parametrize("data", [b"\xff\x00", b"[]", b'{"files": {"a": 1}}', b""])
def test_garbage_in_the_store_is_its_damage(data: bytes, store: Path, tmp_path: Path) -> None:
    (store / "docker" / NAME).write_bytes(data)
    with pytest.raises(NodeError) as caught:
        fill([ONE], tmp_path / "root", store=store)
    assert caught.value.code == "store.damaged"


def test_names_that_are_garbage_are_the_stores_damage(store: Path, tmp_path: Path) -> None:
    names = "image/overlay2/repositories.json"
    edit_records(store / "docker", lambda found: found["files"].update({names: [0o600, "[]"]}))
    with pytest.raises(NodeError) as caught:
        fill([ONE], tmp_path / "root", store=store)
    assert caught.value.code == "store.damaged"


def test_a_link_whose_layer_can_not_be_read_is_no_missing_layer(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, is_dir = tmp_path / "root", Path.is_dir
    fill([ONE, stored("two", "other", mode="copy")], root, store=store, copy=_copy)

    def fail(path: Path) -> bool:
        if path.name == "diff":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", fail)
    with pytest.raises(NodeError) as caught:
        lacking([ONE], root)
    assert caught.value.code == "store.io"
    with pytest.raises(OSError, match="diff"):  # the local disk's own
        lacking([stored("two", "other", mode="copy")], root)


GARBAGE = [b"", b"\0\0\0\0", b"\xff\xfe", b"..", b"/etc", b"x"]


def _small_files(root: Path, image: Any = ONE) -> list[Path]:
    """Return the files of an image's upper layer and its configuration, which a power cut may leave empty."""
    record = root / "image/overlay2/layerdb/sha256" / list(chain(image.diff_ids))[1].chain[7:]
    names = [record / name for name in ("diff", "size", "cache-id", "parent", "tar-split.json.gz")]
    place = _place(root, 1, image)
    return [
        *names,
        place / "link",
        place / "lower",
        root / "image/overlay2/imagedb/content/sha256" / image.id[7:],
    ]


@pytest.mark.parametrize("data", GARBAGE)
@pytest.mark.parametrize("number", range(8))
def test_a_damaged_record_is_written_as_it_was_baked(
    number: int, data: bytes, store: Path, tmp_path: Path
) -> None:
    root, fresh = tmp_path / "root", tmp_path / "fresh"
    for place in (root, fresh):
        fill([ONE, TWO], place, store=store, copy=_copy)
    path = _small_files(root)[number]
    if path.is_symlink():
        path.unlink()
    path.write_bytes(data)
    # Whatever could be one is left: a layer that was pulled again has another link than the baked one.
    is_seen = not data.strip(b"\0") or path.name != "tar-split.json.gz"
    is_seen = is_seen and (path.name, data) != ("link", b"x")
    if is_seen:
        assert lacking([ONE, TWO], root) == [ONE.ref]
    fill([ONE, TWO], root, store=store, copy=_copy)
    assert lacking([ONE, TWO], root) == []
    if is_seen:
        expected = {file.relative_to(fresh): _content(file) for file in fresh.rglob("*")}
        assert {file.relative_to(root): _content(file) for file in root.rglob("*")} == expected


def _content(path: Path) -> str | bytes:
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else "directory"


def test_a_missing_short_link_is_made_again(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE], root, store=store)
    link = root / "overlay2/l" / (_place(root, 0) / "link").read_text()
    link.unlink()
    assert lacking([ONE], root) == [ONE.ref]
    assert fill([ONE], root, store=store).images == (ONE.ref,)
    assert os.readlink(link) == f"../{_place(root, 0).name}/diff" and lacking([ONE], root) == []


@pytest.mark.parametrize("text", ['{"Repositories": {"lab": null}}', '{"Repositories": []}'])
def test_names_of_another_shape_are_written_anew(text: str, store: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fill([ONE], root, store=store)
    (root / "image/overlay2/repositories.json").write_text(text)
    assert lacking([ONE], root) == [ONE.ref] and fill([ONE], root, store=store).images == (ONE.ref,)


@pytest.mark.parametrize("mode", ["reference", "copy"])
def test_nothing_of_a_repair_has_its_name_before_it_is_on_the_disk(
    mode: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power is cut instead of the sync: what was written until then must not count."""
    root, image = tmp_path / "root", stored("one", "base", "a", mode=mode)
    fill([image], root, store=store, copy=_copy)
    files.remove_tree(_place(root, 1) / "diff") if mode == "copy" else (_place(root, 1) / "diff").unlink()
    files.remove_tree(root / "image/overlay2/layerdb/sha256" / image.diff_ids[0][7:])
    (root / "image/overlay2/imagedb/content/sha256" / image.id[7:]).unlink()
    (root / "image/overlay2/repositories.json").write_text("{}")

    def cut(_path: Path) -> None:
        raise OSError(errno.EIO, "cut")

    monkeypatch.setattr(files, "syncfs", cut)
    with pytest.raises(OSError, match="cut"):
        fill([image], root, store=store, copy=_copy)
    assert not (root / "image/overlay2/layerdb/sha256" / image.diff_ids[0][7:]).exists()
    assert not (root / "image/overlay2/imagedb/content/sha256" / image.id[7:]).exists()
    assert (_place(root, 1) / "diff").exists() is (mode == "reference"), "a link is whole at once"
    assert _has_no_names(root)
    monkeypatch.undo()
    assert fill([image], root, store=store, copy=_copy).images == (image.ref,)
    assert lacking([image], root) == []


def _has_no_names(root: Path) -> bool:
    return (root / "image/overlay2/repositories.json").read_text() == "{}"


@pytest.mark.parametrize("aside", [False, True])
def test_names_are_durable_at_once_unless_the_root_is_set_up_aside(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    synced: list[bool] = []
    write = files.write

    def note(path: Path, data: bytes, mode: int, *, durable: bool = True) -> None:
        synced.append(durable)
        write(path, data, mode, durable=durable)

    monkeypatch.setattr(files, "write", note)
    fill([ONE], tmp_path / "root", store=store, aside=aside)
    assert synced[-1] is not aside


def test_a_layer_twice_in_one_image_leads_to_two_directories(tmp_path: Path) -> None:
    image = stored("twice", "base", "empty", "empty")
    store, root = docker_store(tmp_path / "store", [image]), tmp_path / "root"
    fill([image], root, store=store)
    empty = digest("empty")[7:]
    links = [os.readlink(_place(root, number, image) / "diff") for number in (1, 2)]
    assert links == [f"{store}/layers/{empty}", f"{store}/layers/{empty}.1"]
    # For people and for the promotion, both are this layer.
    assert scan(root, "docker").served == {digest("base")[7:], empty}
    found = find_links("docker", root, store)
    assert [link.diff_id for link in found if link.directory].count(digest("empty")) == 2
