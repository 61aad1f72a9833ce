"""The options of the commands that reach hosts, each written once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from image_builder.cli.options import VaultFile
from image_builder.errors import UsageError

if TYPE_CHECKING:
    from image_builder.pool.reach.reach import Access
    from image_builder.pool.rollout import Options


@dataclass(frozen=True)
class HostOptions:
    """Options for reaching hosts and for what they must be."""

    user: Annotated[str, typer.Option("--user", metavar="NAME", help="log in to the hosts as NAME")] = "root"
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="private key for the hosts; required")
    ] = None
    host_ca: Annotated[
        Path | None,
        typer.Option(
            "--host-ca", metavar="FILE", help="accept host certificates of these authorities (known_hosts)"
        ),
    ] = None
    known_hosts: Annotated[
        Path | None,
        typer.Option("--known-hosts", metavar="FILE", help="accept these host keys, by VM id or name"),
    ] = None
    trust_first_use: Annotated[
        Path | None,
        typer.Option(
            "--trust-first-use", metavar="FILE", help="accept each host's first key and record it in FILE"
        ),
    ] = None
    facts: Annotated[
        list[str] | None,
        typer.Option(
            "--facts",
            metavar="[IMAGE=]FILE",
            help="facts.json of a build that hosts of its image, or of IMAGE, must match; repeatable",
        ),
    ] = None
    vault_password_file: VaultFile = None

    def request(self, plan: Path, reports: Path, **more: Any) -> Options:
        """Return the options of a rollout; raises UsageError for a choice that is missing or double."""
        from image_builder.pool.rollout import Options

        return Options(
            plan=plan,
            access=self._access(),
            reports=reports.absolute(),
            facts=tuple(self.facts or ()),
            vault_password_file=self.vault_password_file,
            **more,
        )

    def _access(self) -> Access:
        from image_builder.pool.reach.hostkeys import CertificateAuthority, FirstUse, Pinned
        from image_builder.pool.reach.reach import Access

        choices = (
            (CertificateAuthority, self.host_ca),
            (Pinned, self.known_hosts),
            (FirstUse, self.trust_first_use),
        )
        host_keys = [kind(file.absolute()) for kind, file in choices if file]
        if len(host_keys) != 1:
            raise UsageError(
                "give exactly one of --host-ca, --known-hosts and --trust-first-use",
                hint="hosts whose key can't be verified are not contacted",
            )
        if self.key is None:
            raise UsageError(
                "give the private key with --key", hint="no agent is asked and no default key is used"
            )
        return Access(self.user, self.key.absolute(), host_keys[0])


@dataclass(frozen=True)
class RolloutOptions(HostOptions):
    """The further options of `run` and `resume`."""

    node_configs: Annotated[
        Path | None,
        typer.Option(
            "--node-configs", metavar="DIR", help="HOST.json for hosts without a configuration by user data"
        ),
    ] = None
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig", metavar="FILE", help="the control plane that gates the waves  [default: none]"
        ),
    ] = None
    reports: Annotated[
        Path | None,
        typer.Option("--reports", metavar="DIR", help="reports of failed hosts  [default: PLAN.reports]"),
    ] = None

    def rollout(self, plan: Path, inventories: list[Path] | None, **more: Any) -> Options:
        """Return the options of a rollout; raises UsageError as ``request`` does."""
        return self.request(
            plan,
            self.reports or plan.with_name(f"{plan.name}.reports"),
            inventories=tuple(inventories or ()),
            node_configs=self.node_configs,
            kubeconfig=self.kubeconfig,
            **more,
        )


def expanded(function: Callable[..., int]) -> Callable[..., int]:
    """Return a command whose parameter ``hosts``, a dataclass, is one option for each of its fields."""
    hints = get_type_hints(function, include_extras=True)
    kind = hints.pop("hosts")
    fields = get_type_hints(kind, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "hosts":
            parameters += [
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
                for field in dataclasses.fields(kind)
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> int:
        options = {field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
        return function(**values, hosts=kind(**options))

    command.__annotations__ = {**hints, **fields}
    annotated = [
        parameter.replace(annotation=command.__annotations__[parameter.name]) for parameter in parameters
    ]
    command.__signature__ = inspect.Signature(annotated)  # type: ignore[attr-defined]
    return command
