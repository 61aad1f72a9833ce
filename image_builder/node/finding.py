"""The words that every check of a node shares: what would help against what it found."""

from __future__ import annotations

from typing import Literal, get_args

# What a person or a machine is to do with the node. ``inspect``: a person has to judge.
Action = Literal["none", "reboot", "inspect", "config", "reimage", "replace"]
# The mildest first.
ACTIONS: tuple[Action, ...] = get_args(Action)
