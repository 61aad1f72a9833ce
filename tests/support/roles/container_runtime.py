"""The role container_runtime in a bake of Debian 13: its variables, and the text of its templates."""

from __future__ import annotations

from typing import Any

from tests.support.roles import templates

_BAKE = {
    "target_distribution": "debian",
    "target_suite": "trixie",
    "target_booted": False,
    "target_archives": "",
}


def value(name: str, **variables: Any) -> Any:
    """Return one variable of the role as plain data."""
    return templates.value("container_runtime", name, **{**_BAKE, **variables})


def render(template: str, *, item: Any = None, **variables: Any) -> str:
    """Render one of the role's templates; ``item`` is the loop's."""
    return templates.render("container_runtime", template, **{**_BAKE, **variables, "item": item})
