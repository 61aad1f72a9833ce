"""The values of the variables of an image's roles.

Precedence is Ansible's: role defaults < inventory < play vars < vars/ of all the play's roles < the
role's own vars/ < the ``vars:`` that the play passes to this role < ``-e`` (``Role.get_vars`` of ansible-core 2.19).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from image_builder.canonical import JSON
from image_builder.definition import engine
from image_builder.definition.host_variables import HostVariables
from image_builder.definition.model import BUILDER_NAMES, ImageDefinition
from image_builder.definition.roles import Layer, Role, RoleBook, RoleUse, short_name
from image_builder.definition.values import is_template, looked_up_names, made_from, strings, vaulted_names

# A value that no lookup returns.
_ANOTHER = "another answer of a lookup"
_VARS = re.compile(r"\bvars\b")


def role_variables(
    book: RoleBook,
    layer: Layer,
    use: RoleUse,
    inventory: Mapping[str, JSON],
    extra: Mapping[str, JSON] = MappingProxyType({}),
) -> dict[str, JSON]:
    """Return the variables that a role's tasks see, untemplated."""
    of_play, _ = layer_variables(layer, inventory, extra)
    others = [book.role(other.name) for other in book.uses(layer)]
    *needed, own = (book.role(other.name) for other in book.with_dependencies(use))
    parents = [(parent, book.role(parent.name)) for parent in use.parents]
    scopes: list[Mapping[str, Any]] = [
        *(role.defaults for role in (*others, *needed)),
        *(role.defaults for _, role in parents),
        own.defaults,
        inventory,
        of_play,
        *(role.constants for role in others),
        *(scope for parent, role in parents for scope in (parent.vars, role.constants)),
        *(role.constants for role in needed),
        own.constants,
        use.vars,
        extra,
        {
            "role_path": str(own.path),
            "role_name": own.name,
            # Where lookups look for files, as in this role's tasks.
            "ansible_search_path": [str(own.path), str(layer.playbook.parent)],
        },
    ]
    # The inventory's values are plain already; the rest still carry tags.
    return {
        str(k): v if scope is inventory or scope is extra else engine.plain(v)
        for scope in scopes
        for k, v in scope.items()
    }


def layer_variables(
    layer: Layer, inventory: Mapping[str, JSON], extra: Mapping[str, JSON]
) -> tuple[dict[str, Any], bool]:
    """Return the variables of a layer's play, those of its files last, and whether it is known which files these are.

    Of several names for one file, the first that exists counts, as in Ansible.
    """
    variables, known = dict(layer.play_vars), True
    for names in layer.vars_files:
        for written in names:
            name = engine.plain(written)
            try:
                if is_template(name):
                    of_play = {str(k): engine.plain(v) for k, v in variables.items()}
                    name = engine.Evaluator({**inventory, **of_play, **extra}).evaluate(name)
            except engine.EvaluationError:
                known = False
                break
            if file := engine.file_of_play(layer.playbook, "vars", str(name)):
                content = engine.read_yaml(file)
                variables |= content if isinstance(content, Mapping) else {}
                break
    return variables, known


def play_variables(definition: ImageDefinition, layer: Layer) -> dict[str, JSON]:
    """Return an image's variables in a layer's play: the inventory's, Ansible's own, and the bake's."""
    of_host = definition.variables_in(layer.playbook)
    beside = {"playbook_dir": str(layer.playbook.parent)}
    return {**of_host, **definition.magic, **definition.target, **beside}


@dataclass(frozen=True)
class EvaluatedRole:
    """A role of an image: its variables as written, the values they evaluate to, and why others have none.

    ``values``, ``failures`` and ``unpredictable`` (known only to a play) hold the role's own variables and the
    builder's. A variable that is vaulted, or may be derived from a vaulted one or from one whose file only the play
    chooses, is in none of them. ``looked_up`` are the variables whose value depends on a lookup. It isn't ``complete``
    if only the play knows which files its ``vars_files`` are.
    """

    layer: Layer
    use: RoleUse
    raw: Mapping[str, JSON]
    values: Mapping[str, JSON]
    failures: Mapping[str, str]
    unpredictable: Mapping[str, str]
    looked_up: frozenset[str]
    complete: bool = True


def evaluated_roles(definition: ImageDefinition) -> list[EvaluatedRole]:
    """Return every role of an image, evaluated, in the order of the layers."""
    return [role for layer in definition.layers for role in evaluated_layer(definition, layer)]


def evaluated_layer(definition: ImageDefinition, layer: str) -> tuple[EvaluatedRole, ...]:
    """Evaluate a layer's roles, only once per definition as long as the roles' files are unchanged."""
    return evaluated_playbook(definition, RoleBook(definition.roots).layer(layer))


