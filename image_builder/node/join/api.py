"""One question to a server that must prove itself: the API server, or the broker. Nothing is repeated here."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any

from image_builder.node import asking
from image_builder.node.asking import Said

TIMEOUT = 10.0


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
    headers = {"Accept": "application/json", "User-Agent": "node-agent"}
    if token and authority is not None:
        headers["Authorization"] = f"Bearer {token}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    words = None if body is None else json.dumps(body).encode()
    return asking.ask(url, headers=headers, seconds=timeout, body=words, context=_context(authority))


def _context(authority: str | None) -> ssl.SSLContext:
    if authority is not None:
        return asking.proven_by(authority)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
