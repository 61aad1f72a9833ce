"""The simulator's requests, answers and resources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Json = dict[str, Any]
SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"
PROVIDER = "/providers/Microsoft.Compute/"
_VERBS = {"GET": "read", "PUT": "write", "PATCH": "write", "DELETE": "delete"}


@dataclass(frozen=True)
class Request:
    """A request: ``path`` excludes the query, whose values are in ``query``; header names are lowercase."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    body: Json | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    status: int
    body: Json | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Logged:
    """A request that changes something, and the status of its answer; 0 means that it never arrived."""

    method: str
    path: str
    body: Json | None
    status: int


# Decides what happens to a request: another answer instead of the true one, no answer and nothing done (`drop`), or
# no answer although the request was carried out (`lose`). None lets it pass.
Fault = Callable[[Request], Answer | Literal["drop", "lose"] | None]


class Disks(Protocol):
    """The store of upload disks' pages."""

    def create(self, name: str, size: int) -> None: ...
    def sas(self, name: str, seconds: int) -> str: ...
    def footer(self, name: str) -> bytes: ...
    def delete(self, name: str) -> None: ...


def error(status: int, code: str, message: str, **headers: str) -> Answer:
    """Return an error answer in Resource Manager's format."""
    return Answer(
        status,
        {"error": {"code": code, "message": message}},
        {name.replace("_", "-"): value for name, value in headers.items()},
    )


@dataclass
class Resource:
    """A resource. Readers don't see it for the next ``hidden`` reads."""

    content: Json
    etag: int = 1
    hidden: int = 0

    def seen(self) -> Json | None:
        if self.hidden:
            self.hidden -= 1
            return None
        return self.content


def type_of(path: str) -> str:
    """Return the type of a resource by its id, in the service's spelling."""
    spelling = {"microsoft.compute": "Microsoft.Compute"}
    parts = path.lower().partition(PROVIDER.lower())[2].split("/")
    names = [spelling.get(part, part) for part in parts[::2]]
    return "/".join(["Microsoft.Compute", *names])


def action_of(request: Request) -> str:
    """Return the right that a request needs."""
    parts = request.path.partition(PROVIDER)[2].split("/")
    if request.method == "POST":
        return "/".join(["Microsoft.Compute", *parts[:-1:2], parts[-1], "action"])
    return "/".join(["Microsoft.Compute", *parts[::2], _VERBS[request.method]])
