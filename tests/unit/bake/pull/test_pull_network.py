"""Access to registries: what a definition's variables become, and where a mirror's API is."""

from __future__ import annotations

from typing import Any, cast

import pytest

from image_builder.bake.lock import requirements
from image_builder.bake.lock.requirements import node_network
from image_builder.bake.pull.network import NOTHING_SPECIAL, Mirror
from image_builder.definition import ImageDefinition


@pytest.mark.parametrize(
    ("mirror", "host", "server", "api"),
    [
        (Mirror("https://mirror.test:5000"), "mirror.test:5000", "https://mirror.test:5000", "/v2"),
        (Mirror("https://mirror.test/hub/"), "mirror.test", "https://mirror.test", "/hub/v2"),
        (
            Mirror("https://mirror.test/v2/hub", override_path=True),
            "mirror.test",
            "https://mirror.test",
            "/v2/hub",
        ),
    ],
)
def test_where_a_mirrors_api_is(mirror: Mirror, host: str, server: str, api: str) -> None:
    assert (mirror.host, mirror.server, mirror.api) == (host, server, api)


def test_a_definitions_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: dict[str, Any] = {}
    monkeypatch.setattr(requirements, "resolved_variables", lambda _: variables)
    definition = cast(ImageDefinition, None)
    assert node_network(definition) == NOTHING_SPECIAL
    variables.update(
        container_runtime_registry_mirrors={
            "docker.io": [{"url": "https://mirror.test", "override_path": True}]
        },
        container_runtime_proxy={"https": "http://proxy.test:3128", "no_proxy": [".test", "10.0.0.0/8"]},
        container_runtime_ca_certificates={"one": "PEM of one", "two": "\nPEM of two\n\n"},
    )
    network = node_network(definition)
    assert network.mirrors == {"docker.io": [Mirror("https://mirror.test", override_path=True)]}
    assert network.outbound.proxies == {
        "https_proxy": "http://proxy.test:3128",
        "no_proxy": ".test,10.0.0.0/8",
    }
    assert network.outbound.authorities == b"PEM of one\nPEM of two\n"
