"""What the variables of an image's roles come to.

Precedence is Ansible's: role defaults < inventory < play vars < vars/ of all the play's roles < the
role's own vars/ < the ``vars:`` that the play hands to this role (``Role.get_vars`` of ansible-core 2.19).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.definition import engine
from image_builder.definition.model import ImageDefinition
from image_builder.definition.references import vaulted_names
from image_builder.definition.roles import Layer, RoleBook, RoleUse
from image_builder.definition.values import JSON


def layer_sources(definition: ImageDefinition, layer: str) -> list[Path]:
    """Return what a layer's code digest covers: its playbook, and what of its tasks and roles reaches an image."""
    book = RoleBook(definition.repo_root)
    found = book.layer(layer)
    return [
        found.playbook,
        *found.task_files,
        *(part for use in found.uses for part in book.role(use.name).parts),
    ]


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


@dataclass(frozen=True)
class EvaluatedRole:
    """A role of an image: its variables as written, the values they come to, and why others have none.

    ``values`` and ``failures`` hold the role's own variables and those that no role of the image owns. One
    that is vaulted, or may be made from a vaulted one, is in neither.
    """

    layer: Layer
    use: RoleUse
    raw: Mapping[str, JSON]
    values: Mapping[str, JSON]
    failures: Mapping[str, str]


def evaluated_roles(definition: ImageDefinition) -> list[EvaluatedRole]:
    """Return every role of an image, in the order of the layers."""
    return [role for layer in definition.layers for role in evaluated_layer(definition, layer)]


def evaluated_layer(definition: ImageDefinition, layer: str) -> tuple[EvaluatedRole, ...]:
    """Evaluate a layer's roles; once for a definition, as long as the roles' files are unchanged."""
    book = RoleBook(definition.repo_root)
    found = book.layer(layer)
    files = [found.playbook, *(file for use in found.uses for file in book.role(use.name).declarations)]
    stamp = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    known = definition.evaluated.get(layer)
    if known is None or known[0] != stamp:
        owners = {use.name for name in definition.layers for use in book.layer(name).uses}
        known = (stamp, tuple(_evaluate(definition, book, found, use, owners) for use in found.uses))
        definition.evaluated[layer] = known
    return known[1]


def _evaluate(
    definition: ImageDefinition, book: RoleBook, layer: Layer, use: RoleUse, owners: Collection[str]
) -> EvaluatedRole:
    raw = role_variables(book, layer, use, definition.variables)
    secret = vaulted_names(raw)
    wanted = [
        name
        for name in raw
        if name not in secret and owner(name.removeprefix("__"), owners) in (None, use.name)
    ]
    values, failures = engine.evaluate_all(raw, wanted)
    return EvaluatedRole(layer, use, raw, values, failures)


def owner(name: str, roles: Iterable[str]) -> str | None:
    """Return the role whose prefix a public variable's name has; the longest one counts."""
    return max((role for role in roles if name.startswith(f"{role}_")), key=len, default=None)


def resolved_variables(definition: ImageDefinition) -> dict[str, JSON]:
    """Return every variable's value, of all roles of the image, for the checks to be driven by.

    A role's variables are as that role sees them, handed over by its play or not. Left out are vaulted
    values, all that is made from them, and internal variables that need facts or results of tasks.
    """
    resolved: dict[str, JSON] = {}
    for role in evaluated_roles(definition):
        resolved.update(role.values)
    return {name: value for name, value in resolved.items() if name not in ("role_path", "role_name")}
