"""The network outside for an engine in the sandbox, and what a definition declares of it for its nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from image_builder.bake.pull.mirrors import Mirrors
from image_builder.bake.pull.registry import Endpoints
from image_builder.system.environment import environment
from image_builder.system.sandbox import Root
from image_builder.system.web import NOTHING_DECLARED, Outbound, trusted_authorities

_BUNDLE = "run/image-builder/authorities.pem"


@dataclass(frozen=True)
class Network:
    """How nodes reach registries, as their definition declares it: a bake goes the same way."""

    mirrors: Mirrors = field(default_factory=dict)
    outbound: Outbound = NOTHING_DECLARED


NO_NETWORK = Network()


def variables(root: Root, endpoints: Endpoints, outbound: Outbound) -> dict[str, str]:
    """Hand all authorities to the sandbox, on its tmpfs; return the variables of a program that asks outside.

    The addresses of the environment's own proxies are not among them, since they may hold a password:
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
