"""Tokens of managed identities: only RS256, with a key of the provider, our issuer and audience, and valid now.

They follow RFC 7519 and RFC 8725, read narrowly: what is optional there but always written by Entra ID is required
here. Pure, apart from the arithmetic of RSA.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from jwt import InvalidSignatureError, InvalidTokenError, PyJWS

from image_builder.cluster.broker.config import Identity
from image_builder.cluster.broker.refusal import unproven
from image_builder.node.join import schema

ALGORITHM = "RS256"
MOST_BYTES = 16384
_FORM = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){2}")
_LONGEST_TEXT = 1024

FindKey = Callable[[str], rsa.RSAPublicKey | None]
"""Returns the key of that id, None if the provider has none."""


@dataclass(frozen=True)
class Caller:
    """The identity's object id, and the resource that it belongs to (``xms_mirid``), in lower case."""

    object_id: str
    resource: str


def verify(token: str, find_key: FindKey, rules: Identity, now: float) -> Caller:
    """Return the identity that a token proves. Raises RefusedError (401). ``now`` is Unix time."""
    if len(token) > MOST_BYTES:
        raise unproven("token.malformed", "the token is too long")
    try:
        header = _json(base64.urlsafe_b64decode(token.partition(".")[0] + "=="))
    except ValueError as error:
        raise unproven("token.malformed", "the token's header is not base64url") from error
    # Check the algorithm first: a token must not choose how it is checked.
    if header.get("alg") != ALGORITHM:
        raise unproven("token.algorithm", f"the token is not signed with {ALGORITHM}")
    if not _FORM.fullmatch(token):
        raise unproven("token.malformed", "the token is not three parts of base64url")
    if "crit" in header:
        raise unproven("token.malformed", "the token requires an extension that is not supported")
    key_id = header.get("kid")
    if not isinstance(key_id, str) or not 0 < len(key_id) <= 256:
        raise unproven("token.key", "the token names no key")
    if (key := find_key(key_id)) is None:
        raise unproven("token.key", "the token is signed with an unknown key")
    try:
        claims = _json(PyJWS().decode_complete(token, key, algorithms=[ALGORITHM])["payload"])
    except InvalidSignatureError as error:
        raise unproven("token.signature", "the token's signature is wrong") from error
    except InvalidTokenError as error:
        raise unproven("token.malformed", "a part of the token is not base64url") from error
    _check(claims, rules, now)
    return Caller(_text(claims, "oid"), _text(claims, "xms_mirid"))


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = schema.load(data)
    except (ValueError, RecursionError) as error:
        raise unproven("token.malformed", "a part of the token is not JSON") from error
    if not isinstance(value, dict):
        raise unproven("token.malformed", "a part of the token is not an object")
    return value


def _check(claims: Mapping[str, Any], rules: Identity, now: float) -> None:
    if claims.get("iss") not in rules.believed:
        raise unproven("token.issuer", "the token is from another issuer")
    if claims.get("aud") != rules.audience:
        raise unproven("token.audience", "the token is for another audience")
    if claims.get("tid") != rules.tenant:
        raise unproven("token.tenant", "the token is from another tenant")
    begins, issued, ends = (_moment(claims, name) for name in ("nbf", "iat", "exp"))
    if now > ends + rules.leeway_seconds:
        raise unproven("token.expired", f"the token expired {now - ends:.0f} s ago by this clock")
    if now < max(begins, issued) - rules.leeway_seconds:
        early = max(begins, issued) - now
        raise unproven(
            "token.early", f"the token begins in {early:.0f} s by this clock: one of the clocks is off"
        )


def _moment(claims: Mapping[str, Any], name: str) -> float:
    moment = claims.get(name)
    # To Python, a bool is an int, and NaN compares false with every other number.
    if isinstance(moment, bool) or not isinstance(moment, (int, float)) or not 0 <= moment < 1 << 40:
        raise unproven("token.malformed", f"the token has no `{name}` that is a time")
    return float(moment)


def _text(claims: Mapping[str, Any], name: str) -> str:
    text = claims.get(name, "")
    if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
        raise unproven("token.malformed", f"the token's `{name}` is not a text")
    return text.lower()
