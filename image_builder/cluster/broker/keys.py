"""The identity provider's keys: fetched, kept, and fetched again when a token names one that is not known."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from jwt import PyJWK, PyJWTError

from image_builder.cluster.broker.identity import ALGORITHM
from image_builder.cluster.broker.refusal import RefusedError
from image_builder.node.join import schema
from image_builder.node.net import fetch

# Between two fetches, whatever for: made-up key ids must not become questions to the provider.
PAUSE = 60.0
# While there are no keys at all nobody can have a token, and nothing that anybody makes up changes how often.
FIRST_PAUSE = 10.0
# A node whose key is being fetched comes back after so long.
BUSY_PAUSE = 2.0
# How much longer than their refresh keys are believed that the provider doesn't confirm.
LONGEST_WITHOUT = 86400.0
_SMALLEST_KEY, _LARGEST_KEY = 2048, 8192  # bits
_EXPONENT = 65537
_SECONDS = 10.0

Fetch = Callable[[], bytes]
"""Returns a JWKS; raises OSError."""


def source(place: str, authority: str | None) -> Fetch:
    """Return what fetches the JWKS of an https address, or of a file."""
    if place.startswith("/"):
        return lambda: Path(place).read_bytes()

    def ask() -> bytes:
        context = ssl.create_default_context(cafile=authority)
        response = fetch.ask(place, headers={"Accept": "application/json"}, seconds=_SECONDS, context=context)
        if response.status != 200:
            raise OSError(f"{place} answered {response.status}")
        return response.body

    return ask


def parse_keys(data: bytes) -> dict[str, rsa.RSAPublicKey]:
    """Return the keys of a JWKS (RFC 7517) that may sign with RS256, by their ids. Raises ValueError for no JWKS.

    The rest is left out: other kinds, keys for encryption, keys of another algorithm, weak ones.
    """
    document = schema.load(data)
    if not isinstance(document, dict) or not isinstance(document.get("keys"), list):
        raise ValueError("not a JWKS")
    entries = [entry for entry in document["keys"] if isinstance(entry, dict)]
    return {entry["kid"]: key for entry in entries if (key := _key(entry))}


def _key(entry: dict[str, Any]) -> rsa.RSAPublicKey | None:
    if entry.get("use", "sig") != "sig" or entry.get("alg", ALGORITHM) != ALGORITHM:
        return None
    try:
        key = PyJWK(entry, ALGORITHM).key
    except PyJWTError:
        return None
    is_strong = (
        isinstance(key, rsa.RSAPublicKey)
        and _SMALLEST_KEY <= key.key_size <= _LARGEST_KEY
        and key.public_numbers().e == _EXPONENT
    )
    return key if is_strong and isinstance(entry.get("kid"), str) else None


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
        self._fetched = self._confirmed = float("-inf")

    def find(self, key_id: str) -> rsa.RSAPublicKey | None:
        """Return the key of that id, None if the provider has none. Raises RefusedError (503) while that is unknown."""
        key = self._current().get(key_id)
        if key is not None and self._age() <= self._refresh:
            return key
        is_answered = self._ask_provider(is_wanted=key is None)
        keys = self._current()
        if not keys:
            raise RefusedError(503, "keys", "the identity provider's keys are not known yet", FIRST_PAUSE)
        if key_id not in keys and not is_answered:
            # Another thread asks already. Made-up key ids must not hold all threads for as long as that takes.
            raise RefusedError(503, "keys", "the identity provider is being asked", BUSY_PAUSE)
        return keys.get(key_id)

    def is_ready(self) -> bool:
        """Tell whether there are keys; tries to have some."""
        if not self._current():
            self._ask_provider(is_wanted=True)
        return bool(self._current())

    def _age(self) -> float:
        return self._clock() - self._confirmed

    def _current(self) -> Mapping[str, rsa.RSAPublicKey]:
        """Return the keys that may still be believed: a provider withdraws one by not naming it any more."""
        return self._keys if self._age() <= self._refresh + LONGEST_WITHOUT else {}

    def _ask_provider(self, *, is_wanted: bool) -> bool:
        """Fetch the keys where that is due, and ``is_wanted`` or they are old; False: another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            now = self._clock()
            pause = PAUSE if self._current() else FIRST_PAUSE
            if (is_wanted or self._age() > self._refresh) and now - self._fetched >= pause:
                self._fetched = now
                try:
                    if keys := parse_keys(self._fetch()):
                        self._keys, self._confirmed = keys, now
                    else:
                        self._tell("the identity provider has no usable key")
                except (OSError, ValueError) as error:
                    self._tell(f"the identity provider's keys can't be fetched: {error}")
            return True
        finally:
            self._lock.release()
