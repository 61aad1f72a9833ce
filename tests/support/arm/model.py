"""Requests, answers and resources, as the simulator has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Json = dict[str, Any]
SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"


@dataclass(frozen=True)
class Request:
    """``path`` is without the query, whose values are in ``query``; header names are in lower case."""

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
    """A request that changes something, and how it was answered; status 0 never arrived."""

    method: str
    path: str
    body: Json | None
    status: int


# What happens to a request instead of, or (`lose`) after what should: an answer, no answer with nothing done, or
# no answer to what was done. None lets it pass.
Fault = Callable[[Request], Answer | Literal["drop", "lose"] | None]


class Disks(Protocol):
    """Where the pages of upload disks are."""

    def create(self, name: str, size: int) -> None: ...
    def sas(self, name: str, seconds: int) -> str: ...
    def footer(self, name: str) -> bytes: ...
    def delete(self, name: str) -> None: ...


def error(status: int, code: str, message: str, **headers: str) -> Answer:
    """Return an answer in Resource Manager's form of an error."""
    return Answer(
        status,
        {"error": {"code": code, "message": message}},
        {name.replace("_", "-"): value for name, value in headers.items()},
    )


@dataclass
class Resource:
    """A resource, and what it looked like before: readers see that for the next ``hidden`` reads."""

    content: Json
    etag: int = 1
    hidden: int = 0
    before: Json | None = None

    def seen(self) -> Json | None:
        if self.hidden:
            self.hidden -= 1
            return self.before
        return self.content

    def change(self, content: Json, hidden: int) -> None:
        self.before, self.content = copy.deepcopy(self.content), content
        self.etag += 1
        self.hidden = hidden
