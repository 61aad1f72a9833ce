"""The state between two looks: ``health-state.json`` in the node's directory under /run, lost on reboot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node.decode import decode
from image_builder.node.health.alarms import Alarm
from image_builder.node.health.model import Outcome, Sample
from image_builder.node.health.report import Reported

FORMAT = 2


@dataclass(frozen=True)
class Last:
    """What is known about a check: its last outcome and when that was, what it remembers, and why it could not look.

    ``at`` and ``not_before`` are times of the monotonic clock, ``unix`` is ``at`` as Unix time.
    """

    at: float = -1.0
    unix: float = 0.0
    seconds: float = 0.0
    error: str = ""
    not_before: float = 0.0
    samples: tuple[Sample, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Everything that is remembered. Valid for one boot: the clock and the counters start over with the next."""

    boot_id: str = ""
    checks: Mapping[str, Last] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    reported: Reported = field(default_factory=Reported)


def after(last: Last, outcome: Outcome, now: float, unix: float, seconds: float) -> Last:
    """Return what is known about a check that has looked."""
    rest = now + outcome.rest_seconds
    return Last(now, unix, seconds, "", rest, outcome.samples, {**last.memory, **outcome.memory})


def load(path: Path, boot_id: str) -> tuple[Memory, str]:
    """Return the state that the last look left, and a message if that is damaged."""
    try:
        document = json.loads(path.read_bytes())
        if (document.pop("format"), document["boot_id"]) != (FORMAT, boot_id):
            return Memory(boot_id), ""
        return decode(Memory, document), ""
    except FileNotFoundError:
        return Memory(boot_id), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Memory(boot_id), f"{path} is damaged, starting over: {error!r}"


def as_json(memory: Memory) -> dict[str, Any]:
    """Return a memory as JSON."""
    return {"format": FORMAT, **asdict(memory)}
