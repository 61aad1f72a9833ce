"""This machine's identity, and its configuration from the first of user data, custom data and a file that has one.

Custom data is a JSON object, ``{"config": {...}, "bootstrap_token": "..."}``, with either key or both: only root can
read it, so it may contain a token. Data that doesn't begin with ``{`` isn't for this program.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node.join import schema as schemas
from image_builder.node.join.codes import JoinError
from image_builder.node.join.config import NONE, PLATFORM, NodeConfig, parse
from image_builder.node.join.settings import Settings
from image_builder.node.net import imds
from image_builder.node.net.fetch import Response
from image_builder.node.net.retry import Deadline

_INSTANCE = "/metadata/instance?api-version=2021-02-01"
_PRODUCT_UUID = Path("/sys/class/dmi/id/product_uuid")
_CUSTOM_KEYS = ("config", "bootstrap_token")
# The metadata service's share of the deadline if there is another configuration.
_SHARE = 0.5
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Machine:
    """This machine. Values that the platform doesn't provide are empty; ``user_data`` is already decoded."""

    vm_id: str
    resource_id: str = ""
    cloud: str = ""
    subscription: str = ""
    resource_group: str = ""
    ip: str = ""
    region: str = ""
    zone: str = ""
    fault_domain: str = ""
    scale_set: str = ""
    vm_size: str = ""
    placement_group: str = ""
    user_data: bytes = b""

    @property
    def provider_id(self) -> str:
        """Return the cloud provider's id of the machine, in which the resource group's name is in lower case."""
        lowered = re.sub(r"(?i)(?<=/resourcegroups/)[^/]+", lambda group: group[0].lower(), self.resource_id)
        return f"azure://{lowered}" if self.resource_id else ""

    def facts(self) -> dict[str, str]:
        """Return the facts that labels may be set from."""
        return {
            "zone": f"{self.region}-{self.zone}" if self.region and self.zone else "",
            "region": self.region,
            "fault_domain": self.fault_domain,
            "scale_set": self.scale_set,
            "vm_size": self.vm_size,
            "vm_id": self.vm_id,
            "placement_group": self.placement_group,
        }


def without_platform(path: Path = _PRODUCT_UUID) -> Machine:
    """Return a machine with only what it knows of itself, the firmware's id. Raises OSError."""
    return Machine(vm_id=path.read_text(encoding="ascii").strip().lower())


def instance(address: str, deadline: Deadline) -> Machine:
    """Return this machine as the metadata service describes it. Raises JoinError (11)."""
    response = ask_platform(address, _INSTANCE, deadline, 11)
    try:
        return parse_instance(json.loads(response.body))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise JoinError(11, f"the metadata service's answer can't be parsed: {error!r}") from error


def ask_platform(address: str, path: str, deadline: Deadline, number: int) -> Response:
    """Query the metadata service until it answers. Raises JoinError with this number."""
    try:
        return imds.answer(path, deadline, address=address)
    except OSError as error:
        raise JoinError(number, str(error)) from error


def parse_instance(document: Mapping[str, Any]) -> Machine:
    """Return the machine in an answer. Raises AttributeError, IndexError, KeyError, TypeError or ValueError."""
    compute = document["compute"]
    interfaces = document.get("network", {}).get("interface", [])
    addresses = interfaces[0]["ipv4"]["ipAddress"] if interfaces else []
    try:
        user_data = base64.b64decode(compute.get("userData") or "", validate=True)
    except binascii.Error as error:
        raise ValueError("the user data is not base64") from error
    return Machine(
        vm_id=str(compute["vmId"]).lower(),
        resource_id=str(compute.get("resourceId") or ""),
        cloud=str(compute.get("azEnvironment") or ""),
        subscription=str(compute.get("subscriptionId") or ""),
        resource_group=str(compute.get("resourceGroupName") or ""),
        ip=str(addresses[0]["privateIpAddress"]) if addresses else "",
        region=str(compute.get("location") or ""),
        zone=str(compute.get("zone") or ""),
        fault_domain=str(compute.get("platformFaultDomain") or ""),
        scale_set=str(compute.get("vmScaleSetName") or ""),
        vm_size=str(compute.get("vmSize") or ""),
        placement_group=str(compute.get("placementGroupId") or ""),
        user_data=user_data,
    )


