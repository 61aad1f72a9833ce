"""Faults that would stop a play, known before it runs: missing files and handlers, other machines, questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ansible.playbook.block import Block
from ansible.playbook.handler import Handler

from image_builder.definition.engine.origins import place_of
from image_builder.definition.engine.rounds import Rounds
from image_builder.definition.values import is_template

Fault = tuple[str, str]
"""A place and the reason."""


class Faults:
    """Records the faults of a play's tasks. Only certain faults count, because a play knows more."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.reached = True
        """Whether the tasks at hand are certain to be reached, since their include is certain to run."""
        self._files: set[Fault] = set()
        self._refused: dict[Fault, Any] = {}
        self._handlers: set[str] = set()
        self._notified: dict[str, str] = {}

    def missing_file(self, item: Any, source: str, variables: Mapping[str, Any]) -> None:
        """Record that a file that a task sends doesn't exist, unless the task may not run, or is allowed to fail."""
        if self.surely_runs(item, variables) and not _may_fail(item):
            self._files.add((_place(item), f"no such file on the machine that builds: `{source}`"))

    def refuse(self, item: Any, reason: str, variables: Mapping[str, Any]) -> None:
        """Record that a bake refuses a task, unless it may not run."""
        if self.surely_runs(item, variables):
            self._refused[_place(item), reason] = item

    def refuse_play(self, data: Any, reason: str) -> None:
        """Record that a bake refuses a part of the play itself."""
        self._refused[str(place_of(data) or ""), reason] = None

    def surely_runs(self, item: Any, variables: Mapping[str, Any]) -> bool:
        """Return whether a task is certain to run in a round: neither in a rescue nor by a tag that nobody gives."""
        rescues = any(child in block.rescue for block, child in _blocks(item))
        certain = self.reached and "never" not in item.tags and not rescues
        return certain and self.rounds.surely_runs(item, variables)

    def task(self, item: Any) -> None:
        """Record the handlers that a task notifies, or the names by which a handler is known."""
        if isinstance(item, Handler):
            self._handlers |= _names(item)
        for name in [item.notify] if isinstance(item.notify, str) else item.notify or []:
            self._notified.setdefault(str(name), _place(item))

    def found(self, *, certain: bool) -> frozenset[Fault]:
        """Return all faults, or if it isn't ``certain`` what else the play does, those of tasks without conditions."""
        refused = {
            fault
            for fault, item in self._refused.items()
            if (certain or not (item and item.when))
            and (not isinstance(item, Handler) or self._is_notified(item))
        }
        if not certain:
            return frozenset(refused)
        is_open = any(is_template(name) for name in self._handlers)
        unheard = {
            (place, f"notifies `{name}`: the play has no such handler")
            for name, place in self._notified.items()
            if name not in self._handlers and not is_template(name) and not is_open
        }
        return frozenset(self._files | unheard | refused)

    def _is_notified(self, handler: Handler) -> bool:
        return not _names(handler).isdisjoint(self._notified)


def _names(handler: Handler) -> set[str]:
    """Return the names by which tasks notify a handler."""
    names = (handler.get_name(include_role_fqcn=full) for full in (False, True))
    return {str(name) for name in (handler.name, *names, *(handler.listen or []))}


def _may_fail(item: Any) -> bool:
    forgiving = item.ignore_errors or item.failed_when or item.until
    return bool(forgiving) or any(block.rescue and child in block.block for block, child in _blocks(item))


def _blocks(item: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the blocks around a task, and which part of each it is in."""
    child, parent = item, item._parent
    while parent is not None:
        if isinstance(parent, Block):
            yield parent, child
        child, parent = parent, parent._parent


def _place(item: Any) -> str:
    return str(place_of(item.get_ds()) or item.get_path())
