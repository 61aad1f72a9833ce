"""What the checks of preloaded images share: the list that the bake wrote, and how engines write names."""

from __future__ import annotations

from typing import Any

from suite import load
from testinfra.host import Host

LIST = "/opt/preloaded_docker_images.json"
ARCHIVE = "/opt/preloaded_docker_images.tar"
STORE_FILE = "/opt/preload/store.erofs"


def listed(host: Host) -> dict[str, Any]:
    """Return the list of preloaded images."""
    content = load(host, LIST)
    assert isinstance(content, dict) and content.get("format") == 1, f"{LIST} holds {content!r:.80}"
    return content


def images(host: Host) -> list[dict[str, Any]]:
    """Return the entries of the list."""
    actual: list[dict[str, Any]] = listed(host)["images"]
    return actual


def familiar(ref: str) -> str:
    """Return a reference as Docker writes it, without its own registry."""
    return ref.removeprefix("docker.io/").removeprefix("library/") if ref.startswith("docker.io/") else ref


def plain(digest: str) -> str:
    """Return a digest without its algorithm."""
    return digest.removeprefix("sha256:")
