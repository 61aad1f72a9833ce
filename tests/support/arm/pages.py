"""An import host's store: Azurite, run as a child process of the test, with a page blob for each upload disk."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobSasPermissions, BlobServiceClient, generate_blob_sas

from tests.selftest.surroundings import cache_directory

ACCOUNT = "devstoreaccount1"
# Azurite's documented key of its only account.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
API = "2025-11-05"
_CONTAINER = "disks"
_PACKAGE = Path(__file__).with_name("azurite")


def installed() -> Path:
    """Return Azurite's program, which npm installs once per lock file. Skip the test if npm is missing."""
    if not (npm := shutil.which("npm")):
        pytest.skip("no npm on this host")
    lock = (_PACKAGE / "package-lock.json").read_bytes()
    folder = cache_directory() / "azurite"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (folder / "done").exists() or (folder / "done").read_bytes() != lock:
            for name in ("package.json", "package-lock.json"):
                shutil.copyfile(_PACKAGE / name, folder / name)
            argv = [npm, "ci", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
            subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            (folder / "done").write_bytes(lock)
    return folder / "node_modules/azurite/dist/src/blob/main.js"


@dataclass
class Store:
    """Azurite and the address of its disks: ``host`` is the import host in front of it, once there is one.

    ``longest`` caps the lifetime of signed URLs, in seconds.
    """

    url: str
    host: str = ""
    longest: float = 1e9
    sizes: dict[str, int] = field(default_factory=dict)
    _service: Any = None

    def __post_init__(self) -> None:
        self._service = BlobServiceClient(f"{self.url}/{ACCOUNT}", credential=KEY, api_version=API)
        self._service.create_container(_CONTAINER)

    def blob(self, name: str) -> Any:
        return self._service.get_blob_client(_CONTAINER, name)

    def create(self, name: str, size: int) -> None:
        self.blob(name).create_page_blob(size)
        self.sizes[name] = size

    def sas(self, name: str, seconds: int) -> str:
        """Return the signed URL for writing and listing pages."""
        token = generate_blob_sas(
            ACCOUNT,
            _CONTAINER,
            name,
            account_key=KEY,
            permission=BlobSasPermissions(read=True, write=True),
            expiry=datetime.now(UTC) + timedelta(seconds=min(seconds, self.longest)),
        )
        return f"{self.host or self.url}/{ACCOUNT}/{_CONTAINER}/{name}?{token}"

    def footer(self, name: str) -> bytes:
        """Return a disk's last sector, or empty bytes if the disk was deleted."""
        with suppress(ResourceNotFoundError):
            return self.read(name, self.sizes[name] - 512, 512)
        return b""

    def read(self, name: str, offset: int, length: int) -> bytes:
        data: bytes = self.blob(name).download_blob(offset, length).readall()
        return data

    def ranges(self, name: str) -> list[tuple[int, int]]:
        return [(part.start, part.end + 1) for part in self.blob(name).list_page_ranges()]

    def delete(self, name: str) -> None:
        with suppress(ResourceNotFoundError):
            self.blob(name).delete_blob()


@contextmanager
def azurite(folder: Path) -> Iterator[Store]:
    """Run Azurite until the block ends."""
    argv = ["node", os.fspath(installed()), "--location", ".", "--blobHost", "127.0.0.1", "--blobPort", "0"]
    argv += ["--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout
            for line in child.stdout:
                if address := re.search(r"successfully listens on (\S+)", line):
                    break
            else:
                raise RuntimeError("Azurite ended before it listened")
            yield Store(address[1])
        finally:
            child.send_signal(signal.SIGKILL)
