"""The commands' common parts: registration, errors, results, and options with one name, help text and meaning each."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from image_builder.cli import failure
from image_builder.errors import UsageError
from image_builder.settings import (
    CONFIGURATION,
    LAUNCHER,
    PROJECT_VARIABLE,
    REPO_ROOT,
    Settings,
    VaultId,
    ansible_config,
    project_root,
)

if TYPE_CHECKING:
    from image_builder.bake.stages.kind import Extensions
    from image_builder.definition import Inventory
    from image_builder.node.net.kube import Client

P = ParamSpec("P")
# The command, or the group of commands, that this process runs.
invoked = ""


def register(
    app: typer.Typer,
    *,
    name: str | None = None,
    isolated: Callable[..., bool] | bool = False,
    hidden: bool = False,
    context_settings: dict[str, Any] | None = None,
) -> Callable[[Callable[P, int]], Callable[P, None]]:
    """Register a function as a command: its return value is the exit status, and errors that it raises are shown.

    If ``isolated`` is true (or returns true for the command's arguments), the command runs in its own
    namespaces, which no process outlives; that needs root. A ``hidden`` command isn't in the help.
    """

    def decorate(function: Callable[P, int]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **options: P.kwargs) -> None:
            guard = functools.partial(
                failure.guard, json_wanted=bool(options.get("as_json")), command=failure.command_line()
            )

            def work() -> int:
                return guard(lambda: function(*args, **options))

            if not LAUNCHER.exists() and (refusal := guard(_check_packages)):
                raise typer.Exit(refusal)

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


def _check_packages() -> int:
    """Check for the packages that a checkout's launcher installs; an installed program only reports missing ones."""
    from image_builder.system import host

    host.check_packages(invoked)
    return 0


def _run_isolated(work: Callable[[], int], store: Any) -> int:
    """Run a command's work in its own namespaces, and clean up what it couldn't if a signal ended it."""
    from image_builder.bake.store import Store
    from image_builder.system import cgroups, host, namespace

    host.check_root()
    host.check_capabilities()
    status = namespace.run_isolated(work)
    if status > 128 and isinstance(store, Path):
        Store(store).reap()
        cgroups.reap()
    return status


def _with_examples_kept(text: str) -> str:
    """Mark indented parts as not to be wrapped, so that examples can be copied with their line ends."""
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
    if "vault" in given:
        given["vault"] = tuple(given["vault"])
    return Settings(store=store.absolute(), **given)


def read_inventory(
    paths: Sequence[Path] | None,
    vault: Sequence[VaultId] | None = None,
    extra: Sequence[str] | None = None,
    *,
    of_user: bool = False,
) -> Inventory:
    """Return an inventory, by default that of the ``ansible.cfg`` in effect; see ``inventory_paths``."""
    from image_builder.definition import load_inventory

    paths = inventory_paths(paths, of_user=of_user)
    return load_inventory(paths, vault or (), project=project_root(), extra=extra or ())


def inventory_paths(paths: Sequence[Path] | None, *, of_user: bool = False) -> Sequence[Path]:
    """Return the paths of the inventory: those given, or else those that the ``ansible.cfg`` in effect names.

    Where there is neither a project nor this program's checkout, that is its own ``ansible.cfg``, with a note; if the
    inventory must be ``of_user``, it is a UsageError.
    """
    from image_builder.definition import configured_inventories

    if paths:
        return paths
    project, here = project_root(), Path.cwd()
    configured = configured_inventories()
    if not (project / CONFIGURATION).is_file() or (project == REPO_ROOT and not _is_in_own_checkout(here)):
        reason = f"no {CONFIGURATION} in {here if project == REPO_ROOT else project}"
        if of_user:
            hint = f"change to your repository, name it with {PROJECT_VARIABLE}=DIR, or give an inventory with -i"
            raise UsageError(reason, hint=hint)
        named = ", ".join(map(os.fspath, configured))
        print(f"note: {reason}: using the inventory of image-builder itself, {named}", file=sys.stderr)
    if not configured:
        reason = f"no inventory was given, and {ansible_config([project])} names none"
        raise UsageError(reason, hint="give one with -i")
    return configured


def _is_in_own_checkout(here: Path) -> bool:
    return here.is_relative_to(REPO_ROOT) or bool(os.environ.get(PROJECT_VARIABLE))


def extensions() -> Extensions:
    """Return what every bake is given: the stage that verifies an image, and the lab's images."""
    from image_builder.bake.stages.kind import Extensions
    from image_builder.lab.stage import SUPPLIER
    from image_builder.verify.stage import KIND

    return Extensions(KIND, SUPPLIER)


def connect(kubeconfig: Path | None, agent: str, timeout: float = 15.0) -> Client:
    """Return a client of the API server in a kubeconfig, or of this pod's own. Raises NodeError if that fails."""
    from image_builder.node.net.kube import Client

    if kubeconfig:
        return Client.from_kubeconfig(kubeconfig, agent=agent, timeout=timeout)
    return Client.in_cluster(agent=agent, timeout=timeout)


def completion(
    names: Callable[[Mapping[str, Any]], Iterable[str]],
) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion of the names that ``names`` reads, given the options before the word; none if that fails."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            with contextlib.redirect_stderr(
                io.StringIO()
            ):  # a warning would appear in the line that is being typed
                return [str(name) for name in names(context.params) if name.startswith(incomplete)]
        except Exception:  # the command itself will show the error
            return []

    return complete


