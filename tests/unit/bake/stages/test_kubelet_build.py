"""The inputs of the kubelet build, and what it links in. The build itself is part of every lab bake."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from image_builder.bake.stages.go.run import collect_sources, description, linker_flags
from image_builder.errors import FetchError, LockError

DSC, TAR = "kubernetes_1.20.2-1.dsc", "kubernetes_1.20.2.orig.tar.gz"


def test_the_description_is_told_from_the_other_files() -> None:
    assert description([TAR, DSC]) == DSC


@pytest.mark.parametrize("names", [[], [TAR], [DSC, f"other-{DSC}"], [DSC, "../x"]])
def test_anything_but_one_source_package_is_refused(names: list[str]) -> None:
    with pytest.raises(LockError, match=r"one \.dsc"):
        description(names)


def test_version_is_linked_into_both_copies_and_the_date_is_the_changelogs() -> None:
    flags = linker_flags("1.20.2", "1.20.5+really1.20.2-1", 1_700_000_000).split()
    assert flags[:3] == ["-s", "-w", "-buildid="]
    for package in ("component-base", "client-go/pkg"):
        prefix = f"-X=k8s.io/kubernetes/vendor/k8s.io/{package}/version."
        found = dict(f.removeprefix(prefix).split("=", 1) for f in flags if f.startswith(prefix))
        assert found == {
            "gitVersion": "v1.20.2",
            "gitMajor": "1",
            "gitMinor": "20",
            "gitCommit": "debian/1.20.5+really1.20.2-1",
            "gitTreeState": "archive",
            "buildDate": "2023-11-14T22:13:20Z",
        }


def test_sources_are_taken_by_name_and_only_with_the_locked_bytes(tmp_path: Path) -> None:
    fetched, target = tmp_path / "fetched", tmp_path / "target"
    fetched.mkdir()
    target.mkdir()
    (fetched / "a.dsc").write_bytes(b"description")
    collect_sources({"a.dsc": hashlib.sha256(b"description").hexdigest()}, fetched, target)
    assert (target / "a.dsc").read_bytes() == b"description"
    with pytest.raises(FetchError, match="the lock says 0000"):
        collect_sources({"a.dsc": "0" * 64}, fetched, target)
    with pytest.raises(FetchError, match=r"b\.tar was not fetched"):
        collect_sources({"b.tar": "0" * 64}, fetched, target)
