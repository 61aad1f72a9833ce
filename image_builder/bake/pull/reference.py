"""Container image references: ``registry.example:5000/name:tag``, fully qualified, never a short name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from image_builder.bake.lock.model import LockedImage

DOCKER_HUB = "docker.io"


@dataclass(frozen=True)
class Reference:
    """``registry`` is the host (and port) that the reference names, ``name`` the repository's path in it."""

    registry: str
    name: str
    tag: str

    @property
    def repository(self) -> str:
        """Return the reference without its tag."""
        return f"{self.registry}/{self.name}"

    def at(self, digest: str) -> str:
        """Return the reference to ``digest`` (``sha256:…``) in the same repository."""
        return f"{self.repository}@{digest}"

    @property
    def api_host(self) -> str:
        """Return the host that serves the registry's API; for Docker Hub it isn't the host that its name says."""
        return "registry-1.docker.io" if self.registry == DOCKER_HUB else self.registry

    def __str__(self) -> str:
        return f"{self.repository}:{self.tag}"


def parse(text: str) -> Reference:
    """Split a reference that the definition's model has already validated."""
    path, _, tag = text.rpartition(":")
    registry, _, name = path.partition("/")
    return Reference(registry, name, tag)


def familiar(name: str) -> str:
    """Return a name as Docker lists it: for Docker Hub, without the registry and without ``library/``."""
    registry, _, rest = name.partition("/")
    return rest.removeprefix("library/") if registry == DOCKER_HUB else name


def names_of(images: Iterable[LockedImage]) -> set[str]:
    """Return the names of images, by tag and by digest."""
    return {name for i in images for name in (i.ref, parse(i.ref).at(i.digest))}
