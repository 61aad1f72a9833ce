"""Names of container images, as registries and Docker write them."""

from __future__ import annotations

import pytest

from image_builder.bake.pull.reference import familiar


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("docker.io/library/nginx:1.25", "nginx:1.25"),
        ("docker.io/nginx@sha256:0", "nginx@sha256:0"),
        ("nginx:1.25", "nginx:1.25"),
        ("team/app:1", "team/app:1"),
        ("registry.example/library/nginx:1", "registry.example/library/nginx:1"),
    ],
)
def test_what_is_docker_hubs_is_known_by_dockers_name_for_it(name: str, expected: str) -> None:
    assert familiar(name) == expected
