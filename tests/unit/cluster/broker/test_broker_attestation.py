"""Documents that prove a machine's identity: current ones signed by Azure, and nothing that only looks like them."""

from __future__ import annotations

import base64
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_der_x509_certificate

from image_builder.cluster.broker import attestation
from image_builder.cluster.broker.attestation import NONCE_SECONDS, Machine, Nonces, Rules, until_next
from image_builder.cluster.broker.refusal import RefusedError
from tests.support.azure import attested
from tests.support.azure.attested import SUBSCRIPTION, document, signer
from tests.support.nodes.joins import VM_ID

NONCE = "0123456789"
NOW = time.time()
# A run of all tests takes minutes, and documents are valid only around the time when they were made.
content = partial(attested.content, now=NOW)


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    path = tmp_path / "azure.pem"
    path.write_text(signer().authority)
    return Rules(attestation.load_authorities(path), ("metadata.azure.com",), (SUBSCRIPTION,), 60.0)


def refused(text: str, rules: Rules, now: float = NOW) -> str:
    with pytest.raises(RefusedError) as caught:
        attestation.verify(text, rules, now)
    assert caught.value.status == (403 if caught.value.code == "document.subscription" else 401)
    return caught.value.code


def test_a_document_says_which_machine_asked_with_which_nonce(rules: Rules) -> None:
    assert attestation.verify(document(content(NONCE)), rules, NOW) == Machine(VM_ID, NONCE)
    # As the service writes it; other programs write it in capitals.
    assert attestation.verify(document(content(NONCE, VM_ID.upper())), rules, NOW).vm_id == VM_ID


SIGNED: dict[str, tuple[tuple[str, ...], bool]] = {
    "the name itself": (("metadata.azure.com",), True),
    "a region's": (("southcentralus.metadata.azure.com",), True),
    "any region's": (("*.metadata.azure.com",), True),
    "a name that ends alike": (("evilmetadata.azure.com",), False),
    "a name that begins alike": (("metadata.azure.com.example.net",), False),
    "another service of Azure": (("management.azure.com",), False),
    "another cloud": (("metadata.azure.us",), False),
}


@pytest.mark.parametrize(("names", "is_believed"), SIGNED.values(), ids=SIGNED)
def test_whom_a_documents_certificate_names(rules: Rules, names: tuple[str, ...], is_believed: bool) -> None:
    text = document(content(NONCE), signer(*names))
    if is_believed:
        assert attestation.verify(text, rules, NOW).vm_id == VM_ID
    else:
        assert refused(text, rules) == "document.signer"


def test_a_certificate_that_leads_elsewhere_is_nobodys(rules: Rules) -> None:
    # The forger's certificate has the name that Azure's has, and names its own authority as the issuer.
    assert refused(document(content(NONCE), signer(authority="mallory")), rules) == "document.signer"
    assert refused(document(content(NONCE), signer(days=(-30, -1))), rules) == "document.signer"
    assert refused(document(content(NONCE), signer(days=(1, 30))), rules) == "document.signer"
    assert refused(document(content(NONCE), signer(usage="mail")), rules) == "document.signer"


ODD: dict[str, tuple[bytes, bytes]] = {
    "a key of an unknown kind": (bytes.fromhex("2a864886f70d010101"), bytes.fromhex("2a864886f70d01017f")),
    "a name that is none": (b"\x1awestus3.metadata", b"\x1awest s3.metadata"),
    "a name of an unknown kind": (b"\x82\x12metadata", b"\xa5\x12metadata"),
}


@pytest.mark.parametrize(("before", "after"), ODD.values(), ids=ODD)
def test_an_odd_certificate_is_nobodys(rules: Rules, before: bytes, after: bytes) -> None:
    good = signer("westus3.metadata.azure.com", "metadata.azure.com")
    odd = good.certificate.public_bytes(Encoding.DER).replace(before, after)
    assert odd != good.certificate.public_bytes(Encoding.DER)
    text = document(content(NONCE), replace(good, certificate=load_der_x509_certificate(odd)))
    assert refused(text, rules) == "document.signer"


def test_what_was_not_signed_is_not_believed(rules: Rules) -> None:
    forged = document(content(NONCE), signature=b"\0" * 256)
    assert refused(forged, rules) == "document.signature"
    good = base64.b64decode(document(content(NONCE)))
    changed = good.replace(VM_ID.encode(), b"11111111-2222-4333-8444-555555555555")
    assert changed != good
    assert refused(base64.b64encode(changed).decode(), rules) == "document.signature"


