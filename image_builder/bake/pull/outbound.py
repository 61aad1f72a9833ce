"""Outbound network access for an engine in the sandbox: proxies and certificate authorities."""

from __future__ import annotations

import os

from image_builder.bake.pull.network import Endpoints
from image_builder.system.environment import environment
from image_builder.system.sandbox import Root
from image_builder.system.web import Outbound, trusted_authorities

_BUNDLE = "run/image-builder/authorities.pem"


def variables(root: Root, endpoints: Endpoints, outbound: Outbound) -> dict[str, str]:
    """Write all authorities to the sandbox, on its tmpfs; return the variables of a program that uses the network.

    The addresses of the environment's own proxies are not among them, since they may contain a password; for these, see
    ``Root.argv(…, proxies=True)``.
    """
    env = {name: value for name, value in outbound.variables().items() if name not in environment()}
    if bundle := trusted_authorities() + outbound.authorities:
        path = root.path / _BUNDLE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bundle)
        env["SSL_CERT_FILE"] = os.fspath("/" + _BUNDLE)
    direct = [outbound.variables().get("no_proxy", ""), *endpoints]
    if excepted := ",".join(filter(None, direct)):
        env["no_proxy"] = excepted
    return env
