"""Azure's instance metadata service: one question, never through a proxy, never redirected.

https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service. It answers 429 to a machine that asks more
than some five times a second; how often to ask again is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

ADDRESS = "http://169.254.169.254"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Said:
    """An answer: HTTP status, body, and the seconds that the service wants to be left alone for."""

    status: int
    body: bytes
    retry_after: float = 0.0


def ask(path: str, *, address: str = ADDRESS, seconds: float = 5.0) -> Said:
    """Ask for ``path``, with its query, and wait at most ``seconds`` for each byte. Raises OSError."""
    import http.client  # only here: it takes as long to load as all else of the health check together

    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)
    try:
        connection.request("GET", path, headers={"Metadata": "true"})
        answer = connection.getresponse()
        after = answer.getheader("Retry-After", "")
        return Said(answer.status, answer.read(_MOST_BYTES), float(after) if after.isdigit() else 0.0)
    except http.client.HTTPException as error:
        raise OSError(f"{address}{path}: {error!r}") from error
    finally:
        connection.close()
