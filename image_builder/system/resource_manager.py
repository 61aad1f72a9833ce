"""Azure Resource Manager through Azure's own SDK: its client, its credentials, its handling of limits.

Requests and responses are the service's JSON, not the SDK's models. The SDK retries reads; a request that changes
something is sent once, since only the resource can show whether a lost response meant success.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from email.utils import parsedate_to_datetime
from typing import Any, Self

from image_builder.errors import FetchError
from image_builder.system import host

Json = dict[str, Any]

_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_READ_REPETITIONS = 8
_FORBIDDEN, _MISSING = 403, 404
# With fewer requests than this left before Azure refuses them, each one waits and leaves the rest to others.
_FEW_REQUESTS, _PACE_SECONDS = 5, 1.0
_REMAINING = "x-ms-ratelimit-remaining-"
_SECRET = re.compile(r"(?i)\b(sig=|bearer\s+)[^&\s\"']+")


class ResourceManager:
    """One Azure subscription; a context manager.

    ``endpoint`` is the address of Resource Manager, by default that of the cloud that AZURE_SDK_CLOUD_CONF names.
    """

    # The page that has a role with all the rights needed.
    rights = "docs/how-to/publish.md"

    def __init__(self, subscription: str, *, endpoint: str | None = None) -> None:
        """Raises HostError if the SDK isn't installed."""
        host.check_azure()
        from azure.identity import DefaultAzureCredential
        from azure.mgmt.compute import ComputeManagementClient

        self._open = ExitStack()
        credential = self._open.enter_context(DefaultAzureCredential())
        make: Any = ComputeManagementClient
        self._client = self._open.enter_context(
            make(
                credential,
                subscription,
                base_url=endpoint,
                retry_total=_READ_REPETITIONS,
                connection_timeout=_CONNECT_SECONDS,
                read_timeout=_READ_SECONDS,
            )
        )
        # How far this host's clock is behind the service's, in seconds.
        self.clock_lag = 0.0
        self._remaining = _FEW_REQUESTS
        self._last: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, path: str, api: str, **query: str) -> Json | None:
        """Return a resource, None if it doesn't exist. Raises FetchError for any other error, or no response."""
        answer = self._read(path, {"api-version": api, **query})
        if answer.status_code == _MISSING:
            return None
        return self._content(path, answer)

    def list(self, path: str, api: str, **query: str) -> Iterator[Json]:
        """Yield the items of all pages. Raises FetchError if the list is incomplete."""
        answer = self._content(path, self._read(path, {"api-version": api, **query}))
        while True:
            yield from answer["value"]
            if not (following := answer.get("nextLink")):
                return
            answer = self._content(path, self._read(following, {}))

    def _read(self, path: str, query: Mapping[str, str], **options: Any) -> Any:
        from azure.core.exceptions import AzureError

        try:
            answer = self._request("GET", path, query, None, **options)
        except AzureError as error:
            raise FetchError(f"{path}: {readable(error)}", hint="this request changed nothing") from error
        self._last = answer
        if date := answer.headers.get("Date"):
            self.clock_lag = parsedate_to_datetime(date).timestamp() - time.time()
        return answer

    def _content(self, path: str, answer: Any) -> Json:
        if answer.status_code >= 300:
            raise FetchError(f"{path}: {reason(answer)}", hint=self._hint(answer.status_code))
        content = answer.json()
        if not isinstance(content, dict):
            raise FetchError(f"{path}: the answer is invalid")
        return content

    # -- changing --------------------------------------------------------------------------------------------

    def send(
        self,
        method: str,
        path: str,
        api: str,
        body: Mapping[str, Any] | None = None,
        *,
        if_match: str | None = None,
    ) -> tuple[Any, str]:
        """Send a request once; return the response, None if it was lost, and the status and error as text."""
        from azure.core.exceptions import AzureError

        headers = {} if if_match is None else {"If-Match": if_match}
        try:
            answer = self._request(method, path, {"api-version": api}, body, headers, retry_total=0)
        except AzureError as error:
            return None, readable(error)
        return answer, reason(answer)

    def _request(
        self,
        method: str,
        url: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Any:
        from azure.core.rest import HttpRequest

        request = HttpRequest(method, url, params=query, json=body, headers=dict(headers or {}))
        if self._remaining < _FEW_REQUESTS:
            time.sleep(_PACE_SECONDS)
        answer = self._client.send_request(request, **options)
        self._remaining = min(remaining(answer.headers), default=_FEW_REQUESTS)
        return answer

    def _hint(self, status: int) -> str:
        if status == _FORBIDDEN:
            return f"the error names the action and its scope; {self.rights} has a role with all of them"
        return "nothing else was changed"


def remaining(headers: Mapping[str, str]) -> list[int]:
    """Return how many requests are left according to a response: for the subscription, and for each Compute policy."""
    values = [value for name, value in headers.items() if name.lower().startswith(_REMAINING)]
    numbers = [part.rpartition(";")[2].strip() for value in values for part in value.split(",")]
    return [int(number) for number in numbers if number.isdigit()]


def readable(error: BaseException) -> str:
    """Return an SDK error on one line, without secret signatures and tokens."""
    return _SECRET.sub(r"\1…", " ".join(str(error).split()))[:300]


def reason(answer: Any) -> str:
    """Return a response's status and error on one line."""
    try:
        text = error_text(answer.json())
    except ValueError:
        text = ""
    return _SECRET.sub(r"\1…", f"{answer.status_code} {text or answer.reason}")[:500]


def error_text(content: Any) -> str:
    """Return the code and message of a service error, empty for anything else."""
    error = content.get("error") if isinstance(content, dict) else None
    return f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else ""
