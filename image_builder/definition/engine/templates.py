"""Templates and argument specs, evaluated over plain variables as a play would."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.template import Templar, trust_as_template

from image_builder.canonical import JSON
from image_builder.definition.engine.origins import untagged
from image_builder.definition.engine.reads import NotingLoader, Reads, noting
from image_builder.definition.values import is_template, strings, words

# Only a play gathers facts.
_FACT = re.compile(r"'ansible_\w+' is undefined")


class EvaluationError(Exception):
    """A template could not be evaluated."""


class UnpredictableValueError(EvaluationError):
    """A template's value is known only while a play runs: it comes from a lookup that isn't run before then."""


def trusted(value: JSON) -> Any:
    """Return a value whose strings Ansible treats as templates."""
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, Mapping):
        return {k: trusted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [trusted(v) for v in value]
    return value


class Evaluator:
    """Evaluates templates over a set of variables, which may be templates themselves, as a play would.

    Lookups find files relative to ``basedir``, a playbook's directory, and to the variable ``ansible_search_path``.
    What they read is recorded in ``reads``. With ``any_lookup``, lookups that query programs or the network are run
    too; with an ``answer``, no lookup is run, and each one returns the answer.
    """

    def __init__(
        self,
        variables: Mapping[str, JSON],
        basedir: Path | None = None,
        *,
        any_lookup: bool = False,
        answer: str | None = None,
    ) -> None:
        self.reads = Reads()
        self._answer = answer
        self._any_lookup = any_lookup
        self._templar = Templar(
            loader=NotingLoader(basedir, self.reads),
            variables={k: trusted(v) for k, v in variables.items()},
        )

    def evaluate(self, value: JSON) -> JSON:
        """Return ``value`` with every template in it evaluated.

        Raises UnpredictableValueError if only a play can evaluate it, EvaluationError if it can't be evaluated.
        """
        if not is_template(value):
            return value
        met = Reads(answer=self._answer)
        try:
            with nullcontext() if self._any_lookup else noting(met):
                return _result(self._templar.template(trusted(value)))
        except AnsibleError as error:
            if met.lookups:
                names = ", ".join(f"`{name}`" for name in sorted(met.lookups))
                raise UnpredictableValueError(f"made by the lookup {names}, known only to a play") from error
            # The depth and the wording of this error are Python's and may vary.
            reason = str(error.message).partition(": maximum recursion")[0]
            raise EvaluationError(" ".join(reason.split())) from error
        finally:
            self.reads.files |= met.files
            self.reads.lookups |= met.lookups

    def settle(self, name: str, value: JSON) -> None:
        """Set a variable's final value, which isn't a template, so that others that use it needn't evaluate it."""
        self._templar.available_variables[name] = value


@dataclass(frozen=True)
class Evaluation:
    """The results of variables: ``values``, or by name the reason why there is none.

    ``failures`` are for variables that can't be evaluated, ``unpredictable`` for those that only a play can evaluate.
    """

    values: Mapping[str, JSON]
    failures: Mapping[str, str]
    unpredictable: Mapping[str, str]


def evaluate_all(
    variables: Mapping[str, JSON],
    names: Collection[str],
    basedir: Path | None = None,
    *,
    any_lookup: bool = False,
    answer: str | None = None,
) -> Evaluation:
    """Evaluate the variables in ``names``; the other parameters are those of ``Evaluator``.

    Each is evaluated after those that it names, so that none is evaluated twice: a template takes a millisecond to
    compile.
    """
    evaluator = Evaluator(variables, basedir, any_lookup=any_lookup, answer=answer)
    values: dict[str, JSON] = {}
    failures: dict[str, str] = {}
    unpredictable: dict[str, str] = {}
    visited: set[str] = set()

    def visit(name: str) -> None:
        visited.add(name)
        inside = {word for text in strings(variables[name]) if is_template(text) for word in words(text)}
        for other in sorted(inside & wanted_set - visited):
            visit(other)
        try:
            values[name] = evaluator.evaluate(variables[name])
        except UnpredictableValueError as error:
            unpredictable[name] = str(error)
        except EvaluationError as error:
            (unpredictable if _FACT.search(str(error)) else failures)[name] = str(error)
        else:
            evaluator.settle(name, values[name])

    wanted_set = set(names)
    for name in names:
        if name not in visited:
            visit(name)
    return Evaluation(values, failures, unpredictable)


def _result(value: Any) -> JSON:
    if isinstance(value, Mapping):
        return {str(k): _result(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_result(v) for v in value]
    return untagged(value)


def argument_faults(name: str, option: Mapping[str, Any], value: JSON) -> list[str]:
    """Return what an argument spec rejects in a value, as Ansible checks it before a role runs.

    Ansible itself fails with a traceback for some values, such as an infinite number or a mapping whose keys are not
    strings.
    """
    if odd := list(_odd_values(option, value)):
        return odd
    try:
        result = ArgumentSpecValidator({name: dict(option)}).validate({name: value})
    except Exception as error:  # whatever Ansible's conversions raise, the value is wrong
        return [
            f"argument '{name}' can't be read as {option.get('type', 'str')}: {error or type(error).__name__}"
        ]
    # Ansible lists valid booleans in the order of a set, which differs from run to run.
    return [str(e).partition(" Valid booleans include")[0] for e in result.error_messages]


def _odd_values(option: Mapping[str, Any], value: JSON) -> Iterator[str]:
    """Yield why Ansible can't convert a value, or parts of it, for what its validator doesn't expect at all."""
    kind, inner = option.get("type", "str"), option.get("options")
    if kind == "list" and isinstance(value, list):
        for element in value:
            yield from _odd_values({**option, "type": option.get("elements", "raw")}, element)
    elif kind in ("int", "float") and not _is_finite(value):
        yield f"{value} is not {'an integer' if kind == 'int' else 'a number'}"
    elif kind == "dict" and isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            yield f"the key {odd[0]!r} is not a string"
        for key, of_key in (inner or {}).items():
            if value.get(key) is not None:
                yield from (f"{key}: {reason}" for reason in _odd_values(of_key, value[key]))
    elif kind == "dict" and inner and not isinstance(value, str) and value is not None:
        yield f"{value!r} is not a mapping"


def _is_finite(value: JSON) -> bool:
    """Return whether a value is a finite number, or no number at all, which the validator reports."""
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except OverflowError:
        return False
    except (TypeError, ValueError):
        return True
