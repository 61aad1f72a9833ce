"""The version that a roll brings its hosts to, and everything that is wrong with that, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from image_builder.errors import DefinitionError, Problem
from image_builder.pool.plan.model import Host, Target
from image_builder.pool.plan.plan import named
from image_builder.pool.scale_set.client import Client
from image_builder.pool.scale_set.refusals import refusals


def read_target(client: Client, hosts: Iterable[Host], version: str, more: Iterable[str] = ()) -> Target:
    """Return the target of a roll, as Azure has it now: for the scale sets of hosts, and ``more`` of them.

    Raises DefinitionError with every reason against it, FetchError where Azure can't be read.
    """
    hosts = list(hosts)
    problems: list[Problem] = []
    for variable in ("scale_set_id", "instance", "vm_id"):
        if without := sorted(host.name for host in hosts if not getattr(host, variable)):
            reason = f"isn't known of {named(without)}: a roll needs an inventory of `pool snapshot`"
            problems.append(Problem("", variable, reason))
    target = client.version(version)
    if target is None:
        problems.append(Problem("", "--to", f"there is no version {version}"))
    before: dict[str, str] = {}
    for path in sorted({*more, *(host.scale_set_id for host in hosts if host.scale_set_id)}):
        scale_set = client.scale_set(path)
        before[path] = scale_set.image
        if target:
            present = client.version(scale_set.image) if scale_set.is_pinned else None
            wrong = refusals(scale_set, present, target, datetime.now(UTC))
            problems += [Problem(path, "--to", reason) for reason in wrong]
    if problems or target is None:
        raise DefinitionError(problems, hint="nothing was changed")
    return Target(version=target.id, build=target.build, before=before)
