"""The verdict of this boot in its files, where units, the kubelet, the joining and people find it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from image_builder.node import files, status
from image_builder.node.errors import NodeError
from image_builder.node.preflight import model
from image_builder.node.preflight.model import INCONCLUSIVE, PASSED
from image_builder.node.status import Places


def write(document: Mapping[str, Any], places: Places) -> None:
    """Write a verdict, and the kubelet's labels and taints with it. Raises OSError."""
    files.write_json(places.run / model.FILE, document)
    status.update("preflight", model.section(document), places)


def read(places: Places) -> dict[str, Any]:
    """Return the verdict; raises NodeError (``preflight.none``) where there is none, or another boot's."""
    try:
        document: dict[str, Any] = json.loads((places.run / model.FILE).read_bytes())
        now = status.boot_id(places.boot_id)
    except (OSError, ValueError) as error:
        raise NodeError("preflight.none", f"no verdict of this boot: {error}") from error
    if document["boot_id"] != now:
        raise NodeError(
            "preflight.none", f"the verdict is of boot {document['boot_id']}, but this boot is {now}"
        )
    return document


def admit(document: Mapping[str, Any], run: Path, *, hard: bool) -> None:
    """Let the kubelet start, or not, and have what was not settled tested again. Raises OSError.

    A kubelet that runs is not stopped.
    """
    _mark(run / model.UNSETTLED, document["state"] == INCONCLUSIVE)
    _mark(run / model.ADMITTED, document["state"] == PASSED or not hard)


def _mark(path: Path, is_wanted: bool) -> None:
    if is_wanted:
        path.touch()
    else:
        path.unlink(missing_ok=True)
