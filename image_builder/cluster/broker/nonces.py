"""The number that an attested document has to be of: other ones for each machine, node and minute.

Nothing is kept: a number follows from a key that all replicas have. Azure's metadata service takes ten digits.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

SECONDS = 60.0
"""How long one is given out; it is taken as long again."""
_DIGITS = 10


class Nonces:
    """``key`` returns a secret that all replicas share. Raises what that raises."""

    def __init__(self, key: Callable[[], bytes]) -> None:
        self._key = key

    def current(self, vm_id: str, node: str, now: float) -> str:
        """Return the number that is given out now (Unix time)."""
        return self._of(vm_id, node, int(now // SECONDS))

    def is_valid(self, nonce: str, vm_id: str, node: str, now: float) -> bool:
        """Tell whether a number was given out for this machine and node, a minute or two ago at most."""
        turn = int(now // SECONDS)
        current = [self._of(vm_id, node, at) for at in (turn, turn - 1)]
        return any(hmac.compare_digest(nonce.encode(), number.encode()) for number in current)

    def _of(self, vm_id: str, node: str, turn: int) -> str:
        message = f"image-builder nonce\n{turn}\n{vm_id}\n{node}".encode()
        value = int.from_bytes(hmac.new(self._key(), message, hashlib.sha256).digest()[:16])
        return f"{value % 10**_DIGITS:0{_DIGITS}d}"


def until_next(now: float) -> float:
    """Return the seconds until another number is given out."""
    return SECONDS - now % SECONDS
