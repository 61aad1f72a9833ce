"""Signed EFI programs: the Authenticode digest of a PE32+ file, and where its signatures are.

This determines whether a signature covers exactly these bytes; sbverify checks whether the signature itself is valid
for a certificate. Layout: Microsoft's "PE Format", "Attribute Certificate Table", and the Authenticode specification,
"Calculating the PE Image Hash".
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

_CERTIFICATE_DIRECTORY = 4
_PKCS7 = 0x0002
_PE32_PLUS = 0x020B


class PeError(ValueError):
    """The bytes are not a well-formed PE32+ file."""


@dataclass(frozen=True)
class Section:
    """A section's name and its bytes in the file, without padding."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Program:
    """A PE32+ file. ``signatures`` are PKCS #7 blobs in DER, ``digest`` its Authenticode SHA-256 in hex."""

    digest: str
    signatures: tuple[bytes, ...]
    sections: tuple[Section, ...]

    @property
    def signed(self) -> bool:
        """Return whether a signature covers exactly these bytes, that is, contains their digest."""
        return any(bytes.fromhex(self.digest) in signature for signature in self.signatures)

    def section(self, name: str) -> bytes:
        """Return a section's bytes; raises PeError."""
        for section in self.sections:
            if section.name == name:
                return section.data
        raise PeError(f"no section {name}")


def parse(data: bytes) -> Program:
    """Return the relevant parts of a PE32+ file. Raises PeError."""
    try:
        return _parse(data)
    except struct.error as error:
        raise PeError(f"the file ends too early: {error}") from error


def vendor_certificate(shim: Program) -> bytes:
    """Return the certificate (DER) that a shim was built with: shim boots what that key has signed.

    Raises PeError when there is none, or a list of certificates instead of one.
    """
    table = shim.section(".vendor_cert")
    try:
        size, _denied_size, offset, _denied_offset = struct.unpack_from("<IIII", table)
    except struct.error as error:
        raise PeError("the section .vendor_cert is too short") from error
    certificate = table[offset : offset + size]
    if not size or len(certificate) != size or certificate[:2] != b"\x30\x82":
        raise PeError("the section .vendor_cert holds no single X.509 certificate")
    return certificate


def _parse(data: bytes) -> Program:
    if data[:2] != b"MZ":
        raise PeError("no MZ header")
    (pe,) = struct.unpack_from("<I", data, 0x3C)
    if data[pe : pe + 4] != b"PE\0\0":
        raise PeError("no PE header")
    _machine, count, _time, symbols, symbol_count, optional_size = struct.unpack_from("<HHIIIH", data, pe + 4)
    optional = pe + 24
    if struct.unpack_from("<H", data, optional)[0] != _PE32_PLUS:
        raise PeError("not PE32+")
    strings = symbols + 18 * symbol_count if symbols else 0
    table = optional + optional_size
    sections = tuple(_section(data, table + 40 * index, strings) for index in range(count))
    entry = optional + 112 + 8 * _CERTIFICATE_DIRECTORY
    start, size = struct.unpack_from("<II", data, entry)
    if start and (start + size > len(data) or start < entry):
        raise PeError("the certificate table lies outside the file")
    signatures = tuple(_signatures(data[start : start + size])) if start else ()
    return Program(_digest(data, optional + 64, entry, start or len(data)), signatures, sections)


def _digest(data: bytes, checksum: int, entry: int, end: int) -> str:
    """Hash all but the checksum, the certificate table and its entry, padded to 8 bytes as signing tools do."""
    digest = hashlib.sha256(data[:checksum])
    digest.update(data[checksum + 4 : entry])
    digest.update(data[entry + 8 : end])
    digest.update(bytes(-end % 8))
    return digest.hexdigest()


def _section(data: bytes, header: int, strings: int) -> Section:
    raw, virtual_size, _address, size, offset = struct.unpack_from("<8sIIII", data, header)
    name = raw.rstrip(b"\0").decode("ascii", "replace")
    if name.startswith("/") and name[1:].isdigit() and strings:
        start = strings + int(name[1:])
        name = data[start : data.find(b"\0", start)].decode("ascii", "replace")
    return Section(name, data[offset : offset + min(size, virtual_size or size)])


def _signatures(table: bytes) -> list[bytes]:
    signatures, at = [], 0
    while at + 8 <= len(table):
        length, _revision, kind = struct.unpack_from("<IHH", table, at)
        if length < 8:
            break
        if kind == _PKCS7:
            signatures.append(table[at + 8 : at + length])
        at += length + -length % 8
    return signatures
