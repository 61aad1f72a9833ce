"""Docker's pull stream: what `POST /images/create` sends, as the SDK's ``api.pull(stream=True, decode=True)``
yields it.

Per layer Docker reports "Pulling fs layer", "Waiting", "Downloading", "Verifying Checksum", "Download complete",
"Extracting" and "Pull complete"; or "Already exists"; or "Retrying in N seconds" in between. "Pulling fs layer"
and "Waiting" are both ``waiting``: Docker announces all layers at once, "Waiting" is reported only for those that are
above ``max-concurrent-downloads``, and nothing at all is reported between leaving the queue and the first bytes. So
a registry that accepts the request for a layer and never sends a byte can't be distinguished from the queue here.

Numbers are those of ``progressDetail``; version 29 no longer has ``progress``. Its containerd image store
counts the seconds of an extraction there (``units`` is ``s``), which would be endless progress: they are left
out, so such an extraction has only a beginning and an end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from image_builder.bake.pull.model import Event, Phase


@dataclass(frozen=True)
class Digest:
    """The manifest's digest, ``sha256:…``. It comes near the end of a successful pull."""

    value: str


@dataclass(frozen=True)
class Finished:
    """The last line of a successful pull: ``Downloaded newer image for …``, ``Image is up to date for …``."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The last line of a failed pull. ``code`` is like an HTTP status, None if Docker gives none."""

    message: str
    code: int | None = None


Ended = Digest | Finished | Failed

_LAYER = re.compile(r"[0-9a-f]{12}")
_PHASES: Mapping[str, Phase] = {
    "Pulling fs layer": "waiting",
    "Waiting": "waiting",
    "Downloading": "downloading",
    "Pulling layer fs": "downloading",  # the containerd image store, where it pulls by containerd's transfer service
    "Verifying Checksum": "downloaded",
    "Download complete": "downloaded",
    "Extracting": "extracting",
    "Pull complete": "done",
    "Already exists": "done",
}


def parse(message: Mapping[str, object], at: float) -> Event | Ended | None:
    """Return the event in a message of the stream, which arrived at ``at`` (seconds of a monotonic clock).

    An unknown status, such as "Pulling from …", becomes a ``waiting`` event of the image as a whole, with the
    status as its text: it is shown to people and counts neither as progress nor as a queue. A message with
    neither status nor error gives None.
    """
    if failed := _failed(message):
        return failed
    status, named = message.get("status"), message.get("id")
    if not isinstance(status, str) or not status:
        return None
    if status.startswith("Digest: "):
        return Digest(status.removeprefix("Digest: ").strip())
    if status.startswith("Status: "):
        return Finished(status.removeprefix("Status: ").strip())
    phase = "retrying" if status.startswith("Retrying in ") else _PHASES.get(status)
    if phase is None:
        # The id of "Pulling from" is the tag, which may well look like a layer's.
        whole = not isinstance(named, str) or not named or status.startswith("Pulling from ")
        return Event(at, "", "waiting", text=status if whole else f"{named}: {status}")
    layer = named if isinstance(named, str) and _LAYER.fullmatch(named) else ""
    current, total = _numbers(message.get("progressDetail"))
    return Event(at, layer, phase, current, total, status)


def _failed(message: Mapping[str, object]) -> Failed | None:
    """Return the error in a message. Every version has ``errorDetail``, the older ones ``error`` too."""
    detail, error = message.get("errorDetail"), message.get("error")
    if not detail and not error:
        return None
    reason, code = (
        (detail.get("message"), detail.get("code")) if isinstance(detail, Mapping) else (None, None)
    )
    text = reason or error or "Docker reported an error without a message"
    return Failed(str(text), code if isinstance(code, int) else None)


def _numbers(detail: object) -> tuple[int, int | None]:
    """Return a ``progressDetail``'s bytes done and total (None: unknown); units other than bytes are ignored."""
    if not isinstance(detail, Mapping) or detail.get("units") not in (None, "", "bytes"):
        return 0, None
    current, total = detail.get("current"), detail.get("total")
    return (
        max(0, current) if isinstance(current, int) else 0,
        total if isinstance(total, int) and total > 0 else None,
    )
