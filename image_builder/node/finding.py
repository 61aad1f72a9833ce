"""The words that every check of a node shares: what would help against what it found, and a reason for Kubernetes."""

from __future__ import annotations

import re
from typing import Literal, get_args

# What a person or a machine is to do with the node. ``inspect``: a person has to judge.
Action = Literal["none", "reboot", "inspect", "config", "reimage", "replace"]
# The mildest first.
ACTIONS: tuple[Action, ...] = get_args(Action)


def kubernetes_reason(code: str) -> str:
    """Return a code as Kubernetes writes reasons: ``filesystem.read-only`` is ``FilesystemReadOnly``."""
    return "".join(word.capitalize() for word in re.split(r"[^A-Za-z0-9]+", code))
