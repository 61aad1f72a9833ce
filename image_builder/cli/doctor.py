"""The command ``doctor``: what this host lacks for each command, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from image_builder.cli import failure
from image_builder.cli.command import AsJson, StoreDir, register, show
from image_builder.errors import HostError, ImageBuilderError
from image_builder.settings import DEFAULT_STORE

app = typer.Typer()
Check = Callable[[], None]

# Every command that needs something from the host; all others run wherever this one does.
COMMANDS = ("lock", "plan", "build", "verify DIR", "boot", "lab", "store", "pool", "pool snapshot", "publish")


@dataclass(frozen=True)
class Lack:
    """What the host lacks for ``commands``."""

    commands: tuple[str, ...]
    error: ImageBuilderError

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it: like any error, with the commands."""
        return {"commands": list(self.commands), **failure.as_json(self.error)["error"]}


def lacks(store: Path) -> list[Lack]:
    """Return what this host lacks, found by the same checks as in the commands."""
    from image_builder.system import host, namespace

    # If one of them fails, the ones after it add nothing new.
    rights = (host.check_root, host.check_capabilities, namespace.check)
    checks: list[tuple[tuple[str, ...], tuple[Check, ...]]] = [
        (COMMANDS, (host.check_system,)),
        (("build", "boot", "lab"), (host.check_machine,)),
        (("build", "verify DIR", "lab", "store"), rights),
        *(((command,), (partial(host.check_packages, command),)) for command in COMMANDS),
        (("lock", "plan", "boot"), (partial(host.check_writable, store),)),
        (("build", "boot"), (partial(host.check_store, store),)),
        (("build",), (partial(host.check_kernel, ("overlay",)),)),
        (("build",), (host.check_cgroups,)),
        (("pool snapshot", "publish"), (host.check_azure,)),
    ]
    refusals = ((commands, _refusal(group)) for commands, group in checks)
    return [Lack(commands, error) for commands, error in refusals if error]


def _refusal(checks: Iterable[Check]) -> ImageBuilderError | None:
    """Return the error of the first check that fails, or None."""
    try:
        for check in checks:
            check()
    except ImageBuilderError as error:
        return error
    return None


def _hint(error: ImageBuilderError) -> str:
    return f"\n  {error.hint}" if error.hint else ""


@register(app)
def doctor(store: StoreDir = DEFAULT_STORE, as_json: AsJson = False) -> int:
    """Check this host and report everything that it lacks, for each command, and how to fix it.

    Changes nothing. The exit status is 0 if all commands can run here, otherwise 5.

    Example:

        image-builder doctor
    """
    lacking = lacks(store)
    ready = [name for name in COMMANDS if not any(name in lack.commands for lack in lacking)]
    lines = [f"{', '.join(lack.commands)}: {lack.error.message}" + _hint(lack.error) for lack in lacking]
    lines += [f"ready: {', '.join(ready)}"] if ready else []
    result = {"lacks": [lack.as_json() for lack in lacking], "ready": ready}
    show(result, "\n".join(lines), as_json=as_json)
    return HostError.exit_code if lacking else 0