@completion
def complete_images(options: Mapping[str, Any]) -> Iterable[str]:
    """Return the images of an inventory, by default that of the ``ansible.cfg``."""
    return read_inventory(options.get("inventory"), options.get("vault"), options.get("extra_vars")).images


Image = Annotated[
    str, typer.Argument(metavar="IMAGE", help="an image in the inventory", autocompletion=complete_images)
]
Inventories = Annotated[
    list[Path] | None,
    typer.Option(
        "-i",
        "--inventory",
        metavar="PATH",
        help="an inventory, as in Ansible; repeatable  [default: that of ansible.cfg]",
    ),
]
VaultIds = Annotated[
    list[VaultId] | None,
    typer.Option(
        "--vault-id",
        "--vault-password-file",
        metavar="[LABEL@]FILE",
        parser=VaultId.parse,
        help="a file with the password for vaulted values, as in Ansible; repeatable",
    ),
]


def _with_absolute_file(text: str) -> str:
    return f"@{Path(text[1:]).absolute()}" if text.startswith("@") else text


ExtraVars = Annotated[
    list[str] | None,
    typer.Option(
        "-e",
        "--extra-vars",
        metavar="VARS",
        parser=_with_absolute_file,
        help="variables that override all others, as in Ansible: NAME=VALUE, JSON or @FILE; repeatable",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="URL", help="Azure Resource Manager  [default: that of AZURE_SDK_CLOUD_CONF]"
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        metavar="FILE",
        envvar="KUBECONFIG",
        help="API server and credentials to use  [default: this pod's service account]",
    ),
]
StoreDir = Annotated[
    Path,
    typer.Option(
        "--store", metavar="DIR", envvar="IMAGE_BUILDER_STORE", help="directory for stages and downloads"
    ),
]
Mirror = Annotated[
    str | None,
    typer.Option(
        "--mirror",
        metavar="URL",
        envvar="IMAGE_BUILDER_MIRROR",
        help="Debian mirror to use  [default: image_base.mirror, else the host's own]",
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="directory for the artifacts")]
Locked = Annotated[
    Path | None,
    typer.Option(
        "--locked", metavar="FILE", help="use exactly the packages in this lock  [default: the last lock]"
    ),
]
Facts = Annotated[
    Path | None,
    typer.Option(
        "--facts", metavar="FILE", help="expected facts of the image  [default: the facts.json next to it]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as one JSON object")]
