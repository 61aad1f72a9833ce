"""The identity provider's keys: fetched, kept, and fetched again when a token names one that is not known."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa

from image_builder.broker import jwt
from image_builder.broker.refusal import RefusedError
from image_builder.node import asking

# Between two fetches, whatever for: made-up key ids must not become questions to the provider.
PAUSE = 60.0
# While there are no keys at all nobody can have a token, and nothing that anybody makes up changes how often.
FIRST_PAUSE = 10.0
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
    """Keys by their ids, for several threads. Those that are there serve on while no others can be had."""

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
        """Return the key of that id, None where nobody has it. Raises RefusedError (503) where there are no keys."""
        keys = self._keys
        if key_id not in keys or self._clock() - self._had > self._refresh:
            keys = self._again(key_id)
        if not keys:
            raise RefusedError(503, "keys", "the identity provider's keys are not known yet", FIRST_PAUSE)
        return keys.get(key_id)

    def is_ready(self) -> bool:
        """Tell whether there are keys; tries to have some."""
        return bool(self._keys or self._again(""))

    def _again(self, key_id: str) -> Mapping[str, rsa.RSAPublicKey]:
        # Who has a key that is only old doesn't wait for a provider that is slow: somebody else asks it already.
        if not self._lock.acquire(blocking=key_id not in self._keys):
            return self._keys
        try:
            # Somebody else may have fetched them while this one waited.
            now = self._clock()
            is_wanted = key_id not in self._keys or now - self._had > self._refresh
            if is_wanted and now - self._asked >= (PAUSE if self._keys else FIRST_PAUSE):
                self._asked = now
                try:
                    if found := jwt.parse_keys(self._fetch()):
                        self._keys, self._had = found, now
                    else:
                        self._tell("the identity provider has no key that is of use here")
                except (OSError, ValueError) as error:
                    self._tell(f"the identity provider's keys can't be had: {error}")
            return self._keys
        finally:
            self._lock.release()
