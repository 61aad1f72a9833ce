"""Problems of an image's role variables, found before anything runs.

A role may check its own variables: the list ``__<role>_problems`` in its ``vars/main.yml`` holds texts such as
``kubelet_version: 1.25 is not known; known are 1.20, 1.31``, which are evaluated here as well as in its preflight.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from image_builder.definition import engine
from image_builder.definition.agent_settings import agent_problems
from image_builder.definition.evaluate import (
    EvaluatedRole,
    evaluated_roles,
    layer_variables,
    owner,
    play_variables,
    where_set,
)
from image_builder.definition.host_variables import HostVariables
from image_builder.definition.model import BUILDER_NAMES, PREFIX, ImageDefinition
from image_builder.definition.needs import layer_needs, wanted_names
from image_builder.definition.pools import ANSIBLE_NAMES, POOL_NAMES
from image_builder.definition.reading import layer_reading
from image_builder.definition.roles import Role, RoleBook, RoleUse, undeclared_roles, unknown_roles
from image_builder.definition.values import Place, is_template, strings, words
from image_builder.errors import DefinitionError, Problem
from image_builder.system.trees import files_in
from image_builder.text import did_you_mean

# How similar a name must be to a known one to count as a misspelling of it (difflib's ratio).
_NEARLY = 0.85


def variable_problems(variables: HostVariables, roots: tuple[Path, ...]) -> list[Problem]:
    """Return variables that nothing can read: those with the builder's or a role's prefix but an unknown name."""
    book = RoleBook(roots)
    options_of = {role.name: role.options for role in book.roles()}
    every = [*BUILDER_NAMES, *(name for options in options_of.values() for name in options)]
    problems = []
    for name in variables.tagged:
        role = owner(name.removeprefix("__"), options_of)
        if name in every or not (role or name.startswith(PREFIX)):
            continue
        if name.startswith("__"):
            reason = f"is internal to role `{role}`{did_you_mean(name[2:], every)}"
        elif role and not options_of[role] and _mentions(book.role(role), name):
            specs = Place(str(book.role(role).path / "meta" / "argument_specs.yml"))
            reason = f"unknown variable: declare it in {specs}"
        else:
            reason = f"unknown variable{did_you_mean(name, every)}"
        problems.append(Problem(variables.where([name]), name, reason))
    return problems


def _mentions(role: Role, name: str) -> bool:
    files = (file for part in role.parts for file in files_in(part))
    return any(name in words(file.read_text("utf-8", "replace")) for file in files if file.is_file())


def role_problems(definition: ImageDefinition, variables: HostVariables) -> list[Problem]:
    """Return the problems in an image's layers, its roles, and the values of their variables."""
    book = RoleBook(definition.roots)
    problems = book.clashes()
    for n, name in enumerate(definition.layers):
        if name not in book.layer_names:
            reason = f"unknown layer `{name}`{did_you_mean(name, book.layer_names)}"
            problems.append(Problem(variables.where(["image_layers", n]), f"image_layers[{n}]", reason))
            continue
        try:
            problems += unknown_roles(book, book.layer(name)) or undeclared_roles(book, book.layer(name))
        except engine.UnreadableError as error:
            problems.append(Problem(str(error.place or ""), name, error.reason))
    if problems:
        return problems
    try:
        every = evaluated_roles(definition)
    except engine.UnreadableError as error:
        return [Problem(str(error.place or ""), "roles", error.reason)]
    made_from: dict[str, frozenset[str]] = {}
    for evaluated in every:
        faults = argument_problems(definition, evaluated, variables)
        for problem in faults:
            template = evaluated.raw.get(problem.path)
            texts = [text for text in strings(template) if is_template(text)]
            made_from[problem.path] = frozenset(word for text in texts for word in words(text))
        problems += faults + judged_problems(definition, evaluated, variables, excused=bool(faults))
        known = {problem.path.partition(".")[0].partition("[")[0] for problem in problems}
        problems += agent_problems(book.role(evaluated.use.name), evaluated, variables, known)
    problems += _overridden(definition, [evaluated.use for evaluated in every], variables)
    # A value derived from a wrong one is wrong too: reporting it would be noise.
    wrong = made_from.keys()
    return [p for p in problems if not (made_from.get(p.path, frozenset()) - {p.path}) & wrong]


def stage_problems(definition: ImageDefinition) -> list[Problem]:
    """Return what prevents a plan, such as layers whose needs or reads can't be determined."""
    problems: list[Problem] = []
    for layer in definition.layers:
        try:
            layer_needs(definition, layer)
            problems += reading_problems(definition, layer)
        except DefinitionError as error:
            problems += error.problems
        except engine.UnreadableError as error:
            problems.append(Problem(str(error.place or ""), layer, error.reason))
    return problems


def reading_problems(definition: ImageDefinition, layer: str) -> list[Problem]:
    """Return the faults that would stop a layer's tasks, and the roles that need locking but that only tasks include.

    The packages or files of a role that the layer doesn't list wouldn't be locked.
    """
    book = RoleBook(definition.roots)
    reading = layer_reading(definition, layer)
    problems = [Problem(where, f"layer {layer}", reason) for where, reason in reading.faults]
    for name in reading.unlisted:
        if name in book.role_names:
            role = book.role(name)
            variables = {**role.defaults, **role.constants}
            if wanted := next((w for w in wanted_names(role.prefix) if w in variables), None):
                where = engine.place_in(variables, [wanted]) or Place(str(role.path))
                reason = f"isn't locked: list `{name}` under `roles` of the layer `{layer}`, its tasks only include it"
                problems.append(Problem(str(where), wanted, reason))
    return problems


