"""The files and variables that a playbook reads, so that the stage's id covers all of them.

Roles count as a whole. Ansible finds everything else that is read: the play is loaded, its includes are followed, and
lookups that read files are run. What can't be known before the play is reported.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.canonical import JSON, digest
from image_builder.definition import engine
from image_builder.definition.evaluate import (
    evaluated_playbook,
    layer_variables,
    play_variables,
    role_variables,
)
from image_builder.definition.model import ImageDefinition
from image_builder.definition.roles import VARIABLES_BESIDE, Layer, RoleBook, RoleUse, read_layer
from image_builder.definition.values import (
    is_open,
    is_template,
    lookup_calls,
    referenced_names,
    strings,
    words,
)
from image_builder.errors import VaultError
from image_builder.settings import CONFIGURATION
from image_builder.system.trees import files_in

# A lookup of this program's own and the files that it packs.
_OWN_LOOKUPS = {
    "node_agent_archive": "image_builder/node",
    "image_builder.node.node_agent_archive": "image_builder/node",
}
# Names composed at run time: they may refer to any variable.
_ANY_VARIABLE = re.compile(
    r"\b(?:lookup|query|q)\s*\(\s*['\"](?:ansible\.builtin\.)?(?:vars|varnames)\b"
    r"|\bwith_(?:ansible\.builtin\.)?(?:vars|varnames)\b"
    r"|\bvars\s*(?:[\[|]|\.\s*\w+\s*\()|\bin\s+vars\s*[-%})]|\(\s*vars\s*[,)]"
    r"|\bhostvars\b|\bgroups\s*[\[.]"
)
# Tests and filters whose result depends on files of the machine that builds; the test's or filter's name is a group.
_FILE_TEST = r"(?:ansible\.builtin\.)?((?:is_)?(?:directory|file|link|mount|same_file)|exists|link_exists)\b"
_FILE_ANSWER = re.compile(
    rf"\bis\s+(?:not\s+)?{_FILE_TEST}|\b(?:select|reject)(?:attr\s*\([^,()]*,|\s*\()\s*['\"]{_FILE_TEST}"
    r"|\|\s*(?:ansible\.builtin\.)?(fileglob|realpath|expandvars)\b"
)
# In that case, the entry under which all variables that nothing mentions count.
_OTHERS = "(others)"
_VAULTED_LOOKUP = "what a vaulted template looks up is known only while the play runs"
# Directories whose files the kernel makes, maybe others at each reading.
_OF_KERNEL = ("/proc", "/sys")
_YAML = (".yml", ".yaml", ".json")
# The parts of a role that hold variables.
_DECLARED = ("defaults", "vars", "meta")
# Not read just for being next to a playbook: other playbooks, task files and roles count where they are included.
_NOT_BESIDE = frozenset({"layers", "roles", "tasks", "__pycache__"})

_Scope = Callable[[], Mapping[str, JSON]]
"""Returns the variables that a lookup sees."""


@dataclass(frozen=True)
class PlaybookReading:
    """What a playbook reads.

    ``files`` maps the name under which a file counts to its path, ``variables`` are the inventory's variables that the
    files mention, ``values`` the values of roles' variables that are templates. ``unknown`` are sentences about what
    only the play can determine, which no id can cover. ``unlisted`` are the roles that only tasks bring in, ``faults``
    the faults that would stop the play.
    """

    files: Mapping[str, Path]
    variables: Mapping[str, JSON]
    values: Mapping[str, JSON]
    unknown: tuple[str, ...]
    unlisted: tuple[str, ...]
    faults: frozenset[engine.Fault]


def layer_reading(definition: ImageDefinition, name: str) -> PlaybookReading:
    """Return what a layer reads, cached. Raises UnreadableError if Ansible can't load a playbook or role."""
    reading: PlaybookReading | None = definition.readings.get(name)
    if reading is None:
        reading = playbook_reading(definition, RoleBook(definition.roots).layer(name))
        definition.readings[name] = reading
    return reading


def seal_reading(definition: ImageDefinition, playbook: str) -> PlaybookReading:
    """Return what the playbook that seals an image reads. Raises the same as ``layer_reading``."""
    return playbook_reading(definition, read_layer("seal", definition.repo_root / playbook))


def playbook_reading(definition: ImageDefinition, layer: Layer) -> PlaybookReading:
    """Return what a playbook reads. Raises the same as ``layer_reading``."""
    return _Reader(definition, layer).reading()


