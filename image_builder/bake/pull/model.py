"""The vocabulary of a pull: a runtime's events, limits, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from image_builder.bake.lock.model import LockedImage

CANT_START = (
    "one that needs a mount or a GPU's library to start can't be rehearsed: give it `mode: archive` in image_preload,"
    " and nodes load it from the archive"
)

# The most layers of an image that an engine can use: moby's layer store (maxLayerDepth), and overlayfs itself
# (OVL_MAX_STACK), which containerd leaves it to.
MOST_LAYERS = {"docker": 125, "containerd": 500}

Phase = Literal["waiting", "downloading", "downloaded", "extracting", "done", "retrying"]


@dataclass(frozen=True)
class Event:
    """A runtime's report about one layer of one image at one moment.

    ``at`` is in seconds of a monotonic clock. ``layer`` is a digest or a short id (12 hex digits), empty for the image
    as a whole. ``current`` and ``total`` are this phase's bytes, done and in total; ``text`` is the runtime's own
    message, for people.
    """

    at: float
    layer: str
    phase: Phase
    current: int = 0
    total: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Limits:
    """The limits of a pull. Time in which the whole image is queued counts against none of them.

    ``progress_seconds`` may pass without a new byte downloaded or extracted. ``min_rate`` is the lowest mean rate, in
    bytes per second, over the last ``rate_seconds`` of downloading; 0 sets no limit. ``overall_seconds`` may pass in
    total.
    """

    progress_seconds: float = 1800.0
    min_rate: float = 16384.0
    rate_seconds: float = 300.0
    overall_seconds: float = 4 * 3600.0


def too_deep(engine: str, image: LockedImage) -> str:
    """Return why an engine can't use an image with so many layers; empty if it can."""
    count, most = len(image.layers), MOST_LAYERS[engine]
    return f"has {count} layers, and {engine} takes at most {most} layers" if count > most else ""


@dataclass(frozen=True)
class Verdict:
    """The reason to give up a pull.

    ``layer`` is the one that last made progress, or should have; empty for the image as a whole. ``last`` is its last
    known state, in words: ``downloading, 12.3 MB of 800 MB``. ``seconds`` is how long nothing arrived, how long the
    rate was too low, or how long the pull took in total.
    """

    kind: Literal["stalled", "too slow", "too long"]
    layer: str
    last: str
    seconds: float

    def __str__(self) -> str:
        """Return a sentence: ``no progress for 30:00 min; layer 3f2a…: downloading, 12.3 MB of 800 MB``."""
        causes = {"stalled": "no progress for", "too slow": "too slow for", "too long": "not finished after"}
        short = self.layer.removeprefix("sha256:")[:12]
        where = f"layer {short}: " if short else ""
        return f"{causes[self.kind]} {_duration(self.seconds)}; {where}{self.last}"


def _duration(seconds: float) -> str:
    """Return a duration: ``0:42 min``, ``30:00 min``, ``4:00:00 h``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"
