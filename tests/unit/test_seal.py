"""What names the place of a bake is found; what a package ships is none of its traces."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from image_builder.settings import Settings
from image_builder.stages.seal import _traces, find_traces

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


def _words(store: str) -> tuple[str, ...]:
    context: Any = SimpleNamespace(
        settings=Settings(store=Path(store), repo_root=Path("/srv/checkout"), mirror=MIRROR),
        work=Path(store, "staging/0123456789ab/seal/work"),
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
