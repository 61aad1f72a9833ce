"""What a registry and its mirrors say to one request more, after a runtime has failed to pull an image.

Runtimes hand on little of it: that the registry said 429, but not for how long, and nothing of mirrors, which they ask
before the registry. Where a mirror is the only way out, its words are those that count.
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

# A build that is to end waits for the answer.
_TIMEOUT = urllib3.Timeout(connect=2, read=2)


def retry_after(ref: str, digest: str, endpoints: Endpoints, network: Network) -> float:
    """Ask the registry and its mirrors how long to wait before the next request: the most seconds that one asks for.

    0 where the registry itself has the image now.
    """
    image = parse(ref)
    mirrors = network.mirrors.get(image.registry, ())
    own, *others = [_refusal(image, digest, endpoints, way, network.outbound) for way in (None, *mirrors)]
    return 0.0 if own is None else max(own.pause, *(other.pause for other in others if other), 0.0)


def mirror_failures(ref: str, digest: str, endpoints: Endpoints, network: Network) -> dict[str, str]:
    """Return why mirrors of an image's registry don't give it now, by their addresses.

    A mirror with a CA of the image's own isn't asked: that file can't be read here.
    """
    image = parse(ref)
    refusals = {
        mirror.server: _refusal(image, digest, endpoints, mirror, network.outbound)
        for mirror in network.mirrors.get(image.registry, ())
        if not mirror.ca
    }
    return {server: refusal.reason for server, refusal in refusals.items() if refusal}


@dataclass(frozen=True)
class _Refusal:
    """Why an image isn't given, and for how many seconds the server asks to be left alone; 0 for none."""

    reason: str
    pause: float = 0.0


def _refusal(
    image: Reference, digest: str, endpoints: Endpoints, mirror: Mirror | None, outbound: Outbound
) -> _Refusal | None:
    """Ask a registry or a mirror for an image's manifest; return why it isn't given, None where it is."""
    options: dict[str, Any] = {"outbound": outbound, "retries": False, "timeout": _TIMEOUT}
    try:
        with RegistryClient(image, endpoints, mirror, **options) as client:
            try:
                # It logs in: without credentials a registry answers 401, however often it is asked.
                answer = client.stream("HEAD", client.path(f"manifests/{digest}"), {})
                answer.close()
            except urllib3.exceptions.HTTPError as error:
                return _Refusal(client.unreachable(error))
    except PullError as error:
        return _Refusal(error.message.removeprefix(f"{image}: "))
    if answer.status < 400:
        return None
    return _Refusal(client.refusal(answer, b""), asked_pause(answer) if answer.status == 429 else 0.0)
