"""Reading an Ansible inventory for the pool commands: opening it, and evaluating a host's variables.

Its content is checked elsewhere: the hosts in inventory.py, their node configurations in render.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from image_builder.canonical import JSON
from image_builder.definition.values import VAULT_HINT, Place, is_template
from image_builder.errors import DefinitionError, Problem, VaultError
from image_builder.settings import VaultId, project_root


class Values(NamedTuple):
    """Variables of a host: the evaluated ones, and why others can't be evaluated."""

    good: dict[str, JSON]
    failures: dict[str, str]


@contextmanager
def opened(paths: Sequence[Path], vault: Sequence[VaultId]) -> Iterator[Any]:
    """Yield an inventory, as ``engine.Source``; ``paths`` are absolute.

    Raises DefinitionError for what can't be read, here or in the block, and after the block VaultError for a file that
    can't be decrypted, since it may hide anything.
    """
    from image_builder.definition import engine
    from image_builder.definition.roles import LAYERS

    if missing := [path for path in paths if not path.exists()]:
        reason = "no such file or directory"
        raise DefinitionError([Problem(str(Place(str(path))), "inventory", reason) for path in missing])
    try:
        source = engine.read_inventory(paths, vault, project_root() / LAYERS)
        yield source
    except engine.UnreadableError as error:
        raise DefinitionError([Problem(str(error.place or paths[0]), "inventory", error.reason)]) from error
    if failures := source.vaulted.failures:
        lines = [f"{place}: the file {reason}" for place, reason in sorted(failures.items())]
        raise VaultError("\n".join(lines), hint=VAULT_HINT)


def values_of(source: Any, host: str, is_read: Callable[[str], bool]) -> Values:
    """Return the variables of a host that ``is_read`` accepts by name; raises ``engine.UnreadableError``."""
    from image_builder.definition import engine

    try:
        # Without places, which would take ten times as long: those are only looked up for faults.
        merged = source.variables.get_vars(host=source.manager.get_host(host), include_hostvars=False)
    except Exception:  # Ansible's templar and plugins may raise anything; none of it is swallowed
        source.host_variables(host)  # raises an error that names the file
        raise
    values: dict[str, JSON] = {
        str(name): engine.plain(value) for name, value in merged.items() if is_read(str(name))
    }
    templates = [name for name, value in values.items() if is_template(value)]
    if not templates:
        return Values(values, {})
    evaluated = engine.evaluate_all(_all_plain(merged, host), templates, any_lookup=True)
    plain = {name: value for name, value in values.items() if name not in templates}
    return Values(plain | dict(evaluated.values), dict(evaluated.failures))


def where(source: Any, host: str, variable: str) -> str:
    """Return where a host's variable was set, or else where the host is listed."""
    _, places = source.host_variables(host)
    return str(places.get(variable) or source.host_place(host))


def _all_plain(merged: Mapping[str, Any], host: str) -> dict[str, JSON]:
    """Return a host's merged variables as plain data, without Ansible's own, for evaluating its templates."""
    from image_builder.definition import engine

    skipped = ("groups", "omit", "vars", "hostvars")
    plain = {str(key): engine.plain(value) for key, value in merged.items() if key not in skipped}
    return plain | {"inventory_hostname": host}
