"""Roles and layers of the repositories: their declarations, not their values for one image.

Layer L is ``playbooks/layers/L.yml``: one play whose ``roles`` are names or ``{role, vars?}``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from image_builder.definition import engine
from image_builder.definition.collections import Collection, installed
from image_builder.definition.values import Place
from image_builder.errors import Problem
from image_builder.settings import CONFIGURATION
from image_builder.text import did_you_mean

LAYERS = Path("playbooks/layers")
# Next to a playbook: they apply to its plays, and to no other playbook's.
VARIABLES_BESIDE = frozenset({"group_vars", "host_vars"})
_YAML = (".yml", ".yaml", ".json")
# Parts of a role that never reach an image.
_NOT_BAKED = frozenset({"README.md", "molecule", "tests", ".yamllint", ".ansible-lint"})


@dataclass(frozen=True)
class Role:
    """One role's own declarations. Values carry Ansible's tags (see ``engine.place_of``)."""

    name: str
    path: Path

    @property
    def prefix(self) -> str:
        """Return the prefix of its variables' names, which leaves out the name of a role's collection."""
        return short_name(self.name)

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        return _merged(engine.variable_files(self.path / "defaults"))

    @cached_property
    def constants(self) -> Mapping[str, Any]:
        """Return the variables of ``vars/``. Files that Ansible itself loads win over those that tasks may include."""
        return _merged([*self._includable, *engine.variable_files(self.path / "vars")])

    @cached_property
    def ambiguous(self) -> Mapping[str, tuple[Path, Path]]:
        """Return the variables with different values in two files of ``vars/``, both of which may apply.

        A file that tasks include wins over those that Ansible loads itself.
        """
        contents = {file: _merged([file]) for file in self._includable}
        if loaded := engine.variable_files(self.path / "vars"):
            contents[loaded[-1]] = _merged(loaded)
        return {
            str(name): (file, other)
            for (file, content), (other, more) in itertools.combinations(contents.items(), 2)
            for name in content.keys() & more.keys()
            if content[name] != more[name]
        }

    @property
    def _includable(self) -> list[Path]:
        """Return the files of ``vars/`` that apply only if a task includes them."""
        loaded = engine.variable_files(self.path / "vars")
        files = {file for suffix in _YAML for file in (self.path / "vars").glob(f"*{suffix}")}
        return sorted(file for file in files - set(loaded) if file.is_file())

    @cached_property
    def specs(self) -> Mapping[str, Any]:
        """Return the argument specs by entry point. Raises UnreadableError if they can't be read."""
        file = self._meta("argument_specs") or self._meta("main")
        if file is None:
            return {}
        content = engine.read_untagged_yaml(file)
        specs = _inner(file, content, "argument_specs")
        options = _inner(file, _inner(file, specs, "main"), "options")
        for name in options:
            _inner(file, options, name)
        return specs

    @property
    def options(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the public variables: the options of entry point ``main``. Raises the same as ``specs``."""
        options = (self.specs.get("main") or {}).get("options") or {}
        return {str(name): option or {} for name, option in options.items()}

    @cached_property
    def dependencies(self) -> tuple[RoleUse, ...]:
        """Return the roles that run before this one, as its metadata list them.

        Raises UnreadableError if the file can't be read.
        """
        file = self._meta("main")
        content = engine.read_yaml(file) if file else None
        return _uses(content.get("dependencies"), ("role", "name")) if isinstance(content, Mapping) else ()

    @property
    def declarations(self) -> list[Path]:
        """Return the files that hold the role's variables and their specs."""
        loaded = (engine.variable_files(self.path / part) for part in ("defaults", "vars"))
        files = [*itertools.chain(*loaded), *self._includable]
        files += [file for name in ("argument_specs", "main") if (file := self._meta(name))]
        return sorted(files)

    def _meta(self, name: str) -> Path | None:
        return engine.role_file(self.path / "meta", name)

    @property
    def parts(self) -> list[Path]:
        """Return the files and directories that determine what the role does."""
        return sorted(p for p in self.path.iterdir() if p.name not in _NOT_BAKED)


@dataclass(frozen=True)
class RoleUse:
    """A role in a layer's play. ``vars`` are the variables that the play passes to it.

    ``parents`` are the uses of the roles that depend on it, the outermost first; empty if the play lists it.
    """

    name: str
    vars: Mapping[str, Any] = field(default_factory=dict)
    place: Place | None = None
    parents: tuple[RoleUse, ...] = ()


@dataclass(frozen=True)
class Layer:
    """A layer's play. Each of its ``vars_files`` is a list of names of which the first that exists counts."""

    name: str
    playbook: Path
    uses: tuple[RoleUse, ...]
    play_vars: Mapping[str, Any]
    hosts: Any = "all"
    vars_files: tuple[Sequence[Any], ...] = ()


@dataclass(frozen=True)
class RoleBook:
    """All roles and layers, read on demand and then cached.

    ``roots`` are first the user's repository, if there is one, and last this program's.
    """

    roots: tuple[Path, ...]
    _roles: dict[str, Role] = field(default_factory=dict, compare=False)
    _layers: dict[str, Layer] = field(default_factory=dict, compare=False)

    @cached_property
    def role_folders(self) -> tuple[Path, ...]:
        """Return the role directories in Ansible's order: next to the layers, of an ``ansible.cfg``, then ``roles``."""
        folders = [
            folder
            for root in self.roots
            for folder in (root / LAYERS / "roles", *_configured_roles(root), root / "roles")
        ]
        return tuple(folder for folder in dict.fromkeys(folders) if folder.is_dir())

    @cached_property
    def collections(self) -> tuple[Collection, ...]:
        """Return the collections of the user's repository."""
        return installed(self.collection_folders)

    @property
    def collection_folders(self) -> list[Path]:
        return engine.collection_folders(self.roots[0])

    @cached_property
    def _role_paths(self) -> Mapping[str, Sequence[Path]]:
        paths = _by_name(path for folder in self.role_folders for path in folder.iterdir() if path.is_dir())
        of_collections = {name: [path] for c in self.collections for name, path in c.roles.items()}
        return {**paths, **of_collections}

    @cached_property
    def _layer_paths(self) -> Mapping[str, Sequence[Path]]:
        return _by_name(path for root in self.roots for path in (root / LAYERS).glob("*.yml"))

    @property
    def role_names(self) -> tuple[str, ...]:
        return tuple(self._role_paths)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self._layer_paths)

    def of_collections(self, files: Iterable[Path]) -> tuple[str, ...]:
        """Return the collections' roles that any of these files belong to."""
        every = tuple(files)
        return tuple(
            name
            for collection in self.collections
            for name, path in collection.roles.items()
            if any(file.is_relative_to(path) for file in every)
        )

    def clashes(self) -> list[Problem]:
        """Return the roles and layers that exist twice, so that one would hide the other."""
        kinds = {"role": self._role_paths, "layer": self._layer_paths}
        return [
            Problem(str(Place(str(paths[0]))), name, f"{kind} of the same name as {paths[1]}: rename it")
            for kind, by_name in kinds.items()
            for name, paths in by_name.items()
            if len(paths) > 1
        ]

    def role(self, name: str) -> Role:
        """Return a role. Raises KeyError if there is none of that name."""
        if name not in self._role_paths:
            raise KeyError(name)
        return self._roles.setdefault(name, Role(name, self._role_paths[name][0]))

    def uses(self, layer: Layer) -> list[RoleUse]:
        """Return the roles that a layer's play runs, in order: each only once, and after its dependencies.

        Raises KeyError if a role doesn't exist, UnreadableError if a role's dependencies can't be read.
        """
        uses: list[RoleUse] = []
        for use in layer.uses:
            for role in self.with_dependencies(use):
                if (role.name, role.vars) not in [(other.name, other.vars) for other in uses]:
                    uses.append(role)
        return uses

    def dependencies(self, name: str) -> tuple[RoleUse, ...]:
        """Return a role's dependencies; a collection's role prefers those of its own collection."""
        collection, dot, _ = name.rpartition(".")
        full = [(use, f"{collection}{dot}{use.name}") for use in self.role(name).dependencies]
        return tuple(replace(use, name=own) if own in self._role_paths else use for use, own in full)

    def with_dependencies(self, use: RoleUse) -> Iterator[RoleUse]:
        """Yield a role's dependencies in the order in which they run, and then the role itself."""
        chain = (*use.parents, use)
        for dependency in self.dependencies(use.name):
            if all(dependency.name != parent.name for parent in chain):  # Ansible refuses cycles
                yield from self.with_dependencies(replace(dependency, parents=chain))
        yield use

    def roles(self) -> Iterator[Role]:
        return (self.role(name) for name in self.role_names)

    def layer(self, name: str) -> Layer:
        """Return a layer.

        Raises KeyError if there is none of that name, UnreadableError if its playbook isn't one play with roles.
        """
        if name not in self._layer_paths:
            raise KeyError(name)
        if name not in self._layers:
            self._layers[name] = read_layer(name, self._layer_paths[name][0])
        return self._layers[name]


