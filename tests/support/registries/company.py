"""A company's network around the lab's registry: one way out, its own CA, tokens, a credential helper.

The registry is Debian's docker-registry, behind a proxy of ours that issues tokens as specified in distribution's
"Token Authentication Specification". No resolver knows it, its certificate is from a CA that only ``SSL_CERT_FILE``
names, and it can be reached only through a proxy with a password.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from image_builder.bake.lock.model import LockedImage
from image_builder.lab.registry import HOST
from tests.support.registries.connect_proxy import ConnectProxy, connect_proxy
from tests.support.registries.plan import Tokens
from tests.support.registries.proxy import RegistryProxy
from tests.support.registries.pulls import Lab

REGISTRY, STORAGE, HUB = "registry.company.test", "storage.company.test", "registry-1.docker.io"
_HUB_IN_HELPERS = "https://index.docker.io/v1/"
# As many versions of `docker login` leave it: a helper for each registry.
_HELPER = """#!/bin/sh
read -r server
echo "$1 $server" >> {asked}
printf '{{"ServerURL": "%s", "Username": "{name}", "Secret": "{password}"}}' "$server"
"""


@dataclass
class Company:
    """The registry, its storage for layers, the fake Docker Hub, the proxy that leads to them, and every secret."""

    registry: RegistryProxy
    storage: RegistryProxy
    hub: RegistryProxy
    way: ConnectProxy
    login: tuple[str, str]
    way_login: tuple[str, str]

    @property
    def secrets(self) -> set[str]:
        """Return what must not appear anywhere: passwords as they are and as they are sent, and tokens."""
        pairs = [":".join(login) for login in (self.login, self.way_login)]
        encoded = {base64.b64encode(pair.encode()).decode() for pair in pairs}
        tokens = [t for r in (self.registry, self.hub) if r.tokens for t in list(r.tokens.given)]
        return {self.login[1], self.way_login[1], *encoded, *tokens}

    def reference(self, image: LockedImage) -> str:
        """Return the company's name for an image of the lab."""
        return image.ref.replace(HOST, REGISTRY)


@contextmanager
def company(lab: Lab, *, token_seconds: float = 60.0) -> Iterator[Company]:
    """Serve, and set this process's environment to that of a build in the company."""
    folder = lab.folder("company")
    registry, storage, hub = (lab.serve_proxy(name) for name in (REGISTRY, STORAGE, HUB))
    endpoints = [lab.endpoints.pop(name) for name in (REGISTRY, STORAGE, HUB)]
    known = {endpoint.host: (endpoint.address, endpoint.port) for endpoint in endpoints}
    authorities = folder / "authorities.pem"
    authorities.write_bytes(b"".join(endpoint.ca.read_bytes() for endpoint in endpoints))
    login = ("robot", f"canary-{secrets.token_hex(12)}")
    way_login = ("builder", f"canary-{secrets.token_hex(12)}")
    registry.tokens = hub.tokens = Tokens(login, token_seconds)
    with connect_proxy(way_login, known) as way:
        place = Company(registry, storage, hub, way, login, way_login)
        asked = folder / "asked"
        helper = folder / "docker-credential-company"
        helper.write_text(_HELPER.format(asked=asked, name=login[0], password=login[1]))
        helper.chmod(0o700)
        (folder / "config.json").write_text(
            json.dumps({"credHelpers": dict.fromkeys((REGISTRY, _HUB_IN_HELPERS), "company")})
        )
        settings = {
            "HTTPS_PROXY": f"http://{':'.join(way_login)}@{way.address[0]}:{way.address[1]}",
            "SSL_CERT_FILE": os.fspath(authorities),
            "DOCKER_CONFIG": os.fspath(folder),
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        try:
            with _environment(settings):
                yield place
        finally:  # it contains a password, and isn't a file of the product
            helper.unlink()


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
