"""Credentials for package repositories: apt's own files (apt_auth.conf(5)), for apt and for other downloads.

They are read in place each time, and never copied.
"""

from __future__ import annotations

import base64
import netrc
import os
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from image_builder.errors import FetchError

# A file like /etc/apt/auth.conf, instead of the host's own.
VARIABLE = "IMAGE_BUILDER_APT_AUTH"
_FILE, _FOLDER = Path("/etc/apt/auth.conf"), Path("/etc/apt/auth.conf.d")
HINT = f"put credentials into /etc/apt/auth.conf.d, or into a file of that format named by {VARIABLE}"


def configuration() -> str:
    """Return the lines of apt.conf with which a private apt finds the credentials."""
    if file := os.environ.get(VARIABLE):
        return f'Dir::Etc::netrc "{os.path.abspath(file)}";\nDir::Etc::netrcparts "/dev/null";\n'
    return f'Dir::Etc::netrc "{_FILE}";\nDir::Etc::netrcparts "{_FOLDER}";\n'


def header(url: str) -> dict[str, str]:
    """Return the header to request ``url`` with, the same as apt would send. Raises FetchError for a broken file."""
    parts = urllib.parse.urlsplit(url)
    for path in _files():
        try:
            machines = netrc.netrc(os.fspath(path)).hosts
        except netrc.NetrcParseError as error:
            raise FetchError(f"{path}:{error.lineno}: not a netrc entry") from None
        except OSError as error:
            raise FetchError(f"can't read the credentials {path}: {error.strerror}") from error
        for machine, (login, _, password) in machines.items():
            if _is_meant(machine, parts):
                basic = base64.b64encode(f"{login}:{password}".encode()).decode("ascii")
                return {"Authorization": f"Basic {basic}"}
    return {}


def _files() -> Iterator[Path]:
    if file := os.environ.get(VARIABLE):
        yield Path(file)
        return
    if _FILE.exists():
        yield _FILE
    yield from sorted(_FOLDER.glob("*.conf"))


def _is_meant(machine: str, url: urllib.parse.SplitResult) -> bool:
    """Return whether an entry ``[scheme://]host[:port][/path]`` is for an address; without a scheme only for https."""
    scheme, _, place = machine.rpartition("://")
    if (scheme or "https") != url.scheme:
        return False
    host, slash, path = place.partition("/")
    ours = url.netloc if ":" in host else url.hostname or ""
    return host.lower() == ours.lower() and f"{url.path}/".startswith(f"/{path}" if slash else "/")
