"""Parses a PKCS#7 message (RFC 2315 and 5652: SignedData) with one signer. No signature is checked here.

The RFCs are read narrowly: DER, definite lengths, the content inside, RSA with SHA-256 directly over the content (no
signed attributes). That is what Azure's metadata service writes; everything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography import x509

_SEQUENCE, _SET, _INTEGER, _OCTETS, _OID = 0x30, 0x31, 0x02, 0x04, 0x06
_CONTEXT_0 = 0xA0
_SIGNED_DATA, _DATA = bytes.fromhex("2a864886f70d010702"), bytes.fromhex("2a864886f70d010701")
_SHA256 = bytes.fromhex("608648016503040201")
_RSA, _SHA256_WITH_RSA = bytes.fromhex("2a864886f70d010101"), bytes.fromhex("2a864886f70d01010b")
# The metadata service names the signature's algorithm where the digest's belongs.
_DIGESTS, _SIGNATURES = (_SHA256, _SHA256_WITH_RSA), (_RSA, _SHA256_WITH_RSA)


@dataclass(frozen=True)
class SignedData:
    """``content`` is what was signed, with ``signer``'s key (RSA, PKCS #1 v1.5, SHA-256)."""

    content: bytes
    signer: x509.Certificate
    others: tuple[x509.Certificate, ...]
    signature: bytes


@dataclass(frozen=True)
class _Element:
    tag: int
    value: bytes
    whole: bytes


def parse(data: bytes) -> SignedData:
    """Return the parts of a message. Raises ValueError for anything that isn't exactly of this form."""
    kind, wrapped = _children(_only(data, _SEQUENCE), _OID, _CONTEXT_0)
    _is_one_of(kind, _SIGNED_DATA)
    _, _, inner, certificate_set, signers = _children(
        _only(wrapped, _SEQUENCE), _INTEGER, _SET, _SEQUENCE, _CONTEXT_0, _SET
    )
    content_kind, content = _children(inner, _OID, _CONTEXT_0)
    _is_one_of(content_kind, _DATA)
    certificates = [x509.load_der_x509_certificate(element.whole) for element in _elements(certificate_set)]
    _, issuer_and_serial, digest, algorithm, signature = _children(
        _only(signers, _SEQUENCE), _INTEGER, _SEQUENCE, _SEQUENCE, _SEQUENCE, _OCTETS
    )
    _is_one_of(_elements(digest)[0].value, *_DIGESTS)
    _is_one_of(_elements(algorithm)[0].value, *_SIGNATURES)
    issuer, serial = _elements(issuer_and_serial)
    number = int.from_bytes(serial.value, signed=True)
    signer = [
        certificate
        for certificate in certificates
        if certificate.serial_number == number and certificate.issuer.public_bytes() == issuer.whole
    ]
    if len(signer) != 1:
        raise ValueError("the signer's certificate is not there")
    others = tuple(certificate for certificate in certificates if certificate is not signer[0])
    return SignedData(_only(content, _OCTETS), signer[0], others, signature)


def _elements(data: bytes) -> list[_Element]:
    """Return the consecutive elements of ``data``. Raises ValueError."""
    elements, at = [], 0
    while at < len(data):
        tag, head = data[at], at + 2
        length = data[at + 1] if at + 1 < len(data) else 0x80
        if length & 0x80:
            size = length & 0x7F
            if not 1 <= size <= 4:
                raise ValueError("a length is indefinite, or too long")
            length = int.from_bytes(data[head : head + size])
            head += size
        if head + length > len(data):
            raise ValueError("an element is cut off")
        elements.append(_Element(tag, data[head : head + length], data[at : head + length]))
        at = head + length
    return elements


def _children(data: bytes, *tags: int) -> list[bytes]:
    """Return the values of the elements of ``data``, which must have exactly these tags."""
    elements = _elements(data)
    if tuple(element.tag for element in elements) != tags:
        raise ValueError("it has other parts than expected")
    return [element.value for element in elements]


def _only(data: bytes, tag: int) -> bytes:
    (value,) = _children(data, tag)
    return value


def _is_one_of(value: bytes, *allowed: bytes) -> None:
    if value not in allowed:
        raise ValueError("it names another type or algorithm than expected")
