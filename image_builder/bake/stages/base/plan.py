"""The plans of roots that are made from packages only: the image's base, and those in which something is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.plan.draft import FIXED_EPOCH, Draft
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import StageKind
from image_builder.bake.stages.tools.plan import TOOLS, root_options
from image_builder.definition import ImageDefinition

BASE = "base"
# What an image's base has beyond the essential packages: systemd as its init, and what Ansible runs on.
PACKAGES = (
    "ca-certificates",
    "dbus",
    "init-system-helpers",
    "kmod",
    "libpam-systemd",
    "netbase",
    "procps",
    "python3",
    "python3-apt",
    "systemd-sysv",
    "tzdata",
    "udev",
)


def root(draft: Draft, name: str, include: Iterable[str], epoch: int = FIXED_EPOCH) -> StagePlan:
    """Return the stage ``name``: a root of the locked packages of that group."""
    options = root_options(draft, name, include, epoch)
    return StagePlan(name, KIND.name, options, draft.code(KIND), inputs={TOOLS: draft.id(TOOLS)})


def _needs(definition: ImageDefinition) -> Requirements:
    base = definition.base
    return Requirements({BASE: Group(base.suite, PACKAGES, tuple(base.components))})


def _plan(draft: Draft) -> Iterator[StagePlan]:
    yield root(draft, BASE, PACKAGES, draft.lock.source_date_epoch)


KIND = StageKind(BASE, "image_builder.bake.stages.base.run", _plan, needs=_needs)
