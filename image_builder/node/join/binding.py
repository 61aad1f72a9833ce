"""Values derived from hashed ids: the groups that bind a bootstrap token to a machine and a node, and the node's slot.

The API server adds the groups to each request. The broker puts them into the token, and the gate's approver reads them
in a signing request: neither needs the other, nor the token itself. They are hashes, since a group's name may contain
neither capitals nor dots. No node knows of the others, and none asks when to join: the hash of the VM's id is its slot.
"""

from __future__ import annotations

import hashlib

PREFIX = "system:bootstrappers:image-builder:"
MACHINE, NODE = f"{PREFIX}machine:", f"{PREFIX}node:"
_SLOT_BITS = 64


def of_machine(vm_id: str) -> str:
    """Return the group of tokens for one machine."""
    return MACHINE + _digest(vm_id.lower())


def of_node(name: str) -> str:
    """Return the group of tokens for one node."""
    return NODE + _digest(name)


def slot(vm_id: str, window: float) -> float:
    """Return the seconds from the start of a window (in seconds) to this machine's slot; the same on every call."""
    number = int.from_bytes(hashlib.sha256(vm_id.lower().encode()).digest()[: _SLOT_BITS // 8], "big")
    return window * (number / float(1 << _SLOT_BITS))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
