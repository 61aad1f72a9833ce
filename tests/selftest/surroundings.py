"""The environment variables that the checks see, and the directory of their caches."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from image_builder.system.environment import environment as bare_environment

# Any exit status of a child: its output is printed, and no error raised.
ANY = tuple(range(-64, 256))
_KEPT = (
    "CI",
    "HOME",
    "COLUMNS",
    "IMAGE_BUILDER_PROGRAMS",
    "IMAGE_BUILDER_RANDOM_KILLS",
    "IMAGE_BUILDER_MIRROR",
    "NO_COLOR",
    "TERM",
    "PYTHONPYCACHEPREFIX",
)


def environment(cache: Path) -> dict[str, str]:
    """Return the environment variables that the checks see."""
    return {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        "ANSIBLE_HOME": os.fspath(cache / "ansible"),
        # /tmp is often a tmpfs, where the tree of a bake doesn't belong.
        "TMPDIR": os.environ.get("TMPDIR", "/var/tmp"),
        "PATH": f"{Path(sys.executable).parent}:{bare_environment()['PATH']}",
    }


def cache_directory() -> Path:
    """Return the cache directory of linters and pytest: not in the checkout, which may belong to another user."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "image-builder"
    path.mkdir(parents=True, exist_ok=True)
    return path
