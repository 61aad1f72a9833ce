"""Publishing's requests to Azure Resource Manager: each change is followed to its end, and resent only if not made.

A request that changes something is sent once. If its response is lost, or reports throttling, a conflict or a server
error, the resource is read to find out whether the change was made; only if it wasn't is the request sent again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from image_builder.errors import PublishError
from image_builder.gallery.plan import Call
from image_builder.system.resource_manager import Json, ResourceManager, error_text, readable, reason

__all__ = ["Json", "Service", "readable"]

Say = Callable[[str], None]

_TRIES = 8
# Seconds between two polls of a long operation, if the service names none.
_LOOK_SECONDS = 10.0
_LONGEST_WAIT = 300.0
_THROTTLED, _CONFLICT, _ACCEPTED = 429, 409, 202
_UNCERTAIN = range(500, 600)
_ENDED = {"succeeded", "failed", "canceled"}


class Service(ResourceManager):
    """One Azure subscription. ``say`` is called with what people should know while they wait."""

    def __init__(self, subscription: str, *, endpoint: str | None = None, say: Say = lambda _: None) -> None:
        super().__init__(subscription, endpoint=endpoint)
        self._say = say

    def change(self, call: Call, is_done: Callable[[], bool], *, follows: bool = True) -> Json:
        """Send a request, wait until the operation that it starts has ended if ``follows``, and return its result.

        ``is_done`` reads from the resource whether the change was made if the response doesn't say so; the result is
        then empty. Raises PublishError.
        """
        problem = ""
        for attempt in range(_TRIES):
            answer, problem = self.send(call.method, call.path, call.api, call.body)
            status = answer.status_code if answer is not None else 0
            if 200 <= status < 300:
                return self._operation(call, answer) if follows else {}
            if status and status not in (_THROTTLED, _CONFLICT, *_UNCERTAIN):
                raise PublishError(f"{call.method} {call.path}: {problem}", hint=self._hint(status))
            self._say(f"{call.method} {call.path.rsplit('/', 1)[-1]}: {problem}")
            self.wait(answer, attempt)
            if is_done():
                return {}
        raise PublishError(
            f"{call.method} {call.path}: {problem}, {_TRIES} times", hint="rerun the same command to resume"
        )

    def _operation(self, call: Call, answer: Any) -> Json:
        """Follow a long-running operation to its end (Azure-AsyncOperation, else Location)."""
        monitor, location = answer.headers.get("Azure-AsyncOperation"), answer.headers.get("Location")
        while monitor:
            self.wait(answer)
            answer = self._read(monitor, {})
            state = self._content(call.path, answer)
            if str(state.get("status", "")).lower() in _ENDED:
                if state["status"].lower() != "succeeded":
                    raise PublishError(f"{call.method} {call.path}: {error_text(state)}")
                output = (state.get("properties") or {}).get("output")
                if output or not location:
                    return dict(output or {})
                monitor = None
                answer = self._read(location, {})
        while answer.status_code == _ACCEPTED and location:
            self.wait(answer)
            answer = self._read(location, {})
        if answer.status_code >= 300:
            raise PublishError(f"{call.method} {call.path}: {reason(answer)}")
        return answer.json() if answer.content else {}

    def wait(self, answer: Any = None, attempt: int | None = None) -> None:
        """Wait as long as a response (by default the last one read) says, else a moment, longer at each attempt."""
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
