"""What the tests of joining share: certificates, a configuration, and what a metadata service answers.

The answers have the shape that Azure documents (Instance Metadata Service, API version 2021-02-01; managed identities,
2018-02-01), shortened, with made-up ids. They are no recordings: there is no cloud to ask here.
"""

from __future__ import annotations

import base64
import copy
import datetime
import ipaddress
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VM_ID = "02aab8a4-74ef-476e-8182-f6d2ba4166a6"
TOKEN = "k3y1dx.s3cr3ts3cr3ts3cr"
BROKER = {
    "kind": "broker",
    "url": "https://127.0.0.1/token",
    "resource": "api://node-broker",
}

INSTANCE: dict[str, Any] = {
    "compute": {
        "azEnvironment": "AzurePublicCloud",
        "location": "westus3",
        "name": "vmss-h100-a_17",
        "osProfile": {"adminUsername": "operator", "computerName": "vmss-h100-a000017"},
        "osType": "Linux",
        "placementGroupId": "f67c14ab-e92c-408c-ae2d-da15866ec79a",
        "platformFaultDomain": "2",
        "platformUpdateDomain": "0",
        "resourceGroupName": "Pools-West",
        "resourceId": (
            "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/Pools-West/providers/"
            "Microsoft.Compute/virtualMachineScaleSets/vmss-h100-a/virtualMachines/17"
        ),
        "subscriptionId": "8d10da13-8125-4ba9-a717-bf7490507b3d",
        "tagsList": [],
        "userData": "",
        "vmId": VM_ID.upper(),
        "vmScaleSetName": "vmss-h100-a",
        "vmSize": "Standard_ND96isr_H100_v5",
        "zone": "1",
    },
    "network": {
        "interface": [
            {
                "ipv4": {
                    "ipAddress": [{"privateIpAddress": "127.0.0.1", "publicIpAddress": ""}],
                    "subnet": [{"address": "10.20.0.0", "prefix": "16"}],
                },
                "ipv6": {"ipAddress": []},
                "macAddress": "0011AAFFBB22",
            }
        ]
    },
}
IDENTITY: dict[str, Any] = {
    "access_token": "the-managed-identity",
    "client_id": "2b9a3f1e-3a5e-4b57-9d5a-0a7b4f6d8c11",
    "expires_in": "86399",
    "expires_on": "1506484173",
    "ext_expires_in": "86399",
    "not_before": "1506397473",
    "resource": "api://node-broker",
    "token_type": "Bearer",
}
TOO_MANY = (429, {"Retry-After": "0"}, b'{"error":"Too many requests"}')


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM."""

    certificate: str
    key: str


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _signed(
    common: str, days: tuple[float, float], issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    signer, signing_key = issuer or (_name(common), key)
    made = (
        x509.CertificateBuilder(signer, _name(common), key.public_key(), x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False
        )
    )
    if issuer is None:
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        made = made.add_extension(usage, critical=True)
    else:
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Pair(
        made.sign(signing_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )


def authority() -> Pair:
    """Return a new CA."""
    return _signed("cluster", (-1, 30), None)


def issued(by: Pair, common: str, days: tuple[float, float] = (-1, 30)) -> Pair:
    """Return a certificate for 127.0.0.1; ``days`` from now is it valid."""
    key = serialization.load_pem_private_key(by.key.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _signed(common, days, (_name("cluster"), key))


def document(ca: str, server: str = "https://127.0.0.1:6443", **parts: Any) -> dict[str, Any]:
    """Return a configuration; ``parts`` replace whole keys of it."""
    return {
        "format": 1,
        "generation": 7,
        "cluster": {"server": server, "ca": ca, "dns": ["10.0.0.10"]},
        "credentials": {"kind": "custom-data"},
        "node": {
            "max_pods": 30,
            "labels": {"node.example/pool": "h100-a"},
            "platform_labels": {
                "topology.kubernetes.io/zone": "zone",
                "node.example/fault-domain": "fault_domain",
                "node.example/build": "build",
            },
            "taints": [{"key": "node.example/team", "value": "research", "effect": "NoSchedule"}],
        },
        **parts,
    }


def instance(user_data: bytes = b"") -> dict[str, Any]:
    """Return the metadata service's answer about this machine."""
    made = copy.deepcopy(INSTANCE)
    made["compute"]["userData"] = base64.b64encode(user_data).decode()
    return made
