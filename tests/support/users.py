"""An ordinary user of the tests, and its way to a test's directory."""

from __future__ import annotations

import tempfile
from pathlib import Path

NOBODY = 65534


def open_to_all(folder: Path) -> None:
    """Let everybody enter a test's directory: pytest's own, of which xdist has one more, are closed to others."""
    ends = Path(tempfile.gettempdir()).resolve()
    for path in (folder, *folder.parents):
        if path == ends or not path.is_relative_to(ends):
            return
        path.chmod(0o755)