def idle_layers(definition: ImageDefinition, source: engine.Source) -> list[Problem]:
    """Return the layers whose play Ansible would skip because its hosts don't include the image."""
    book = RoleBook(definition.roots)
    problems = []
    for name in definition.layers:
        layer = book.layer(name)
        where = str(engine.place_of(layer.hosts) or Place(str(layer.playbook)))
        extra = definition.extra_variables
        of_play, _ = layer_variables(layer, play_variables(definition, layer), extra)
        variables = {**{str(k): engine.plain(v) for k, v in of_play.items()}, **extra}
        try:
            hosts = engine.Evaluator(variables).evaluate(engine.plain(layer.hosts))
        except engine.EvaluationError as error:
            problems.append(Problem(where, f"layer {name}", f"hosts: {error}"))
            continue
        pattern = ",".join(map(str, hosts)) if isinstance(hosts, list) else str(hosts or "")
        if not pattern or definition.name not in source.match(pattern):
            reason = (
                f"its play would not run: its hosts are `{pattern}`, without the image `{definition.name}`"
            )
            problems.append(Problem(where, f"layer {name}", reason))
    return problems


def closely_named(definition: ImageDefinition, variables: HostVariables) -> list[Problem]:
    """Return variables that nothing reads and whose names are very similar to a known one: probably typos."""
    roles = RoleBook(definition.roots).roles()
    known_names = [
        *BUILDER_NAMES,
        *POOL_NAMES,
        *ANSIBLE_NAMES,
        *(name for role in roles for name in role.options),
    ]
    read = {word for value in variables.plain.values() for text in strings(value) for word in words(text)}
    read |= {name for layer in definition.layers for name in layer_reading(definition, layer).variables}
    problems = []
    for name in variables.tagged.keys() - read - set(known_names):
        if close := difflib.get_close_matches(name, known_names, n=1, cutoff=_NEARLY):
            reason = f"nothing reads it; did you mean `{close[0]}`?"
            problems.append(Problem(variables.where([name]), name, reason))
    return problems


def unpredictable_layers(definition: ImageDefinition) -> list[Problem]:
    """Return what is known about an image's layers only while their plays run, which is why they run in every build."""
    return [
        Problem("", f"layer {layer}", f"runs in every build: {reason}")
        for layer in definition.layers
        for reason in layer_reading(definition, layer).unknown
    ]


def _overridden(definition: ImageDefinition, every: list[RoleUse], variables: HostVariables) -> list[Problem]:
    """Return the inventory's variables that have no effect because every use of a role passes it another value."""
    uses: dict[str, list[RoleUse]] = {}
    for use in every:
        uses.setdefault(use.name, []).append(use)
    return [
        Problem(variables.where([name]), name, f"has no effect: {first.place} sets it")
        for first, *more in uses.values()
        for name in first.vars
        if name in variables.tagged.keys() - definition.extra_variables.keys()
        and all(name in use.vars for use in more)
    ]


def argument_problems(
    definition: ImageDefinition, evaluated: EvaluatedRole, variables: HostVariables
) -> list[Problem]:
    """Check the values of a role's public variables against its argument specs, as Ansible will."""
    role = RoleBook(definition.roots).role(evaluated.use.name)
    problems: list[Problem] = []
    for name, option in role.options.items():
        where = where_set(role, evaluated, variables, name)
        if name in evaluated.values:
            faults = engine.argument_faults(name, option, evaluated.values[name])
            problems += [Problem(where, name, reason) for reason in faults]
        elif name in evaluated.failures and is_template(evaluated.raw[name]):
            problems.append(Problem(where, name, evaluated.failures[name]))
        elif name not in evaluated.raw and option.get("required") and evaluated.complete:
            where = variables.where(["image_layers"])
            reason = f"role `{role.name}` of image `{definition.name}` needs it"
            problems.append(Problem(where, name, reason))
    return problems


def judged_problems(
    definition: ImageDefinition, evaluated: EvaluatedRole, variables: HostVariables, *, excused: bool
) -> list[Problem]:
    """Return what a role rejects in its own variables.

    If argument problems of the role are already known, it is ``excused`` when this list can't be evaluated.
    """
    role = RoleBook(definition.roots).role(evaluated.use.name)
    name = f"__{role.prefix}_problems"
    if name in evaluated.failures and excused:
        return []
    if name in evaluated.failures:
        return [Problem(where_set(role, evaluated, variables, name), name, evaluated.failures[name])]
    texts = evaluated.values.get(name)
    problems = []
    for text in texts if isinstance(texts, list) else []:
        variable, colon, reason = str(text).partition(": ")
        if not colon:
            variable, reason = role.name, str(text)
        judged = variable.split(".")[0].split("[")[0]
        where = where_set(role, evaluated, variables, judged)
        value = evaluated.values.get(judged)
        if isinstance(value, int | float) and role.options.get(judged, {}).get("type", "str") == "str":
            reason += f' (a number: put it in quotes, "{value}")'
        problems.append(Problem(where, variable, " ".join(reason.split())))
    return problems
