"""Templates and argument specs, evaluated over plain variables as a play would."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from image_builder.definition.engine.origins import untagged
from image_builder.definition.values import JSON, is_template, strings, words


class EvaluationError(Exception):
    """A template could not be evaluated."""


def _trusted(value: JSON) -> Any:
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, Mapping):
        return {k: _trusted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_trusted(v) for v in value]
    return value


class Evaluator:
    """Evaluates templates over a set of variables, themselves templates, as a play would."""

    def __init__(self, variables: Mapping[str, JSON]) -> None:
        self._templar = Templar(loader=DataLoader(), variables={k: _trusted(v) for k, v in variables.items()})

    def evaluate(self, value: JSON) -> JSON:
        """Return ``value`` with every template in it evaluated; raises EvaluationError."""
        if not is_template(value):
            return value
        try:
            return _result(self._templar.template(_trusted(value)))
        except AnsibleError as error:
            # How deep, and how that is worded, is Python's own affair.
            what = str(error.message).partition(": maximum recursion")[0]
            raise EvaluationError(" ".join(what.split())) from error

    def settle(self, name: str, value: JSON) -> None:
        """Let a variable be its final value, which is no template: others that use it needn't evaluate it."""
        self._templar.available_variables[name] = value


def evaluate_all(
    variables: Mapping[str, JSON], wanted: Collection[str]
) -> tuple[dict[str, JSON], dict[str, str]]:
    """Evaluate the ``wanted`` variables; return the values, and for the rest why they have none.

    Each is evaluated after those that it names, so none twice: a template costs a millisecond to compile.
    """
    evaluator = Evaluator(variables)
    values: dict[str, JSON] = {}
    failures: dict[str, str] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        seen.add(name)
        inside = {word for text in strings(variables[name]) if is_template(text) for word in words(text)}
        for other in sorted(inside & wanted_set - seen):
            visit(other)
        try:
            values[name] = evaluator.evaluate(variables[name])
        except EvaluationError as error:
            failures[name] = str(error)
        else:
            evaluator.settle(name, values[name])

    wanted_set = set(wanted)
    for name in wanted:
        if name not in seen:
            visit(name)
    return values, failures


def _result(value: Any) -> JSON:
    if isinstance(value, Mapping):
        return {str(k): _result(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_result(v) for v in value]
    return untagged(value)


def argument_faults(name: str, option: Mapping[str, Any], value: JSON) -> list[str]:
    """Return what an argument spec says against a value, as Ansible checks it before a role runs."""
    result = ArgumentSpecValidator({name: dict(option)}).validate({name: value})
    # Ansible lists valid booleans in the order of a set: another one in each run.
    return [str(e).partition(" Valid booleans include")[0] for e in result.error_messages]
