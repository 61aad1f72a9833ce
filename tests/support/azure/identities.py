"""An identity provider for tests: its own keys, and tokens as Entra ID issues them to a machine's managed identity.

Claims and header follow Microsoft's documentation (access token claims reference, version 1.0 tokens; `xms_mirid` of
managed identities) with made-up ids. They aren't recordings: no cloud is available here.
"""

from __future__ import annotations

import base64
import functools
import json
import time
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

TENANT = "3d2f1b8e-7c55-4f8b-9a55-1d6a0c9e4b11"
AUDIENCE = "api://node-broker"
OBJECT = "9b1f6c1e-52a3-4b55-8a0e-6f2f3d1f7a01"
SCALE_SET = (
    "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourcegroups/Pools-West/providers/"
    "Microsoft.Compute/virtualMachineScaleSets/vmss-h100-a"
)


@functools.cache
def key(name: str = "one", bits: int = 2048) -> rsa.RSAPrivateKey:
    """Return a key of the provider, the same one on each call."""
    return rsa.generate_private_key(65537, bits)


def segment(data: bytes) -> str:
    """Return base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def jwk(name: str = "one", **more: Any) -> dict[str, Any]:
    """Return a public key as it appears in the provider's JWKS."""
    numbers = (
        key(name, **({"bits": more.pop("bits")} if "bits" in more else {})).public_key().public_numbers()
    )
    n, e = (value.to_bytes((value.bit_length() + 7) // 8) for value in (numbers.n, numbers.e))
    return {"kty": "RSA", "use": "sig", "kid": name, "x5t": name, "n": segment(n), "e": segment(e), **more}


def jwks(*names: str) -> bytes:
    return json.dumps({"keys": [jwk(name) for name in names]}).encode()


def claims(now: float | None = None, **parts: Any) -> dict[str, Any]:
    """Return a managed identity's claims; ``parts`` replace some, and None removes one."""
    at = int(time.time() if now is None else now)
    whole = {
        "aud": AUDIENCE,
        "iss": f"https://sts.windows.net/{TENANT}/",
        "iat": at - 300,
        "nbf": at - 300,
        "exp": at + 86100,
        "aio": "E2NgYHj+Y3mCAA==",
        "appid": "2b9a3f1e-3a5e-4b57-9d5a-0a7b4f6d8c11",
        "appidacr": "2",
        "idp": f"https://sts.windows.net/{TENANT}/",
        "idtyp": "app",
        "oid": OBJECT,
        "sub": OBJECT,
        "tid": TENANT,
        "ver": "1.0",
        "xms_mirid": SCALE_SET,
        **parts,
    }
    return {name: value for name, value in whole.items() if value is not None}


def token(
    told: Mapping[str, Any] | None = None, *, by: str = "one", header: Mapping[str, Any] | None = None
) -> str:
    """Return a signed token."""
    head = {"typ": "JWT", "alg": "RS256", "x5t": by, "kid": by, **(header or {})}
    body = claims() if told is None else told
    return signed(json.dumps(head).encode(), json.dumps(body).encode(), by)


def signed(head: bytes, body: bytes, by: str = "one") -> str:
    """Return a signed token made of exactly these bytes."""
    text = f"{segment(head)}.{segment(body)}"
    return f"{text}.{segment(key(by).sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"
