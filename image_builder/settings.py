"""Paths and settings of this host: not part of any definition, never hashed."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from image_builder.errors import UsageError

DEFAULT_STORE = Path("/var/lib/image-builder")
# This checkout; for an installed program, site-packages, which has the same files in the same places.
REPO_ROOT = Path(__file__).resolve().parent.parent
# The script that starts a checkout, after checking for Debian packages; an installed program starts without it.
LAUNCHER = REPO_ROOT / "image-builder"
SUITE = REPO_ROOT / "image_builder" / "suite"
CONFIGURATION = "ansible.cfg"
# The user's own checks, and the file that says what breaks each.
CHECKS, MUTATIONS = "checks", "mutations.yml"
PROJECT_VARIABLE = "IMAGE_BUILDER_PROJECT"
# The file with a repository's id, which is the same in every checkout and different in every other repository.
REPOSITORY_ID = ".image-builder-id"


def project_root() -> Path:
    """Return the user's repository, with their own roles, layers and checks, or this checkout if there is none.

    It is the directory that IMAGE_BUILDER_PROJECT names, else the working directory if that has an ``ansible.cfg``.
    Like Ansible, this doesn't use a world-writable working directory, but it raises UsageError instead of ignoring it:
    this checkout's images, built or checked in place of the user's, would pass for theirs.
    """
    if name := os.environ.get(PROJECT_VARIABLE):
        named = Path(name).resolve()
        if not named.is_dir():
            raise UsageError(f"{PROJECT_VARIABLE}: {named} is not a directory")
        return named
    here = Path.cwd()
    if here == REPO_ROOT or not (here / CONFIGURATION).is_file():
        return REPO_ROOT
    if here.stat().st_mode & stat.S_IWOTH:
        raise UsageError(
            f"{here / CONFIGURATION} doesn't count: anybody may write to its directory",
            hint=f"chmod o-w {shlex.quote(str(here))}, or name it: {PROJECT_VARIABLE}={shlex.quote(str(here))}",
        )
    return here


def repository_id(project: Path) -> str | None:
    """Return the id that ``init`` wrote into a repository, or None if it has none. Raises UsageError if unreadable."""
    try:
        return (project / REPOSITORY_ID).read_text("utf-8", "replace").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{project / REPOSITORY_ID}: {error.strerror}") from None


def own_checks(project: Path) -> Path | None:
    """Return the directory of a repository's own checks, or None if it has none."""
    return folder if (folder := project / CHECKS).is_dir() else None


def ansible_config(roots: Iterable[Path]) -> Path | None:
    """Return the ``ansible.cfg`` that applies: that of the first repository that has one."""
    configs = (root / CONFIGURATION for root in roots)
    return next((config for config in configs if config.is_file()), None)


@dataclass(frozen=True)
class VaultId:
    """Where the password for vaulted values is: Ansible's label, and a file, or a program that prints it."""

    label: str
    file: Path

    @classmethod
    def parse(cls, text: str) -> VaultId:
        """Parse ``LABEL@FILE``, or just a file."""
        label, at, file = text.partition("@")
        if not at or Path(text).expanduser().exists():
            label, file = "default", text
        # Ansible runs in another directory, and the shell doesn't expand `~` in an environment variable.
        return cls(label or "default", Path(file).expanduser().absolute())

    def __str__(self) -> str:
        return f"{self.label}@{self.file}"


@dataclass(frozen=True)
class Settings:
    """``store`` holds stages and downloads, ``output`` the published artifacts.

    ``mirror`` overrides where Debian packages come from (a URL, or None for the definition's own or the
    host's source). ``python`` is the interpreter for child processes (Ansible, pytest); ``checks`` is the
    directory of the user's own checks. A play from which Ansible reports nothing for ``idle_minutes`` is ended.
    """

    store: Path = DEFAULT_STORE
    output: Path = field(default_factory=lambda: Path.cwd() / "output")
    repo_root: Path = REPO_ROOT
    mirror: str | None = None
    python: Path = field(default_factory=lambda: Path(sys.executable))
    vault: tuple[VaultId, ...] = ()
    checks: Path | None = field(default_factory=lambda: own_checks(project_root()))
    idle_minutes: float = 60.0
