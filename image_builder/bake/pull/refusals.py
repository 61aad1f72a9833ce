"""The answers of a registry and its mirrors to one more request, after a runtime has failed to pull an image.

Runtimes pass on little of this: that the registry answered 429, but not for how long, and nothing about mirrors, which
they ask before the registry. If a mirror is the only way out, its answer is the one that counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import urllib3

from image_builder.bake.pull.network import Endpoints, Mirror, Network
from image_builder.bake.pull.reference import Reference, parse
from image_builder.bake.pull.registry import RegistryClient, asked_pause
from image_builder.errors import PullError
from image_builder.system.web import Outbound

# Short, since a build that is about to end waits for the answer.
_TIMEOUT = urllib3.Timeout(connect=2, read=2)


def retry_after(ref: str, digest: str, endpoints: Endpoints, network: Network) -> float:
    """Return the longest pause, in seconds, that the registry or a mirror asks for before the next request.

    Return 0 if the registry itself has the image now.
    """
    image = parse(ref)
    mirrors = network.mirrors.get(image.registry, ())
    own, *others = [_refusal(image, digest, endpoints, way, network.outbound) for way in (None, *mirrors)]
    return 0.0 if own is None else max(own.pause, *(other.pause for other in others if other), 0.0)


def mirror_failures(ref: str, digest: str, endpoints: Endpoints, network: Network) -> dict[str, str]:
    """Return why the mirrors of an image's registry don't serve it now, by the mirrors' addresses."""
    image = parse(ref)
    refusals = {
        mirror.server: _refusal(image, digest, endpoints, mirror, network.outbound)
        for mirror in network.mirrors.get(image.registry, ())
    }
    return {server: refusal.reason for server, refusal in refusals.items() if refusal}


@dataclass(frozen=True)
class _Refusal:
    """Why an image isn't served, and for how many seconds the server asks to pause; 0 for none."""

    reason: str
    pause: float = 0.0


def _refusal(
    image: Reference, digest: str, endpoints: Endpoints, mirror: Mirror | None, outbound: Outbound
) -> _Refusal | None:
    """Request an image's manifest from a registry or mirror; return why it isn't served, None if it is."""
    options: dict[str, Any] = {"outbound": outbound, "retries": False, "timeout": _TIMEOUT}
    try:
        with RegistryClient(image, endpoints, mirror, **options) as client:
            try:
                # This logs in: without credentials, a registry answers 401 however often it is asked.
                answer = client.stream("HEAD", client.path(f"manifests/{digest}"), {})
                answer.close()
            except urllib3.exceptions.HTTPError as error:
                return _Refusal(client.unreachable(error))
    except PullError as error:
        return _Refusal(error.message.removeprefix(f"{image}: "))
    if answer.status < 400:
        return None
    return _Refusal(client.refusal(answer, b""), asked_pause(answer) if answer.status == 429 else 0.0)
