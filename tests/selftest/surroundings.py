"""What the checks see of the environment, and where they keep things."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from image_builder.system.environment import environment as bare_environment

# Every exit status that a child can have: what one says is told, not raised.
ANY = tuple(range(-64, 256))
_KEPT = (
    "CI",
    "HOME",
    "COLUMNS",
    "IMAGE_BUILDER_ARTEFACT",
    "IMAGE_BUILDER_PROGRAMS",
    "IMAGE_BUILDER_RANDOM_KILLS",
    "IMAGE_BUILDER_MIRROR",
    "NO_COLOR",
    "TERM",
    "PYTHONPYCACHEPREFIX",
)


def environment(cache: Path) -> dict[str, str]:
    """Return what the checks see of our environment."""
    return {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        "ANSIBLE_HOME": os.fspath(cache / "ansible"),
        # A bake's tree doesn't belong on a tmpfs, which /tmp often is.
        "TMPDIR": os.environ.get("TMPDIR", "/var/tmp"),
        "PATH": f"{Path(sys.executable).parent}:{bare_environment()['PATH']}",
    }


def cache_directory() -> Path:
    """Return where the linters and pytest keep things: not in the checkout, which may be someone else's."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "image-builder"
    path.mkdir(parents=True, exist_ok=True)
    return path
