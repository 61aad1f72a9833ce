"""A target: a root that checks, Ansible and tests can reach, whether a tree, a VM or a live machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from image_builder.plan.model import JSON
from image_builder.process import Completed


class Target(Protocol):
    """What all targets have in common. Paths are the target's own; commands run as its root."""

    @property
    def url(self) -> str:
        """``sandbox:PATH`` or ``ssh://USER@HOST:PORT?key=FILE``: what ``tests/image`` takes as ``--target``."""

    @property
    def booted(self) -> bool:
        """True when a kernel and an init run there, so that services and sysctls can be asked."""

    def run(
        self,
        argv: Sequence[str],
        *,
        ok: Sequence[int] = (0,),
        input: str | None = None,
        timeout: float = 120,
    ) -> Completed:
        """Run a command as root; raises CommandError for a status outside ``ok`` or after ``timeout`` seconds."""

    def put(self, content: bytes, path: str, *, mode: int = 0o644) -> None:
        """Write a file that belongs to root, with its directories; raises CommandError."""

    def ansible_variables(self) -> Mapping[str, JSON]:
        """Return the inventory variables by which Ansible reaches it."""