def evaluated_playbook(definition: ImageDefinition, layer: Layer) -> tuple[EvaluatedRole, ...]:
    """Evaluate the roles of a playbook that is structured like a layer's, only once, as in ``evaluated_layer``."""
    book = RoleBook(definition.roots)
    uses = book.uses(layer)
    files = [layer.playbook, *(file for use in uses for file in book.role(use.name).declarations)]
    stamp = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    cached = definition.evaluated.get(layer.playbook)
    if cached is None or cached[0] != stamp:
        roles = [book.role(use.name).path for use in uses]
        engine.use_plugins_beside([layer.playbook.parent, *roles])
        layers = (layer, *map(book.layer, definition.layers))
        owners = {short_name(use.name) for other in layers for use in book.uses(other)}
        cached = (stamp, tuple(_evaluate(definition, book, layer, use, owners) for use in uses))
        definition.evaluated[layer.playbook] = cached
    return cached[1]


def _evaluate(
    definition: ImageDefinition, book: RoleBook, layer: Layer, use: RoleUse, owners: Collection[str]
) -> EvaluatedRole:
    inventory = play_variables(definition, layer)
    raw = role_variables(book, layer, use, inventory, definition.extra_variables)
    texts = [text for value in raw.values() for text in strings(value) if "vars" in text]
    if any("hostvars" in text for text in texts):
        raw["hostvars"] = definition.hostvars()
    if any(_VARS.search(text) for text in texts):
        raw["vars"] = dict(raw)
    _, complete = layer_variables(layer, inventory, definition.extra_variables)
    chosen_late = {name for other in book.uses(layer) for name in book.role(other.name).ambiguous}
    left_out = vaulted_names(raw) | made_from(chosen_late & raw.keys(), raw)
    names = [
        name
        for name in raw
        if name not in left_out
        and (name in BUILDER_NAMES or owner(name.removeprefix("__"), owners) == short_name(use.name))
    ]
    evaluation = engine.evaluate_all(raw, names, layer.playbook.parent)
    undefined = {name: why for name, why in evaluation.failures.items() if why.endswith(" is undefined")}
    unknown = {} if complete else undefined
    return EvaluatedRole(
        layer,
        use,
        raw,
        evaluation.values,
        {name: why for name, why in evaluation.failures.items() if name not in unknown},
        {**evaluation.unpredictable, **unknown},
        _looked_up(raw, evaluation.values, layer),
        complete,
    )


def _looked_up(raw: Mapping[str, JSON], values: Mapping[str, JSON], layer: Layer) -> frozenset[str]:
    """Return the variables whose value depends on lookups: those that change when lookups return something else."""
    possible = looked_up_names(raw) & values.keys()
    if not possible:
        return frozenset()
    others = engine.evaluate_all(raw, sorted(possible), layer.playbook.parent, answer=_ANOTHER).values
    return frozenset(name for name in possible if name not in others or others[name] != values[name])


def owner(name: str, roles: Iterable[str]) -> str | None:
    """Return the role whose prefix a public variable's name has; the longest prefix wins."""
    return max((role for role in roles if name.startswith(f"{role}_")), key=len, default=None)


def resolved_variables(definition: ImageDefinition) -> dict[str, JSON]:
    """Return the value of every variable that a role of the image owns, and of the builder's own variables.

    A role's variables have the values that the role sees, whether or not its play passes them. Vaulted values,
    everything derived from them, and internal variables that need facts or results of tasks are left out.
    """
    resolved: dict[str, JSON] = {}
    for role in evaluated_roles(definition):
        resolved.update(role.values)
    return resolved


def published_variables(definition: ImageDefinition) -> dict[str, JSON]:
    """Return the ``resolved_variables`` that may be published.

    These are declared, and depend on no lookup and on no option with ``no_log``.
    """
    published: dict[str, JSON] = {}
    book = RoleBook(definition.roots)
    for role in evaluated_roles(definition):
        options = book.role(role.use.name).options
        declared = BUILDER_NAMES | options.keys() | book.role(role.use.name).constants.keys()
        hidden = made_from({name for name, option in options.items() if option.get("no_log")}, role.raw)
        declared -= hidden
        published |= {name: value for name, value in role.values.items() if name in declared - role.looked_up}
    return published


def where_set(role: Role, evaluated: EvaluatedRole, variables: HostVariables, name: str) -> str:
    """Return where a role's variable was given its value: by the play, the inventory, or the role."""
    if name in evaluated.use.vars:
        return str(engine.place_in(evaluated.use.vars, [name]) or evaluated.use.place or "")
    return variables.where([name]) or str(engine.place_in({**role.defaults, **role.constants}, [name]) or "")
