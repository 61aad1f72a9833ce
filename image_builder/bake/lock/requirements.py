"""What a definition needs from outside, stage by stage: the question that a lock answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.bake.lock.model import Lock, LockedArchive, Question
from image_builder.bake.pull.network import Mirror, Network
from image_builder.definition import ImageDefinition, Repository, resolved_variables
from image_builder.system.web import Outbound


@dataclass(frozen=True)
class Group:
    """The packages one stage asks apt for, of one suite, on top of the group ``after``, and Debian source packages.

    ``alone``: these files are wanted and nothing is installed, so nothing that they depend on.
    """

    suite: str
    names: tuple[str, ...]
    components: tuple[str, ...] = ("main",)
    after: str | None = None
    repositories: tuple[Repository, ...] = ()
    alone: bool = False
    sources: tuple[str, ...] = ()

    @property
    def question(self) -> Question:
        """Return what is asked of apt, in the form in which a lock remembers it."""
        return Question(
            suite=self.suite,
            components=list(self.components),
            repositories=[_line(r) for r in self.repositories],
            requested=sorted(self.names),
        )


@dataclass(frozen=True)
class Requirements:
    """``groups`` by stage name, each after the one that it is installed on; ``archives`` maps a layer to the files
    that its roles fetch by address, ``preload`` are the references of the container images to preload."""

    groups: Mapping[str, Group] = field(default_factory=dict)
    archives: Mapping[str, tuple[LockedArchive, ...]] = field(default_factory=dict)
    preload: tuple[str, ...] = ()

    def __or__(self, other: Requirements) -> Requirements:
        """Return the requirements of both."""
        return Requirements(
            {**self.groups, **other.groups},
            {**self.archives, **other.archives},
            (*self.preload, *other.preload),
        )

    @property
    def sources(self) -> dict[str, str]:
        """Return the suite that each Debian source package comes from."""
        return {name: group.suite for group in self.groups.values() for name in group.sources}

    @property
    def all_archives(self) -> tuple[LockedArchive, ...]:
        """Return the archives of all layers, each once."""
        return tuple({a.sha256: a for archives in self.archives.values() for a in archives}.values())

    def unlocked_images(self, lock: Lock) -> list[str]:
        """Return the references that ``lock`` says nothing of."""
        return [ref for ref in self.preload if lock.locked_image(ref) is None and ref not in lock.left_out]

    def misfit(self, lock: Lock) -> list[str]:
        """Tell why ``lock`` doesn't answer these requirements, images apart: one sentence a difference."""
        questions = {name: group.question for name, group in self.groups.items()}
        return lock.misfit(questions, self.sources, self.all_archives)


def node_network(definition: ImageDefinition) -> Network:
    """Return how the nodes reach registries: a bake may have no other way either."""
    variables = resolved_variables(definition)

    def declared(name: str) -> Mapping[str, Any]:
        value = variables.get(f"container_runtime_{name}")
        return value if isinstance(value, Mapping) else {}

    mirrors = {
        str(registry): [Mirror.declared(mirror) for mirror in mirrors if isinstance(mirror, Mapping)]
        for registry, mirrors in declared("registry_mirrors").items()
        if isinstance(mirrors, list)
    }
    proxy = declared("proxy")
    proxies = {f"{scheme}_proxy": str(proxy[scheme]) for scheme in ("http", "https") if proxy.get(scheme)}
    if direct := proxy.get("no_proxy"):
        proxies["no_proxy"] = ",".join(map(str, direct))
    authorities = "".join(f"{str(pem).strip()}\n" for pem in declared("ca_certificates").values())
    return Network(mirrors, Outbound(proxies, authorities.encode()))


def keyring(definition: ImageDefinition) -> Path:
    """Return the keyring that the base's repositories are signed with."""
    default = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return Path(definition.base.keyring) if definition.base.keyring else default


def _line(repository: Repository) -> str:
    """Return a repository in one line; ``signed_by`` is a keyring's path or an armoured key."""
    key = repository.signed_by.encode()
    if "BEGIN PGP" not in repository.signed_by and Path(repository.signed_by).is_file():
        key = Path(repository.signed_by).read_bytes()
    digest = hashlib.sha256(key).hexdigest()[:16]
    return " ".join([*repository.uris, *repository.suites, *repository.components, f"[key {digest}]"])
