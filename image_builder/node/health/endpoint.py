"""``node-agent health-endpoint``: the node's state for Azure's Application Health extension, on loopback.

Serves one address, ``GET /health``. Each answer is read from the files that other commands leave in ``/run/node``, so
nothing is started or asked for it; what they mean is decided in ``application``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import layout, status
from image_builder.node import settings as settings_files
from image_builder.node.decode import at_least, within
from image_builder.node.errors import NodeError
from image_builder.node.health import application
from image_builder.node.health.application import Documents, Memory, Upgrade
from image_builder.node.net import serving

ADDRESS, PATH = "127.0.0.1", "/health"
# Concurrent connections, and the seconds that one may take: the extension makes one every few seconds.
_MOST, _SECONDS = 4, 5.0
# The document that each command writes, by the name of its settings.
_DOCUMENTS = {"preflight": "preflight", "join": "provision", "health": "health"}


@dataclass(frozen=True)
class Settings:
    """``/etc/node-agent/health-endpoint.json``, as the role node_health writes it.

    ``grace_seconds``: how long a node may initialize. ``stale_seconds``: how old the last look at it may be.
    ``phases``: of a rolling upgrade. ``lease_seconds``: how long a lease counts after its last change.
    ``idle_gpu_users``: how often an idle node has ``/dev/nvidia-uvm`` open.
    """

    port: int = 10299
    grace_seconds: int = 1800
    stale_seconds: int = 300
    phases: int = 1
    lease_seconds: int = 3600
    idle_gpu_users: int = 0

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        yield from within("port", self.port, 1, 65535)
        for name in ("grace_seconds", "stale_seconds", "phases", "lease_seconds"):
            yield from at_least(name, getattr(self, name), 1)
        yield from at_least("idle_gpu_users", self.idle_gpu_users, 0)


@dataclass(frozen=True)
class Places:
    """Where everything is; others only in tests."""

    run: Path = status.DIRECTORY
    etc: Path = settings_files.DIRECTORY
    sys: Path = Path("/sys")
    boot_id: Path = status.BOOT_ID
    listed: Path = layout.LIST

    @property
    def leases(self) -> Path:
        """Return the directory whose files are the leases of jobs."""
        return self.run / "busy"


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings; raises NodeError (``settings``) with everything that is wrong."""
    return settings_files.parse(Settings, document, "health-endpoint")


def look(places: Places, boot_id: str) -> Documents:
    """Read what is known of the node. Raises no error: what can't be read is named."""
    documents: dict[str, Any] = {}
    damaged = []
    for name in ("status", *_DOCUMENTS.values()):
        try:
            documents[name] = _object((places.run / f"{name}.json").read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            damaged.append(f"{name}.json")
    expected = [document for name, document in _DOCUMENTS.items() if (places.etc / f"{name}.json").exists()]
    return Documents(
        boot_id=boot_id,
        now=time.time(),
        expected=frozenset(expected),
        sections=status.wanted_sections(places.etc, places.listed),
        damaged=tuple(damaged),
        **documents,
    )


def _object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def busy(places: Places, settings: Settings) -> tuple[str, ...]:
    """Return what says that a job runs here: live leases, and programs that have the GPUs.

    A lease is a file in ``/run/node/busy``; it counts until ``lease_seconds`` after its time of modification, so that
    one that was left behind ends by itself, and a job that is longer touches it or dates it ahead. Every CUDA program
    has ``/dev/nvidia-uvm`` open, and the kernel counts that as references to its module: one file to read, right in
    containers too, and right again when a program was killed.
    """
    reasons = [f"lease {name}" for name in _leases(places.leases, time.time() - settings.lease_seconds)]
    users = _gpu_users(places.sys)
    if users > settings.idle_gpu_users:
        reasons.append(f"{users} users of /dev/nvidia-uvm")
    return tuple(reasons)


def _leases(directory: Path, oldest: float) -> list[str]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return []
    names = []
    for entry in entries:
        try:
            if entry.stat(follow_symlinks=False).st_mtime > oldest:
                names.append(entry.name)
        except FileNotFoundError:
            pass  # the job ended just now
    return sorted(names)


def _gpu_users(sys: Path) -> int:
    try:
        return int((sys / "module/nvidia_uvm/refcnt").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0  # no driver, and so no job that uses it


class Endpoint:
    """Answers for a node; remembers of earlier questions what ``application.step`` needs."""

    def __init__(self, settings: Settings, places: Places) -> None:
        self._settings, self._places = settings, places
        self._boot_id = status.boot_id(places.boot_id)
        self._memory, self._lock = Memory(), threading.Lock()

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Return status and body for one question."""
        settings = self._settings
        documents = look(self._places, self._boot_id)
        verdict = application.judge(documents, settings.stale_seconds)
        with self._lock:
            before = self._memory
            self._memory, verdict = application.step(
                before, verdict, time.monotonic(), settings.grace_seconds
            )
        upgrade = Upgrade(application.phase(documents.vm_id, settings.phases), busy(self._places, settings))
        return application.answer(verdict, upgrade)


def open_server(settings: Settings, places: Places) -> serving.Server:
    """Return a server that has its port already. Raises OSError."""
    endpoint = Endpoint(settings, places)

    class Handler(serving.Handler):
        def respond(self) -> None:
            if self.command != "GET":
                self.answer(405, {"error": "method", "message": "only GET is allowed"}, {"Allow": "GET"})
            elif self.path.partition("?")[0] != PATH:
                self.answer(404, {"error": "path", "message": f"the only path is {PATH}"})
            else:
                self.answer(*endpoint.answer())

    return serving.Server((ADDRESS, settings.port), Handler, most=_MOST, seconds=_SECONDS)


def run(places: Places = Places()) -> int:
    """Serve until the process is ended. Raises NodeError (``settings``, ``endpoint.port``)."""
    settings = parse(settings_files.load("health-endpoint", places.etc))
    try:
        server = open_server(settings, places)
    except OSError as error:
        message = f"{ADDRESS}:{settings.port} can't be served: {error.strerror}"
        raise NodeError("endpoint.port", message) from error
    with server:
        status.tell(f"health-endpoint: http://{ADDRESS}:{server.port}{PATH}")
        server.serve_forever(poll_interval=serving.TICK)
    return 0