MALFORMED: dict[str, str] = {
    "nothing": "",
    "no base64": "%%%",
    "no message": base64.b64encode(b"\x30\x03\x02\x01\x01").decode(),
    "a length without an end": base64.b64encode(b"\x30\x80\x00\x00").decode(),
    "a length that is cut off": base64.b64encode(b"\x30").decode(),
    "half of one": document(content(NONCE))[:2000],
    "signed attributes": document(content(NONCE), attributes=attested.der(0xA0)),
    "another digest": document(content(NONCE), digest=attested.der(0x06, bytes.fromhex("2b0e03021a"))),
    "no JSON": document(b"vmId"),
    "a key that is there twice": document(b'{"vmId":"a","vmId":"b"}'),
    "deep JSON": document(b"[" * 5000),
    "no times": document(content(NONCE, timeStamp=None)),
    "times that are none": document(content(NONCE, timeStamp={"createdOn": "now", "expiresOn": "later"})),
    "no machine": document(content(NONCE, vmId="")),
    "no nonce": document({name: value for name, value in content(NONCE).items() if name != "nonce"}),
    "too long": document(content(NONCE, sku="x" * 9000)),
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_document(rules: Rules, text: str) -> None:
    assert refused(text, rules) == "document.malformed"


TIMES: list[tuple[float, bool]] = [
    (-61, False),
    (-59, True),
    (6 * 3600 + 299, True),
    (6 * 3600 + 301, False),
]


@pytest.mark.parametrize(("later", "is_in_time"), TIMES)
def test_a_document_has_its_time(rules: Rules, later: float, is_in_time: bool) -> None:
    began = float(int(NOW))
    text = document(content(NONCE, now=began))
    if is_in_time:
        assert attestation.verify(text, rules, began + later)
    else:
        assert refused(text, rules, began + later) == "document.expired"


def test_another_subscriptions_machine_may_not_join(rules: Rules) -> None:
    text: dict[str, Any] = content(NONCE, subscriptionId="11111111-2222-4333-8444-555555555555")
    assert refused(document(text), rules) == "document.subscription"


def test_authorities_that_are_none_are_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "azure.pem"
    for text in ("", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        path.write_text(text)
        with pytest.raises(Exception, match=r"azure\.pem: no certificates"):
            attestation.load_authorities(path)


# The start of a minute.
NODE, MINUTE = "vmss-h100-a000017", 1_800_000_000.0
NONCES = Nonces(lambda: b"the key of the certificate")


def test_a_nonce_is_ten_digits_of_one_machine_node_and_minute() -> None:
    nonce = NONCES.current(VM_ID, NODE, MINUTE)
    assert re.fullmatch("[0-9]{10}", nonce)
    assert NONCES.current(VM_ID, NODE, MINUTE + NONCE_SECONDS - 1) == nonce
    others = [
        NONCES.current(VM_ID, NODE, MINUTE + NONCE_SECONDS),
        NONCES.current(VM_ID[::-1], NODE, MINUTE),
        NONCES.current(VM_ID, NODE + "8", MINUTE),
        Nonces(lambda: b"another key").current(VM_ID, NODE, MINUTE),
    ]
    assert len({nonce, *others}) == 5
    # Nonces are well spread, whatever they are made from.
    assert len({NONCES.current(VM_ID, f"node-{number}", MINUTE) for number in range(1000)}) == 1000


def test_it_is_taken_for_a_minute_or_two_by_each_replica() -> None:
    nonce = NONCES.current(VM_ID, NODE, MINUTE + NONCE_SECONDS - 1)
    replica = Nonces(lambda: b"the key of the certificate")
    assert replica.is_valid(nonce, VM_ID, NODE, MINUTE)
    assert replica.is_valid(nonce, VM_ID, NODE, MINUTE + 2 * NONCE_SECONDS - 1)
    assert not replica.is_valid(nonce, VM_ID, NODE, MINUTE + 2 * NONCE_SECONDS)
    assert not replica.is_valid(nonce, VM_ID, NODE, MINUTE - 1)
    assert not replica.is_valid(nonce, VM_ID, NODE + "8", MINUTE)
    assert not replica.is_valid("", VM_ID, NODE, MINUTE) and not replica.is_valid("ä", VM_ID, NODE, MINUTE)


def test_who_used_one_is_told_when_the_next_is_there() -> None:
    assert until_next(MINUTE + 5) == 55.0 and until_next(MINUTE) == NONCE_SECONDS
