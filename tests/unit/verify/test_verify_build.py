"""A published build is hashed before anything in it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.errors import UsageError, VerifyError
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.verify.command import report_name, verify
from tests.support.images.manifests import DOCUMENTS, manifest, write


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda disk: disk.write_bytes(b"other bytes"), "worker.raw is not what the manifest says"),
        (lambda disk: disk.unlink(), "worker.raw is missing, which the manifest names"),
    ],
    ids=["changed", "missing"],
)
def test_a_file_that_is_not_the_published_one(
    tmp_path: Path, harm: Callable[[Path], object], told: str
) -> None:
    files = {"worker.raw": b"disk"}
    build = write(tmp_path / "build", {**files, **DOCUMENTS, "manifest.json": manifest(files).render()})
    harm(build / "worker.raw")
    settings = Settings(store=tmp_path / "store")
    with pytest.raises(VerifyError, match=told):
        verify(str(build), None, tmp_path / "out", settings=settings, monitor=Monitor())


def test_facts_that_are_none_are_named(tmp_path: Path) -> None:
    for name in ("key", "known_hosts"):
        (tmp_path / name).touch()
    (tmp_path / "other.json").write_text("{ torn")
    url = f"ssh://a@127.0.0.1?key={tmp_path / 'key'}&known_hosts={tmp_path / 'known_hosts'}"
    settings = Settings(store=tmp_path / "store")
    with pytest.raises(UsageError, match=r"other\.json: not JSON"):
        verify(url, tmp_path / "other.json", tmp_path / "out", settings=settings, monitor=Monitor())


def test_each_target_has_its_own_reports() -> None:
    names = {
        "ssh://admin@node7?key=/k&known_hosts=/h": "admin@node7",
        "ssh://admin@node7:2222?key=/k": "admin@node7-2222",
        "ssh://[fe80::1]:22": "fe80-1-22",
        "ssh://../..": "root",
        "/srv/tree": "srv-tree",
        "/srv/other/../tree/": "srv-tree",
        "/": "root",
    }
    assert {target: report_name(target) for target in names} == names
    assert (
        report_name("/" + "a" * 90 + "/tree").endswith("a-tree") and len(report_name("/" + "é" * 300)) <= 80
    )
