"""Whether this test was tried on healthy machines like this one: the same size, driver and program.

Until it was, what it computes and measures is reported and holds no node back: a floor may be wrong, and so may we.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Calibration:
    """A record that healthy machines passed. ``agent`` is the document's ``tool_version``; ``source`` says who, when,
    and how many machines."""

    size: str
    driver: str
    agent: str
    source: str


def read(value: Any) -> Calibration:
    """Return a record from its JSON object, in which ``from`` is the source. Raises ValueError."""
    names = {"from" if field.name == "source" else field.name for field in fields(Calibration)}
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"calibrations: {value!r} has not exactly {', '.join(sorted(names))}")
    if not all(isinstance(text, str) and text.strip() for text in value.values()):
        raise ValueError(f"calibrations: {value!r}: not everything is a text")
    return Calibration(value["size"], value["driver"], value["agent"], value["from"])


def is_on_record(records: Iterable[Calibration], size: str, driver: str, program: str) -> bool:
    """Tell whether one of the records is about machines of this size, with this driver and program."""
    machine = (size.lower(), driver, program)
    return any((record.size.lower(), record.driver, record.agent) == machine for record in records)
