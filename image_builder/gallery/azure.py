"""Azure Resource Manager through Azure's own SDK: its client, its credentials, its handling of limits.

Requests and answers are the service's JSON, not the SDK's models: ``plan`` shows what is sent because nothing lies
between. A request that changes something is sent once. Whether an answer that was lost, or that reports a conflict or
an error of the service, meant success is read from the resource; only then is it sent again.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from email.utils import parsedate_to_datetime
from typing import Any, Self

from image_builder.errors import FetchError, HostError, PublishError
from image_builder.gallery.plan import Call

Json = dict[str, Any]
Say = Callable[[str], None]

_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_READ_REPETITIONS = 8
_TRIES = 8
# Seconds between two looks at what takes long, where the service names none.
_LOOK_SECONDS = 10.0
_LONGEST_WAIT = 300.0
# With fewer requests left before Azure refuses them, each one waits: the rest is for others.
_FEW_REQUESTS, _PACE_SECONDS = 5, 1.0
_REMAINING = "x-ms-ratelimit-remaining-"
_THROTTLED, _CONFLICT, _FORBIDDEN, _MISSING, _ACCEPTED = 429, 409, 403, 404, 202
_UNCERTAIN = range(500, 600)
_ENDED = {"succeeded", "failed", "canceled"}
_SECRET = re.compile(r"(?i)\b(sig=|bearer\s+)[^&\s\"']+")


class Service:
    """One subscription of Azure; a context manager. ``say`` is called with what people should know while they wait.

    ``endpoint`` is the address of Resource Manager; without it that of the cloud that AZURE_SDK_CLOUD_CONF names.
    """

    def __init__(self, subscription: str, *, endpoint: str | None = None, say: Say = lambda _: None) -> None:
        """Raises HostError where the SDK isn't installed."""
        try:
            from azure.identity import DefaultAzureCredential
            from azure.mgmt.compute import ComputeManagementClient
        except ImportError as error:
            raise HostError(f"Azure's SDK is missing: {error}", hint="install the extra `azure`") from error
        self._say = say
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
        """Return a resource, None where there is none; raises FetchError for any other answer, or none."""
        answer = self._read(path, {"api-version": api, **query})
        if answer.status_code == _MISSING:
            return None
        return self._content(path, answer)

    def list(self, path: str, api: str) -> Iterator[Json]:
        """Yield the items of all pages; raises FetchError for an incomplete list."""
        answer = self._content(path, self._read(path, {"api-version": api}))
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
            raise FetchError(f"{path}: {readable(error)}", hint="nothing was changed by asking") from error
        self._last = answer
        if date := answer.headers.get("Date"):
            self.clock_lag = parsedate_to_datetime(date).timestamp() - time.time()
        return answer

    def _content(self, path: str, answer: Any) -> Json:
        if answer.status_code >= 300:
            raise FetchError(f"{path}: {_reason(answer)}", hint=_hint(answer.status_code))
        content = answer.json()
        if not isinstance(content, dict):
            raise FetchError(f"{path}: the answer makes no sense")
        return content

    # -- changing --------------------------------------------------------------------------------------------

    def change(self, call: Call, is_done: Callable[[], bool], *, follows: bool = True) -> Json:
        """Send a request, wait for the end of the operation that it starts if ``follows``, and return its result.

        ``is_done`` reads from the resource whether an answer that says nothing of it meant success: the result is
        empty then. Raises PublishError.
        """
        problem = ""
        for attempt in range(_TRIES):
            answer, problem = self._send(call)
            status = answer.status_code if answer is not None else 0
            if 200 <= status < 300:
                return self._operation(call, answer) if follows else {}
            if status and status not in (_THROTTLED, _CONFLICT, *_UNCERTAIN):
                raise PublishError(f"{call.method} {call.path}: {problem}", hint=_hint(status))
            self._say(f"{call.method} {call.path.rsplit('/', 1)[-1]}: {problem}")
            self.wait(answer, attempt)
            if is_done():
                return {}
        raise PublishError(
            f"{call.method} {call.path}: {problem}, {_TRIES} times", hint="the same command again goes on"
        )

    def _send(self, call: Call) -> tuple[Any, str]:
        from azure.core.exceptions import AzureError

        try:
            query = {"api-version": call.api}
            answer = self._request(call.method, call.path, query, call.body, retry_total=0)
        except AzureError as error:
            return None, readable(error)
        return answer, _reason(answer)

    def _operation(self, call: Call, answer: Any) -> Json:
        """Follow a long-running operation to its end (Azure-AsyncOperation, else Location)."""
        monitor, location = answer.headers.get("Azure-AsyncOperation"), answer.headers.get("Location")
        while monitor:
            self.wait(answer)
            answer = self._read(monitor, {})
            state = self._content(call.path, answer)
            if str(state.get("status", "")).lower() in _ENDED:
                if state["status"].lower() != "succeeded":
                    raise PublishError(f"{call.method} {call.path}: {_error_text(state)}")
                output = (state.get("properties") or {}).get("output")
                if output or not location:
                    return dict(output or {})
                monitor = None
                answer = self._read(location, {})
        while answer.status_code == _ACCEPTED and location:
            self.wait(answer)
            answer = self._read(location, {})
        if answer.status_code >= 300:
            raise PublishError(f"{call.method} {call.path}: {_reason(answer)}")
        return answer.json() if answer.content else {}

    def wait(self, answer: Any = None, attempt: int | None = None) -> None:
        """Wait as long as an answer asks for (the last one that was read), else a moment: longer at each attempt."""
        if answer is None and attempt is None:
            answer = self._last
        named = answer.headers.get("Retry-After", "") if answer is not None else ""
        if named.replace(".", "", 1).isdigit():
            seconds = min(float(named), _LONGEST_WAIT)
        elif attempt is None:
            seconds = _LOOK_SECONDS
        else:
            seconds = random.uniform(0.5, 1.0) * min(2.0**attempt, _LOOK_SECONDS)  # noqa: S311  # no secret
        time.sleep(seconds)

    def _request(
        self, method: str, url: str, query: Mapping[str, str], body: Mapping[str, Any] | None, **options: Any
    ) -> Any:
        from azure.core.rest import HttpRequest

        if self._remaining < _FEW_REQUESTS:
            time.sleep(_PACE_SECONDS)
        answer = self._client.send_request(HttpRequest(method, url, params=query, json=body), **options)
        self._remaining = min(remaining(answer.headers), default=_FEW_REQUESTS)
        return answer


def remaining(headers: Mapping[str, str]) -> list[int]:
    """Return how many requests an answer says that are left: of a subscription, and of each policy of Compute's."""
    values = [value for name, value in headers.items() if name.lower().startswith(_REMAINING)]
    numbers = [part.rpartition(";")[2].strip() for value in values for part in value.split(",")]
    return [int(number) for number in numbers if number.isdigit()]


def readable(error: BaseException) -> str:
    """Return an error of the SDK in one line, without addresses that are secrets."""
    return _SECRET.sub(r"\1…", " ".join(str(error).split()))[:300]


def _reason(answer: Any) -> str:
    try:
        text = _error_text(answer.json())
    except ValueError:
        text = ""
    return _SECRET.sub(r"\1…", f"{answer.status_code} {text or answer.reason}")[:500]


def _error_text(content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else ""


def _hint(status: int) -> str:
    if status == _FORBIDDEN:
        return "the error names the action and its scope; docs/how-to/publish.md has a role with all of them"
    return "nothing else was changed"
