"""The identity provider's keys: fetched, kept, and fetched again when a token names one that is not known."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa

from image_builder.cluster.broker import jwt
from image_builder.cluster.broker.refusal import RefusedError
from image_builder.node import asking

# Between two fetches, whatever for: made-up key ids must not become questions to the provider.
PAUSE = 60.0
# While there are no keys at all nobody can have a token, and nothing that anybody makes up changes how often.
FIRST_PAUSE = 10.0
# A node whose key is being fetched comes back after so long.
BUSY_PAUSE = 2.0
# How much longer than their refresh keys are believed that the provider doesn't confirm.
LONGEST_WITHOUT = 86400.0
_SECONDS = 10.0

Fetch = Callable[[], bytes]
"""Returns a JWKS; raises OSError."""


def source(place: str, authority: str | None) -> Fetch:
    """Return what fetches the JWKS of an https address, or of a file."""
    if place.startswith("/"):
        return lambda: Path(place).read_bytes()

    def ask() -> bytes:
        context = ssl.create_default_context(cafile=authority)
        said = asking.ask(place, headers={"Accept": "application/json"}, seconds=_SECONDS, context=context)
        if said.status != 200:
            raise OSError(f"{place} answered {said.status}")
        return said.body

    return ask


class Keys:
    """Keys by their ids, for several threads. Those that are there serve on while no others can be had, for a day."""

    def __init__(
        self,
        fetch: Fetch,
        refresh_seconds: float,
        *,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch, self._refresh, self._tell, self._clock = fetch, refresh_seconds, tell, clock
        self._lock = threading.Lock()
        self._keys: Mapping[str, rsa.RSAPublicKey] = {}
        self._asked = self._had = float("-inf")

    def find(self, key_id: str) -> rsa.RSAPublicKey | None:
        """Return the key of that id, None where nobody has it. Raises RefusedError (503) where that isn't known yet."""
        key = self._known().get(key_id)
        if key is not None and self._age() <= self._refresh:
            return key
        is_asked = self._ask_provider(is_wanted=key is None)
        keys = self._known()
        if not keys:
            raise RefusedError(503, "keys", "the identity provider's keys are not known yet", FIRST_PAUSE)
        if key_id not in keys and not is_asked:
            # Another thread asks already. Made-up key ids must not hold all threads for as long as that takes.
            raise RefusedError(503, "keys", "the identity provider is being asked", BUSY_PAUSE)
        return keys.get(key_id)

    def is_ready(self) -> bool:
        """Tell whether there are keys; tries to have some."""
        if not self._known():
            self._ask_provider(is_wanted=True)
        return bool(self._known())

    def _age(self) -> float:
        return self._clock() - self._had

    def _known(self) -> Mapping[str, rsa.RSAPublicKey]:
        """Return the keys that may still be believed: a provider withdraws one by not naming it any more."""
        return self._keys if self._age() <= self._refresh + LONGEST_WITHOUT else {}

    def _ask_provider(self, *, is_wanted: bool) -> bool:
        """Fetch the keys where that is due, and ``is_wanted`` or they are old; False: another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            now = self._clock()
            pause = PAUSE if self._known() else FIRST_PAUSE
            if (is_wanted or self._age() > self._refresh) and now - self._asked >= pause:
                self._asked = now
                try:
                    if found := jwt.parse_keys(self._fetch()):
                        self._keys, self._had = found, now
                    else:
                        self._tell("the identity provider has no key that is of use here")
                except (OSError, ValueError) as error:
                    self._tell(f"the identity provider's keys can't be had: {error}")
            return True
        finally:
            self._lock.release()
