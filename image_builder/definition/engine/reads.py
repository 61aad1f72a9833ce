"""Ansible's reads while it evaluates: the files that it opens, and lookups whose result isn't in any file.

Ansible's own lookups that read files are run, and their files are recorded. Any other lookup (``env``, ``pipe``,
``url``, a third-party plugin) is never run here: only the play knows what it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible._internal._templating import _jinja_plugins
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from jinja2 import FileSystemLoader

from image_builder.definition.engine.origins import ciphertext_digest, vaulted_variables

# Their results depend only on variables and settings, or on files that the loader opens.
_PREDICTABLE = frozenset(
    {
        *(
            "config",
            "dict",
            "indexed_items",
            "items",
            "list",
            "nested",
            "sequence",
            "subelements",
            "together",
        ),
        *("varnames", "vars"),
        *("csvfile", "file", "fileglob", "first_found", "ini", "template", "unvault"),
    }
)
_NAMES_OF_FILES = frozenset({"fileglob", "first_found"})
# Not the name of a plugin. A value made from this lookup can't be evaluated: only the play knows it.
PLAY = "the play"
UNKNOWN = trust_as_template(f"{{{{ lookup('{PLAY}') }}}}")


class UnpredictableError(AnsibleError):  # type: ignore[misc]
    """A lookup that is not run before the play."""


@dataclass
class Reads:
    """The ``files`` that were opened or found, and the ``lookups`` that were not run, by plugin name.

    With an ``answer``, no lookup is run: each one returns the answer, which shows what depends on lookups. The
    program's ``own`` lookups return nothing, and those that were called are in ``own_met``.
    """

    files: set[Path] = field(default_factory=set)
    lookups: set[str] = field(default_factory=set)
    answer: str | None = None
    own: frozenset[str] = frozenset()
    own_met: set[str] = field(default_factory=set)


_current: ContextVar[Reads | None] = ContextVar("reads", default=None)


@contextlib.contextmanager
def noting(reads: Reads) -> Iterator[None]:
    """Within the block, run only predictable lookups, and record the others in ``reads``."""
    token = _current.set(reads)
    try:
        yield
    finally:
        _current.reset(token)


class NotingLoader(DataLoader):  # type: ignore[misc]
    """A DataLoader that notes what it opens, and what it finds for a lookup."""

    def __init__(self, basedir: Path | None, reads: Reads) -> None:
        super().__init__()
        if basedir:
            self.set_basedir(str(basedir))
        self.reads = reads

    def _get_file_contents(self, file_name: str) -> tuple[bytes, bool]:
        self.reads.files.add(Path(self.path_dwim(file_name)))
        contents: tuple[bytes, bool] = super()._get_file_contents(file_name)
        return contents

    def load_from_file(self, file_name: str, cache: str = "all", unsafe: bool = False, **more: Any) -> Any:  # noqa: ARG002
        path = Path(self.path_dwim(file_name))
        if path.is_file() and ciphertext_digest(path):
            self.reads.files.add(path)
            return dict.fromkeys(vaulted_variables(path), UNKNOWN)
        # This skips the copy that protects the loader's cache: nothing here changes loaded data.
        return super().load_from_file(file_name, cache=cache, unsafe=True, **more)

    def path_dwim_relative_stack(
        self, paths: list[str], dirname: str, source: str, is_role: bool = False
    ) -> str:
        path: str = super().path_dwim_relative_stack(paths, dirname, source, is_role)
        self.reads.files.add(Path(path))
        return path

    def sent_path(self, paths: list[str], dirname: str, source: str) -> Path:
        """Return the same path as ``path_dwim_relative_stack``, without recording it."""
        return Path(super().path_dwim_relative_stack(paths, dirname, source))


def plugin_name(name: str) -> str:
    """Return the short name of one of Ansible's own plugins, and any other name unchanged."""
    return name.removeprefix("ansible.builtin.").removeprefix("ansible.legacy.")


def is_predictable(lookup: str) -> bool:
    """Return whether a lookup can be run before the play."""
    return plugin_name(lookup) in _PREDICTABLE


_invoke = _jinja_plugins._invoke_lookup


def _guarded(*, plugin_name: str, lookup_terms: list[Any], lookup_kwargs: dict[str, Any], **more: Any) -> Any:
    reads = _current.get()
    if reads is not None and reads.answer is not None:
        return [reads.answer] if lookup_kwargs.get("wantlist") else reads.answer
    if reads is not None and plugin_name in reads.own:
        reads.own_met.add(plugin_name)
        return []
    if reads is not None and not is_predictable(plugin_name):
        reads.lookups.add(plugin_name)
        raise UnpredictableError(f"what the lookup `{plugin_name}` gives is known only while a play runs")
    result = _invoke(plugin_name=plugin_name, lookup_terms=lookup_terms, lookup_kwargs=lookup_kwargs, **more)
    named = plugin_name.rpartition(".")[2] in _NAMES_OF_FILES and isinstance(result, str | list | tuple)
    if reads is not None and named:
        names = result.split(",") if isinstance(result, str) else [str(name) for name in result]
        reads.files.update(Path(name) for name in names if name.startswith("/"))
    return result


# Every lookup in a template ends up here, in this process only: plays run in their own process.
_jinja_plugins._invoke_lookup = _jinja_plugins._DirectCall.mark(_guarded)


def loop_items(templar: Templar, lookup: str, terms: list[Any]) -> Any:
    """Return the items of a task's ``with_LOOKUP``, obtained as Ansible does it."""

    @_jinja_plugins._DirectCall.mark  # type: ignore[untyped-decorator]
    def ask() -> Any:
        return _guarded(
            plugin_name=lookup,
            lookup_terms=terms,
            lookup_kwargs={"wantlist": True},
            invoked_as_with=True,
        )

    return templar.evaluate_expression(trust_as_template("ask()"), local_variables={"ask": ask})


_get_source = FileSystemLoader.get_source


def _noted_source(loader: FileSystemLoader, environment: Any, template: str) -> Any:
    """Record what a template includes, which doesn't pass through Ansible's loader."""
    source = _get_source(loader, environment, template)
    if reads := _current.get():
        reads.files.add(Path(source[1]))
    return source


FileSystemLoader.get_source = _noted_source  # type: ignore[method-assign,assignment]
