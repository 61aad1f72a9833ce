"""Traces that name the place of a bake are found; files that a package ships aren't such traces."""

from __future__ import annotations

import base64
import hashlib
import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.bake.stages.seal import run as seal
from image_builder.bake.stages.seal.run import _traces, find_traces
from image_builder.errors import PullError
from image_builder.settings import Settings

MIRROR = "https://mirror.example/debian"
CLOUD = f"primary: {MIRROR}\n"


def _tree(tmp_path: Path, cloud: str = CLOUD) -> Path:
    for name, text in {
        "etc/cloud/cloud.cfg": cloud,
        "etc/mine.conf": "no trace\n",
        "opt/preload/store.json": '{"file": "/opt/preload/store.erofs"}\n',
        "var/lib/dpkg/status": "Package: cloud-init\nConffiles:\n"
        f" /etc/cloud/cloud.cfg {hashlib.md5(CLOUD.encode()).hexdigest()}\nVersion: 1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def _words(store: str, *refs: str) -> dict[str, str]:
    context: Any = SimpleNamespace(
        settings=Settings(store=Path(store), repo_root=Path("/srv/checkout"), mirror=MIRROR),
        work=Path(store, "staging/0123456789ab/seal/work"),
        definition=SimpleNamespace(
            preload=[SimpleNamespace(ref=ref) for ref in refs],
            roots=(Path("/srv/project"), Path("/srv/checkout")),
        ),
    )
    return _traces(context)


def test_debians_own_mirror_and_a_store_of_one_name_are_no_traces(tmp_path: Path) -> None:
    assert list(find_traces(_tree(tmp_path), _words("/store"))) == []


def test_what_the_bake_wrote_is_found(tmp_path: Path) -> None:
    tree = _tree(tmp_path, cloud=f"{CLOUD}# edited\n")
    (tree / "etc/mine.conf").write_text("/store/staging/0123456789ab/seal\n")
    (tree / "etc/other.conf").write_text("/srv/checkout/roles\n")
    assert set(find_traces(tree, _words("/store"))) == {
        ("etc/cloud/cloud.cfg", MIRROR),
        ("etc/mine.conf", "/store/staging"),
        ("etc/mine.conf", "0123456789ab"),
        ("etc/other.conf", "/srv/checkout"),
    }
    (tree / "etc/mine.conf").write_text("/var/lib/image-builder/debs\n")
    found = dict(find_traces(tree, _words("/var/lib/image-builder")))
    assert found["etc/mine.conf"] == "/var/lib/image-builder"


def test_a_registrys_password_in_the_image_is_found_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"registry.example": {"username": "robot", "password": "s3cret-word"}}
    monkeypatch.setenv("IMAGE_BUILDER_REGISTRY_AUTH", json.dumps(known))
    words = _words("/store", "registry.example/team/app:1")
    tree = _tree(tmp_path)
    assert list(find_traces(tree, words)) == []
    (tree / "etc/mine.conf").write_text("password = s3cret-word\n")
    (tree / "etc/docker.json").write_text(base64.b64encode(b"robot:s3cret-word").decode())
    assert sorted(find_traces(tree, words)) == [
        ("etc/docker.json", "the credentials for registry.example"),
        ("etc/mine.conf", "the credentials for registry.example"),
    ]


def test_without_a_registrys_credentials_nothing_passes_as_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull may have had them, so a helper that fails now ends the build."""

    def fail(registry: str) -> None:
        raise PullError(f"the credential helper for {registry} failed: exit status 1")

    monkeypatch.setattr(seal, "credentials_for", fail)
    with pytest.raises(PullError, match="broken.example failed"):
        _words("/store", "broken.example/app:1")


def test_a_file_larger_than_memory_is_searched(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    with (tree / "opt/weights").open("wb") as stream:
        stream.truncate(256 << 20)
        stream.seek(200 << 20)
        stream.write(b"/store/staging/x")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    taken = int(status["VmData"].split()[0]) << 10
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + (64 << 20), before[1]))
    try:
        assert list(find_traces(tree, {"/store/staging": "the store"})) == [("opt/weights", "the store")]
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
