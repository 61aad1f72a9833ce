"""Azure's instance metadata service.

https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service. It answers five questions a second and
machine, then 429 with a time to wait; a machine that has just come up may get errors of the server.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from image_builder.node.net.fetch import Response
from image_builder.node.net.fetch import ask as ask_http

ADDRESS = "http://169.254.169.254"
# Not found yet (as cloud-init knows it of machines that just came up), too many requests, or not up yet; 410 is "being
# updated, at most 70 seconds".
_LATER = frozenset({404, 408, 410, 429})
# Seconds: the limits of the first wait between two questions and of the longest.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0


class RefusedError(OSError):
    """It will not answer this question later either."""


def ask(path: str, *, address: str = ADDRESS, seconds: float = 5.0) -> Response:
    """Ask once for ``path``, with its query, and wait at most ``seconds`` for the whole answer. Raises OSError."""
    return ask_http(f"{address}{path}", headers={"Metadata": "true"}, seconds=seconds)


def answer(
    path: str,
    seconds: float,
    *,
    address: str = ADDRESS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    chance: Callable[[], float] = random.random,
) -> Response:
    """Ask until 200 is answered, for at most ``seconds``. Raises OSError: RefusedError before the time is over."""
    until, attempt = clock() + seconds, 0
    while True:
        after = 0.0
        try:
            response = ask(path, address=address, seconds=max(0.5, min(5.0, until - clock())))
        except OSError as error:
            message = f"the metadata service does not answer: {error}"
        else:
            if response.status == 200:
                return response
            message = f"the metadata service answered {response.status}: {_first_words(response.body)}"
            if response.status < 500 and response.status not in _LATER:
                raise RefusedError(message)
            after = response.retry_after
        # Full jitter, after what the service asked for: machines that came up together don't ask together.
        wait = after + chance() * min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(attempt, 10))
        if clock() + wait >= until:
            raise OSError(message)
        sleep(wait)
        attempt += 1


def _first_words(body: bytes) -> str:
    return " ".join(body[:300].decode(errors="replace").split())
