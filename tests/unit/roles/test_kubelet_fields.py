"""The role kubelet's fields, checked against the sources of each version: tests/data/kubelet-fields.json.

The file has the fields of KubeletConfiguration (v1beta1) from the tags of kubernetes/kubelet. It begins with 1.28.
No field was removed since 1.20, so an older version has none that 1.28 lacks.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from image_builder.settings import REPO_ROOT
from tests.support.roles.kubelet import (
    CRI_DOCKERD,
    KNOWN,
    Rendered,
    containerd,
    docker,
    every_option,
    fields_of,
    table,
)

VERSIONS = tuple(f"1.{minor}" for minor in range(28, 38))


@cache
def sources() -> dict[str, set[str]]:
    """Return the fields of KubeletConfiguration by minor version."""
    read = json.loads((REPO_ROOT / "tests/data/kubelet-fields.json").read_text("utf-8"))
    return {version: set(row["fields"]) for version, row in read.items()}


def runtimes(version: str) -> list[dict[str, Any]]:
    """Return an inventory for each runtime that the role has for a version."""
    shim = {} if table()[version]["dockershim"] else {"container_runtime_cri_dockerd": CRI_DOCKERD}
    return [containerd(version), docker(version, **shim)]


def test_the_facts_have_every_known_version_but_the_first() -> None:
    assert list(sources()) == list(VERSIONS)
    assert [version for version in KNOWN if version not in sources()] == ["1.20"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_has_the_fields_of_its_version(version: str) -> None:
    assert fields_of(version) == sources()[version]


@pytest.mark.parametrize("mode", ["cluster", "standalone"])
@pytest.mark.parametrize("version", KNOWN)
def test_a_rendering_has_only_fields_of_its_version(version: str, mode: str) -> None:
    """For each runtime, with all options set that the version has."""
    for runtime in runtimes(version):
        rendered = Rendered({**every_option(version), **runtime, "kubelet_mode": mode})
        assert rendered.problems == []
        written = rendered.config.keys() - {"apiVersion", "kind"}
        assert len(written) > 25
        assert written - sources().get(version, sources()[VERSIONS[0]]) == set()
