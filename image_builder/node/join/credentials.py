"""A bootstrap token, and the proof that it works: it is tried on the API server before the kubelet gets it.

A kubelet with an expired token, the wrong CA or a clock that is off retries forever, and says so only in its own log.
"""

from __future__ import annotations

import json
import re
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from image_builder.node.join.codes import JoinError
from image_builder.node.join.config import NodeConfig
from image_builder.node.join.identity import ask_platform
from image_builder.node.net import fetch
from image_builder.node.net.fetch import Response
from image_builder.node.net.retry import Deadline, NotYet, patiently

_ATTESTED = "/metadata/attested/document?api-version=2020-09-01"
_IDENTITY = "/metadata/identity/oauth2/token?api-version=2018-02-01"
_TIMEOUT = 10.0
TOKEN = re.compile(r"[a-z0-9]{6}\.[a-z0-9]{16}")
# OpenSSL's error codes for a certificate that is not yet valid, or has expired (X509_V_ERR_...).
_OUT_OF_TIME = (9, 10)
# The metadata service doesn't accept a longer nonce.
_NONCE = re.compile(r"[0-9]{10}")
_CODE = re.compile(r"[a-z.]{1,40}")
# Statuses to retry besides server errors: 409 for a document that was already used or has another nonce (a new one will
# do), and 429 for too many requests.
_LATER = frozenset({409, 429})
# A token that has just been created may not be known to every API server yet, nor may a new CA of clients.
REFUSALS = 3


@dataclass(frozen=True)
class Token:
    """A bootstrap token; ``expires`` is in Unix time, 0 if unknown."""

    text: str
    expires: float = 0.0


def from_custom_data(data: Mapping[str, Any]) -> Token:
    """Return the token in the custom data. Raises JoinError (68)."""
    text = data.get("bootstrap_token")
    if not isinstance(text, str) or not TOKEN.fullmatch(text):
        raise JoinError(
            68, "`bootstrap_token` in the custom data is missing or not a token (abcdef.0123456789abcdef)"
        )
    return Token(text)


def from_broker(config: NodeConfig, address: str, machine: Mapping[str, str], deadline: Deadline) -> Token:
    """Request a token from the broker, as this machine and its managed identity. Raises JoinError (60 to 63).

    The broker issues a nonce, the metadata service signs it, and in return the broker issues the token.
    """
    source = config.credentials
    proof = identity_token(address, source.resource, source.client_id, deadline)

    def exchange() -> Token:
        nonce = parse_nonce(_ask_broker(config, proof, machine, deadline))
        document = attested_document(address, nonce, deadline)
        return parse_broker(_ask_broker(config, proof, {**machine, "document": document}, deadline))

    return patiently(exchange, deadline)


def _ask_broker(config: NodeConfig, proof: str, request: Mapping[str, str], deadline: Deadline) -> bytes:
    """Return the body of the broker's answer. Raises NotYet, JoinError (62)."""
    source = config.credentials
    try:
        response = ask(
            source.url, source.ca or config.ca, deadline.attempt(_TIMEOUT), token=proof, body=request
        )
    except ssl.SSLCertVerificationError as error:
        raise JoinError(62, f"the broker's certificate can't be verified: {error.verify_message}") from error
    except OSError as error:
        raise NotYet(JoinError(62, f"the broker does not answer: {error}")) from error
    if response.status == 200:
        return response.body
    refusal = JoinError(62, f"the broker answered {response.status}{_code(response.body)}")
    if response.status < 500 and response.status not in _LATER:
        raise refusal
    raise NotYet(refusal, response.retry_after)


