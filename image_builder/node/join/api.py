"""One question to a server that must prove itself: the API server, or the broker. Nothing is repeated here."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

_MOST_BYTES = 1 << 16
TIMEOUT = 10.0


@dataclass(frozen=True)
class Said:
    """An answer. ``date`` is what the server's clock said (Unix time), 0 where it did not say."""

    status: int
    body: bytes
    date: float = 0.0
    retry_after: float = 0.0


def ask(
    url: str,
    authority: str | None,
    *,
    token: str = "",
    body: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
) -> Said:
    """GET, or POST ``body``. Raises OSError (ssl.SSLCertVerificationError for a server that isn't proven).

    ``authority`` None proves nothing: then no token is sent, and what comes back is hearsay.
    """
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": "application/json", "User-Agent": "node-agent"}
    if token and authority is not None:
        headers["Authorization"] = f"Bearer {token}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port or 443, timeout=timeout, context=_context(authority)
    )
    try:
        words = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", parts.path or "/", words, headers)
        answer = connection.getresponse()
        after = answer.headers.get("Retry-After", "")
        return Said(
            status=answer.status,
            body=answer.read(_MOST_BYTES),
            date=_seconds(answer.headers.get("Date", "")),
            retry_after=float(after) if after.isdigit() else 0.0,
        )
    except http.client.HTTPException as error:
        raise OSError(f"the answer is no HTTP: {error!r}") from error
    finally:
        connection.close()


def _context(authority: str | None) -> ssl.SSLContext:
    if authority is not None:
        return ssl.create_default_context(cadata=authority)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _seconds(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return 0.0
