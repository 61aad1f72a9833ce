"""A definition's external requirements, stage by stage: the question that a lock answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.bake.lock.model import Lock, LockedArchive, Question
from image_builder.bake.pull.network import Mirror, Network
from image_builder.canonical import digest
from image_builder.definition import ImageDefinition, Repository, resolved_variables
from image_builder.system.web import Outbound


@dataclass(frozen=True)
class Group:
    """The packages of one suite that a stage requests on top of the group ``after``, and Debian source packages.

    ``alone`` means that only these package files are wanted: nothing is installed, so their dependencies aren't needed.
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
        """Return the request to apt, in the form that a lock stores."""
        return Question(
            suite=self.suite,
            components=list(self.components),
            repositories=[_line(r) for r in self.repositories],
            requested=sorted(self.names),
        )


@dataclass(frozen=True)
class Requirements:
    """What a definition requires.

    ``groups`` are by stage name, each after the one that it is installed on; ``archives`` maps a layer to the files
    that its roles fetch by address; ``preload`` has the references of the container images to preload, ``optional`` of
    those that may be missing.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    archives: Mapping[str, tuple[LockedArchive, ...]] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()

    def __or__(self, other: Requirements) -> Requirements:
        """Return the combined requirements of both."""
        return Requirements(
            {**self.groups, **other.groups},
            {**self.archives, **other.archives},
            (*self.preload, *other.preload),
            self.optional | other.optional,
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
        """Return the references that ``lock`` has no digest for, except the optional ones that it leaves out."""
        answered = self.optional.intersection(lock.left_out)
        return [ref for ref in self.preload if lock.locked_image(ref) is None and ref not in answered]

    def misfit(self, lock: Lock) -> list[str]:
        """Return why ``lock`` doesn't meet these requirements, apart from images: one sentence per difference.

        What it has besides is no misfit.
        """
        lock = self.part_of(lock)
        questions = {name: group.question for name, group in self.groups.items()}
        reasons = lock.misfit(questions, self.sources, self.all_archives)
        return reasons or [
            f"{name}: locked on top of other packages"
            for name in self.groups
            if not self.is_based(lock, name)
        ]

    def below(self, name: str) -> list[str]:
        """Return the groups that a group is installed on, lowest first."""
        after = self.groups[name].after
        return [*self.below(after), after] if after else []

    def is_based(self, lock: Lock, name: str) -> bool:
        """Return whether a group of ``lock`` was resolved on top of the groups that it is installed on here."""
        return lock.groups[name].below in (None, lock.digest_of(self.below(name)))

    def part_of(self, lock: Lock) -> Lock:
        """Return ``lock`` without the groups and source packages that aren't required."""
        groups = {name: group for name, group in lock.groups.items() if name in self.groups}
        sources = {name: source for name, source in lock.sources.items() if name in self.sources}
        return lock.model_copy(update={"groups": groups, "sources": sources})

    @property
    def digest(self) -> str:
        """Return the SHA-256 of everything that is required, in hex."""
        groups = {
            name: [group.after, sorted(group.sources), group.question.model_dump()]
            for name, group in self.groups.items()
        }
        archives = sorted(archive.sha256 for archive in self.all_archives)
        return digest([groups, archives, sorted(self.preload), sorted(self.optional)])


def node_network(definition: ImageDefinition) -> Network:
    """Return how the nodes reach registries, since a bake may have no other way to reach them."""
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
    """Return the keyring with which the base's repositories are verified."""
    default = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return Path(definition.base.keyring) if definition.base.keyring else default


def _line(repository: Repository) -> str:
    """Return a repository as one line; ``signed_by`` is a keyring's path or an armored key."""
    key = repository.signed_by.encode()
    if "BEGIN PGP" not in repository.signed_by and Path(repository.signed_by).is_file():
        key = Path(repository.signed_by).read_bytes()
    of_key = hashlib.sha256(key).hexdigest()[:16]
    return " ".join([*repository.uris, *repository.suites, *repository.components, f"[key {of_key}]"])
