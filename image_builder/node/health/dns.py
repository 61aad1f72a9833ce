"""Names, asked of the configured servers themselves (RFC 1035), each in parallel and with one deadline.

The C library's resolver waits for many seconds, for one name after the other, and doesn't say which server is dead.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_A, _AAAA = 1, 28
_MOST_SERVERS = 3  # as the C library has it
_CODES = {1: "FORMERR", 2: "SERVFAIL", 3: "NXDOMAIN", 4: "NOTIMP", 5: "REFUSED"}
_TRUNCATED = 0x0200


@dataclass(frozen=True)
class Answer:
    """What a name's lookup came to: ``addresses``, or the reason in ``error``. ``seconds`` until the first answer."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0


def servers(etc: Path) -> list[str]:
    """Return the name servers of resolv.conf, empty where there are none."""
    lines = _lines(etc / "resolv.conf")
    return [words[1] for words in lines if words[0] == "nameserver" and len(words) > 1][:_MOST_SERVERS]


def hosts(etc: Path) -> dict[str, list[str]]:
    """Return the addresses that /etc/hosts gives to names."""
    found: dict[str, list[str]] = {}
    for address, *names in _lines(etc / "hosts"):
        for name in names:
            found.setdefault(name.lower(), []).append(address)
    return found


def _lines(path: Path) -> Iterator[list[str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        if words := line.partition("#")[0].split():
            yield words


def lookup(names: Iterable[str], asked: Sequence[str], seconds: float, port: int = 53) -> dict[str, Answer]:
    """Return an answer for each name. All servers are asked at once, twice at most, for IPv4 and IPv6.

    The first answer with addresses counts, else the last one that says why there are none.
    """
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    if not asked:
        return {name: Answer(name, error="no name server is configured") for name in wanted}
    answers: dict[str, Answer] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        sockets = _open(asked, port, stack)
        for opened in sockets:
            selector.register(opened, selectors.EVENT_READ)
        began = time.monotonic()
        for attempt in (1, 2):
            missing = [name for name in wanted if not _found(answers, name)]
            queries = {os.urandom(2): (name, kind) for name in missing for kind in (_A, _AAAA)}
            _send(sockets, queries)
            until = began + seconds * attempt / 2
            _receive(selector, queries, answers, began, until)
    return {name: answers.get(name, Answer(name, error="no answer")) for name in wanted}


def _found(answers: Mapping[str, Answer], name: str) -> bool:
    return name in answers and bool(answers[name].addresses)


def _open(asked: Sequence[str], port: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    found = []
    for address in asked:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        opened = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        opened.setblocking(False)
        # No route to it, or a scope that isn't there: the others may answer.
        with contextlib.suppress(OSError):
            opened.connect((address, port))
            found.append(opened)
    return found


def _send(sockets: Iterable[socket.socket], queries: Mapping[bytes, tuple[str, int]]) -> None:
    for opened in sockets:
        for identity, (name, kind) in queries.items():
            with contextlib.suppress(OSError):
                opened.send(question(identity, name, kind))


def _receive(
    selector: selectors.BaseSelector,
    queries: Mapping[bytes, tuple[str, int]],
    answers: dict[str, Answer],
    began: float,
    until: float,
) -> None:
    """Take answers until each name has addresses, both kinds of question were answered, or it is too late."""
    open_questions = set(queries.values())
    while open_questions and (left := until - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            opened = key.fileobj
            assert isinstance(opened, socket.socket)
            try:
                data = opened.recv(4096)
            except OSError:
                continue  # refused: nobody listens there
            if data[:2] not in queries:
                continue
            name, kind = queries[data[:2]]
            addresses, error = parse(data)
            seconds = time.monotonic() - began
            if addresses:
                open_questions -= {(name, _A), (name, _AAAA)}
                answers[name] = Answer(name, tuple(addresses), seconds=seconds)
            elif not _found(answers, name):
                answers[name] = Answer(name, error=error, seconds=seconds)
                # A name that is not there is so for every server; another's trouble may be its own.
                if error in ("NXDOMAIN", "no addresses"):
                    open_questions.discard((name, kind))


def question(identity: bytes, name: str, kind: int) -> bytes:
    """Return a query for a whole name, which is ASCII: its labels have at most 63 characters."""
    labels = [label[:63] for label in name.rstrip(".").encode("ascii", "replace").split(b".")]
    sent = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return identity + struct.pack(">HHHHH", 0x0100, 1, 0, 0, 0) + sent + struct.pack(">HH", kind, 1)


def parse(data: bytes) -> tuple[list[str], str]:
    """Return the addresses in a message, or the reason why there are none."""
    try:
        return _parse(data)
    except (IndexError, struct.error, ValueError):
        return [], "damaged answer"


def _parse(data: bytes) -> tuple[list[str], str]:
    _identity, flags, questions, answers = struct.unpack_from(">HHHH", data)
    if code := flags & 0xF:
        return [], _CODES.get(code, f"code {code}")
    at = 12
    for _ in range(questions):
        at = _skip(data, at) + 4
    found = []
    for _ in range(answers):
        at = _skip(data, at)
        kind, _class, _ttl, length = struct.unpack_from(">HHIH", data, at)
        value = data[at + 10 : at + 10 + length]
        at += 10 + length
        if (kind, len(value)) in ((_A, 4), (_AAAA, 16)):
            found.append(socket.inet_ntop(socket.AF_INET if kind == _A else socket.AF_INET6, value))
    return found, "" if found else "truncated answer" if flags & _TRUNCATED else "no addresses"


def _skip(data: bytes, at: int) -> int:
    """Return where a name ends; a compressed one ends with its pointer."""
    while length := data[at]:
        if length & 0xC0:
            return at + 2
        at += length + 1
    return at + 1
