"""Whether this test was tried on healthy machines like this one: the same size, driver and program.

Until it was, what it computes and measures is reported and holds no node back: a floor may be wrong, and so may we.
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

# What the answers and the speeds depend on: what a worker runs, and the kernels.
PROGRAM = (
    "bandwidth.py",
    "copies.py",
    "cuda.py",
    "known_answer.py",
    "memory.py",
    "reference.py",
    "tensor.py",
    "worker.py",
    "kernels/base.ptx",
    "kernels/memory.ptx",
    "kernels/tc_sm70.ptx",
    "kernels/tc_sm80.ptx",
)
_DIGITS = 12


@dataclass(frozen=True)
class Calibration:
    """A record that healthy machines passed. ``agent`` is the document's ``tool_version``; ``source`` says who, when,
    and how many machines."""

    size: str
    driver: str
    agent: str
    source: str


@functools.cache
def agent() -> str:
    """Return the digest of the program that the workers run, shortened."""
    found = hashlib.sha256()
    for name in PROGRAM:
        data = pkgutil.get_data(__package__, name)
        if data is None:  # a loader that gives no data: then no record may ever match
            return "unknown"
        found.update(f"{name} {len(data)}\n".encode() + data)
    return found.hexdigest()[:_DIGITS]


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
    wanted = (size.lower(), driver, program)
    return any((one.size.lower(), one.driver, one.agent) == wanted for one in records)
