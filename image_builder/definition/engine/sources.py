"""The files on the build machine that a task's module, its lookups and its templates read."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from ansible.errors import AnsibleError
from ansible.module_utils.parsing.convert_bool import boolean

from image_builder.definition.engine.faults import Faults
from image_builder.definition.engine.reads import NotingLoader
from image_builder.definition.engine.rounds import Rounds, UnknownError
from image_builder.definition.engine.volatile import volatile
from image_builder.definition.values import is_template, lookup_calls
from image_builder.system.trees import files_in

# Modules that read a file or a directory on the build machine, the arguments that name it, and the directory of a role
# where it is searched for.
_MODULES = {
    "assemble": (("src",), "files"),
    "copy": (("src",), "files"),
    "include_vars": (("file", "_raw_params", "dir"), "vars"),
    "script": (("_raw_params", "cmd"), "files"),
    "template": (("src",), "templates"),
    "unarchive": (("src",), "files"),
    "uri": (("src",), "files"),
}
_FREE_FORM = frozenset({"include_vars", "script"})
_DELIMITERS = tuple(
    f"{kind}_{end}_string" for kind in ("block", "variable", "comment") for end in ("start", "end")
)


class Sources:
    """Records in ``sent`` and in the loader's reads what tasks read, and through ``unknown`` what can't be known.
    ``templates`` are those of the files that are evaluated.

    ``fetched`` are the files and directories that tasks fetch from the image to the build machine.
    """

    def __init__(
        self,
        rounds: Rounds,
        loader: NotingLoader,
        sent: set[Path],
        templates: set[Path],
        unknown: Callable[[Any, str], None],
        faults: Faults,
    ) -> None:
        self.rounds, self.loader, self.sent, self.unknown = rounds, loader, sent, unknown
        self.templates = templates
        self.faults = faults
        self.fetched: set[Path] = set()

    def has(self, item: Any) -> bool:
        """Return whether a task's module reads or writes files."""
        return _module(item) in {"fetch", *_MODULES}

    def note(self, item: Any, variables: Mapping[str, Any]) -> None:
        """Record what a task's module reads or writes in one round."""
        module = _module(item)
        if module == "fetch":
            self._note_fetched(item, variables)
        if module not in _MODULES:
            return
        names, folder = _MODULES[module]
        arguments = self.arguments(item, variables)
        if self._is_remote(module, arguments, variables):
            return
        for written in (arguments[name] for name in names if arguments.get(name)):
            # A script's arguments don't name files.
            name = written if module != "script" or is_template(_first(written)) else _first(written)
            try:
                source = self.rounds.evaluate(name, variables)
            except UnknownError:
                self.unknown(item, f"the file `{written}` is named only while the play runs")
                continue
            if isinstance(source, str) and source.strip():
                path = _first(source) if module == "script" else source.rstrip("\n")
                self._note_file(item, module, folder, path, variables)

    def _note_fetched(self, item: Any, variables: Mapping[str, Any]) -> None:
        """Record where a task fetches a file to, as Ansible's ``fetch`` puts it."""
        arguments = self.arguments(item, variables)
        try:
            source, dest, flat = (
                self.rounds.evaluate(arguments.get(name), variables) for name in ("src", "dest", "flat")
            )
        except UnknownError:
            return
        if isinstance(source, str) and isinstance(dest, str):
            place = Path(self.loader.path_dwim(dest))
            if not boolean(flat, strict=False):
                place /= variables["inventory_hostname"]
            elif dest.endswith("/"):
                place /= Path(source).name
            self.fetched.add(place)

    def arguments(self, item: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task's arguments as they are written, including the play's defaults for its module."""
        module = _module(item)
        written = dict(item.args)
        layers = [
            values
            for defaults in item.module_defaults or []
            for name, values in defaults.items()
            if name.rpartition(".")[2] == module
        ]
        in_one = ["_variable_params"] if module in _FREE_FORM else ["_variable_params", "_raw_params"]
        layers += [written.pop(name) for name in in_one if name in written]
        arguments: dict[str, Any] = {}
        for layer in layers:
            try:
                arguments |= self.rounds.evaluate(layer, variables) if isinstance(layer, str) else layer
            except (UnknownError, TypeError, ValueError):
                self.unknown(item, f"the arguments `{layer}` are known only while the play runs")
        return arguments | written

    def _is_remote(self, module: str, arguments: Mapping[str, Any], variables: Mapping[str, Any]) -> bool:
        """Return whether what a module reads is in the image."""
        try:
            copied = self.rounds.evaluate(arguments.get("copy", True), variables)
            remote = self.rounds.evaluate(arguments.get("remote_src", module == "assemble"), variables)
        except UnknownError:
            return False
        return boolean(remote, strict=False) or not boolean(copied, strict=False)

    def _note_file(
        self, item: Any, module: str, folder: str, source: str, variables: Mapping[str, Any]
    ) -> None:
        if module == "include_vars" and "dir" in item.args and item._role is None:
            folder = ""  # next to the file of tasks
        try:
            path = self.loader.sent_path(item.get_search_path(), folder, source)
        except AnsibleError:
            self.faults.missing_file(item, source, variables)
            return
        if module == "template":
            self._template(item, path, variables, set())
        elif module == "include_vars":
            for file in sorted(files_in(path, whole=True)):
                self._variables(item, file, variables)
        else:
            self.sent.update(files_in(path, whole=True, links=True))

    def _variables(self, item: Any, path: Path, variables: Mapping[str, Any]) -> None:
        try:
            content = self.loader.load_from_file(str(path), trusted_as_template=True)
        except AnsibleError:
            content = None
        self.loader.reads.files.add(path)
        if isinstance(content, Mapping):
            self.rounds.include(item, variables, content)

    def _template(self, item: Any, path: Path, variables: Mapping[str, Any], visited: set[Path]) -> None:
        """Record what a template includes and looks up; its own loops aren't run."""
        visited.add(path)
        self.templates.add(path)
        try:
            text = self.loader.get_text_file_contents(str(path))
        except AnsibleError:
            self.unknown(item, f"the template `{path.name}` can be read only while the play runs")
            return
        for _, call in lookup_calls(text):
            self._call(item, call, variables)
        delimiters = {name: str(item.args[name]) for name in _DELIMITERS if name in item.args}
        for used in volatile(text, tuple(delimiters.items())) if delimiters else ():
            self.unknown(item, f"what `{used}` gives is known only while the play runs")
        for name in _included(text, delimiters):
            if name is None:
                self.unknown(item, f"what `{path.name}` includes is known only while the play runs")
                continue
            included = self._beside(variables, path, name)
            if included and included not in visited:
                self._template(item, included, variables, visited)

    def _beside(self, variables: Mapping[str, Any], template: Path, name: str) -> Path | None:
        """Return where Ansible finds a file that a template includes."""
        folders = [Path(folder) for folder in (*variables["ansible_search_path"], template.parent)]
        places = [place for folder in folders for place in (folder / "templates" / name, folder / name)]
        return next((place for place in places if place.is_file()), None)

    def lookups(self, item: Any, text: str, variables: Mapping[str, Any]) -> None:
        """Record what the lookups in a text read, if there are any."""
        calls = list(lookup_calls(text))
        if not calls:
            return
        if is_template(text):
            try:
                self.rounds.evaluate(text, variables)
            except UnknownError:
                pass  # maybe because of another part of the text
            else:
                return
        for _, call in calls:
            self._call(item, call, variables)

    def _call(self, item: Any, call: str, variables: Mapping[str, Any]) -> None:
        try:
            self.rounds.evaluate_call(call, variables)
        except UnknownError as error:
            self.unknown(item, _why(call, error))


def _why(call: str, error: UnknownError) -> str:
    if error.lookups:
        names = ", ".join(f"`{name}`" for name in sorted(error.lookups))
        return f"made by the lookup {names}, known only to a play"
    return f"what `{call}` reads is known only while the play runs"


def _module(item: Any) -> str:
    return str(item.action).rpartition(".")[2]


def _first(command: str) -> str:
    try:
        return shlex.split(command)[0]
    except (IndexError, ValueError):  # the play will fail
        return command


def _included(text: str, delimiters: Mapping[str, str]) -> Iterator[str | None]:
    """Yield the names of the files that a template includes or imports, None for a name that it computes."""
    if text.startswith("#jinja2:") and "_string" in text.partition("\n")[0]:
        yield None  # other delimiters
        return
    extensions = ["jinja2.ext.do", "jinja2.ext.loopcontrols"]
    try:
        environment = jinja2.Environment(extensions=extensions, **delimiters)  # type: ignore[arg-type]  # noqa: S701 (it only parses)
        yield from jinja2.meta.find_referenced_templates(environment.parse(text))
    except (jinja2.TemplateSyntaxError, AssertionError):  # two delimiters may be the same
        yield None
