"""The identity provider's keys: fetched, cached, and fetched again when a token names an unknown one."""

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

# Seconds between two fetches, for whatever reason: made-up key ids must not turn into requests to the provider.
PAUSE = 60.0
# The same while there are no keys at all: nobody can get a token then, and made-up key ids don't cause more fetches.
FIRST_PAUSE = 10.0
# When a node whose key is being fetched is to retry.
BUSY_PAUSE = 2.0
# How long past their refresh interval keys are trusted if the provider doesn't confirm them.
LONGEST_WITHOUT = 86400.0
_SMALLEST_KEY, _LARGEST_KEY = 2048, 8192  # bits
_EXPONENT = 65537
_SECONDS = 10.0

Fetch = Callable[[], bytes]
"""Returns a JWKS; raises OSError."""


def source(place: str, authority: str | None) -> Fetch:
    """Return a function that fetches the JWKS from an https address or a file."""
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
    """Return the keys of a JWKS (RFC 7517) that may sign with RS256, by their ids. Raises ValueError if it is no JWKS.

    Others are left out: other kinds of keys, keys for encryption or for another algorithm, weak ones.
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
    """Keys by their ids. Thread-safe. If no others can be fetched, the existing keys stay in use for another day."""

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
            # Another thread is already asking. Made-up key ids must not block all threads for as long as that takes.
            raise RefusedError(503, "keys", "the identity provider is being asked", BUSY_PAUSE)
        return keys.get(key_id)

    def is_ready(self) -> bool:
        """Return whether there are keys, after trying to fetch some if necessary."""
        if not self._current():
            self._ask_provider(is_wanted=True)
        return bool(self._current())

    def _age(self) -> float:
        return self._clock() - self._confirmed

    def _current(self) -> Mapping[str, rsa.RSAPublicKey]:
        """Return the keys that may still be trusted: a provider withdraws a key by no longer listing it."""
        return self._keys if self._age() <= self._refresh + LONGEST_WITHOUT else {}

    def _ask_provider(self, *, is_wanted: bool) -> bool:
        """Fetch the keys if a fetch is due and they are wanted or old; return False if another thread is doing so."""
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
