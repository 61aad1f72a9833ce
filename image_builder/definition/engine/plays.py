"""A play as Ansible loads it: the files that it opens, the roles that it brings in, and what only a run can tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible import constants as settings
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.block import Block
from ansible.playbook.helpers import load_list_of_blocks
from ansible.playbook.play import Play
from ansible.playbook.role.include import RoleInclude
from ansible.playbook.role_include import IncludeRole
from ansible.playbook.task_include import TaskInclude
from ansible.plugins.loader import action_loader, add_all_plugin_dirs, get_all_plugin_loaders
from ansible.vars.manager import VariableManager

from image_builder.canonical import JSON
from image_builder.definition.engine.faults import Fault, Faults
from image_builder.definition.engine.origins import (
    UnreadableError,
    place_of,
    read_untagged_yaml,
    unreadable,
)
from image_builder.definition.engine.reads import NotingLoader, Reads, is_predictable, noting
from image_builder.definition.engine.rounds import Rounds, UnknownError, concealed
from image_builder.definition.engine.sources import Sources
from image_builder.definition.engine.volatile import volatile, volatile_expressions
from image_builder.definition.values import Place, is_template, lookup_calls, strings
from image_builder.settings import CONFIGURATION

_TASKS = frozenset({"pre_tasks", "tasks", "post_tasks", "handlers"})
# The same as in `Role` and `RoleDefinition` of ansible-core 2.19.
_EXTENSIONS = (".yml", ".yaml", ".json")
_KEYWORDS = frozenset({*RoleInclude.fattributes, "role"})
_ANSIBLE = Path(settings.__file__).parent
# A bake sets these itself.
_SET_FOR_PLAYS = frozenset({"COLLECTIONS_PATHS", "DEFAULT_ROLES_PATH", "DEFAULT_CONNECTION_PLUGIN_PATH"})


@dataclass
class PlayReading:
    """What a play reads: ``files``, ``roles`` (the names of those whose files it reads), and what isn't known.

    ``sent`` are files that reach the image unchanged, ``fetched`` files and directories that the play itself writes.
    ``followed`` are files of tasks whose strings have already been examined. ``lookups`` are the program's own lookups
    that are called, ``templates`` files that are evaluated. ``unknown`` are sentences, each with the place that it is
    about.
    """

    files: set[Path] = field(default_factory=set)
    sent: set[Path] = field(default_factory=set)
    fetched: set[Path] = field(default_factory=set)
    followed: set[Path] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    lookups: set[str] = field(default_factory=set)
    templates: set[Path] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    faults: frozenset[Fault] = frozenset()


def read_play(
    playbook: Path,
    roles: Sequence[Path],
    variables: Mapping[str, JSON],
    extra: Mapping[str, JSON],
    own_lookups: frozenset[str],
) -> PlayReading:
    """Load the one play of a playbook and follow everything that it includes.

    ``roles`` are the directories of roles, ``variables`` those of the host, ``extra`` those that win over all others.
    The results of ``own_lookups`` are known elsewhere. Raises UnreadableError if Ansible can't load the play.
    """
    reads = Reads()
    loader = NotingLoader(playbook.parent, reads)
    try:
        with _roles_in(roles), noting(reads):
            play, written = _load(playbook, loader, variables, extra)
            return _Walk(play, loader, roles, own_lookups).reading(playbook, written)
    except AnsibleError as error:
        failure = unreadable(error)
        raise UnreadableError(failure.place or Place(str(playbook)), failure.reason) from error
    except AttributeError as error:  # Ansible's own check of this comes too late
        mappings = (file for file in sorted(reads.files) if file.parent.name in ("tasks", "handlers"))
        if file := next((file for file in mappings if isinstance(read_untagged_yaml(file), Mapping)), None):
            raise UnreadableError(Place(str(file), 1), "must be a list of tasks") from error
        raise


def use_plugins_beside(folders: Iterable[Path]) -> None:
    """Make Ansible find plugins that are in roles or next to a playbook, as it does when it loads them."""
    for folder in folders:
        add_all_plugin_dirs(str(folder))


def variable_files(folder: Path) -> list[Path]:
    """Return the files that Ansible itself loads of a role's ``defaults`` or ``vars``: ``main``, file or directory."""
    found = DataLoader().find_vars_files(str(folder), "main", [*_EXTENSIONS, ""]) if folder.is_dir() else []
    return [Path(file) for file in found]


