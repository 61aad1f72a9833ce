"""The retry policy for failed pulls: whether and when, based on the runtimes' messages. Pure.

The messages are those of Docker 20.10 to 29 (``distribution/errors.go``) and containerd 1.6 to 2.3
(``remotes/docker``), and of Go's net/http and crypto/x509, which both of them pass on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Class = Literal["transient", "limited", "corrupt", "full", "permanent"]

# The names of images, files and addresses in an engine's message, which may look like any status.
_NAME = re.compile(r"""https?://[^\s"']+|[^\s"',]*[/@][^\s"',]*""")
# Introduces why a mirror was skipped, up to the end of the line; the registry was asked after it.
MIRROR = "; mirror "
_STATUS = r"(?:(?:answered|http|status|code|request to)[\s:=]+|\]: )(?:%s)\b"
# The first match counts. A message without a match is transient: one more attempt does no harm, the deadlines hold.
_CLASSES: tuple[tuple[Class, str], ...] = (
    ("full", r"no space left on device|disk quota exceeded"),
    ("limited", r"toomanyrequests|too many requests|rate limit|" + _STATUS % "429"),
    (
        "corrupt",
        r"verification failed for digest|unexpected commit digest|failed size validation|digest mismatch"
        r"|content digest .* does not match|invalid (checksum|gzip|tar) header|flate: corrupt|gzip: invalid",
    ),
    (
        "permanent",
        r"manifest unknown|manifest for .* not found|name unknown|repository .* not found|\bnot found\b",
    ),
    (
        "permanent",
        r"unauthorized|login refused|authentication required|no basic auth credentials|access.* denied|"
        + _STATUS % "401|403",
    ),
    (
        "permanent",
        r"no matching manifest|does not match the specified platform|unsupported media type|schema version",
    ),
    ("permanent", r"x509:|certificate (has expired|is not|signed by)|tls: (bad|unknown) certificate"),
    # The files of a layer don't fit what is below them, in any attempt.
    (
        "permanent",
        r"takes at most \d+ layers|max depth exceeded|failed to (register|extract) layer.*(no such file or directory"
        r"|not a directory|is a directory|file exists|file name too long|invalid argument|operation not permitted"
        r"|too many levels of symbolic links|invalid hardlink|invalid symlink|unhandled tar header)",
    ),
    ("permanent", r"stopped after \d+ redirects|invalid reference"),
)
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0
# Bytes that are wrong twice are wrong at the registry.
_CORRUPT_ATTEMPTS = 2


def classify(message: str) -> Class:
    """Return the class of a failure from the runtime's message."""
    lowered = _NAME.sub("", re.sub(f"{MIRROR}.*", "", message.lower()))
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, lowered)), "transient")


@dataclass(frozen=True)
class Policy:
    """A retry policy: ``attempts`` in total; ``longest_wait`` is how many seconds of Retry-After are obeyed."""

    attempts: int = 5
    longest_wait: float = 600.0


def pause_before_next(
    policy: Policy, kind: Class, attempt: int, chance: float, wanted_by_registry: float = 0.0
) -> float | None:
    """Return the seconds to wait after failed attempt number ``attempt`` (from 1), or None if it was the last.

    ``chance`` in [0, 1) spreads concurrent waits (full jitter in the upper half). ``wanted_by_registry`` is its
    Retry-After, which is never cut short: a registry that asks for more than ``longest_wait`` counts as refusing.
    """
    last = _CORRUPT_ATTEMPTS if kind == "corrupt" else policy.attempts
    if kind in ("permanent", "full") or attempt >= min(last, policy.attempts):
        return None
    if wanted_by_registry > policy.longest_wait:
        return None
    backoff = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** (attempt - 1)) * (0.5 + chance / 2)
    return max(backoff, wanted_by_registry * (1 + chance / 10))
