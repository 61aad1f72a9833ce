"""One question over HTTP, with the standard library alone: no proxy, no redirection, nothing repeated."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import http.client
    import ssl

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Said:
    """An answer. ``retry_after`` is for how long the server wants to be left alone, in seconds (0: it did not say).

    ``date`` is what its clock said (Unix time), 0 where it did not say.
    """

    status: int
    body: bytes
    retry_after: float = 0.0
    date: float = 0.0


def ask(
    url: str,
    *,
    headers: Mapping[str, str],
    seconds: float,
    body: bytes | None = None,
    context: ssl.SSLContext | None = None,
) -> Said:
    """GET a URL, or POST ``body`` to it; wait at most ``seconds`` for each byte. Raises OSError.

    ``context`` is what proves a server, and is needed for https.
    """
    import http.client  # only here: it takes as long to load as all else of the health check together

    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port or 443, timeout=seconds, context=context)
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port or 80, timeout=seconds)
    )
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers))
        answer = connection.getresponse()
        found = answer.headers
        return Said(
            answer.status,
            answer.read(_MOST_BYTES),
            retry_after(found, time.time()) or 0.0,
            _moment(found.get("Date", "")) or 0.0,
        )
    except http.client.HTTPException as error:
        raise OSError(f"{url}: the answer is no HTTP: {error!r}") from error
    finally:
        connection.close()


def proven_by(authority: str) -> ssl.SSLContext:
    """Return a context that believes a server which these certificates (PEM) prove; empty: those of the system.

    As strict as the kubelet, which lives with the same authority. Python 3.13 and later also refuse one without the
    key identifiers and usages of RFC 5280, which clusters that are older than that have.
    """
    import ssl  # only here: what speaks plain HTTP needs none of it

    context = ssl.create_default_context(cadata=authority or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def retry_after(headers: http.client.HTTPMessage, now: float) -> float | None:
    """Return the seconds of a Retry-After, which may be a date; None without one that is understood.

    A date that is past asks for nothing.
    """
    value = headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    at = _moment(value)
    return None if at is None else max(0.0, at - now)


def _moment(date: str) -> float | None:
    if not date:
        return None
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
