"""The rounds of a task's loop as far as they are known before the play: the variables of each, and what they come to.

What only the play can tell (facts, what a task registers or sets, vaulted values) is a variable that can't be
evaluated, so nothing that is made from it is taken for known, ``default()`` or not.
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
    """Only the play can tell what a template comes to; ``lookups`` are those that were met and not run."""

    def __init__(self, lookups: Iterable[str] = ()) -> None:
        super().__init__()
        self.lookups = frozenset(lookups) - {PLAY}


def concealed(value: JSON) -> Any:
    """Return a variable of the host as a play has it, vaulted values unknown."""
    if isinstance(value, Mapping):
        return UNKNOWN if VAULT_KEY in value else {k: concealed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [concealed(v) for v in value]
    return trusted(value)


class Rounds:
    """What tasks of a play see, in the order in which they run."""

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
        """Return what a task sees, or the play where there is none."""
        variables: dict[str, Any] = self.manager.get_vars(play=self.play, task=item)
        variables |= self._set
        variables |= item.get_include_params() if item else {}
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
        """Return the variables that a task's loop sets: the item's, and the number's if there is one."""
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
        """Tell whether a task runs in a round, as far as its conditions say."""
        return self._condition(item, variables) is True

    def _condition(self, item: Any, variables: Mapping[str, Any]) -> bool | None:
        """Return what a task's conditions come to, None where that isn't known."""
        result: bool | None = True
        for condition in item.when:
            try:
                if not self._noted(lambda c=condition: self._templar(variables).evaluate_conditional(c)):
                    return False
            except UnknownError:
                result = None
        return result

    def evaluate(self, written: Any, variables: Mapping[str, Any]) -> Any:
        """Return what a template comes to; raises UnknownError."""
        if not is_template(written):
            return written
        return self._noted(lambda: self._templar(variables).template(written))

    def evaluate_call(self, call: str, variables: Mapping[str, Any]) -> None:
        """Evaluate a lookup call of a text, for what it reads; raises UnknownError."""
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
        """Tell whether it isn't known which variables a task sets."""
        names = item.args if _is_set_fact(item) else {}
        return any(name in ("_raw_params", "_variable_params") or is_template(name) for name in names)

    def finish(self, item: Any) -> None:
        """Note what a task sets: what comes after it sees that in place of what was known."""
        names = [item.register] if item.register else []
        names += item.args if _is_set_fact(item) else []
        self._set |= dict.fromkeys(names, UNKNOWN)

    def include(self, item: Any, variables: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Note the variables that ``include_vars`` brings: known if it surely runs, and once."""
        once = item.loop is None and self._condition(item, variables) and "hash_behaviour" not in item.args
        name = item.args.get("name")
        content = {name: content} if name else content
        self._set |= content if once else dict.fromkeys(content, UNKNOWN)


def _is_set_fact(item: Any) -> bool:
    return str(item.action).rpartition(".")[2] == "set_fact"
