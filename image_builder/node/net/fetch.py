"""One HTTP request, with only the standard library: no proxy, no redirection, no retry."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from image_builder.node.net.retry import Deadline

if TYPE_CHECKING:
    import http.client
    import ssl

_MOST_BYTES = 1 << 20
# The longest Retry-After that is believed, in seconds.
_LONGEST_WAIT = 86400.0


@dataclass(frozen=True)
class Response:
    """An answer. ``retry_after`` is how long the server wants to be left alone, in seconds (0 if it doesn't say).

    ``date`` is the server's clock (Unix time), 0 if it doesn't say.
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
) -> Response:
    """GET a URL, or POST ``body`` to it; wait at most ``seconds`` for the whole request. Raises OSError.

    ``context`` verifies the server, and is required for https. The request is made in a thread, which is left behind
    when time is up: a resolver has no timeout, and a socket's timeout restarts with each byte.
    """
    ended: list[Response | BaseException] = []
    opened: list[http.client.HTTPConnection] = []

    def work() -> None:
        try:
            ended.append(_ask(url, headers, seconds, body, context, opened))
        except BaseException as error:  # whatever it is, the caller gets it
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        _hang_up(opened)
        raise TimeoutError(errno.ETIMEDOUT, f"{url}: no whole answer within {seconds:g} s")
    (result,) = ended
    if isinstance(result, BaseException):
        raise result
    return result


def _hang_up(opened: list[http.client.HTTPConnection]) -> None:
    """End what the thread is waiting for, if it has a connection."""
    for connection in opened:
        if (sock := connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _ask(
    url: str,
    headers: Mapping[str, str],
    seconds: float,
    body: bytes | None,
    context: ssl.SSLContext | None,
    opened: list[http.client.HTTPConnection],
) -> Response:
    import http.client  # only here: it takes as long to load as everything else in the health check together

    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port or 443, timeout=seconds, context=context)
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port or 80, timeout=seconds)
    )
    opened.append(connection)
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers))
        with connection.getresponse() as answer:
            answer_headers = answer.headers
            return Response(
                answer.status,
                answer.read(_MOST_BYTES),
                retry_after(answer_headers, time.time()) or 0.0,
                _moment(answer_headers.get("Date", "")) or 0.0,
            )
    except http.client.HTTPException as error:
        raise OSError(f"{url}: the answer is not HTTP: {error!r}") from error
    finally:
        connection.close()


def is_up(url: str, seconds: float) -> bool:
    """Return whether a URL is answered with 200 in time. No proxy is used."""
    try:
        return ask(url, headers={}, seconds=seconds).status == 200
    except OSError:
        return False


def wait_until_up(url: str, deadline: Deadline, seconds: float = 5.0, pause: float = 2.0) -> bool:
    """Poll until the answer is 200; return whether it was. A request takes at most ``seconds``, and a pause follows."""
    while not is_up(url, seconds):
        if not deadline.poll(pause):
            return False
    return True


def proven_by(authority: str) -> ssl.SSLContext:
    """Return a context that trusts servers which these certificates (PEM; empty: the system's) prove.

    As strict as the kubelet, which uses the same authority. Python 3.13 and later also reject an authority without the
    key identifiers and usages of RFC 5280, such as older clusters have.
    """
    import ssl  # only here: plain HTTP doesn't need it

    context = ssl.create_default_context(cadata=authority or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def retry_after(headers: http.client.HTTPMessage, now: float) -> float | None:
    """Return the seconds of a Retry-After, which may be a date; None if there is none, or it can't be parsed.

    A date in the past means 0.
    """
    value = headers.get("Retry-After", "")
    if value.isdecimal():
        return min(_LONGEST_WAIT, float(value))
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
