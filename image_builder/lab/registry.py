"""The lab's registry: Debian's ``docker-registry`` on its own loopback address, under its real name.

It runs from the tools tree in a sandbox root, but in the host's network, with a certificate made for this one
start. Clients reach it by name: a client puts ``Registry.hosts_line`` in /etc/hosts and trusts
``Registry.ca``. Nothing listens on 127.0.0.1, so many registries can run side by side, each on port 443.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import urllib3

from image_builder.canonical import JSON
from image_builder.errors import CommandError, HostError
from image_builder.lab import certificate, pause
from image_builder.system import process
from image_builder.system.sandbox import open_root

HOST = pause.HOST
PORT = 443
_START_SECONDS = 30.0
_PROGRAM = "usr/bin/docker-registry"
# In the root's /run, a tmpfs: the private key and the secret never reach a disk.
_HOME = "/run/registry"
_STORAGE = f"{_HOME}/storage"
# Connecting has a timeout, and so does every single read or write; a transfer as a whole has none.
_TIMEOUT = urllib3.Timeout(connect=10, read=120)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Registry:
    """A running registry: ``ca`` is the PEM file of its authority, ``log`` its output, including its requests."""

    address: str
    port: int
    ca: Path
    log: Path

    @property
    def hosts_line(self) -> str:
        """Return the line for /etc/hosts that directs a client here."""
        return f"{self.address} {HOST}"

    def connect(self) -> urllib3.HTTPSConnectionPool:
        """Return a connection pool that verifies its name and its authority; the caller closes it."""
        return urllib3.HTTPSConnectionPool(
            self.address,
            self.port,
            timeout=_TIMEOUT,
            retries=False,
            maxsize=os.cpu_count() or 1,
            headers={"Host": HOST},
            blocksize=_BLOCK,
            ca_certs=os.fspath(self.ca),
            cert_reqs="CERT_REQUIRED",
            server_hostname=HOST,
            assert_hostname=HOST,
        )


@contextmanager
def serve(tools: Path, storage: Path, work: Path, *, writable: bool = False) -> Iterator[Registry]:
    """Run a registry over ``storage`` until the block ends; it is serving when the block begins.

    ``tools`` is a tree with the package docker-registry. ``work`` gets the registry's log, its authority's
    certificate and the sandbox's scratch files; the caller deletes it. Without ``writable``, the storage is mounted
    read-only and a push is refused (405). Callers must be in a private mount namespace
    (``namespace.run_isolated``); the registry dies with the thread that started it. Raises HostError if the
    tools tree lacks the program or the storage is missing, and CommandError with the end of its log if it
    doesn't serve, or ends before the block does.
    """
    if not (tools / _PROGRAM).exists():
        raise HostError(f"{tools} holds no {_PROGRAM}: the tools tree lacks the package docker-registry")
    if not storage.is_dir():
        raise HostError(f"{storage} is not a directory: the registry has nothing to serve")
    address = _random_address()
    place = work / f"registry-{address}"
    place.mkdir(parents=True)
    log = place / "registry.log"
    binds = {_STORAGE: storage}
    with open_root(
        [tools],
        place / "sandbox",
        binds={} if writable else binds,
        writable_binds=binds if writable else {},
        network=True,
    ) as root:
        home = root.path / _HOME.lstrip("/")
        files = certificate.make(HOST, home)
        ca = place / "ca.pem"
        ca.write_bytes(files.ca.read_bytes())
        config = json.dumps(configuration(address, writable=writable), indent=1)
        (home / "config.json").write_text(config, encoding="utf-8")
        argv = root.argv([f"/{_PROGRAM}", "serve", f"{_HOME}/config.json"])
        with process.background(argv, log=log) as child:
            registry = Registry(address, PORT, ca, log)
            _await(registry, child.poll, argv)
            try:
                yield registry
            except Exception as error:
                if child.poll() is not None:
                    raise _failure(registry, argv, f"ended with status {child.returncode}") from error
                raise
            if child.poll() is not None:
                raise _failure(registry, argv, f"ended with status {child.returncode}")


def configuration(address: str, *, writable: bool) -> Mapping[str, JSON]:
    """Return the registry's configuration (version 0.1 of its format, which is YAML, a superset of JSON)."""
    return {
        "version": 0.1,
        "log": {"level": "error", "formatter": "text"},
        "storage": {
            "filesystem": {"rootdirectory": _STORAGE},
            "delete": {"enabled": False},
            "maintenance": {
                "uploadpurging": {"enabled": False},
                "readonly": {"enabled": not writable},
            },
        },
        "http": {
            "addr": f"{address}:{PORT}",
            "secret": secrets.token_hex(32),
            "tls": {"certificate": f"{_HOME}/server.pem", "key": f"{_HOME}/server-key.pem"},
        },
    }


def _random_address() -> str:
    """Return a loopback address unlikely to be in use: one of some 16 million, none in 127.0.0."""
    second, third, fourth = 1 + secrets.randbelow(254), secrets.randbelow(256), 1 + secrets.randbelow(254)
    return f"127.{second}.{third}.{fourth}"


def _await(registry: Registry, status: Callable[[], int | None], argv: list[str]) -> None:
    """Wait until the registry answers under its name. ``status`` returns its exit status. Raises CommandError."""
    deadline = time.monotonic() + _START_SECONDS
    with registry.connect() as pool:
        while True:
            if (ended := status()) is not None:
                raise _failure(registry, argv, f"ended with status {ended}")
            try:
                answer = pool.request("GET", "/v2/", timeout=2).status
                reason = f"answers with HTTP status {answer}"
                if answer == 200:
                    return
            except urllib3.exceptions.HTTPError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise _failure(registry, argv, f"does not serve after {_START_SECONDS:g} s: {reason}")
            time.sleep(0.02)


def _failure(registry: Registry, argv: list[str], reason: str) -> CommandError:
    lines = registry.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return CommandError(
        f"the registry at {registry.address}:{registry.port} {reason}: {shlex.join(argv)}",
        argv=argv,
        tail="\n".join(lines[-process.TAIL_LINES :]),
        hint=f"port {PORT} must be free on the loopback addresses: a server on 0.0.0.0:{PORT} takes them all",
    )
