"""Paths and settings of this host: not part of any definition, never hashed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_STORE = Path("/var/lib/image-builder")
REPO_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """``store`` holds stages and downloads, ``output`` the published artefacts.

    ``mirror`` overrides where Debian packages come from (an URL, or None for the definition's own or the
    host's source). ``python`` is the interpreter that child processes (Ansible, pytest) run under.
    """

    store: Path = DEFAULT_STORE
    output: Path = field(default_factory=lambda: Path.cwd() / "output")
    repo_root: Path = REPO_ROOT
    mirror: str | None = None
    python: Path = field(default_factory=lambda: Path(sys.executable))
    vault_password_file: Path | None = None