def short_name(role: str) -> str:
    """Return a role's name without its collection's name."""
    return role.rpartition(".")[2]


def _configured_roles(root: Path) -> list[Path]:
    config = root / CONFIGURATION
    return engine.configured_roles(config) if config.is_file() else []


def _by_name(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Group paths by their names without suffix, sorted by name; paths of the same name keep their order."""
    by_name: dict[str, list[Path]] = {}
    for path in paths:
        by_name.setdefault(path.stem if path.suffix == ".yml" else path.name, []).append(path)
    return dict(sorted(by_name.items()))


def read_layer(name: str, playbook: Path) -> Layer:
    """Read a layer's playbook. Raises UnreadableError if it isn't exactly one play."""
    plays = engine.read_yaml(playbook)
    if not isinstance(plays, list) or len(plays) != 1 or not isinstance(plays[0], Mapping):
        raise engine.UnreadableError(Place(str(playbook), 1), "a layer must be exactly one play")
    uses = _uses(plays[0].get("roles"), ("role",))
    variables = dict(_mapping(plays[0].get("vars"), Place(str(playbook))))
    written = plays[0].get("vars_files") or []
    files = written if isinstance(written, list) else [written]  # of another type, Ansible refuses it
    vars_files = tuple(file if isinstance(file, list) else [file] for file in files)
    return Layer(name, playbook, uses, variables, plays[0].get("hosts"), vars_files)


def _uses(entries: Any, keys: Sequence[str]) -> tuple[RoleUse, ...]:
    """Return the roles in a list; in an entry that is a mapping, one of ``keys`` has the role's name."""
    uses = []
    if entries and not isinstance(entries, list):
        raise engine.UnreadableError(engine.place_of(entries), "roles must be a list")
    for entry in entries or []:
        place = engine.place_of(entry)
        fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"role": entry}
        name = next((fields[key] for key in keys if isinstance(fields.get(key), str)), None)
        if name is None:
            raise engine.UnreadableError(place, "a role must be a name or a mapping with `role`")
        variables = _mapping(fields.get("vars"), place)
        uses.append(RoleUse(str(name), {**variables, **engine.role_parameters(fields)}, place))
    return tuple(uses)


