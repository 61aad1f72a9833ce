"""A play as Ansible loads it: the files that it opens, the roles that it brings, and what only a run can tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible import constants as settings
from ansible.errors import AnsibleError
from ansible.playbook.block import Block
from ansible.playbook.helpers import load_list_of_blocks
from ansible.playbook.play import Play
from ansible.playbook.role_include import IncludeRole
from ansible.playbook.task_include import TaskInclude
from ansible.template import Templar
from ansible.vars.manager import VariableManager

from image_builder.definition.engine.origins import place_of, unreadable
from image_builder.definition.engine.reads import NotingLoader, Reads, is_predictable, noting
from image_builder.definition.engine.templates import trusted
from image_builder.definition.values import JSON, is_template

# Modules that read a file of the control machine, and the argument that names it.
_SENT = {
    "assemble": "src",
    "copy": "src",
    "include_vars": "file",
    "script": "_raw_params",
    "template": "src",
    "unarchive": "src",
}
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass
class PlayReading:
    """What a play reads: ``files``, ``roles`` (the names of those it brings beside its list), and what isn't known.

    ``unknown`` are sentences, each with the place that it is about.
    """

    files: set[Path] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


def read_play(
    playbook: Path, roles: Path, variables: Mapping[str, JSON], is_plain: Callable[[str], bool]
) -> PlayReading:
    """Load the one play of a playbook and follow all that it includes; raises UnreadableError.

    ``roles`` is the directory of roles, ``variables`` those of the host. A role that ``is_plain`` reads no more than
    its own files and is not loaded, which takes time.
    """
    reads = Reads()
    loader = NotingLoader(playbook.parent, reads)
    try:
        with _roles_in(roles), noting(reads):
            play = _load(playbook, loader, variables, is_plain)
            return _Walk(play, loader, roles, is_plain).reading()
    except AnsibleError as error:
        raise unreadable(error) from error


@contextlib.contextmanager
def _roles_in(folder: Path) -> Iterator[None]:
    """Have Ansible look for roles in ``folder``, as a bake's plays do."""
    before = settings.DEFAULT_ROLES_PATH
    settings.DEFAULT_ROLES_PATH = [str(folder)]
    try:
        yield
    finally:
        settings.DEFAULT_ROLES_PATH = before


def _load(
    playbook: Path, loader: NotingLoader, variables: Mapping[str, JSON], is_plain: Callable[[str], bool]
) -> Any:
    written = loader.load_from_file(str(playbook), trusted_as_template=True)[0]
    listed = [
        entry
        for entry in written.get("roles") or []
        if not is_plain(str(entry["role"] if isinstance(entry, Mapping) else entry))
    ]
    manager = VariableManager(loader=loader)
    # In the way of extra variables: a play that names its imports by variables finds those of the host.
    manager._extra_vars = {name: trusted(value) for name, value in variables.items()}
    play = Play.load({**written, "roles": listed}, variable_manager=manager, loader=loader)
    manager.get_vars(play=play)  # opens vars_files
    play.image_builder_variables = manager
    return play


class _Walk:
    """Follows the tasks of a loaded play."""

    def __init__(self, play: Any, loader: NotingLoader, roles: Path, is_plain: Callable[[str], bool]) -> None:
        self.play, self.loader, self.roles, self.is_plain = play, loader, roles, is_plain
        self.manager = play.image_builder_variables
        self.found = PlayReading()
        self.seen: set[str] = set()

    def reading(self) -> PlayReading:
        self.blocks([*self.play.compile(), *self.play.handlers])
        for role in self.play.roles:
            self.blocks(role.get_handler_blocks(play=self.play))
        self.found.files |= self.loader.reads.files
        for file in self.found.files:
            with contextlib.suppress(ValueError):
                self.found.roles.add(file.relative_to(self.roles).parts[0])
        return self.found

    def blocks(self, items: Iterable[Any]) -> None:
        for item in items:
            if isinstance(item, Block):
                self.blocks([*item.block, *item.rescue, *item.always])
            elif isinstance(item, IncludeRole):
                self.include_role(item)
            elif isinstance(item, TaskInclude):
                self.include_tasks(item)
            else:
                self.task(item)

    def include_role(self, item: Any) -> None:
        name = self.value(item, item._role_name)
        if name is None:
            self.unknown(item, f"the role `{item._role_name}` is named only while the play runs")
            return
        self.found.roles.add(str(name))
        key = f"role {name} {item._from_files}"
        if key in self.seen or self.is_plain(str(name)):
            return
        self.seen.add(key)
        item._role_name = str(name)
        blocks, handlers = item.get_block_list(self.play, self.manager, self.loader)
        self.blocks([*blocks, *handlers])

    def include_tasks(self, item: Any) -> None:
        written = item.args.get("_raw_params") or item.args.get("file")
        name = self.value(item, written)
        if name is None:
            # In a role, where all files count, a name that a loop or a fact gives is one of the role's own.
            if item._role is None:
                self.unknown(item, f"the tasks `{written}` are named only while the play runs")
            return
        path = self.loader.path_dwim_relative_stack(item.get_search_path(), "tasks", str(name))
        if path in self.seen:
            return
        self.seen.add(path)
        data = self.loader.load_from_file(path, trusted_as_template=True) or []
        self.blocks(
            load_list_of_blocks(
                data,
                play=self.play,
                role=item._role,
                task_include=item,
                variable_manager=self.manager,
                loader=self.loader,
            )
        )

    def task(self, item: Any) -> None:
        if item.loop_with and not is_predictable(item.loop_with):
            self.unknown(item, f"what `with_{item.loop_with}` gives is known only while a play runs")
        if str(item.delegate_to) in _HERE or item.connection == "local":
            self.unknown(item, "a task on the machine that builds reads what it likes")
        module = item.action.rpartition(".")[2]
        source = item.args.get(_SENT.get(module, ""))
        if not isinstance(source, str) or item.args.get("remote_src"):
            return
        name = self.value(item, source.split()[0] if module == "script" else source)
        if isinstance(name, str) and name:
            with contextlib.suppress(AnsibleError):
                self.loader.path_dwim_relative_stack(item.get_search_path(), "files", name)

    def value(self, item: Any, written: Any) -> Any:
        """Return what a template comes to, None where only the play can tell."""
        if not is_template(written):
            return written
        try:
            variables = self.manager.get_vars(play=self.play, task=item)
            return Templar(loader=self.loader, variables=variables).template(written)
        except AnsibleError:
            return None

    def unknown(self, item: Any, what: str) -> None:
        self.found.unknown.add(f"{place_of(item.get_ds()) or item.get_path()}: {what}")