def _beside(playbook: Path) -> Iterator[Path]:
    """Yield what a playbook's tasks can find by relative name: non-YAML files next to it, and files in directories."""
    skipped = _NOT_BESIDE | (VARIABLES_BESIDE if playbook.parent.name == "layers" else frozenset())
    for path in sorted(playbook.parent.iterdir()):
        if path.name not in skipped and (path.is_dir() or path.suffix not in _YAML):
            yield from files_in(path)


def _is_of_kernel(file: Path) -> bool:
    target = Path(os.path.realpath(file))
    return any(map(target.is_relative_to, _OF_KERNEL))


def _is_templates(file: Path) -> bool:
    """Return whether a file looks like a template: a variable's lookup may evaluate it."""
    return file.suffix == ".j2" or "templates" in file.parts


def _uncommented(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


class _Reader:
    def __init__(self, definition: ImageDefinition, layer: Layer) -> None:
        self.definition, self.layer = definition, layer
        self.book = RoleBook(definition.roots)
        self.of_host = definition.variables_in(layer.playbook)
        self.inventory = play_variables(definition, layer)
        self.texts: dict[Path, str] = {}
        self.unknown: set[str] = set()
        self.opened: set[Path] = set()
        self.fetched: set[Path] = set()

    def reading(self) -> PlaybookReading:
        playbook = self.layer.playbook
        roles = {use.name: self._role_files(use.name) for use in self.book.uses(self.layer)}
        play = self._play(self.layer)
        self.unknown |= play.unknown
        beside = set(_beside(playbook))
        self.fetched = play.fetched | (self._fetched_by_layers() if beside else set())
        unlisted = tuple(sorted(play.roles - roles.keys()))
        roles |= {name: self._role_files(name) for name in unlisted}
        in_roles = {file for files in roles.values() for file in files if not self._is_fetched(file)}
        files = {f for f in play.files - in_roles if f.is_file()}
        around = {playbook, *files, *(file for file in beside if not self._is_fetched(file))}
        if config := self.definition.ansible_config:
            around.add(config)
            around.update(file for folder in engine.configured_plugins(config) for file in files_in(folder))
        if self.layer.playbook.is_relative_to(self.definition.roots[0]):
            around.update(part for collection in self.book.collections for part in collection.parts)
            brought = self.book.of_collections(play.files | play.followed)
            unlisted += tuple(name for name in brought if name not in roles)
        for name in play.lookups:
            self.opened.update(files_in(self.definition.repo_root / _OWN_LOOKUPS[name]))
        spoken = self._variables([*around, *in_roles])
        for name, of_role in roles.items():
            declared = [f for f in of_role if self._is_declaration(f, name)]
            self._lookups(declared, functools.partial(self._scope, name))
        of_play, known = layer_variables(self.layer, self.inventory, self.definition.extra_variables)
        if not known:
            reason = "which of its `vars_files` are read is known only while the play runs"
            self.unknown.add(f"{self._name(playbook)}: {reason}")
        variables = {**self.inventory, **{str(k): engine.plain(v) for k, v in of_play.items()}}
        variables |= self.definition.extra_variables
        self._lookups(files - play.followed, lambda: variables)
        self._file_answers(play.files | play.followed)
        any_variable = _OTHERS in spoken
        self._variable_lookups(self.of_host if any_variable else spoken, variables)
        for file in play.templates | {f for f in play.files | self.opened if _is_templates(f)}:
            self._volatile(self._name(file), [self._text(file)])
            self._managed(file)
        every = around | in_roles | self.opened | play.sent
        varying = {file for file in every if _is_of_kernel(file)}
        varying |= set(filter(self._is_fetched, every | play.files))
        self.unknown |= {f"{file}: what it holds is known only while the play runs" for file in varying}
        return PlaybookReading(
            {self._name(file): file for file in sorted(every - varying)},
            spoken,
            self._values(),
            tuple(sorted(self.unknown)),
            unlisted,
            play.faults,
        )

    def _play(self, layer: Layer) -> engine.PlayReading:
        """Return a play as Ansible loads it, only once per definition."""
        plays, definition = self.definition.plays, self.definition
        if layer.playbook not in plays:
            variables, extra = play_variables(definition, layer), definition.extra_variables
            plays[layer.playbook] = engine.read_play(
                layer.playbook, self.book.role_folders, variables, extra, frozenset(_OWN_LOOKUPS)
            )
        play: engine.PlayReading = plays[layer.playbook]
        return play

    def _fetched_by_layers(self) -> set[Path]:
        """Return what the plays of all layers write, because what is beside playbooks counts for each of them."""
        fetched: set[Path] = set()
        for name in self.definition.layers:
            with suppress(KeyError, engine.UnreadableError):  # reported for the layer itself
                fetched |= self._play(self.book.layer(name)).fetched
        return fetched

    def _role_files(self, name: str) -> list[Path]:
        try:
            parts = self.book.role(name).parts
        except KeyError:  # next to the playbook, where all files count
            return []
        return [file for part in parts for file in files_in(part, links=True)]

    def _is_declaration(self, file: Path, role: str) -> bool:
        """Return whether a role's file is one of those that hold variables."""
        return any(file.is_relative_to(self.book.role(role).path / part) for part in _DECLARED)

    def _is_fetched(self, file: Path) -> bool:
        """Return whether a play itself writes a file; one that it doesn't also read decides nothing."""
        return any(map(file.is_relative_to, self.fetched))

    def _text(self, file: Path) -> str:
        if file not in self.texts:
            self.texts[file] = file.read_text("utf-8", "replace") if file.is_file() else ""
        return self.texts[file]

    def _decrypted(self, file: Path) -> str:
        """Return a file's text, vaulted or not, to be searched only for names."""
        text = self._text(file)
        if text.startswith("$ANSIBLE_VAULT"):
            with suppress(VaultError):  # a file that tasks send needs its password in the bake, not here
                return engine.decrypted_text(file)
        return text

    def _variables(self, files: Iterable[Path]) -> dict[str, JSON]:
        """Return the inventory's variables that files mention."""
        texts = [self._decrypted(file) for file in files]
        variables = self.of_host
        names = referenced_names(texts, variables)
        spoken = {name: variables[name] for name in sorted(names)}
        composed = itertools.chain(texts, *(strings(value) for value in spoken.values()))
        if any(_ANY_VARIABLE.search(text) for text in composed):
            # All others count by their digest: there may be secrets among them that no file mentions.
            others: dict[str, JSON] = {
                name: value
                for name, value in variables.items()
                if name not in names and not name.startswith("ansible_")
            }
            met = {word for text in texts for word in words(text)}
            others |= {"groups": self.definition.magic.get("groups", {})} if "groups" in met else {}
            if "hostvars" in met:
                others["hostvars"] = self._hostvars()
            spoken[_OTHERS] = digest(others)
        return spoken

    def _hostvars(self) -> JSON:
        """Return all hosts' variables; what differs from play to play in them is reported."""
        hostvars = self.definition.hostvars()
        texts = [text for text in strings(hostvars) if is_template(text)]
        self._volatile("hostvars", texts)
        for name in {name for text in texts for name, _ in lookup_calls(text)} - _OWN_LOOKUPS.keys():
            if not engine.is_predictable(name):
                self.unknown.add(f"hostvars: made by the lookup `{name}`, known only to a play")
        return hostvars

    def _scope(self, role: str) -> Mapping[str, JSON]:
        evaluated = evaluated_playbook(self.definition, self.layer)
        own = next(
            (evaluated_role.raw for evaluated_role in evaluated if evaluated_role.use.name == role), None
        )
        return own or role_variables(
            self.book, self.layer, RoleUse(role), self.inventory, self.definition.extra_variables
        )

    def _lookups(self, files: Iterable[Path], scope: _Scope) -> None:
        """Run the lookups in variable files."""
        for file in files:
            if file.suffix not in _YAML or file.stem == "argument_specs":
                continue
            text = self._text(file)
            if (readable := self._decrypted(file)) == text:
                self._run_lookups(self._name(file), _uncommented(text), scope)
                with suppress(engine.UnreadableError):  # reported elsewhere
                    self._volatile(self._name(file), strings(engine.read_untagged_yaml(file)))
            elif any(lookup_calls(readable)) or engine.volatile(readable):  # which may name secrets
                self.unknown.add(f"{self._name(file)}: {_VAULTED_LOOKUP}")

    def _file_answers(self, files: Iterable[Path]) -> None:
        """Report what tasks, variables and templates ask about files of the machine that builds."""
        for file in files:
            templated = file.suffix in _YAML or _is_templates(file)
            if templated and file.stem != "argument_specs":
                self._file_answer(self._name(file), _uncommented(self._decrypted(file)))

    def _volatile(self, where: str, texts: Iterable[str]) -> None:
        """Report what in templates differs from play to play, or from machine to machine."""
        for name in frozenset().union(*map(engine.volatile, texts)):
            self.unknown.add(f"{where}: what `{name}` gives is known only while the play runs")

    def _managed(self, template: Path) -> None:
        """Report a template with ``ansible_managed``, if ansible.cfg makes that of the machine that builds."""
        config, name = self.definition.ansible_config, "ansible_managed"
        if config is None or name in self.of_host:
            return
        used = all(name in words(self._text(file)) for file in (template, config))
        if used and not {"%", "{"}.isdisjoint(engine.managed_text(config)):
            reason = f"what `{name}` of {CONFIGURATION} gives is known only while the play runs"
            self.unknown.add(f"{self._name(template)}: {reason}")

    def _file_answer(self, where: str, text: str) -> None:
        for match in _FILE_ANSWER.finditer(text):
            name = next(filter(None, match.groups()))
            reason = f"what `{name}` finds on the machine that builds is known only while the play runs"
            self.unknown.add(f"{where}: {reason}")

    def _variable_lookups(self, spoken: Mapping[str, JSON], scope: Mapping[str, JSON]) -> None:
        """Run the lookups in the inventory's values, which may refer to files of any role."""
        roles = [str(self.book.role(use.name).path) for use in self.book.uses(self.layer)]
        scope = {**scope, "ansible_search_path": [*roles, str(self.layer.playbook.parent)]}
        for name, value in spoken.items():
            if is_open(value):
                self.unknown.add(f"{name}: {_VAULTED_LOOKUP}")
            for text in strings(value):
                if is_template(text):
                    self._volatile(name, [text])
                    self._run_lookups(name, text, lambda: scope, shown=False)

    def _run_lookups(self, where: str, text: str, scope: _Scope, *, shown: bool = True) -> None:
        """Run the lookups in a text; those that can't be are reported, with their terms if these may be ``shown``."""
        self._file_answer(where, text)
        calls = list(lookup_calls(text))
        if not calls:
            return
        evaluator = engine.Evaluator(scope(), self.layer.playbook.parent)
        for lookup, call in calls:
            if lookup in _OWN_LOOKUPS:
                self.opened.update(files_in(self.definition.repo_root / _OWN_LOOKUPS[lookup]))
                continue
            try:
                evaluator.evaluate("{{ " + call + " }}")
            except engine.UnpredictableValueError as error:
                self.unknown.add(f"{where}: {error}")
            except engine.EvaluationError:
                named = call if shown else f"lookup('{lookup or '…'}', …)"
                self.unknown.add(f"{where}: what `{named}` reads is known only while the play runs")
        self.opened |= {path for path in evaluator.reads.files if path.is_file()}

    def _values(self) -> dict[str, JSON]:
        """Return the values of the roles' templates. Secrets are left out; their files count instead."""
        values: dict[str, JSON] = {}
        for role in evaluated_playbook(self.definition, self.layer):
            values |= {
                name: self._placeless(value)
                for name, value in role.values.items()
                if name not in role.looked_up and is_template(role.raw[name])
            }
        return values

    def _name(self, file: Path) -> str:
        """Return the name under which a file counts, regardless of where the repository or the inventory is."""
        for root, prefix in self._roots:
            if file.is_relative_to(root):
                return prefix + os.fspath(file.relative_to(root))
        return os.fspath(file)

    def _placeless(self, value: JSON) -> JSON:
        """Return a value with its paths written as ``_name`` returns them."""
        if isinstance(value, str):
            for root, prefix in self._roots:
                value = value.replace(f"{root}/", prefix)
            return value
        if isinstance(value, Mapping):
            return {key: self._placeless(inner) for key, inner in value.items()}
        if isinstance(value, Sequence):
            return [self._placeless(inner) for inner in value]
        return value

    @functools.cached_property
    def _roots(self) -> list[tuple[Path, str]]:
        paths = self.definition.inventory_paths
        inventories = [(path if path.is_dir() else path.parent, "inventory/") for path in paths]
        *projects, own = self.definition.roots
        roots = [*((root, "project/") for root in projects), (own, "")]
        roots += [(folder, "collections/") for folder in self.book.collection_folders]
        # One repository may be inside the other.
        return [*sorted(roots, key=lambda root: -len(root[0].parts)), *inventories]
