"""What in a template differs from play to play, or from machine to machine: the time, chance, names and paths."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

import jinja2
from jinja2 import nodes

# Names that Ansible itself gives a value: the time, the machine that builds, where its checkout is.
_NAMES = frozenset(
    {
        *("now", "lipsum", "role_uuid", "ansible_playbook_python", "ansible_config_file"),
        *(f"template_{word}" for word in ("run_date", "host", "uid", "mtime", "path", "fullpath")),
    }
)
# Filters that draw at random or read the clock, unless an argument says from what: its name, and its position after the
# filtered value. If that is none, they do so, too; those below also if it is empty.
_FILTERS = {
    "password_hash": ("salt", 1),
    "random": ("seed", 2),
    "shuffle": ("seed", 0),
    "strftime": ("second", 0),
    "vault": ("salt", 1),
}
_EMPTY_COUNTS_AS_NONE = frozenset({"password_hash", "shuffle", "vault"})
# A call of these names its lookup. Under another name, nothing would notice it.
_LOOKUPS = frozenset({"lookup", "query"})
_CANDIDATE = re.compile(
    rf"\b(?:{'|'.join(sorted({*_NAMES, *_LOOKUPS}))}|\w*(?:{'|'.join(_FILTERS)})\w*|map)\b"
)
# Jinja's own delimiters; the extensions of Ansible's templates that add statements.
_JINJA = jinja2.Environment(extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"])  # noqa: S701 (it only parses)


@functools.cache
def volatile(text: str, delimiters: tuple[tuple[str, str], ...] = ()) -> frozenset[str]:
    """Return what the templates in a text use whose value no file and no variable decides, as it is written there.

    ``delimiters`` are those that aren't Jinja's own, such as ``("variable_start_string", "[[")``.
    """
    candidates = frozenset(_CANDIDATE.findall(text)) - {"map", *_LOOKUPS}
    if not _CANDIDATE.search(text):
        return frozenset()
    try:
        jinja = _JINJA.overlay(**dict(delimiters)) if delimiters else _JINJA  # type: ignore[arg-type]
        return frozenset(_uses(jinja.parse(text)))
    except (jinja2.TemplateSyntaxError, AssertionError):  # other delimiters, or an error that stops the play
        return candidates


def volatile_expressions(expressions: Iterable[str]) -> frozenset[str]:
    """Return the same for expressions without delimiters, such as conditions."""
    return frozenset().union(*(volatile("{{ " + text + " }}") for text in expressions))


def _uses(template: nodes.Template) -> Iterator[str]:
    stored = {name.name for name in template.find_all(nodes.Name) if name.ctx != "load"}
    called = {id(call.node) for call in template.find_all(nodes.Call)}
    for name in template.find_all(nodes.Name):
        if name.name in stored:
            continue
        if name.name in _NAMES:
            yield f"{name.name}()" if name.name in ("now", "lipsum") else name.name
        elif name.name in _LOOKUPS and id(name) not in called:
            yield f"{name.name} under another name"
    for text in template.find_all(nodes.Const):
        if isinstance(text.value, str) and text.value in _NAMES - {"now"}:  # vars["template_host"]
            yield text.value
    for call in template.find_all(nodes.Filter):
        yield from _filter_uses(call)


def _filter_uses(call: nodes.Filter) -> Iterator[str]:
    """Yield the filter's name if it draws or reads the clock; ``map`` and its like get a filter as a text."""
    name, args = call.name.rpartition(".")[2], call.args
    if name == "map" and args:
        if not isinstance(args[0], nodes.Const):
            yield "map(…)"
            return
        name, args = str(args[0].value).rpartition(".")[2], args[1:]
    random = name.startswith("random")  # those of collections have names such as `random_mac`
    keyword, position = _FILTERS.get("random" if random else name, ("", -1))
    given = [argument.value for argument in call.kwargs if argument.key == keyword] + args[position:][:1]
    if position < 0 or call.dyn_kwargs:
        return
    if not any(_says_something(name, value) for value in given):
        yield name


def _says_something(name: str, argument: nodes.Expr) -> bool:
    """Return whether an argument of a filter is one: not the constant none, or empty."""
    if not isinstance(argument, nodes.Const):
        return True
    return bool(argument.value) if name in _EMPTY_COUNTS_AS_NONE else argument.value is not None
