"""Whether a token proves an identity: RS256 and nothing else, a known key, our issuer and audience, in its time.

RFC 7519 and RFC 8725, of which this takes the narrow reading: what is optional there and Entra ID always writes must be
here. Pure but for the arithmetic of RSA.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from image_builder.cluster.broker.refusal import unproven
from image_builder.node.join import schema

MOST_BYTES = 16384
_SMALLEST_KEY, _LARGEST_KEY = 2048, 8192  # bits
_SEGMENT = re.compile(r"[A-Za-z0-9_-]+")
_EXPONENT = 65537

Find = Callable[[str], rsa.RSAPublicKey | None]
"""Returns the key of that id, None where nobody has it."""


@dataclass(frozen=True)
class Rules:
    """Whom a token has to be of, and for. ``leeway`` is how far clocks may be apart, in seconds."""

    issuers: tuple[str, ...]
    audience: str
    tenant: str
    leeway: float


@dataclass(frozen=True)
class Proven:
    """Who it is: the identity's object id, and the resource that it belongs to (``xms_mirid``), in lower case."""

    object_id: str
    resource: str


def verify(token: str, find: Find, rules: Rules, now: float) -> Proven:
    """Return who a token proves. Raises RefusedError (401). ``now`` is Unix time."""
    if len(token) > MOST_BYTES:
        raise unproven("token.malformed", "the token is too long")
    parts = token.split(".")
    if len(parts) != 3:
        raise unproven("token.malformed", "the token has not three parts")
    header, claims = (_object(part) for part in parts[:2])
    # First what the key is used for: a token must not choose how it is checked.
    if header.get("alg") != "RS256":
        raise unproven("token.algorithm", "the token is not signed with RS256")
    if "crit" in header:
        raise unproven("token.malformed", "the token asks for an extension that is not known here")
    key_id = header.get("kid")
    if not isinstance(key_id, str) or not 0 < len(key_id) <= 256:
        raise unproven("token.key", "the token names no key")
    if (key := find(key_id)) is None:
        raise unproven("token.key", "the token is signed by a key that nobody knows")
    try:
        signed = f"{parts[0]}.{parts[1]}".encode("ascii")
        key.verify(_bytes(parts[2]), signed, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature as error:
        raise unproven("token.signature", "the token's signature is wrong") from error
    _check(claims, rules, now)
    return Proven(_text(claims, "oid"), _text(claims, "xms_mirid"))


def _check(claims: Mapping[str, Any], rules: Rules, now: float) -> None:
    if claims.get("iss") not in rules.issuers:
        raise unproven("token.issuer", "the token is of another issuer")
    if claims.get("aud") != rules.audience:
        raise unproven("token.audience", "the token is for another audience")
    if claims.get("tid") != rules.tenant:
        raise unproven("token.tenant", "the token is of another tenant")
    begins, issued, ends = (_moment(claims, name) for name in ("nbf", "iat", "exp"))
    if now > ends + rules.leeway:
        raise unproven("token.expired", f"the token expired {now - ends:.0f} s ago by this clock")
    if now < max(begins, issued) - rules.leeway:
        early = max(begins, issued) - now
        raise unproven(
            "token.early", f"the token begins in {early:.0f} s by this clock: one of the clocks is off"
        )


def _moment(claims: Mapping[str, Any], name: str) -> float:
    found = claims.get(name)
    # A bool is an int for Python, and a number that is no time at all compares with every other one.
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1 << 40:
        raise unproven("token.malformed", f"the token has no `{name}` that is a time")
    return float(found)


def _text(claims: Mapping[str, Any], name: str) -> str:
    found = claims.get(name, "")
    if not isinstance(found, str) or len(found) > 1024:
        raise unproven("token.malformed", f"the token's `{name}` is no text")
    return found.lower()


def _bytes(segment: str) -> bytes:
    if not _SEGMENT.fullmatch(segment):
        raise unproven("token.malformed", "a part of the token is no base64url")
    try:
        return base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    except binascii.Error as error:
        raise unproven("token.malformed", "a part of the token is no base64url") from error


def _object(segment: str) -> dict[str, Any]:
    try:
        found = schema.load(_bytes(segment))
    except (ValueError, RecursionError) as error:
        raise unproven("token.malformed", "a part of the token is no JSON") from error
    if not isinstance(found, dict):
        raise unproven("token.malformed", "a part of the token is no object")
    return found


def parse_keys(data: bytes) -> dict[str, rsa.RSAPublicKey]:
    """Return the keys of a JWKS (RFC 7517) that may sign with RS256, by their ids. Raises ValueError for no JWKS.

    What else is in there is left out: other kinds, keys for encryption, keys of another algorithm, weak ones.
    """
    found = schema.load(data)
    if not isinstance(found, dict) or not isinstance(found.get("keys"), list):
        raise ValueError("it is no JWKS")
    made = {}
    for one in found["keys"]:
        if isinstance(one, dict) and isinstance(key_id := one.get("kid"), str) and (key := _key(one)):
            made[key_id] = key
    return made


def _key(found: Mapping[str, Any]) -> rsa.RSAPublicKey | None:
    is_ours = (
        found.get("kty") == "RSA"
        and found.get("use", "sig") == "sig"
        and found.get("alg", "RS256") == "RS256"
    )
    if not is_ours:
        return None
    try:
        modulus, exponent = (int.from_bytes(_number(found[name])) for name in ("n", "e"))
        if not _SMALLEST_KEY <= modulus.bit_length() <= _LARGEST_KEY or exponent != _EXPONENT:
            return None
        return rsa.RSAPublicNumbers(exponent, modulus).public_key()
    except (KeyError, TypeError, ValueError):
        return None


def _number(text: object) -> bytes:
    if not isinstance(text, str) or not _SEGMENT.fullmatch(text):
        raise ValueError("it is no base64url")
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
