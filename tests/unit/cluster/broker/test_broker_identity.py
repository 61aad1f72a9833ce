"""Tokens that prove an identity: a valid one does, and any change makes it worthless."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding

from image_builder.cluster.broker import identity, keys
from image_builder.cluster.broker.config import Identity
from image_builder.cluster.broker.refusal import RefusedError
from tests.support.azure import identities as ids

NOW = 1_800_000_000.0
RULES = Identity(tenant=ids.TENANT, audience=ids.AUDIENCE, leeway_seconds=60.0)
KEYS = keys.parse_keys(ids.jwks("one", "two"))


def verify(token: str) -> identity.Caller:
    return identity.verify(token, KEYS.get, RULES, NOW)


def made(**parts: Any) -> str:
    return ids.token(ids.claims(NOW, **parts))


def test_a_managed_identitys_token_is_believed() -> None:
    assert verify(made()) == identity.Caller(ids.OBJECT, ids.SCALE_SET.lower())
    assert verify(ids.token(ids.claims(NOW), by="two")).object_id == ids.OBJECT
    # Version 2.0 has another issuer; a user-assigned identity outside Azure's compute has no resource.
    other = made(iss=f"https://login.microsoftonline.com/{ids.TENANT}/v2.0", ver="2.0", xms_mirid=None)
    assert verify(other) == identity.Caller(ids.OBJECT, "")


def _header(**parts: Any) -> Callable[[], str]:
    return lambda: ids.token(ids.claims(NOW), header=parts)


def _claims(**parts: Any) -> Callable[[], str]:
    return lambda: made(**parts)


def _hmac() -> str:
    """Sign by HMAC with the public key as the secret, the attack that RFC 8725 warns about."""
    head = ids.segment(json.dumps({"typ": "JWT", "alg": "HS256", "kid": "one"}).encode())
    text = f"{head}.{ids.segment(json.dumps(ids.claims(NOW)).encode())}"
    pem = (
        ids.key()
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return f"{text}.{ids.segment(hmac.new(pem, text.encode(), hashlib.sha256).digest())}"


def _unsigned(algorithm: str) -> str:
    head = ids.segment(json.dumps({"alg": algorithm, "kid": "one"}).encode())
    return f"{head}.{ids.segment(json.dumps(ids.claims(NOW)).encode())}."


def _padded(scheme: str) -> str:
    """Sign with the right key by another RSA scheme, and label it RS256."""
    text = made().rpartition(".")[0]
    if scheme == "pss":
        done = ids.key().sign(text.encode(), padding.PSS(padding.MGF1(hashes.SHA256()), 32), hashes.SHA256())
    else:
        done = ids.key().sign(text.encode(), padding.PKCS1v15(), hashes.SHA512())
    return f"{text}.{ids.segment(done)}"


def _changed(part: int) -> str:
    """Change one bit of a part without changing its form."""
    parts = made().split(".")
    data = bytearray(base64.urlsafe_b64decode(parts[part] + "=="))
    data[len(data) // 2] ^= 1
    parts[part] = ids.segment(bytes(data))
    return ".".join(parts)


def _swapped() -> str:
    """Put another token's claims under this one's signature."""
    head, _, sign = made().split(".")
    return f"{head}.{made(oid='0' * 8 + ids.OBJECT[8:]).split('.')[1]}.{sign}"


def _own_key() -> str:
    """Sign with a key that the token itself brings along."""
    return ids.token(ids.claims(NOW), by="mallory", header={"kid": "one", "jwk": ids.jwk("mallory")})


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "no algorithm": (lambda: _unsigned("none"), "token.algorithm"),
    "no algorithm, in capitals": (lambda: _unsigned("NONE"), "token.algorithm"),
    "no signature": (lambda: _unsigned("RS256"), "token.malformed"),
    "HMAC by the public key": (_hmac, "token.algorithm"),
    "another algorithm's name": (_header(alg="RS512"), "token.algorithm"),
    "an algorithm that is no text": (_header(alg=["RS256"]), "token.algorithm"),
    "PSS that says it is RS256": (lambda: _padded("pss"), "token.signature"),
    "SHA-512 that says it is RS256": (lambda: _padded("sha512"), "token.signature"),
    "a changed signature": (lambda: _changed(2), "token.signature"),
    "another token's claims": (_swapped, "token.signature"),
    "a key of its own": (_own_key, "token.signature"),
    "another key's id": (lambda: ids.token(ids.claims(NOW), header={"kid": "two"}), "token.signature"),
    "a key that nobody knows": (_header(kid="three"), "token.key"),
    "no key": (_header(kid=None), "token.key"),
    "a key that is no text": (_header(kid=1), "token.key"),
    "an extension": (_header(crit=["exp"]), "token.malformed"),
    "another issuer": (_claims(iss="https://sts.windows.net/0/"), "token.issuer"),
    "an issuer that begins right": (_claims(iss=f"https://sts.windows.net/{ids.TENANT}/x"), "token.issuer"),
    "no issuer": (_claims(iss=None), "token.issuer"),
    "an issuer that is a list": (_claims(iss=[f"https://sts.windows.net/{ids.TENANT}/"]), "token.issuer"),
    "another audience": (_claims(aud="https://management.azure.com/"), "token.audience"),
    "several audiences": (_claims(aud=[ids.AUDIENCE, "x"]), "token.audience"),
    "no audience": (_claims(aud=None), "token.audience"),
    "another tenant": (_claims(tid=ids.OBJECT), "token.tenant"),
    "it is expired": (_claims(exp=int(NOW) - 61), "token.expired"),
    "it has no end": (_claims(exp=None), "token.malformed"),
    "its end is no time": (_claims(exp="2100-01-01"), "token.malformed"),
    "its end is true": (_claims(exp=True), "token.malformed"),
    "it begins before all time": (_claims(nbf=-1), "token.malformed"),
    "its end is beyond all time": (_claims(exp=1e300), "token.malformed"),
    "it is not valid yet": (_claims(nbf=int(NOW) + 61), "token.early"),
    "it was issued tomorrow: a clock is off": (_claims(iat=int(NOW) + 86400), "token.early"),
    "it has no beginning": (_claims(nbf=None), "token.malformed"),
    "an identity that is no text": (_claims(oid=7), "token.malformed"),
    "an identity that is a long text": (_claims(oid="a" * 1025), "token.malformed"),
    "two parts": (lambda: made().rpartition(".")[0], "token.malformed"),
    "five parts, as if it were encrypted": (lambda: f"{made()}.a.b", "token.malformed"),
    "nothing": (lambda: "", "token.malformed"),
    "no base64url": (lambda: made().replace(".", ".+", 1), "token.malformed"),
    "base64url with padding": (lambda: made().replace(".", "=.", 1), "token.malformed"),
    "too long": (lambda: made(x="a" * 20000), "token.malformed"),
    "claims that are a list": (lambda: ids.signed(b'{"alg":"RS256","kid":"one"}', b"[]"), "token.malformed"),
    "claims that are no JSON": (lambda: ids.signed(b'{"alg":"RS256","kid":"one"}', b"{"), "token.malformed"),
    "a key that is there twice": (
        lambda: ids.signed(
            b'{"alg":"RS256","kid":"one"}', json.dumps(ids.claims(NOW)).encode()[:-1] + b',"aud":"x"}'
        ),
        "token.malformed",
    ),
    "a number that is none": (
        lambda: ids.signed(b'{"alg":"RS256","kid":"one"}', b'{"exp": NaN}'),
        "token.malformed",
    ),
    "nested without an end": (
        lambda: ids.signed(b'{"alg":"RS256","kid":"one"}', b"[" * 11000),
        "token.malformed",
    ),
}


@pytest.mark.parametrize(("make", "code"), REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused(make: Callable[[], str], code: str) -> None:
    with pytest.raises(RefusedError) as caught:
        verify(make())
    assert (caught.value.status, caught.value.code) == (401, code)


def test_clocks_may_be_a_minute_apart() -> None:
    assert verify(made(exp=int(NOW) - 59)) and verify(made(nbf=int(NOW) + 59, iat=int(NOW) + 59))


def test_only_strong_keys_for_rs256_are_taken() -> None:
    document = {
        "keys": [
            ids.jwk("one"),
            ids.jwk("weak", bits=1024),
            {**ids.jwk("one"), "kid": "encrypts", "use": "enc"},
            {**ids.jwk("one"), "kid": "other", "alg": "RS512"},
            {**ids.jwk("one"), "kid": "three", "e": "Aw"},
            {"kty": "EC", "kid": "ec", "crv": "P-256", "x": "AA", "y": "AA"},
            {"kty": "oct", "kid": "one", "k": "c2VjcmV0"},
            {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
            {**ids.jwk("one"), "kid": None},
            "no key",
        ]
    }
    assert set(keys.parse_keys(json.dumps(document).encode())) == {"one"}


@pytest.mark.parametrize("data", [b"", b"[]", b'{"keys": {}}', b"<html>"])
def test_what_is_no_jwks(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a JWKS|Expecting value"):
        keys.parse_keys(data)


@pytest.mark.parametrize(("bits", "is_taken"), [(2047, False), (2048, True), (8192, True), (8193, False)])
def test_a_key_has_a_size_that_is_worth_its_arithmetic(bits: int, is_taken: bool) -> None:
    modulus = (1 << bits - 1) + 1
    entry = {**ids.jwk("one"), "n": ids.segment(modulus.to_bytes((bits + 7) // 8))}
    assert bool(keys.parse_keys(json.dumps({"keys": [entry]}).encode())) == is_taken


@pytest.mark.parametrize(("key_id", "is_looked_up"), [("", False), ("k" * 256, True), ("k" * 257, False)])
def test_only_the_name_of_a_key_is_looked_up(key_id: str, is_looked_up: bool) -> None:
    key_ids: list[str] = []
    with pytest.raises(RefusedError, match="key"):
        identity.verify(ids.token(ids.claims(NOW), header={"kid": key_id}), key_ids.append, RULES, NOW)
    assert key_ids == ([key_id] if is_looked_up else [])


def test_times_and_texts_have_their_limits() -> None:
    assert verify(made(nbf=0, iat=0)) and verify(made(xms_mirid="a" * 1024)).resource == "a" * 1024
    with pytest.raises(RefusedError, match="`exp` that is a time"):
        verify(made(exp=1 << 40))
