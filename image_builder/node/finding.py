"""Terms that all checks of a node share: the action that a finding calls for, and its reason in Kubernetes."""

from __future__ import annotations

import re
from typing import Literal, get_args

# What a person or a machine should do with the node. ``inspect``: a person has to judge.
Action = Literal["none", "reboot", "inspect", "config", "reimage", "replace"]
# Mildest first.
ACTIONS: tuple[Action, ...] = get_args(Action)


def kubernetes_reason(code: str) -> str:
    """Return a code as a Kubernetes reason: ``filesystem.read-only`` becomes ``FilesystemReadOnly``."""
    return "".join(word.capitalize() for word in re.split(r"[^A-Za-z0-9]+", code))
