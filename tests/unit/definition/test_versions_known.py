"""The versions that the roles know: the whole list, and an error that names it for any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from image_builder.definition import engine
from image_builder.definition.evaluate import role_variables
from image_builder.definition.roles import RoleBook

BOOK = RoleBook((Path(__file__).resolve().parents[3],))

KUBERNETES = ["1.20", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"]
DOCKER = ["20.10", "23", "24", "25", "26", "27", "28", "29"]
CONTAINERD = ["1.6", "1.7", "2.0", "2.1", "2.2", "2.3"]


def evaluator(layer: str, role: str, inventory: dict[str, Any]) -> engine.Evaluator:
    found = BOOK.layer(layer)
    use = next(use for use in found.uses if use.name == role)
    return engine.Evaluator(role_variables(BOOK, found, use, inventory))


def problems(layer: str, role: str, inventory: dict[str, Any]) -> list[str]:
    """Return a role's objections to an inventory, as `validate` and the role's preflight do."""
    found = evaluator(layer, role, inventory).evaluate("{{ __" + role + "_problems }}")
    assert isinstance(found, list)
    return [" ".join(str(text).split()) for text in found]


def kubelet(version: Any) -> list[str]:
    # containerd 1.7 works with all but the newest, 2.2 with all but the oldest.
    return problems(
        "kubernetes",
        "kubelet",
        {
            "kubelet_version": version,
            "kubelet_source": {"type": "none"},
            "container_runtime_engine": "containerd",
            "container_runtime_containerd_version": "1.7" if str(version).startswith("1.20") else "2.2",
        },
    )


def container_runtime(**inventory: Any) -> list[str]:
    return problems("container_runtime", "container_runtime", inventory)


def test_the_tables_are_complete() -> None:
    assert evaluator("kubernetes", "kubelet", {}).evaluate("{{ __kubelet_versions | list }}") == KUBERNETES
    runtime = evaluator("container_runtime", "container_runtime", {})
    assert runtime.evaluate("{{ __container_runtime_known.docker | list }}") == DOCKER
    assert runtime.evaluate("{{ __container_runtime_known.containerd | list }}") == CONTAINERD


@pytest.mark.parametrize("series", KUBERNETES)
@pytest.mark.parametrize("release", ["", ".0", ".14"])
def test_known_kubernetes(series: str, release: str) -> None:
    assert kubelet(series + release) == []


@pytest.mark.parametrize(
    "version", ["1.19", "1.21.14", "1.30", "1.38", "1.2", "2.0", "1", "latest", "v1.34.2", 1.2]
)
def test_unknown_kubernetes(version: Any) -> None:
    assert kubelet(version) == [f"kubelet_version: {version} is not known; known are {', '.join(KUBERNETES)}"]


@pytest.mark.parametrize("version", [*DOCKER, "20.10.24", "26.1.5", "29.7.2"])
def test_known_docker(version: str) -> None:
    assert container_runtime(container_runtime_docker_version=version) == []


@pytest.mark.parametrize("version", ["19.03", "20", "21.0", "30.0.1", "2", "latest"])
def test_unknown_docker(version: str) -> None:
    told = f"container_runtime_docker_version: {version} is not known; known are {', '.join(DOCKER)}"
    assert container_runtime(container_runtime_docker_version=version) == [told]


@pytest.mark.parametrize("version", [*CONTAINERD, "1.6.20", "1.7.24", "2.2.3"])
def test_known_containerd(version: str) -> None:
    assert container_runtime(container_runtime_containerd_version=version) == []


@pytest.mark.parametrize("version", ["1.5.11", "1.8", "2.4", "2", "latest"])
def test_unknown_containerd(version: str) -> None:
    told = f"container_runtime_containerd_version: {version} is not known; known are {', '.join(CONTAINERD)}"
    assert container_runtime(container_runtime_containerd_version=version) == [told]
