"""The verdict of this boot, where units, the kubelet and people find it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_builder.node import durable, status
from image_builder.node.preflight import model
from image_builder.node.preflight.model import INCONCLUSIVE, PASSED


def write(told: Mapping[str, Any], *, run: Path, etc: Path) -> None:
    """Write a verdict, and what the kubelet is told of it. Raises OSError."""
    durable.write_json(run / model.FILE, told)
    status.update("preflight", model.section(told), directory=run, settings=etc)


def admit(told: Mapping[str, Any], *, run: Path, hard: bool) -> None:
    """Let the kubelet start, or not, and have what was not settled tested again. Raises OSError.

    A kubelet that runs is not stopped.
    """
    _mark(run / model.UNSETTLED, told["state"] == INCONCLUSIVE)
    _mark(run / model.ADMITTED, told["state"] == PASSED or not hard)


def _mark(path: Path, is_wanted: bool) -> None:
    if is_wanted:
        path.touch()
    else:
        path.unlink(missing_ok=True)