def _mapping(variables: Any, place: Place | None) -> Mapping[str, Any]:
    """Return the value of ``vars``. Raises UnreadableError if it isn't a mapping."""
    if variables is not None and not isinstance(variables, Mapping):
        raise engine.UnreadableError(engine.place_of(variables) or place, "`vars` must be a mapping")
    return variables or {}


def unknown_roles(book: RoleBook, layer: Layer) -> list[Problem]:
    """Return those roles of a layer, and of their dependencies, that don't exist."""
    lists: list[tuple[str, tuple[RoleUse, ...], Path]] = [("roles", layer.uses, layer.playbook)]
    problems = []
    visited: set[str] = set()
    while lists:
        path, uses, file = lists.pop()
        for n, use in enumerate(uses):
            if use.name not in book.role_names:
                where = str(use.place or Place(str(file)))
                reason = f"unknown role `{use.name}`{did_you_mean(use.name, book.role_names)}"
                problems.append(Problem(where, f"{path}[{n}]", reason))
            elif use.name not in visited:
                visited.add(use.name)
                role = book.role(use.name)
                lists.append(("dependencies", book.dependencies(use.name), role.path / "meta" / "main.yml"))
    return problems


def undeclared_roles(book: RoleBook, layer: Layer) -> list[Problem]:
    """Return a layer's roles that have variables but no argument spec, so that no value could be checked.

    Roles of collections are left out: how they are written is up to the collection's author.
    """
    return [
        Problem(
            str(use.place or Place(str(layer.playbook))),
            use.name,
            "has variables and no meta/argument_specs.yml that declares them",
        )
        for use in book.uses(layer)
        if (role := book.role(use.name)).prefix == role.name and role.defaults and not role.specs
    ]


def _inner(file: Path, outer: Any, key: str) -> Mapping[str, Any]:
    """Return the mapping under a key of a file, or an empty one. Raises UnreadableError if it isn't a mapping."""
    inner = (outer.get(key) if isinstance(outer, Mapping) else None) or {}
    if not isinstance(inner, Mapping):
        raise engine.UnreadableError(Place(str(file)), f"{key}: must be a mapping")
    return inner


def _merged(files: Iterable[Path]) -> dict[str, Any]:
    """Return the variables of files; those of later files win."""
    merged: dict[str, Any] = {}
    for file in files:
        content = engine.read_yaml(file)
        if content is None:
            continue
        if not isinstance(content, Mapping):
            raise engine.UnreadableError(Place(str(file), 1), "a file of variables must be a mapping")
        for key, value in content.items():
            merged.pop(key, None)  # keep the winner's key, which knows its line
            merged[key] = value
    return merged