def role_file(folder: Path, name: str) -> Path | None:
    """Return the file of a name that Ansible loads of a role's ``meta``, whichever extension it has."""
    files = (folder / f"{name}{extension}" for extension in _EXTENSIONS)
    return next((file for file in files if file.is_file()), None)


def file_of_play(playbook: Path, folder: str, name: str) -> Path | None:
    """Return the file that a play names, searched for in the playbook's ``folder`` and beside it."""
    try:
        return Path(DataLoader().path_dwim_relative_stack([str(playbook.parent)], folder, name))
    except AnsibleError:
        return None


def role_parameters(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables in a role's entry next to its keywords; they win over those under ``vars``."""
    return {key: value for key, value in entry.items() if key not in _KEYWORDS}


def configured_plugins(config: Path) -> list[Path]:
    """Return the directories of plugins and modules that an ``ansible.cfg`` names."""
    return [folder for name in _plugin_paths() for folder in _folders(name, config)]


def forget_plugins_of_this_machine() -> None:
    """Make Ansible ignore the directories of plugins that it searches though no ``ansible.cfg`` names them."""
    origins = {name: settings.config.get_config_value_and_origin(name)[1] for name in _plugin_paths()}
    names = [name for name, origin in origins.items() if origin == "default"]
    folders = {folder for name in names for folder in getattr(settings, name)}
    for _, loader in get_all_plugin_loaders():
        loader.config = [folder for folder in loader.config if folder not in folders]


def plugin_settings(config: Path | None, nowhere: Path) -> dict[str, str]:
    """Return Ansible's environment variables for directories of plugins: those that an ``ansible.cfg`` names.

    Where it names none, it is ``nowhere``, and not a directory of this machine or its user.
    """
    named = {name: _named(name, config) for name in _plugin_paths()} if config and config.is_file() else {}
    return {
        variable: ":".join(map(str, named.get(name) or [nowhere]))
        for name, variable in _plugin_paths().items()
    }


def _plugin_paths() -> dict[str, str]:
    """Return the settings for directories of plugins and modules, and the environment variable of each."""
    definitions = settings.config.get_configuration_definitions().items()
    return {
        name: definition["env"][0]["name"]
        for name, definition in definitions
        if definition.get("type") == "pathspec" and name not in _SET_FOR_PLAYS
    }


def configured_roles(config: Path) -> list[Path]:
    """Return the directories of roles that an ``ansible.cfg`` names."""
    return _folders("DEFAULT_ROLES_PATH", config)


def collection_folders(root: Path) -> list[Path]:
    """Return where a repository's collections are: the paths in its ``ansible.cfg``, or else ``collections``."""
    config = root / CONFIGURATION
    configured = _named("COLLECTIONS_PATHS", config) if config.is_file() else []
    return configured or [root / "collections"]


def configured_inventories() -> list[Path]:
    """Return the inventories that the ``ansible.cfg`` in effect names."""
    config = Path(settings.CONFIG_FILE)
    return _named("DEFAULT_HOST_LIST", config)


def managed_text(config: Path) -> str:
    """Return the text of ``ansible_managed`` in an ``ansible.cfg``, which may ask for a name, a path or a date."""
    _forget_changed(config)
    return str(settings.config.get_config_value_and_origin("DEFAULT_MANAGED_STR", cfile=str(config))[0])


def _folders(name: str, config: Path) -> list[Path]:
    return [folder for folder in _named(name, config) if folder.is_dir()]


def _named(name: str, config: Path) -> list[Path]:
    """Return the paths of a setting in an ``ansible.cfg``."""
    _forget_changed(config)
    paths, origin = settings.config.get_config_value_and_origin(name, cfile=str(config))
    return [Path(path) for path in paths or []] if str(origin) == str(config) else []


_configs: dict[Path, tuple[int, int]] = {}


def _forget_changed(config: Path) -> None:
    """Make Ansible reread a configuration file that has changed since it was last read."""
    stat = config.stat()
    state = (stat.st_mtime_ns, stat.st_size)
    if _configs.setdefault(config, state) != state:
        _configs[config] = state
        settings.config._parsers.pop(str(config), None)
        settings.config._get_ini_config_value.cache_clear()


@contextlib.contextmanager
def _roles_in(folders: Sequence[Path]) -> Iterator[None]:
    """Make Ansible look for roles in ``folders``, as a bake's plays do."""
    before = settings.DEFAULT_ROLES_PATH
    settings.DEFAULT_ROLES_PATH = [str(folder) for folder in folders]
    try:
        yield
    finally:
        settings.DEFAULT_ROLES_PATH = before


def _load(
    playbook: Path, loader: NotingLoader, variables: Mapping[str, JSON], extra: Mapping[str, JSON]
) -> tuple[Any, Mapping[str, Any]]:
    written = loader.load_from_file(str(playbook), trusted_as_template=True)[0]
    manager = VariableManager(loader=loader)
    manager._extra_vars = {name: concealed(value) for name, value in extra.items()}
    # They win over role defaults and lose to everything in the play, like variables of an inventory.
    of_host = {name: concealed(value) for name, value in variables.items()}
    play = Play.load(
        {**written, "vars": {**of_host, **(written.get("vars") or {})}},
        variable_manager=manager,
        loader=loader,
    )
    manager.get_vars(play=play)  # opens vars_files
    play.image_builder_variables = manager
    return play, written


class _Walk:
    """Follows the tasks of a loaded play."""

    def __init__(
        self, play: Any, loader: NotingLoader, roles: Sequence[Path], own_lookups: frozenset[str]
    ) -> None:
        self.play, self.loader, self.roles = play, loader, roles
        self.result = PlayReading()
        self.rounds = Rounds(play, loader, own_lookups)
        self.faults = Faults(self.rounds)
        self.sources = Sources(
            self.rounds, loader, self.result.sent, self.result.templates, self.unknown, self.faults
        )
        self.included: set[str] = set()

    def reading(self, playbook: Path, written: Mapping[str, Any]) -> PlayReading:
        self.result.followed.add(playbook)
        outside_tasks = [value for key, value in written.items() if key not in _TASKS]
        variables = self.rounds.variables(None)
        for text in strings(outside_tasks):
            self.sources.lookups(written, text, variables)
            self.volatile(written, volatile(text))
        self.refusals(written)
        self.blocks([*self.play.compile(), *self.play.handlers])
        for role in self.play.roles:
            self.blocks(role.get_handler_blocks(play=self.play))
        self.result.files |= self.loader.reads.files
        self.result.fetched |= self.sources.fetched
        self.result.lookups |= self.rounds.own_lookups
        self.result.faults = self.faults.found(certain=not self.result.unknown)
        for file in self.result.files | self.result.sent:
            for folder in self.roles:
                if file.is_relative_to(folder):
                    self.result.roles.add(file.relative_to(folder).parts[0])
        return self.result

    def blocks(self, items: Iterable[Any]) -> None:
        for item in items:
            if isinstance(item, Block):
                self.blocks([*item.block, *item.rescue, *item.always])
                continue
            self.result.followed.add(Path(item.get_path().rpartition(":")[0]))
            self.faults.task(item)
            self.volatile(item, _volatile_choice(item))
            if isinstance(item, TaskInclude):
                reached = self.faults.reached
                for variables in self.rounds.of(item):
                    self.lookups(item, variables)
                    self.faults.reached = reached and self.faults.surely_runs(item, variables)
                    include = self.include_role if isinstance(item, IncludeRole) else self.include_tasks
                    try:
                        include(self.in_round(item, variables), variables)
                    except AnsibleError as error:
                        if not unreadable(error).place:  # errors about missing files have none
                            error.obj = item.get_ds()
                        raise
                self.faults.reached = reached
            else:
                self.task(item)

    def in_round(self, item: Any, variables: Mapping[str, Any]) -> Any:
        """Return an include as it is in one round of its loop: what it includes sees the loop's variable."""
        copy = item.copy(exclude_parent=True)
        copy._parent = item._parent
        copy.vars = {**item.vars, **{name: variables[name] for name in self.rounds.loop_names(item)}}
        return copy

    def is_new(self, item: Any, name: str) -> bool:
        """Record an include; return whether it is the first one with the same variables."""
        key = f"{name} {item.get_vars()} {self.rounds.state()}"
        new = key not in self.included
        self.included.add(key)
        return new

    def include_role(self, item: Any, variables: Mapping[str, Any]) -> None:
        try:
            name = str(self.rounds.evaluate(item._role_name, variables))
            files = self.rounds.evaluate(item._from_files, variables)
        except UnknownError:
            self.unknown(item, f"the role `{item._role_name}` is named only while the play runs")
            return
        if not self.is_new(item, f"role {name} {files}"):
            return
        item._role_name, item._from_files = name, files
        blocks, handlers = item.get_block_list(self.play, self.rounds.manager, self.loader)
        self.blocks([*blocks, *handlers])

    def include_tasks(self, item: Any, variables: Mapping[str, Any]) -> None:
        written = item.args.get("_raw_params") or item.args.get("file")
        try:
            name = str(self.rounds.evaluate(written, variables))
        except UnknownError:
            self.unknown(item, f"the tasks `{written}` are named only while the play runs")
            return
        path = self.loader.path_dwim_relative_stack(item.get_search_path(), "tasks", name)
        if not self.is_new(item, path):
            return
        self.result.followed.add(Path(path))
        data = self.loader.load_from_file(path, trusted_as_template=True) or []
        item.args = dict(item.args)  # `apply` is taken out of it
        self.blocks(
            load_list_of_blocks(
                data,
                play=self.play,
                role=item._role,
                parent_block=item.build_parent_block(),
                variable_manager=self.rounds.manager,
                loader=self.loader,
            )
        )

    def task(self, item: Any) -> None:
        if item.loop_with and not is_predictable(item.loop_with):
            self.unknown(item, f"what `with_{item.loop_with}` gives is known only while a play runs")
        if is_template(item.action):
            self.unknown(item, f"the module `{item.action}` is named only while the play runs")
        if not _is_ansibles_own(item):
            self.unknown(
                item, f"what the action plugin `{item.action}` reads is known only while the play runs"
            )
        if self.rounds.sets_unknown_names(item):
            self.unknown(item, "which variables it sets is known only while the play runs")
        asks, elsewhere = str(item.action).rpartition(".")[2] == "pause", _may_be_elsewhere(item)
        if _texts(item) or _volatile(item) or asks or elsewhere or self.sources.has(item):
            for variables in self.rounds.of(item):
                self.lookups(item, variables)
                self.sources.note(item, variables)
                if asks:
                    self.question(item, variables)
                if elsewhere:
                    self.elsewhere(item, variables)
        self.rounds.finish(item)

    def lookups(self, item: Any, variables: Mapping[str, Any]) -> None:
        for text in _texts(item):
            self.sources.lookups(item.get_ds(), text, variables)
        self.volatile(item, _volatile(item))

    def volatile(self, item: Any, names: Iterable[str]) -> None:
        for name in names:
            self.unknown(item, f"what `{name}` gives is known only while the play runs")

    def refusals(self, written: Mapping[str, Any]) -> None:
        """Refuse a play for this machine, and what it would ask for; it doesn't ask for what `-e` gives."""
        for connection in (written.get("connection"), (written.get("vars") or {}).get("ansible_connection")):
            if _is_local(connection):
                self.faults.refuse_play(connection, _elsewhere("localhost"))
        prompts = written.get("vars_prompt") or []
        for prompt in [prompts] if isinstance(prompts, Mapping) else prompts:
            name = str(prompt.get("name", ""))
            if name not in self.rounds.manager._extra_vars:
                reason = f"asks for `{name}`: nobody answers in a bake, give it with `-e`"
                self.faults.refuse_play(prompt, reason)

    def question(self, item: Any, variables: Mapping[str, Any]) -> None:
        """Refuse a pause that waits for somebody."""
        arguments = self.sources.arguments(item, variables)
        try:
            length = [self.rounds.evaluate(arguments.get(unit), variables) for unit in ("seconds", "minutes")]
        except UnknownError:
            return
        if length == [None, None]:
            self.faults.refuse(item, "waits for an answer: nobody gives one in a bake", variables)

    def elsewhere(self, item: Any, variables: Mapping[str, Any]) -> None:
        """Refuse a task that acts on a machine other than the image; the play refuses those known only to it."""
        try:
            target = self.rounds.evaluate(item.delegate_to, variables)
            connection = self.rounds.evaluate(_connection(item), variables)
        except UnknownError:
            return
        if _is_local(connection) and not _is_local(self.play.connection):
            target = "localhost"
        if target and target != variables.get("inventory_hostname"):
            self.faults.refuse(item, _elsewhere(target), variables)

    def unknown(self, item: Any, reason: str) -> None:
        data = item if isinstance(item, Mapping) else item.get_ds()
        self.result.unknown.add(f"{place_of(data) or item.get_path()}: {reason}")


def _texts(item: Any) -> list[str]:
    """Return the strings in a task, or around it, that call lookups."""
    written = [item.get_ds(), item.get_vars(), item.when, item.environment]
    return [text for text in dict.fromkeys(strings(written)) if any(lookup_calls(text))]


def _volatile(item: Any) -> frozenset[str]:
    """Return what differs from play to play in a task's templates."""
    return frozenset().union(*map(volatile, strings([item.get_ds(), item.get_vars(), item.environment])))


def _volatile_choice(item: Any) -> frozenset[str]:
    """Return what differs from play to play in what decides whether, and how often, a task runs or fails."""
    conditions = [item.when, item.until, item.failed_when, item.changed_when, item.args.get("that")]
    return volatile_expressions(strings(conditions)).union(*map(volatile, strings([item.loop])))


def _action(item: Any) -> str:
    return str(action_loader.find_plugin(str(item.action)) or "")


def _is_ansibles_own(item: Any) -> bool:
    """Return whether a task's action plugin is Ansible's own. Any other one may read what it likes."""
    plugin = _action(item)
    return not plugin or Path(plugin).is_relative_to(_ANSIBLE)


def _connection(item: Any) -> Any:
    """Return the connection that a task's keywords or variables name, or that it sets for later ones."""
    given = {**item.get_vars(), **(item.args if _action(item).endswith("/set_fact.py") else {})}
    return given.get("ansible_connection", item.connection)


def _is_local(connection: Any) -> bool:
    return str(connection).rpartition(".")[2] == "local"


def _elsewhere(target: str) -> str:
    return f"acts on `{target}`: a bake has only the image"


def _may_be_elsewhere(item: Any) -> bool:
    """Return whether a task may act on a machine other than the image, unlike ``debug``, which acts on none."""
    connection = _connection(item)
    if is_template(connection) or _is_local(connection):
        return _acts(item) or "ansible_connection" in item.args
    return bool(item.delegate_to) and _acts(item)


def _acts(item: Any) -> bool:
    if str(item.action) in settings._ACTION_META:
        return False
    plugin = action_loader.get(str(item.action), class_only=True) if _action(item) else None
    return bool(getattr(plugin, "_requires_connection", True))
