"""``node-agent join``: the phases in order, each with its deadline, all within one budget."""

from __future__ import annotations

import json
import ssl
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from image_builder.node import files, status
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError
from image_builder.node.join import credentials, kubelet, surroundings
from image_builder.node.join import record as records
from image_builder.node.join import settings as join_settings
from image_builder.node.join.binding import slot
from image_builder.node.join.codes import OVER, PHASES, UNEXPECTED, JoinError
from image_builder.node.join.config import default_deadlines
from image_builder.node.join.credentials import Token
from image_builder.node.join.identity import Identity, learn
from image_builder.node.join.record import Done, Ended, Record, digest
from image_builder.node.join.settings import Settings
from image_builder.node.net import kube
from image_builder.node.net.kubeconfig import Pem
from image_builder.node.net.retry import Deadline, NotYet, patiently

# The budget (seconds) until a configuration says otherwise.
_BUDGET = 900.0
# How long a kubelet may need the token after its slot, to request its certificate (seconds).
_TOKEN_SECONDS = 60.0
# No configuration: the node hasn't joined, but the unit must not fail.
_NOT_CONFIGURED = 12
# Exit statuses. After the first, the unit is restarted; after the second, a person must change something first.
AGAIN, FINAL = 1, 2
_FINAL_KINDS = ("configuration", "image")


@dataclass(frozen=True)
class Places(surroundings.Places):
    """Also the firmware's id of the machine. ``restart`` is the command that restarts a running kubelet."""

    firmware: Path = Path("/sys/class/dmi/id/product_uuid")
    restart: tuple[str, ...] = kubelet.RESTART


@dataclass
class Joining:
    """The state of a run: what phases learn and later ones need. ``began`` is on the monotonic clock."""

    places: Places
    boot_id: str
    began: float
    settings: Settings = field(default_factory=Settings)
    identity_: Identity | None = None
    token: Token | None = field(default=None, repr=False)
    is_member: bool = False
    # A certificate of the kubelet that the API server no longer accepts.
    refused: str = field(default="", repr=False)
    # Why the preflight did not pass, if the node joins anyway.
    doubt: str = ""

    @property
    def identity(self) -> Identity:
        assert self.identity_ is not None
        return self.identity_

    @property
    def kubelet(self) -> kubelet.Places:
        kubernetes, restart = Path(self.settings.kubernetes), self.places.restart
        return kubelet.Places(self.places.run, self.places.etc, kubernetes=kubernetes, restart=restart)


def run(places: Places = Places()) -> int:
    """Join, or verify that this node has joined. Return 0 if it has, or has no configuration; else AGAIN or FINAL.

    Raises OSError if not even the record can be written.
    """
    began = time.monotonic()
    with files.lock(places.run / "join.lock"):
        joining = Joining(places, status.boot_id(places.boot_id), began)
        record = Record(places.run, joining.boot_id, lambda: time.monotonic() - began)
        for name in PHASES:
            ended = _phase(name, joining, record)
            record.end(ended)
            if ended.state == records.FAILED:
                break
        joined = record.close()
    if joined:
        return 0
    failure = record.failure
    if failure and failure.code == _NOT_CONFIGURED:
        return 0
    return FINAL if failure and records.kind(failure.code) in _FINAL_KINDS else AGAIN


def _phase(name: str, joining: Joining, record: Record) -> Ended:
    """Run one phase and return how it ended, whatever happens in it."""
    began = time.monotonic()
    config = joining.identity.config if joining.identity_ else None
    budget = joining.began + (config.budget_seconds if config else _BUDGET)
    deadlines = config.deadlines if config else default_deadlines()
    record.begin(name)
    try:
        if began >= budget:
            raise JoinError(
                OVER, f"timed out: the {budget - joining.began:g} s budget for all phases is used up"
            )
        done = _STEPS[name](joining, Deadline(min(budget, began + deadlines[name])))
    except JoinError as error:
        number, reason = error.number, error.message
    except (NodeError, OSError) as error:
        number, reason = UNEXPECTED, f"{type(error).__name__}: {error}"
    except Exception as error:
        # A bug. The record must say that the phase failed, not that it is still running. The journal gets the traceback
        # without the message, which may contain anything that a phase knows, even a token.
        sys.stderr.write("".join(traceback.format_tb(error.__traceback__)))
        number, reason = UNEXPECTED, f"{type(error).__name__}, a bug: the journal says where"
    else:
        if joining.identity_:
            record.about = _about(joining.identity)
        state = records.DEGRADED if done.number else records.SKIPPED if done.is_skipped else records.OK
        return Ended(name, state, time.monotonic() - began, done.number, done.reason, done.key)
    return Ended(name, records.FAILED, time.monotonic() - began, number, reason)


def _about(identity: Identity) -> dict[str, object]:
    return {
        "generation": identity.config.generation,
        "config": identity.config.digest,
        "source": identity.source,
        "vm_id": identity.machine.vm_id,
    }


def _identity(joining: Joining, deadline: Deadline) -> Done:
    places = joining.places
    try:
        joining.settings = join_settings.parse(settings_files.load("join", places.etc))
        settings_files.kubelet_taints(places.etc)
    except NodeError as error:
        raise JoinError(16, error.message) from error
    identity = learn(joining.settings, deadline, places.firmware)
    identity.labels(settings_files.build_id(places.release))
    joining.identity_ = identity
    reason = f"{identity.machine.vm_id}, generation {identity.config.generation} from {identity.source}"
    return Done(digest(identity.machine.vm_id, identity.config.digest), reason)


