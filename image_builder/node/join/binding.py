"""What a bootstrap token is bound to: one machine and one node, as groups that the API server writes into each request.

The broker puts them into the token, the gate's approver reads them in a signing request: neither needs the other, nor
the token itself. Both are hashed, since a group's name takes neither capitals nor dots.
"""

from __future__ import annotations

import hashlib

PREFIX = "system:bootstrappers:image-builder:"
MACHINE, NODE = f"{PREFIX}machine:", f"{PREFIX}node:"


def of_machine(vm_id: str) -> str:
    """Return the group of the tokens of one machine."""
    return MACHINE + _digest(vm_id.lower())


def of_node(name: str) -> str:
    """Return the group of the tokens for one node."""
    return NODE + _digest(name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
