"""Azure's instance metadata service.

https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service. It answers five requests per second and
machine, then 429 with a time to wait; a machine that has just come up may get server errors.
"""

from __future__ import annotations

from image_builder.node.net.fetch import Response
from image_builder.node.net.fetch import ask as ask_http
from image_builder.node.net.retry import Deadline, NotYet, patiently

ADDRESS = "http://169.254.169.254"
# Not found yet (cloud-init, too, expects that of machines that just came up), too many requests, or not up yet; 410 is
# "being updated, at most 70 seconds".
_LATER = frozenset({404, 408, 410, 429})
# Seconds: the limits of the first wait between two requests and of the longest.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0
# How long one request may take.
_SECONDS = 5.0


class RefusedError(OSError):
    """The service won't answer this request later either."""


def ask(path: str, *, address: str = ADDRESS, seconds: float = _SECONDS) -> Response:
    """Request ``path``, with its query, once; wait at most ``seconds`` for the whole answer. Raises OSError."""
    return ask_http(f"{address}{path}", headers={"Metadata": "true"}, seconds=seconds)


def answer(path: str, deadline: Deadline, *, address: str = ADDRESS) -> Response:
    """Retry until the answer is 200. Raises OSError at the deadline, RefusedError (an OSError) before that."""

    def probe() -> Response:
        try:
            response = ask(path, address=address, seconds=deadline.attempt(_SECONDS))
        except OSError as error:
            raise NotYet(OSError(f"the metadata service does not answer: {error}")) from error
        if response.status == 200:
            return response
        message = f"the metadata service answered {response.status}: {_first_words(response.body)}"
        if response.status < 500 and response.status not in _LATER:
            raise RefusedError(message)
        raise NotYet(OSError(message), response.retry_after)

    return patiently(probe, deadline, base=_FIRST_WAIT, cap=_LONGEST_WAIT)


def _first_words(body: bytes) -> str:
    return " ".join(body[:300].decode(errors="replace").split())
