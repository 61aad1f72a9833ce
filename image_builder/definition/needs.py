"""The packages, repositories and archives of a layer: the lists that its roles compute, checked."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.evaluate import EvaluatedRole, evaluated_layer
from image_builder.definition.model import APT_AUTH, ImageDefinition
from image_builder.definition.roles import Role, RoleBook, short_name
from image_builder.definition.values import Place, is_vaulted, referenced_names
from image_builder.errors import DefinitionError, Problem

_KINDS = ("packages", "repositories", "archives")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The ids of Debian's own repositories in a lock, which has no address of them.
_DEBIANS = ("debian", "debian-security")
_VAULTED = f"a vaulted value would end in the lock; {APT_AUTH}"


@dataclass(frozen=True)
class Repository:
    """A third-party apt repository, as ``deb822_repository`` takes it."""

    name: str
    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str


@dataclass(frozen=True)
class Archive:
    """A file fetched by URL and identified by its hash."""

    url: str
    sha256: str


@dataclass(frozen=True)
class LayerNeeds:
    """What a layer fetches; all of it goes into the lock."""

    packages: tuple[str, ...]
    repositories: tuple[Repository, ...]
    archives: tuple[Archive, ...]


def wanted_names(prefix: str) -> tuple[str, ...]:
    """Return the variables in which a role lists what it fetches."""
    return tuple(f"__{prefix}_{kind}" for kind in _KINDS)


def layer_needs(definition: ImageDefinition, layer: str) -> LayerNeeds:
    """Return what a layer installs and fetches. Raises DefinitionError if that can't be evaluated."""
    book = RoleBook(definition.roots)
    evaluated = evaluated_layer(definition, layer)
    problems: list[Problem] = []
    lists: dict[str, list[JSON]] = {kind: [] for kind in _KINDS}
    for role in evaluated:
        for items, name in zip(lists.values(), wanted_names(short_name(role.use.name)), strict=True):
            if name not in role.raw:
                continue
            if unsure := _ambiguous(book.role(role.use.name), role, name):
                problems.append(unsure)
                continue
            value = role.values.get(name)
            if isinstance(value, list) and not is_vaulted(value):
                items.extend(item for item in value if item not in items)
                continue
            where = str(engine.place_in(book.role(role.use.name).constants, [name]) or "")
            reason = (
                role.failures.get(name)
                or role.unpredictable.get(name)
                or (f"is not a list, but {value!r}" if name in role.values else _VAULTED)
            )
            problems.append(Problem(where, name, f"{definition.name}: {reason}"))
    if not problems:
        try:
            return LayerNeeds(
                tuple(_text(p) for p in lists["packages"]),
                tuple(_repository(r) for r in lists["repositories"]),
                tuple(_archive(a) for a in lists["archives"]),
            )
        except TypeError as error:
            playbook = Place(str(book.layer(layer).playbook))
            problems.append(Problem(str(playbook), layer, f"{definition.name}: {error}"))
    raise DefinitionError(problems)


def _ambiguous(role: Role, evaluated: EvaluatedRole, name: str) -> Problem | None:
    """Return a problem if a list depends on which of two variable files the play includes."""
    for other in sorted(referenced_names([name], evaluated.raw) & role.ambiguous.keys()):
        first, second = role.ambiguous[other]
        where = engine.place_in(engine.read_yaml(first), [other]) or Place(str(first))
        reason = f"vars/{second.name} sets it, too, and only the play knows which of them it includes"
        return Problem(
            str(where), other, f"{reason}: for a plan set it in vars/main.yml alone, by target_distribution"
        )
    return None


def _text(value: JSON) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"a value must be a non-empty string, got {value!r}")
    return value


def _texts(value: JSON) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, list):
        raise TypeError(f"a value must be a list of strings, got {value!r}")
    return tuple(_text(v) for v in value)


def _repository(value: JSON) -> Repository:
    if not isinstance(value, Mapping):
        raise TypeError(f"a repository must be a mapping, got {value!r}")
    if missing := sorted({"name", "uris", "suites", "signed_by"} - set(value)):
        raise TypeError(f"repository {value.get('name', '?')} lacks {', '.join(missing)}")
    repository = Repository(
        _text(value["name"]),
        tuple(_address(uri) for uri in _texts(value["uris"])),
        _texts(value["suites"]),
        _texts(value.get("components") or []),
        _text(value["signed_by"]),
    )
    if repository.name in _DEBIANS:
        raise TypeError(
            f"repository {repository.name}: `{repository.name}` is Debian's own, take another name"
        )
    # As in apt: a suite that is a path has no components; any other suite needs at least one.
    flat = [suite.endswith("/") for suite in repository.suites]
    if any(flat) and repository.components:
        raise TypeError(
            f"repository {repository.name}: a flat one (a suite with / at its end) has no components"
        )
    if not all(flat) and not repository.components:
        raise TypeError(f"repository {repository.name}: needs components, or a suite with / at its end")
    return repository


def _address(url: str) -> str:
    """Return an address. Raises TypeError if it contains credentials, which the message leaves out."""
    parts = urllib.parse.urlsplit(url)
    _, credentials, host = parts.netloc.rpartition("@")
    if credentials:
        bare = urllib.parse.urlunsplit(parts._replace(netloc=host))
        raise TypeError(f"{bare} has credentials in it, which would end in the lock; {APT_AUTH}")
    return url


def _archive(value: JSON) -> Archive:
    if not isinstance(value, Mapping) or not {"url", "sha256"} <= set(value):
        raise TypeError(f"an archive must be a mapping with url and sha256, got {value!r}")
    url, sha256 = _address(_text(value["url"])), _text(value["sha256"]).lower()
    if not _SHA256.fullmatch(sha256):
        raise TypeError(f"the archive {url} needs a sha256 of 64 hexadecimal digits, got {sha256!r}")
    return Archive(url, sha256)
