"""The lab's registry as a service: one per host, started by ``lab up``, ended by ``lab down``.

The running lab is recorded in one file below /run, so a reboot forgets it. The file identifies the process by its id
and its start time: an id that has been reused for another process isn't mistaken for it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import urllib3

from image_builder.bake.build import obtain_lock, supplied
from image_builder.bake.plan.resolve import requirements
from image_builder.bake.records import remember
from image_builder.bake.stages.kind import Extensions
from image_builder.bake.store import Store
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition
from image_builder.errors import ImageBuilderError
from image_builder.events import Monitor, shown_stage
from image_builder.lab.registry import HOST
from image_builder.node import files
from image_builder.settings import Settings
from image_builder.system import process
from image_builder.system.signals import listening

_PLACE = Path("/run/image-builder-lab")
# The server, in its own PID namespace, records where it serves; its parent adds the process id.
_SERVING, _STATE, _CA = _PLACE / "serving.json", _PLACE / "state.json", _PLACE / "ca.pem"
_STARTING = _PLACE.with_suffix(".lock")  # next to the directory, which the server removes
_START_SECONDS = 1800.0
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class State:
    """A running lab: ``pid`` and ``started`` (kernel ticks since boot) name its process."""

    pid: int
    started: int
    host: str
    address: str
    port: int
    ca: str
    images: tuple[str, ...]

    def as_json(self) -> dict[str, JSON]:
        """Return the state for users' tools."""
        return {**asdict(self), "images": list(self.images)}

    def answers(self) -> bool:
        """Return whether it answers over TLS, under its name."""
        with urllib3.HTTPSConnectionPool(
            self.address,
            self.port,
            ca_certs=self.ca,
            server_hostname=self.host,
            assert_hostname=self.host,
            timeout=5,
            retries=False,
        ) as pool:
            try:
                return pool.request("GET", "/v2/", headers={"Host": self.host}).status == 200
            except urllib3.exceptions.HTTPError:
                return False


def running() -> State | None:
    """Return the running lab, or None."""
    try:
        document = json.loads(_STATE.read_bytes())
        state = State(**{**document, "images": tuple(document["images"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return state if _started(state.pid) == state.started else None


def _started(pid: int) -> int | None:
    """Return when a process started, in kernel ticks; None if it doesn't exist or is a zombie."""
    try:
        # The second field may contain blanks and parentheses; the fields after its last parenthesis don't (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def start(argv: Sequence[str], store: Path, monitor: Monitor) -> State:
    """Start ``argv``, which is to serve, in its own session, and wait until it does.

    Raises ImageBuilderError with the end of its log if it ends instead or takes too long. If the wait fails or is
    interrupted, the server is killed. A caller that arrives while another one starts the lab waits and gets the same.
    """
    with files.lock(_STARTING):
        return running() or _start(argv, store, monitor)


def _start(argv: Sequence[str], store: Path, monitor: Monitor) -> State:
    (store / "logs").mkdir(parents=True, exist_ok=True)
    log = store / "logs" / "lab.log"
    for path in (log, _SERVING, _STATE):  # left by one that was killed
        path.unlink(missing_ok=True)
    child = process.detach(argv, log=log)
    with shown_stage(monitor, "lab"):
        try:
            return _await_serving(child.pid, lambda: child.poll() is None, log, monitor)
        except BaseException:
            # No file names it yet, so `lab down` couldn't find it. Its namespaces end with it.
            child.kill()
            child.wait()
            raise


def _await_serving(pid: int, alive: Callable[[], bool], log: Path, monitor: Monitor) -> State:
    """Wait until process ``pid`` serves, and record that. Raises ImageBuilderError."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and alive():
        if _SERVING.exists():
            document = json.loads(_SERVING.read_bytes())
            record = {**document, "pid": pid, "started": _started(pid)}
            files.write_json(_STATE, record, durable=False)
            if state := running():
                return state
        if last := _last_line(log):
            monitor.stage_doing("lab", last)
        time.sleep(0.2)
    raise ImageBuilderError(f"the lab does not start:\n{process.tail(log)}", hint=f"its log: {log}")


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return lines[-1].partition(" ")[2].strip() if lines else ""


def serve(definition: ImageDefinition, settings: Settings, monitor: Monitor, extensions: Extensions) -> None:
    """Serve the lab's images until SIGTERM or SIGINT; runs in the namespace."""
    Store(settings.store).prepare()
    with listening(signal.SIGTERM, signal.SIGINT) as wait:
        lock = obtain_lock(definition, settings, monitor, extensions)
        needs = requirements(definition, extensions)
        remember(definition, needs, lock, settings, extensions.supplier, monitor)
        with supplied(definition, lock, settings, monitor, extensions) as supply:
            endpoint = supply.endpoints()[HOST]
            _PLACE.mkdir(mode=0o755, exist_ok=True)
            shutil.copyfile(endpoint.ca, _CA)
            images = [i.ref for i in definition.preload if i.ref.startswith(f"{HOST}/")]
            document = {
                "host": HOST,
                "address": endpoint.address,
                "port": endpoint.port,
                "ca": os.fspath(_CA),
                "images": images,
            }
            files.write_json(_SERVING, document, durable=False)
            monitor.note(f"serving at {endpoint.address}")
            try:
                wait()
            finally:
                for path in (_SERVING, _STATE, _CA):
                    path.unlink(missing_ok=True)
                with suppress(OSError):
                    _PLACE.rmdir()


def stop() -> bool:
    """End the running lab and wait until it has ended; return False if there was none."""
    state = running()
    if state is None:
        return False
    with suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _started(state.pid) == state.started and time.monotonic() < deadline:
        time.sleep(0.05)
    if _started(state.pid) == state.started:
        raise ImageBuilderError(f"the lab (process {state.pid}) does not end")
    return True
