"""The lab's container images: what a layer contains, and that the same files give the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from image_builder.errors import ImageBuilderError
from image_builder.lab import images, pause, registry, software


def _gzip(argv: Sequence[str]) -> None:
    """Do the program's work: a unit test may not start it."""
    assert list(argv[:-1]) == ["gzip", "-1", "-n", "-f"]
    tar = Path(argv[-1])
    Path(f"{tar}.gz").write_bytes(gzip.compress(tar.read_bytes(), compresslevel=1, mtime=0))
    tar.unlink()


def _tar(
    entries: Mapping[str, bytes | str | None], *, mode: str, mtime: float = 5, owner: int = 1000
) -> bytes:
    """Return a tar: bytes make a file, None a directory, text a link (``=path`` a hard one)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.mode, entry.mtime, entry.uid, entry.gid, entry.uname = 0o755, mtime, owner, owner, "someone"
            if content is None:
                entry.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                entry.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                entry.linkname = content.removeprefix("=")
            else:
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def _deb(path: Path, entries: Mapping[str, bytes | str | None], kind: str = "xz", **how: int) -> Path:
    """Write a package as deb(5) specifies; members of odd size are padded."""
    data = _tar({"./": None, **entries}, mode=f"w:{kind}", **how)
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", f"data.tar.{kind}".rstrip("."): data}
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in members.items():
            file.write(f"{name:16}{0:<12}{0:<6}{0:<6}{'100644':8}{len(content):<10}`\n".encode())
            file.write(content + b"\n" * (len(content) % 2))
    return path


def _entries(layer: images.Layer) -> dict[str, tuple[tarfile.TarInfo, bytes | None]]:
    """Return a layer's entries in order, after checking everything recorded about it."""
    packed = layer.path.read_bytes()
    content = gzip.decompress(packed)
    assert layer.digest == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert layer.diff_id == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert (layer.size, layer.tar_size) == (len(packed), len(content))
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for entry in tar:
            assert entry.name not in found
            assert (entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, "", "")
            file = tar.extractfile(entry) if entry.isreg() else None
            found[entry.name] = (entry, file.read() if file else None)
    return found


# -- packages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["xz", "gz", ""])
def test_packages_become_one_layer(tmp_path: Path, kind: str) -> None:
    base = _deb(
        tmp_path / "base.deb",
        {"./bin": "usr/bin", "./usr": None, "./usr/bin": None, "./usr/bin/a": b"A"},
        kind,
    )
    more = _deb(tmp_path / "more.deb", {"./usr": None, "./usr/bin": None, "./usr/bin/b": b"B"}, kind)
    layer = images.layer_from_debs([base, more], tmp_path / "0.tar.gz", _gzip)
    found = _entries(layer)
    assert list(found) == ["bin", "usr", "usr/bin", "usr/bin/a", "usr/bin/b"]
    assert found["bin"][0].issym() and found["usr"][0].isdir()
    assert [found[f"usr/bin/{n}"][1] for n in "ab"] == [b"A", b"B"]
    assert found["usr/bin/a"][0].mode == 0o755 and found["usr/bin/a"][0].mtime == 5
    assert not (tmp_path / "0.tar").exists()


def test_what_a_package_has_outside_usr_goes_where_the_links_lead(tmp_path: Path) -> None:
    deb = _deb(
        tmp_path / "old.deb",
        {
            "./lib": None,
            "./lib/x.so": b"X",
            "./lib/y.so": "=./lib/x.so",
            "./lib64/ld.so": "/lib/x.so",
            "./libexec": None,
            "./etc/lib/z": b"Z",
        },
    )
    found = _entries(images.layer_from_debs([deb], tmp_path / "0.tar.gz", _gzip))
    assert list(found) == ["usr/lib/x.so", "usr/lib/y.so", "usr/lib64/ld.so", "libexec", "etc/lib/z"]
    assert found["usr/lib/y.so"][0].islnk() and found["usr/lib/y.so"][0].linkname == "usr/lib/x.so"
    assert found["usr/lib64/ld.so"][0].linkname == "/lib/x.so"


def test_two_packages_with_one_file_are_refused(tmp_path: Path) -> None:
    one = _deb(tmp_path / "one.deb", {"./usr/x": b"1"})
    two = _deb(tmp_path / "two.deb", {"./usr/x": b"2"})
    with pytest.raises(ImageBuilderError, match=r"two\.deb and one\.deb both have /usr/x"):
        images.layer_from_debs([one, two], tmp_path / "0.tar.gz", _gzip)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.deb", "two.deb"]


def test_same_packages_give_the_same_bytes_whoever_packed_them(tmp_path: Path) -> None:
    files: dict[str, bytes | str | None] = {"./usr/" + "long" * 60: b"x" * 5000, "./usr/ä": b""}
    layers = []
    for number, owner in enumerate((0, 1000)):
        deb = _deb(tmp_path / f"{number}.deb", files, "xz", owner=owner)
        layers.append(images.layer_from_debs([deb], tmp_path / f"{number}.tar.gz", _gzip))
    assert layers[0].digest == layers[1].digest
    assert set(_entries(layers[0])) == {name.removeprefix("./") for name in files}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no archive", "is not a Debian package"),
        (b"!<arch>\n", "has no data.tar"),
        (b"!<arch>\n" + f"{'data.tar.zst':16}{0:<12}{0:<6}{0:<6}{'100644':8}{0:<10}`\n".encode(), "tar.zst"),
    ],
)
def test_what_is_no_package_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "x.deb").write_bytes(content)
    with pytest.raises(ImageBuilderError, match=told):
        images.layer_from_debs([tmp_path / "x.deb"], tmp_path / "0.tar.gz", _gzip)


