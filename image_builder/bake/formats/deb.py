"""The control file of a Debian package: one stanza of fields, which apt's index of a repository repeats."""

from __future__ import annotations

import os
from pathlib import Path

from debian.arfile import ArError
from debian.deb822 import Deb822
from debian.debfile import DebError, DebFile


class NotAPackageError(ValueError):
    """The file is not a Debian package."""


def read_control(package: Path) -> str:
    """Return a package's control stanza. Raises NotAPackageError, OSError."""
    try:
        with DebFile(filename=os.fspath(package)) as deb:
            return str(deb.debcontrol().dump())
    except (DebError, ArError) as error:
        raise NotAPackageError(str(error)) from error


def fields(control: str) -> dict[str, str]:
    """Return the fields of a control stanza; none for what has not even a name and a version."""
    try:
        stanza = {str(name): str(value) for name, value in Deb822(control).items()}
    except ValueError:
        return {}
    return stanza if {"Package", "Version", "Architecture"} <= stanza.keys() else {}
