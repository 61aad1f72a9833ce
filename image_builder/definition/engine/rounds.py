"""The rounds (iterations) of a task's loop, as far as they are known before the play: each one's variables and values.

Whatever only the play can determine (facts, what a task registers or sets, vaulted values) becomes a variable that
can't be evaluated, so nothing derived from it counts as known, with ``default()`` or without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ansible._internal._task import TaskContext
from ansible.errors import AnsibleError, AnsibleValueOmittedError
from ansible.template import Templar, trust_as_template

from image_builder.canonical import JSON
from image_builder.definition.engine.reads import PLAY, UNKNOWN, NotingLoader, Reads, loop_items, noting
from image_builder.definition.engine.templates import trusted
from image_builder.definition.values import VAULT_KEY, is_template


class UnknownError(Exception):
    """Only the play can determine a template's value; ``lookups`` are those that it calls and that weren't run."""

    def __init__(self, lookups: Iterable[str] = ()) -> None:
        super().__init__()
        self.lookups = frozenset(lookups) - {PLAY}


def concealed(value: JSON) -> Any:
    """Return a variable of the host as a play has it, with vaulted values unknown."""
    if isinstance(value, Mapping):
        return UNKNOWN if VAULT_KEY in value else {k: concealed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [concealed(v) for v in value]
    return trusted(value)


class Rounds:
    """The variables that a play's tasks see, in the order in which the tasks run."""

    def __init__(self, play: Any, loader: NotingLoader, own_lookups: frozenset[str]) -> None:
        self.play, self.loader = play, loader
        self.manager = play.image_builder_variables
        self.own_lookups: set[str] = set()
        self._own_lookups = own_lookups
        self._set: dict[str, Any] = dict.fromkeys(("ansible_facts", "hostvars"), UNKNOWN)

    def state(self) -> str:
        """Return what the tasks so far have set, for comparison."""
        return str(self._set)

    def variables(self, item: Any) -> dict[str, Any]:
        """Return the variables that a task sees, or the play if there is no task."""
        variables: dict[str, Any] = self.manager.get_vars(play=self.play, task=item)
        variables |= self._set
        variables |= item.get_include_params() if item else {}
        variables |= self.manager._extra_vars  # nothing that a play sets wins over them
        search = [*item.get_search_path()] if item else []
        variables["ansible_search_path"] = list(dict.fromkeys([*search, self.loader.get_basedir()]))
        variables["vars"] = dict(variables)
        return variables

    def of(self, item: Any) -> list[dict[str, Any]]:
        """Return the variables of each round in which a task may run."""
        variables = self.variables(item)
        names = self.loop_names(item)
        if not names:
            rounds = [variables]
        else:
            try:
                values = self._loop(item, variables)
            except UnknownError:
                rounds = [{**variables, **dict.fromkeys(names, UNKNOWN)}]
            else:
                rounds = [
                    {**variables, **dict(zip(names, (value, index), strict=False))}
                    for index, value in enumerate(values)
                ]
        return [scope for scope in rounds if self._condition(item, scope) is not False]

    def loop_names(self, item: Any) -> list[str]:
        """Return the names of the variables that a task's loop sets: the item's, and the index's if there is one."""
        if item.loop is None:
            return []
        control = item.loop_control
        return [str(name) for name in (control.loop_var, control.index_var) if name]

    def _loop(self, item: Any, variables: Mapping[str, Any]) -> list[Any]:
        values = self.evaluate(item.loop, variables)
        if item.loop_with:
            terms = values if isinstance(values, list) else [values]
            with TaskContext(item):
                values = self._noted(lambda: loop_items(self._templar(variables), item.loop_with, terms))
        if not isinstance(values, list):
            raise UnknownError
        return values

    def surely_runs(self, item: Any, variables: Mapping[str, Any]) -> bool:
        """Return whether a task is certain to run in a round, judging by its loop and its conditions."""
        known = not any(variables.get(name) is UNKNOWN for name in self.loop_names(item))
        return known and self._condition(item, variables) is True

    def _condition(self, item: Any, variables: Mapping[str, Any]) -> bool | None:
        """Return the result of a task's conditions, or None if it isn't known."""
        result: bool | None = True
        for condition in item.when:
            try:
                if not self._noted(lambda c=condition: self._templar(variables).evaluate_conditional(c)):
                    return False
            except UnknownError:
                result = None
        return result

    def evaluate(self, written: Any, variables: Mapping[str, Any]) -> Any:
        """Return the value of a template. Raises UnknownError if only the play can determine it."""
        if not is_template(written):
            return written
        return self._noted(lambda: self._templar(variables).template(written))

    def evaluate_call(self, call: str, variables: Mapping[str, Any]) -> None:
        """Evaluate a lookup call in a text to record what it reads. Raises UnknownError if that can't be known."""
        self._noted(lambda: self._templar(variables).template(trust_as_template("{{ " + call + " }}")))

    def _templar(self, variables: Mapping[str, Any]) -> Templar:
        return Templar(loader=self.loader, variables=variables)

    def _noted(self, evaluate: Any) -> Any:
        met = Reads(own=self._own_lookups)
        try:
            with noting(met):
                value = evaluate()
        except AnsibleValueOmittedError:
            value = None
        except AnsibleError as error:
            raise UnknownError(met.lookups) from error
        finally:
            self.loader.reads.files |= met.files
            self.own_lookups |= met.own_met
        if met.lookups:
            raise UnknownError(met.lookups)
        return value

    def sets_unknown_names(self, item: Any) -> bool:
        """Return whether a task sets variables whose names aren't known."""
        names = item.args if _is_set_fact(item) else {}
        return any(name in ("_raw_params", "_variable_params") or is_template(name) for name in names)

    def finish(self, item: Any) -> None:
        """Record what a task sets: later tasks see these variables as unknown."""
        names = [item.register] if item.register else []
        names += item.args if _is_set_fact(item) else []
        self._set |= dict.fromkeys(names, UNKNOWN)

    def include(self, item: Any, variables: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Record the variables that ``include_vars`` loads: they are known if it is certain to run, and only once."""
        once = item.loop is None and self._condition(item, variables) and "hash_behaviour" not in item.args
        name = item.args.get("name")
        content = {name: content} if name else content
        self._set |= content if once else dict.fromkeys(content, UNKNOWN)


def _is_set_fact(item: Any) -> bool:
    return str(item.action).rpartition(".")[2] == "set_fact"