# -- trees -----------------------------------------------------------------------------------------------------


def _tree(path: Path, names: Sequence[str]) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
        (path / name).chmod(0o644)
    return path


def test_tree_becomes_a_layer(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "tree", ["b", "a/c"])
    (tree / "a/link").symlink_to("/nowhere")
    (tree / "same").hardlink_to(tree / "b")
    (tree / "empty").mkdir(mode=0o700)
    found = _entries(images.layer_from_tree(tree, tmp_path / "0.tar.gz", _gzip))
    assert list(found) == ["a", "a/c", "a/link", "b", "empty", "same"]
    assert {entry.mtime for entry, _ in found.values()} == {0}
    assert found["a/link"][0].linkname == "/nowhere"
    assert found["same"][0].islnk() and found["same"][0].linkname == "b"
    assert found["a/c"][1] == b"a/c" and found["empty"][0].mode == 0o700


def test_tree_layer_depends_on_no_time_and_no_order(tmp_path: Path) -> None:
    names = ["one", "two/three", "four"]
    trees = [_tree(tmp_path / "x", names), _tree(tmp_path / "y", names[::-1])]
    os.utime(trees[0] / "one", (1, 1))
    layers = [images.layer_from_tree(t, tmp_path / f"{t.name}.tar.gz", _gzip) for t in trees]
    assert layers[0].digest == layers[1].digest


def test_fifo_is_kept(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    os.mkfifo(tmp_path / "tree/fifo")
    found = _entries(images.layer_from_tree(tmp_path / "tree", tmp_path / "0.tar.gz", _gzip))
    assert found["fifo"][0].isfifo()


# -- images ----------------------------------------------------------------------------------------------------


def test_pause_image_is_the_one_of_the_archive(tmp_path: Path) -> None:
    image = images.pause_image(tmp_path / "pause.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(pause.archive())) as tar:
        member = tar.extractfile("manifest.json")
        assert member
        (manifest,) = json.loads(member.read())
    assert image.id == f"sha256:{manifest['Config'].removesuffix('.json')}"
    (layer,) = image.layers
    assert layer.diff_id == f"sha256:{manifest['Layers'][0].partition('/')[0]}"
    ((name, (_, program)),) = _entries(layer).items()
    assert (name, program) == ("pause", pause.program())


def test_pause_image_has_this_digest(tmp_path: Path) -> None:
    """No compressor is involved, so its digest is the same on every host."""
    image = images.pause_image(tmp_path / "pause.tar.gz")
    assert image.digest == "sha256:0e9333b31309086a066bbd47a6b1baaee1dfa2d0201780da6e60855d4639dc48"


def test_manifest_names_every_blob(tmp_path: Path) -> None:
    layers = [
        images.layer_from_tree(_tree(tmp_path / n, [n]), tmp_path / f"{n}.tar.gz", _gzip)
        for n in ("one", "two")
    ]
    image = images.make_image(layers, {"Cmd": ["/bin/sh"]}, ["first", "second"])
    manifest = json.loads(image.manifest())
    assert (manifest["schemaVersion"], manifest["mediaType"]) == (2, images.MANIFEST_TYPE)
    assert [(x["digest"], x["size"]) for x in manifest["layers"]] == [(x.digest, x.size) for x in layers]
    config = pause.encode(image.config)
    assert manifest["config"] == {"mediaType": images.CONFIG_TYPE, "digest": image.id, "size": len(config)}
    described = json.loads(config)
    assert described["rootfs"]["diff_ids"] == [layer.diff_id for layer in layers]
    assert [entry["created_by"] for entry in described["history"]] == ["first", "second"]
    assert described["config"] == {"Cmd": ["/bin/sh"]}
    assert image.digest == f"sha256:{hashlib.sha256(image.manifest()).hexdigest()}"


def test_image_of_packages_has_a_layer_for_each_group(tmp_path: Path) -> None:
    debs = [[_deb(tmp_path / f"{n}.deb", {f"./usr/{n}": n.encode()})] for n in ("one", "two", "three")]
    image = software.build_image("some", debs, tmp_path, _gzip)
    assert [list(_entries(layer)) for layer in image.layers] == [["usr/one"], ["usr/two"], ["usr/three"]]
    assert image.config["config"]["Cmd"] == ["/bin/sh"] and len(image.config["history"]) == 3


def test_one_name_everywhere() -> None:
    for reference in (pause.REFERENCE, *software.IMAGES):
        assert reference.startswith(f"{registry.HOST}/")
    assert (
        registry.Registry("127.1.2.3", 443, Path("ca"), Path("log")).hosts_line
        == f"127.1.2.3 {registry.HOST}"
    )
