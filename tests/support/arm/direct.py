"""The simulator without a connection: the interface of ``ResourceManager``, for tests that open no sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.errors import FetchError
from tests.support.arm.model import Answer, Json, Request
from tests.support.arm.service import Arm


@dataclass(frozen=True)
class Received:
    """An answer as the SDK returns it."""

    status_code: int
    headers: Mapping[str, str]


@dataclass
class Direct:
    arm: Arm

    def get(self, path: str, api: str, **query: str) -> Json | None:
        answer = self._ask("GET", path, {"api-version": api, **query})
        if answer is not None and answer.status == 404:
            return None
        if answer is None or answer.status >= 300:
            raise FetchError(f"{path}: {answer}")
        return json.loads(json.dumps(answer.body))  # type: ignore[no-any-return]

    def list(self, path: str, api: str, **query: str) -> Iterator[Json]:
        while True:
            page = self.get(path, api, **query)
            assert page is not None
            yield from page["value"]
            if not (following := page.get("nextLink")):
                return
            query = dict(pair.split("=", 1) for pair in following.partition("?")[2].split("&"))
            query.pop("api-version")

    def send(
        self,
        method: str,
        path: str,
        api: str,
        body: Mapping[str, Any] | None = None,
        *,
        if_match: str | None = None,
    ) -> tuple[Any, str]:
        headers = {} if if_match is None else {"if-match": if_match}
        answer = self._ask(method, path, {"api-version": api}, dict(body or {}), headers)
        if answer is None:
            return None, "Connection aborted."
        return Received(answer.status, answer.headers), str((answer.body or {}).get("error", ""))

    def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Json | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer | None:
        target = path.removeprefix(self.arm.url)
        return self.arm.answer(Request(method, target, query, body, headers or {}))
