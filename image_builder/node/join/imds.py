"""What the platform says of this machine, and for it: Azure's instance metadata service."""

from __future__ import annotations

import base64
import binascii
import json
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import imds
from image_builder.node.asking import Said
from image_builder.node.join.codes import JoinError
from image_builder.node.join.deadline import Deadline

_INSTANCE = "/metadata/instance?api-version=2021-02-01"
_ATTESTED = "/metadata/attested/document?api-version=2020-09-01"
_IDENTITY = "/metadata/identity/oauth2/token?api-version=2018-02-01"
_PRODUCT_UUID = Path("/sys/class/dmi/id/product_uuid")


@dataclass(frozen=True)
class Machine:
    """This machine. What the platform does not say is empty; ``user_data`` is decoded already."""

    vm_id: str
    resource_id: str = ""
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
        """Return the cloud provider's name of the machine; the group's name is in lower case there."""
        lowered = re.sub(r"(?i)(?<=/resourcegroups/)[^/]+", lambda group: group[0].lower(), self.resource_id)
        return f"azure://{lowered}" if self.resource_id else ""

    def facts(self) -> dict[str, str]:
        """Return what labels may be made of."""
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
    """Return what a machine knows of itself: the firmware's id of it. Raises OSError."""
    return Machine(vm_id=path.read_text(encoding="ascii").strip().lower())


def instance(address: str, deadline: Deadline) -> Machine:
    """Ask who this machine is. Raises JoinError (11)."""
    said = _patiently(address, _INSTANCE, deadline, 11)
    try:
        return parse(json.loads(said.body))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise JoinError(11, f"the metadata service's answer is not understood: {error!r}") from error


def parse(found: Mapping[str, Any]) -> Machine:
    """Return the machine of an answer. Raises KeyError, TypeError, ValueError and their like."""
    compute = found["compute"]
    interfaces = found.get("network", {}).get("interface", [])
    addresses = interfaces[0]["ipv4"]["ipAddress"] if interfaces else []
    try:
        user_data = base64.b64decode(compute.get("userData") or "", validate=True)
    except binascii.Error as error:
        raise ValueError("the user data is no base64") from error
    return Machine(
        vm_id=str(compute["vmId"]).lower(),
        resource_id=str(compute.get("resourceId") or ""),
        ip=str(addresses[0]["privateIpAddress"]) if addresses else "",
        region=str(compute.get("location") or ""),
        zone=str(compute.get("zone") or ""),
        fault_domain=str(compute.get("platformFaultDomain") or ""),
        scale_set=str(compute.get("vmScaleSetName") or ""),
        vm_size=str(compute.get("vmSize") or ""),
        placement_group=str(compute.get("placementGroupId") or ""),
        user_data=user_data,
    )


def identity_token(address: str, resource: str, client_id: str, deadline: Deadline) -> str:
    """Return a token that proves this machine's managed identity to ``resource``. Raises JoinError (61)."""
    query = {"resource": resource, **({"client_id": client_id} if client_id else {})}
    said = _patiently(address, f"{_IDENTITY}&{urllib.parse.urlencode(query)}", deadline, 61)
    try:
        token = json.loads(said.body)["access_token"]
    except (KeyError, TypeError, ValueError) as error:
        # Not what it holds: a token could be in it.
        raise JoinError(61, f"the metadata service's answer has no token: {type(error).__name__}") from error
    return str(token)


def attested_document(address: str, nonce: str, deadline: Deadline) -> str:
    """Return a document (PKCS#7, base64) that proves this machine to whoever gave the nonce. Raises JoinError (60)."""
    said = _patiently(address, f"{_ATTESTED}&{urllib.parse.urlencode({'nonce': nonce})}", deadline, 60)
    try:
        document = json.loads(said.body)["signature"]
    except (KeyError, TypeError, ValueError) as error:
        raise JoinError(
            60, f"the metadata service's answer is no document: {type(error).__name__}"
        ) from error
    return str(document)


def _patiently(address: str, path: str, deadline: Deadline, number: int) -> Said:
    """Ask until there is an answer. Raises JoinError with this number."""
    try:
        return imds.answer(path, deadline.left, address=address, clock=deadline.clock, sleep=deadline.sleep)
    except OSError as error:
        raise JoinError(number, str(error)) from error
