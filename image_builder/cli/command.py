"""What every command shares: how it is registered, how its errors show, how its result is printed."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import typer

from image_builder.cli import failure
from image_builder.settings import Settings

P = ParamSpec("P")


def register(
    app: typer.Typer,
    *,
    name: str | None = None,
    isolated: Callable[..., bool] | bool = False,
    hidden: bool = False,
    context_settings: dict[str, Any] | None = None,
) -> Callable[[Callable[P, int]], Callable[P, None]]:
    """Register a function as a command: what it returns is the exit status, what it raises is shown.

    With ``isolated`` (or where that function of the command's arguments says so) the command runs in
    namespaces of its own that nothing outlives; that needs root. A ``hidden`` one is not in the help.
    """

    def decorate(function: Callable[P, int]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **options: P.kwargs) -> None:
            guard = functools.partial(
                failure.guard, json_wanted=bool(options.get("as_json")), command=failure.command_line()
            )

            def work() -> int:
                return guard(lambda: function(*args, **options))

            if isolated(**options) if callable(isolated) else isolated:
                raise typer.Exit(guard(lambda: _run_isolated(work, options.get("store"))))
            failure.end_on_sigterm()
            raise typer.Exit(work())

        app.command(
            name or function.__name__,
            help=_with_examples_kept(inspect.getdoc(function) or ""),
            hidden=hidden,
            context_settings=context_settings,
        )(run)
        return run

    return decorate


def _run_isolated(work: Callable[[], int], store: Any) -> int:
    """Run a command's work in namespaces of its own, and clear away what it could not when a signal ended it."""
    from image_builder.bake.store import Store
    from image_builder.system import cgroups, host, namespace

    host.check_root()
    status = namespace.run_isolated(work)
    if status > 128 and isinstance(store, Path):
        Store(store).reap()
        cgroups.reap()
    return status


def _with_examples_kept(text: str) -> str:
    """Mark what is indented as not to be wrapped: an example is there to be copied, its line ends too."""
    return "\n\n".join(f"\b\n{part}" if part.startswith(" ") else part for part in text.split("\n\n"))


def show(result: Any, text: str, *, as_json: bool) -> None:
    """Print a result: ``result`` as JSON, or ``text``."""
    if as_json:
        print(json.dumps(result, indent=1, default=os.fspath))
    elif text:
        print(text)


def host_settings(store: Path, **more: Any) -> Settings:
    """Return this host's settings; options that were not given keep their defaults."""
    given = {name: value for name, value in more.items() if value is not None}
    if password_file := given.get("vault_password_file"):
        # Ansible runs in another directory, and the shell expands no `~` of an environment variable.
        given["vault_password_file"] = password_file.expanduser().absolute()
    return Settings(store=store.absolute(), **given)
