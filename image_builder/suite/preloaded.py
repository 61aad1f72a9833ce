"""The common parts of the checks of preloaded images: the list that the bake wrote, and how engines write names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from suite import is_member, load
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


def deletable(host: Host, v: dict[str, Any]) -> set[str]:
    """Return the images that the kubelet of a cluster's node may have deleted for lack of space: it spares pinned ones.

    Without an archive, all of containerd's images are pinned (image_builder/node/preload/images.py).
    """
    all_pinned = v["container_runtime_engine"] == "containerd" and not v["image_preload_archive"]
    if all_pinned or not is_member(host, v):
        return set()
    return {image["ref"] for image in images(host) if not image["pin"]} - {v["container_runtime_pause_image"]}


def familiar(ref: str) -> str:
    """Return a reference as Docker writes it, without its own registry."""
    return ref.removeprefix("docker.io/").removeprefix("library/") if ref.startswith("docker.io/") else ref


def plain(digest: str) -> str:
    """Return a digest without its algorithm."""
    return digest.removeprefix("sha256:")


def kernel_modules(lists: Mapping[str, str]) -> dict[str, set[str]]:
    """Return each kernel's modules, built in or not, from the texts of ``modules.dep`` and ``modules.builtin``."""
    modules: dict[str, set[str]] = {}
    for path, text in lists.items():
        names = re.findall(r"^\S*?([^/\s]+)\.ko\b", text, re.MULTILINE)
        modules.setdefault(path.split("/")[-2], set()).update(name.replace("-", "_") for name in names)
    return modules