def _gpu(joining: Joining, deadline: Deadline) -> Done:
    done = surroundings.gpu(joining.places, deadline)
    joining.doubt = done.reason if done.number else ""
    return done


def _credentials(joining: Joining, deadline: Deadline) -> Done:
    identity, config = joining.identity, joining.identity.config
    key = digest(config.server, config.ca)
    if _is_member(joining, deadline):
        joining.is_member = True
        return Done(key, "the kubelet has its certificate")
    if config.credentials.kind == "broker":
        machine = {"vm_id": identity.machine.vm_id, "node": identity.name, "boot_id": joining.boot_id}
        token = credentials.from_broker(config, joining.settings.imds, machine, deadline)
    else:
        token = credentials.from_custom_data(identity.custom)
    credentials.prove(config, token.text, joining.settings.clock_seconds, deadline)
    credentials.check_life(token, _wait_for_slot(joining) + _TOKEN_SECONDS, time.time())
    joining.token = token
    return Done(key, f"a bootstrap token that {config.server} takes")


def _is_member(joining: Joining, deadline: Deadline) -> bool:
    """Return whether the kubelet has a certificate that the API server accepts. Raises JoinError (65 to 67)."""
    access, config = kubelet.membership(joining.kubelet.config), joining.identity.config
    if access is None:
        return False
    if access.server != config.server:
        message = f"this node belongs to {access.server}: joining another cluster needs a new disk"
        raise JoinError(65, message)
    if access.node != joining.identity.name:
        raise JoinError(65, f"the kubelet's certificate is for {access.node}: another name needs a new disk")
    # Not the CA on the disk, which this one replaces: if it is wrong, the kubelet must not get it.
    access = replace(access, authority=Pem(config.ca))
    refused = 0

    def probe() -> bool:
        nonlocal refused
        try:
            with kube.Client(access, timeout=deadline.attempt(kube.TIMEOUT)) as client:
                client.request("GET", "/version")
        except kube.KubeError as error:
            if error.status == 401 and access.certificate:
                refused += 1
                if refused >= credentials.REFUSALS:  # it has expired, for example, and a new one is needed
                    joining.refused = access.certificate.read()
                    return False
            if error.status == 403:
                return True
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                seconds = joining.settings.clock_seconds
                raise credentials.unproven(error.__cause__, config, seconds) from error
            raise NotYet(JoinError(67, error.message), error.retry_after) from error
        return True

    return patiently(probe, deadline)


def _wait_for_slot(joining: Joining) -> float:
    """Return the seconds until this node's slot; the time that earlier phases took counts toward the wait."""
    due = slot(joining.identity.machine.vm_id, joining.identity.config.window)
    return max(0.0, joining.began + due - time.monotonic())


def _join(joining: Joining, deadline: Deadline) -> Done:
    due = slot(joining.identity.machine.vm_id, joining.identity.config.window)
    key = f"{due:.3f}"
    if joining.is_member:
        return Done(key, "already a member", is_skipped=True)
    wait = _wait_for_slot(joining)
    if wait and not deadline.wait(wait):
        raise JoinError(71, f"the slot is in {wait:.0f} s, but only {deadline.remaining:.0f} s remain")
    return Done(key, f"slot {due:.1f} s of {joining.identity.config.window:.1f} s, waited {wait:.1f} s")


def _kubelet(joining: Joining, _deadline: Deadline) -> Done:
    build = settings_files.build_id(joining.places.release)
    token = joining.token.text if joining.token else ""
    return kubelet.write(joining.identity, token, build, joining.kubelet)


def _ready(joining: Joining, deadline: Deadline) -> Done:
    done = kubelet.wait_until_ready(
        joining.kubelet,
        joining.settings.healthz,
        joining.boot_id,
        deadline,
        refused=joining.refused,
        pod_network=joining.settings.pod_network,
    )
    if joining.doubt:
        raise JoinError(94, f"{done.reason}, with its taint: {joining.doubt}")
    return done


_STEPS: Mapping[str, Callable[[Joining, Deadline], Done]] = {
    "identity": _identity,
    "network": lambda joining, deadline: surroundings.network(
        joining.identity, joining.places.guard, deadline
    ),
    "disk": lambda joining, deadline: surroundings.disk(joining.places, deadline),
    "runtime": lambda joining, deadline: surroundings.runtime(
        joining.places, joining.settings.engine, deadline
    ),
    "gpu": _gpu,
    "credentials": _credentials,
    "join": _join,
    "kubelet": _kubelet,
    "ready": _ready,
}


def tell_status(places: Places = Places()) -> int:
    """Print the record; return 0 if this boot has joined. Raises NodeError (``join.none``) if there is no record."""
    record = records.read(places.run)
    if not record:
        raise NodeError("join.none", f"{places.run / records.FILE}: there is no record of this boot")
    sys.stdout.write(json.dumps(record, indent=1) + "\n")
    is_this_boot = record.get("boot_id") == status.boot_id(places.boot_id)
    return 0 if is_this_boot and record.get("state") == records.OK else 1
