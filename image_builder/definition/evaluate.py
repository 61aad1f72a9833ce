"""What an image's roles come to: a layer's packages, repositories and archives, every variable's value.

Precedence is Ansible's: role defaults < inventory < play vars < vars/ of all the play's roles < the
role's own vars/ < the ``vars:`` that the play hands to this role (``Role.get_vars`` of ansible-core 2.19).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.definition import engine
from image_builder.definition.model import ImageDefinition
from image_builder.definition.references import vaulted_names
from image_builder.definition.roles import Layer, RoleBook, RoleUse
from image_builder.definition.values import JSON, is_vaulted
from image_builder.errors import DefinitionError, Problem


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
    """A file fetched by URL, known by its hash."""

    url: str
    sha256: str


@dataclass(frozen=True)
class LayerNeeds:
    """What a layer fetches; all of it goes into the lock."""

    roles: tuple[str, ...]
    packages: tuple[str, ...]
    repositories: tuple[Repository, ...]
    archives: tuple[Archive, ...]


def layer_sources(definition: ImageDefinition, layer: str) -> list[Path]:
    """Return what a layer's code digest covers: its playbook and what of its roles reaches an image."""
    book = RoleBook(definition.repo_root)
    found = book.layer(layer)
    return [found.playbook, *(part for use in found.uses for part in book.role(use.name).parts)]


def role_variables(
    book: RoleBook, layer: Layer, use: RoleUse, inventory: Mapping[str, JSON]
) -> dict[str, JSON]:
    """Return the variables that a role's tasks see, untemplated."""
    others = [book.role(u.name) for u in layer.uses]
    own = book.role(use.name)
    scopes: list[Mapping[str, Any]] = [
        *(role.defaults for role in others),
        own.defaults,
        inventory,
        layer.play_vars,
        *(role.constants for role in others),
        own.constants,
        use.vars,
        {"role_path": str(own.path), "role_name": own.name},
    ]
    # The inventory's values are plain already; the rest still carry tags.
    return {
        str(k): v if scope is inventory else engine.plain(v) for scope in scopes for k, v in scope.items()
    }


def layer_needs(definition: ImageDefinition, layer: str) -> LayerNeeds:
    """Evaluate what a layer installs and fetches; raises DefinitionError for what can't be evaluated."""
    book = RoleBook(definition.repo_root)
    found = book.layer(layer)
    problems: list[Problem] = []
    lists: dict[str, list[JSON]] = {"packages": [], "repositories": [], "archives": []}
    for use in found.uses:
        variables = role_variables(book, found, use, definition.variables)
        evaluator = engine.Evaluator(variables)
        for kind, items in lists.items():
            name = f"__{use.name}_{kind}"
            if name not in variables:
                continue
            where = str(engine.place_in(book.role(use.name).constants, [name]) or "")
            try:
                value = evaluator.evaluate(variables[name])
            except engine.EvaluationError as error:
                problems.append(Problem(where, name, f"{definition.name}: {error}"))
                continue
            if is_vaulted(value):
                what = "a vaulted value would end in the lock; give apt its credentials in auth.conf.d"
                problems.append(Problem(where, name, f"{definition.name}: {what}"))
            elif isinstance(value, list):
                items.extend(item for item in value if item not in items)
            else:
                problems.append(Problem(where, name, f"{definition.name}: is not a list, but {value!r}"))
    needs = None
    if not problems:
        try:
            needs = LayerNeeds(
                tuple(use.name for use in found.uses),
                tuple(_text(p) for p in lists["packages"]),
                tuple(_repository(r) for r in lists["repositories"]),
                tuple(_archive(a) for a in lists["archives"]),
            )
        except (TypeError, KeyError) as error:
            problems.append(Problem(str(found.playbook), layer, f"{definition.name}: {error}"))
    if needs is None:
        raise DefinitionError(problems)
    return needs


def _text(value: JSON) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"a non-empty string is needed, got {value!r}")
    return value


def _texts(value: JSON) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, list):
        raise TypeError(f"a list of strings is needed, got {value!r}")
    return tuple(_text(v) for v in value)


def _repository(value: JSON) -> Repository:
    if not isinstance(value, Mapping):
        raise TypeError(f"a repository is a mapping, got {value!r}")
    if missing := sorted({"name", "uris", "suites", "signed_by"} - set(value)):
        raise TypeError(f"repository {value.get('name', '?')}: without {', '.join(missing)}")
    return Repository(
        _text(value["name"]),
        _texts(value["uris"]),
        _texts(value["suites"]),
        _texts(value.get("components") or []),
        _text(value["signed_by"]),
    )


def _archive(value: JSON) -> Archive:
    if not isinstance(value, Mapping) or not {"url", "sha256"} <= set(value):
        raise TypeError(f"an archive is a mapping with url and sha256, got {value!r}")
    return Archive(_text(value["url"]), _text(value["sha256"]).lower())


@dataclass(frozen=True)
class EvaluatedRole:
    """A role of an image: its variables as written, the values they come to, and why others have none.

    A value that is vaulted, or may be made from a vaulted one, is in neither ``values`` nor ``failures``.
    """

    layer: Layer
    use: RoleUse
    raw: Mapping[str, JSON]
    values: Mapping[str, JSON]
    failures: Mapping[str, str]


def evaluated_roles(definition: ImageDefinition) -> Iterator[EvaluatedRole]:
    """Yield every role of an image, in the order of the layers."""
    book = RoleBook(definition.repo_root)
    for layer in (book.layer(name) for name in definition.layers):
        for use in layer.uses:
            raw = role_variables(book, layer, use, definition.variables)
            evaluator = engine.Evaluator(raw)
            secret = vaulted_names(raw)
            values: dict[str, JSON] = {}
            failures: dict[str, str] = {}
            for name, template in raw.items():
                if name in secret:
                    continue
                try:
                    values[name] = evaluator.evaluate(template)
                except engine.EvaluationError as error:
                    failures[name] = str(error)
            yield EvaluatedRole(layer, use, raw, values, failures)


def resolved_variables(definition: ImageDefinition) -> dict[str, JSON]:
    """Return every variable's value, of all roles of the image, for the checks to be driven by.

    What is handed to a role by its play counts for that role's own variables. Left out are vaulted values,
    all that is made from them, and internal variables that need facts or results of tasks.
    """
    resolved: dict[str, JSON] = {}
    own: dict[str, JSON] = {}
    for role in evaluated_roles(definition):
        prefixes = (f"{role.use.name}_", f"__{role.use.name}_")
        resolved.update(role.values)
        own.update({name: value for name, value in role.values.items() if name.startswith(prefixes)})
    return {k: v for k, v in {**resolved, **own}.items() if k not in ("role_path", "role_name")}
