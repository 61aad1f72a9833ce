"""When a node joins: each of those that were started together at its own moment.

No node knows of the others, and none is asked: the hash of the VM's id says where in the window its slot is.
"""

from __future__ import annotations

import hashlib

_BITS = 64


def slot(vm_id: str, window: float) -> float:
    """Return the seconds from the beginning of a window (in seconds) to this machine's slot; the same at each call."""
    number = int.from_bytes(hashlib.sha256(vm_id.lower().encode()).digest()[: _BITS // 8], "big")
    return window * (number / float(1 << _BITS))