def _code(body: bytes) -> str:
    """Return the code of a refusal, which isn't secret, in parentheses; empty if it has none."""
    try:
        code = json.loads(body)["error"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""
    return f" ({code})" if isinstance(code, str) and _CODE.fullmatch(code) else ""


def identity_token(address: str, resource: str, client_id: str, deadline: Deadline) -> str:
    """Return a token that proves this machine's managed identity to ``resource``. Raises JoinError (61)."""
    query = {"resource": resource, **({"client_id": client_id} if client_id else {})}
    response = ask_platform(address, f"{_IDENTITY}&{urllib.parse.urlencode(query)}", deadline, 61)
    return str(_field(response.body, "access_token", 61, "the metadata service's answer has no token"))


def attested_document(address: str, nonce: str, deadline: Deadline) -> str:
    """Return a document (PKCS#7, base64) that proves this machine to the nonce's issuer. Raises JoinError (60)."""
    response = ask_platform(address, f"{_ATTESTED}&{urllib.parse.urlencode({'nonce': nonce})}", deadline, 60)
    return str(_field(response.body, "signature", 60, "the metadata service's answer has no document"))


def _field(body: bytes, key: str, number: int, problem: str) -> Any:
    """Return a value of a JSON object. Raises JoinError with this number, but without the body: it may be a token."""
    try:
        return json.loads(body)[key]
    except (KeyError, TypeError, ValueError) as error:
        raise JoinError(number, f"{problem}: {type(error).__name__}") from error


def parse_nonce(body: bytes) -> str:
    """Return the nonce in a broker's answer, ``{"nonce": "0123456789"}``. Raises JoinError (63)."""
    nonce = _field(body, "nonce", 63, "the broker's answer can't be parsed")
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise JoinError(63, "the broker's answer has no nonce of ten digits")
    return nonce


def parse_broker(body: bytes) -> Token:
    """Return the token in a broker's answer, ``{"token": ..., "expires": RFC 3339}``. Raises JoinError (63)."""
    try:
        answer = json.loads(body)
        text, expires = answer["token"], datetime.fromisoformat(answer["expires"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # Don't quote the answer: it may contain the token.
        raise JoinError(63, f"the broker's answer can't be parsed: {type(error).__name__}") from error
    if not isinstance(text, str) or not TOKEN.fullmatch(text):
        raise JoinError(63, "the broker's answer has no bootstrap token (abcdef.0123456789abcdef)")
    if expires.tzinfo is None:
        raise JoinError(63, "the broker's `expires` has no time zone")
    return Token(text, expires.timestamp())


def prove(config: NodeConfig, token: str, clock_seconds: float, deadline: Deadline) -> None:
    """Verify that the API server is the right one, accepts the token and agrees on the time.

    Raises JoinError (64 to 67). Anyone may read ``/version``, but not with a wrong token.
    """
    refused = 0

    def probe() -> None:
        nonlocal refused
        try:
            response = ask(f"{config.server}/version", config.ca, deadline.attempt(_TIMEOUT), token=token)
        except ssl.SSLCertVerificationError as error:
            raise unproven(error, config, clock_seconds) from error
        except OSError as error:
            raise NotYet(JoinError(67, f"{config.server} does not answer: {error}")) from error
        check_clock(response.date, time.time(), clock_seconds)
        # 403: the token is valid, but this cluster doesn't publish its version.
        if response.status in (200, 403):
            return
        if response.status != 401:
            answer = JoinError(67, f"{config.server} answered {response.status}")
            raise NotYet(answer, response.retry_after)
        refused += 1
        refusal = JoinError(64, f"{config.server} rejects the token: it is expired or unknown")
        raise refusal if refused >= REFUSALS else NotYet(refusal, response.retry_after)

    patiently(probe, deadline)


def check_clock(server: float, local: float, limit: float) -> None:
    """Raise JoinError (66) if two clocks are more than ``limit`` seconds apart. ``server`` 0: unknown."""
    if server and abs(off := local - server) > limit:
        direction = "ahead of" if off > 0 else "behind"
        raise JoinError(66, f"this machine's clock is {abs(off):.0f} s {direction} the API server's")


def unproven(error: ssl.SSLCertVerificationError, config: NodeConfig, clock_seconds: float) -> JoinError:
    """Return the error for a certificate that can't be verified: a wrong clock, a wrong date in it, or a wrong CA."""
    if error.verify_code in _OUT_OF_TIME:
        try:
            # Unverified, but no secret is sent: this only improves the error message.
            response = ask(f"{config.server}/version", None)
            check_clock(response.date, time.time(), clock_seconds)
        except JoinError as wrong_clock:
            return wrong_clock
        except OSError:
            pass  # then it isn't known which of the first two it is
        return JoinError(67, f"the certificate of {config.server} is not valid now: {error.verify_message}")
    return JoinError(
        65, f"the certificate of {config.server} is not signed by this CA: {error.verify_message}"
    )


def check_life(token: Token, needed: float, now: float) -> None:
    """Raise JoinError (69) if a token expires before the kubelet can use it, within ``needed`` seconds from ``now``."""
    if token.expires and token.expires < now + needed:
        remaining = max(0.0, token.expires - now)
        raise JoinError(69, f"the token expires in {remaining:.0f} s, but is needed for {needed:.0f} s")


def ask(
    url: str,
    authority: str | None,
    timeout: float = _TIMEOUT,
    *,
    token: str = "",
    body: Mapping[str, Any] | None = None,
) -> Response:
    """GET, or POST ``body``. Raises OSError (ssl.SSLCertVerificationError if the server can't be verified).

    If ``authority`` is None, the server isn't verified: then no token is sent, and the response can't be trusted.
    """
    headers = {"Accept": "application/json", "User-Agent": "node-agent"}
    if token and authority is not None:
        headers["Authorization"] = f"Bearer {token}"
    if body is not None:
        headers["Content-Type"] = "application/json"
    data = None if body is None else json.dumps(body).encode()
    return fetch.ask(url, headers=headers, seconds=timeout, body=data, context=_context(authority))


def _context(authority: str | None) -> ssl.SSLContext:
    if authority is not None:
        return fetch.proven_by(authority)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
