"""What a definition needs from outside, stage by stage: the question that a lock answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from image_builder.definition import ImageDefinition, Repository, layer_needs, resolved_variables
from image_builder.lock import LockedArchive
from image_builder.stages import base, kubelet_build, tools


@dataclass(frozen=True)
class Group:
    """The packages one stage asks apt for, of one suite, on top of the group ``after``."""

    suite: str
    names: tuple[str, ...]
    after: str | None = None
    repositories: tuple[Repository, ...] = ()


@dataclass(frozen=True)
class Requirements:
    """``groups`` by stage name, in the order in which they are installed; ``sources`` maps a Debian source
    package to the suite it comes from."""

    groups: Mapping[str, Group]
    sources: Mapping[str, str]
    archives: tuple[LockedArchive, ...]

    @property
    def requests(self) -> dict[str, tuple[str, ...]]:
        return {name: group.names for name, group in self.groups.items()}


def requirements(definition: ImageDefinition) -> Requirements:
    """Collect the needs of the tools tree, the base, every layer and what is built from source."""
    groups = {"tools": Group(tools.SUITE, tuple(tools.TOOLS_PACKAGES))}
    sources: dict[str, str] = {}
    archives: dict[str, LockedArchive] = {}
    from_source = kubelet_from_source(definition)
    if from_source:
        groups["build_root"] = Group(from_source, tuple(kubelet_build.BUILD_PACKAGES))
        sources[kubelet_build.SOURCE_PACKAGE] = from_source
    suite = definition.base.suite
    groups["base"] = Group(suite, base.PACKAGES)
    below = "base"
    repositories: dict[str, Repository] = {}
    for layer in definition.layers:
        needs = layer_needs(definition, layer)
        repositories.update({r.name: r for r in needs.repositories})
        groups[layer] = Group(suite, tuple(sorted(set(needs.packages))), below, tuple(repositories.values()))
        archives.update({a.sha256: LockedArchive(url=a.url, sha256=a.sha256) for a in needs.archives})
        below = layer
    return Requirements(groups, sources, tuple(archives.values()))


def kubelet_from_source(definition: ImageDefinition) -> str | None:
    """Return the suite whose ``kubernetes`` source package the kubelet is built from, or None."""
    if "kubernetes" not in definition.layers:
        return None
    source = resolved_variables(definition).get("kubelet_source")
    if not isinstance(source, Mapping) or source.get("type") != "debian_source":
        return None
    return str(source.get("suite", "bookworm"))


def keyring(definition: ImageDefinition) -> Path:
    """Return the keyring that the base's repositories are signed with."""
    default = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return Path(definition.base.keyring) if definition.base.keyring else default
