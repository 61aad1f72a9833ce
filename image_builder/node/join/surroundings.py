"""Prerequisites of a useful kubelet: network, local disk, images and their engine, a healthy machine.

Other units of this boot have prepared or tested most of these; this module waits for their reports and reads them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import layout, status
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError
from image_builder.node.join.codes import JoinError
from image_builder.node.join.identity import Identity
from image_builder.node.join.record import Done, digest
from image_builder.node.net import reach
from image_builder.node.net.retry import Deadline
from image_builder.node.preflight import checks, model
from image_builder.node.preflight.model import INCONCLUSIVE, PASSED
from image_builder.node.preflight.settings import Settings as Endpoints

_POLL = 0.5
_NETWORK = {"network.dns": 22, "network.tcp": 23}


@dataclass(frozen=True)
class PodGuard:
    """The unit that keeps pods away from the metadata service, and the file that exists while it does (azure_guest)."""

    unit: Path = Path("/etc/systemd/system/azure-pod-guard.service")
    mark: Path = Path("/run/azure-pod-guard")


@dataclass(frozen=True)
class Places(status.Places):
    """Also the list of preloaded images, and the pod guard."""

    listed: Path = layout.LIST
    guard: PodGuard = PodGuard()


def network(identity: Identity, guard: PodGuard, deadline: Deadline) -> Done:
    """Verify that pods are kept out, the address is ours, and the API server's name resolves and accepts connections.

    Raises JoinError (21 to 24).
    """
    while guard.unit.exists() and not guard.mark.exists():
        if not deadline.poll(_POLL):
            raise JoinError(24, f"{guard.unit.name} has not finished: see systemctl status {guard.unit.name}")
    while foreign := [ip for ip in identity.ip.split(",") if ip and not _is_ours(ip)]:
        if not deadline.poll(_POLL):
            raise JoinError(21, f"{foreign[0]} is not an address of this machine")
    host, port = identity.config.endpoint
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    endpoints = Endpoints(
        dns=() if reach.is_address(host) else (host,), tcp=(place,), wait_seconds=deadline.attempt()
    )
    for check in checks.reach_all(endpoints):
        if check.state != PASSED:
            raise JoinError(_NETWORK[check.code], check.reason)
    return Done(
        digest(identity.config.server, identity.ip), f"{identity.ip or 'any address'}, {place} answers"
    )


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True


def disk(places: Places, deadline: Deadline) -> Done:
    """Wait for this boot's report on the local disk, and check it. Raises JoinError (31, 32)."""
    return _section("disk", (31, 32), places, deadline)


def runtime(places: Places, engine: str, deadline: Deadline) -> Done:
    """Verify that the engine answers and has the preloaded images. Raises JoinError (41 to 43)."""
    done = _section("preload", (41, 42), places, deadline)
    if engine:
        for check in checks.reach_all(Endpoints(engine=engine, wait_seconds=deadline.attempt())):
            if check.state != PASSED:
                raise JoinError(43, check.reason)
        reason = f"{engine} answers; {done.reason}"
        return Done(digest(done.key, engine), reason)
    return done


def _section(name: str, numbers: tuple[int, int], places: Places, deadline: Deadline) -> Done:
    """Read a section of this boot's status, waiting for a missing one. Raises JoinError with one of ``numbers``.

    A section that failed ends this attempt, even if its unit retries: so does the unit of the join.
    """
    failed, missing = numbers
    if name not in status.wanted_sections(places.etc, places.listed):
        return Done("none", "this image has none", is_skipped=True)
    while True:
        sections = status.read(places.run)
        (check,) = checks.prepared(sections, [name])
        if check.state == PASSED:
            return Done(_digest(sections[name]), check.reason or str(sections[name]["state"]))
        if name in sections:
            raise JoinError(failed, f"{check.code}: {check.reason}")
        if not deadline.poll(_POLL):
            raise JoinError(missing, check.reason)


def gpu(places: Places, deadline: Deadline) -> Done:
    """Return the preflight's verdict, waiting for it. Raises JoinError (51 to 53).

    Unless the preflight is hard, a node that didn't pass still joins, with its taint, so that its fault is visible
    in the cluster; the join then fails in its last phase.
    """
    if not (places.etc / "preflight.json").exists():
        return Done("none", "this image has no preflight", is_skipped=True)
    verdict = _verdict(places, deadline)
    key = digest(str(verdict["boot_id"]), str(verdict["started"]))
    if verdict["state"] == PASSED:
        return Done(key, f"passed in {verdict['seconds']:g} s")
    number = 52 if verdict["state"] == INCONCLUSIVE else 51
    reason = f"{verdict['code']}: {verdict['reason']} (action: {verdict['action']})"
    if settings_files.load("preflight", places.etc).get("hard", False):
        raise JoinError(number, reason)
    return Done(key, reason, number=number)


def _verdict(places: Places, deadline: Deadline) -> dict[str, Any]:
    while True:
        try:
            return model.read_verdict(places)
        except NodeError as error:
            if not deadline.poll(_POLL):
                raise JoinError(53, error.message) from error


def _digest(section: Mapping[str, Any]) -> str:
    return digest(
        json.dumps({key: value for key, value in section.items() if key != "seconds"}, sort_keys=True)
    )