@dataclass(frozen=True)
class Identity:
    """This machine, its configuration, the configuration's source, and the custom data."""

    machine: Machine
    config: NodeConfig
    source: str
    custom: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def ip(self) -> str:
        """Return the node's address; empty if the kubelet should detect it."""
        return {PLATFORM: self.machine.ip, NONE: ""}.get(self.config.ip, self.config.ip)

    @property
    def provider_id(self) -> str:
        """Return the cloud provider's id of the machine; empty for none."""
        chosen = self.config.provider_id
        return {PLATFORM: self.machine.provider_id, NONE: ""}.get(chosen, chosen)

    @property
    def name(self) -> str:
        """Return the name that the kubelet registers with."""
        return self.config.name or os.uname().nodename.lower()

    def labels(self, build: str) -> dict[str, str]:
        """Return the labels; ``build`` is the image's. Raises JoinError (15) for an invalid label value."""
        facts = {**self.machine.facts(), "build": build}
        own = {key: facts[fact] for key, fact in self.config.platform_labels.items() if facts[fact]}
        for key, value in own.items():
            if not _VALUE.fullmatch(value):
                raise JoinError(15, f"node.platform_labels.{key}: {value!r} is not a valid label value")
        return {**self.config.labels, **own}


def learn(settings: Settings, deadline: Deadline, firmware: Path) -> Identity:
    """Return this machine with its configuration. Raises JoinError (11 to 15), OSError."""
    custom = custom_data(Path(settings.custom_data))
    written = _written(custom, Path(settings.file))
    machine = _machine(settings, deadline, firmware, alone=not written)
    if machine.user_data.lstrip().startswith(b"{"):
        source, text = "user data", machine.user_data
    elif written:
        source, text = written
    else:
        raise JoinError(12, f"no configuration in user data, custom data or {settings.file}")
    identity = Identity(machine, _parsed(text, source), source, custom)
    _check(identity)
    return identity


def custom_data(path: Path) -> dict[str, Any]:
    """Return the custom data that is for this program. Raises JoinError (13), OSError."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    if not text.lstrip().startswith(b"{"):
        return {}
    try:
        document: dict[str, Any] = schemas.load(text)
    except ValueError as error:
        raise JoinError(13, f"the custom data is not JSON: {type(error).__name__}") from error
    if not set(document) & set(_CUSTOM_KEYS):
        return {}  # not for this program; cloud-init also stores user data here if there is no custom data
    if unknown := sorted(set(document) - set(_CUSTOM_KEYS)):
        raise JoinError(13, "; ".join(f"custom data: {key}: unknown key" for key in unknown))
    return document


def _written(custom: Mapping[str, Any], file: Path) -> tuple[str, bytes] | None:
    if "config" in custom:
        return "custom data", json.dumps(custom["config"], sort_keys=True).encode()
    try:
        return str(file), file.read_bytes()
    except FileNotFoundError:
        return None


def _machine(settings: Settings, deadline: Deadline, firmware: Path, *, alone: bool) -> Machine:
    if not settings.imds:
        return without_platform(firmware)
    try:
        return instance(settings.imds, deadline if alone else deadline.sooner(deadline.remaining * _SHARE))
    except JoinError:
        if alone:
            raise
        return without_platform(firmware)


def _parsed(text: bytes, source: str) -> NodeConfig:
    try:
        return parse(text)
    except JoinError as error:
        raise JoinError(error.number, f"{source}: {error.message}") from error


def _check(identity: Identity) -> None:
    """Raise JoinError (15) with all values that the platform should have provided but didn't."""
    missing = [
        f"{path}: the configuration leaves it to the platform, which does not provide it"
        for path, chosen, value in (
            ("node.ip", identity.config.ip, identity.ip),
            ("node.provider_id", identity.config.provider_id, identity.provider_id),
            ("azure", PLATFORM if identity.config.azure else NONE, identity.machine.cloud),
        )
        if chosen == PLATFORM and not value
    ]
    if missing:
        raise JoinError(15, "; ".join(missing))
