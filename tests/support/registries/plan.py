"""The faults of the registry proxy, its tokens, the address of its registry, and its record of a request."""

from __future__ import annotations

import base64
import datetime
import re
import secrets
import ssl
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["stall", "reset", "status", "short", "wrong", "redirect_loop", "elsewhere", "drip", "silence"]


@dataclass(frozen=True)
class Fault:
    """One kind of failure, for requests whose path matches.

    - ``stall``: the right headers, ``after`` bytes, then nothing until the client leaves;
    - ``reset``: the same, then RST; ``short``: the same, then an orderly end of the connection;
    - ``wrong``: the right length, but every bit from byte ``after`` on is flipped;
    - ``drip``: from byte ``after`` on, ``rate`` bytes per second;
    - ``status``: ``status``, ``headers`` and a registry's error as the body, without asking the registry;
    - ``redirect_loop``: 307 to the same URL; ``elsewhere``: 307 to the same path of the server ``host``;
    - ``silence``: not even headers, until the client leaves.

    A body that isn't longer than ``after`` comes through whole, but still uses up one of ``times``.
    """

    kind: Kind
    path: str = "/blobs/"  # a regular expression, searched in the request's path (with its query)
    after: int = 0  # bytes of this answer's body, even if it is a part (206)
    times: int | None = None  # how many matching requests get it; None for all
    status: int = 503
    headers: tuple[tuple[str, str], ...] = ()  # for `status`, such as ("Retry-After", "2")
    rate: float = 0.0  # bytes per second
    skip: int = 0  # matching requests let through before the first fault
    method: str = "GET"
    host: str = ""  # for `elsewhere`

    def __post_init__(self) -> None:
        re.compile(self.path)
        if self.kind == "drip" and self.rate <= 0:
            raise ValueError("drip needs a rate above 0")
        if self.method == "HEAD" and self.kind not in ("status", "redirect_loop", "silence"):
            raise ValueError(f"the answer to HEAD has no body for {self.kind} to spoil")


@dataclass
class Tokens:
    """Makes a registry require tokens that live for ``seconds``; ``login`` (user, password) gets one at ``/token``.

    With ``login`` None no one gets any. Clients assume that a token lives for at least a minute, so ``issued_at`` is
    early enough that ``seconds`` are left of one (distribution's "Token Authentication Specification").
    """

    login: tuple[str, str] | None
    seconds: float
    given: dict[str, float] = field(default_factory=dict)

    def give(self) -> str:
        """Return a new token."""
        token = secrets.token_hex(16)
        self.given[token] = time.monotonic() + self.seconds
        return token

    def answer(self, authorization: str | None, form: str = "") -> tuple[int, dict[str, object]]:
        """Return the status and the body for a request with this header's value, or with a form (OAuth 2)."""
        basic = base64.b64encode(":".join(self.login or ()).encode()).decode()
        fields = dict(urllib.parse.parse_qsl(form))
        told = (fields.get("username", ""), fields.get("password", ""))
        if self.login is None or (authorization != f"Basic {basic}" and told != self.login):
            return 401, {"errors": [{"code": "UNAUTHORIZED", "message": "incorrect username or password"}]}
        issued = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=max(60 - self.seconds, 0))
        left = {"expires_in": 60, "issued_at": issued.strftime("%Y-%m-%dT%H:%M:%SZ")}
        return 200, {"access_token" if fields else "token": self.give(), **left}

    def lets_in(self, authorization: str) -> bool:
        """Return whether the value of a request's header has a token that is still alive."""
        return self.given.get(authorization.removeprefix("Bearer "), 0.0) > time.monotonic()


@dataclass(frozen=True)
class Upstream:
    """The registry; ``tls`` is None for plain HTTP, ``host`` (with its port if necessary) is the Host and SNI.

    A registry builds its absolute ``Location`` from ``host``; the proxy passes it on unchanged.
    """

    ip: str
    port: int
    host: str
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class Request:
    """The record of one request; times are from ``time.monotonic``."""

    method: str
    path: str
    range: str | None  # the header's value
    fault: Kind | None
    started: float
    status: int = 0  # 0: no answer (yet)
    sent: int = 0  # bytes of the answer's body put on the wire
    ended: float | None = None  # just before its last bytes were sent, or when it was given up
