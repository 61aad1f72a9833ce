"""Host keys: signed by a host CA, pinned per VM, or trusted on first use.

Each is a file in OpenSSH's ``known_hosts`` format, so that OpenSSH (for Ansible's connections) can read the same file,
with the options of ``openssh_options``. It lists a host under ``known_as``, never under its address, which a scale set
gives to the next VM.

paramiko can't check certificates, so that is done here, more strictly than by OpenSSH: a certificate without
principals, which OpenSSH accepts for any host, isn't enough, nor is a pattern among the principals.
https://cvsweb.openbsd.org/src/usr.bin/ssh/PROTOCOL.certkeys
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as forms

from image_builder.definition.connection import Hop
from image_builder.errors import UsageError
from image_builder.node import files
from image_builder.pool.plan.model import Host

_CERTIFICATE = "-cert-v01@openssh.com"
# The algorithms that a host may sign the key exchange with, best first, and the kind of key that each needs. No SHA-1.
_SIGNATURES = {
    "ssh-ed25519": "ssh-ed25519",
    "ecdsa-sha2-nistp256": "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384": "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521": "ecdsa-sha2-nistp521",
    "rsa-sha2-512": "ssh-rsa",
    "rsa-sha2-256": "ssh-rsa",
}
_CERTIFICATES = tuple(name + _CERTIFICATE for name in _SIGNATURES)
_NAME = re.compile(r"[a-z0-9][a-z0-9._:-]*")
_MARKERS = {"@cert-authority": "cert-authority", "@revoked": "revoked"}


class HostKeyError(Exception):
    """A host's key isn't one that it may show; the message says why."""


@dataclass(frozen=True)
class CertificateAuthority:
    """``@cert-authority`` lines: a host must show a certificate for its name, signed by one of these keys."""

    path: Path


@dataclass(frozen=True)
class Pinned:
    """One or more lines for each host, from a trusted channel such as the serial console."""

    path: Path


@dataclass(frozen=True)
class FirstUse:
    """The first key that a host shows is accepted and stored in the file; from then on, it is like ``Pinned``."""

    path: Path


HostKeys = CertificateAuthority | Pinned | FirstUse


@dataclass(frozen=True)
class Entry:
    """A line of a known_hosts file. ``marker``: ``cert-authority``, ``revoked`` or empty; ``blob``: the key."""

    marker: str
    names: tuple[str, ...]
    kind: str
    blob: bytes


def known_as(host: Host | Hop) -> str:
    """Return the name that a host's keys are listed under: the VM's id, or its inventory name if no id is known.

    A bastion's is its address in the inventory. The name is in lower case, as OpenSSH makes it. Raises UsageError for a
    name that a known_hosts file can't contain literally.
    """
    if isinstance(host, Hop):
        return host.address.lower()
    name = (host.vm_id or host.name).lower()
    if not _NAME.fullmatch(name):
        raise UsageError(f"{host.name}: `{name}` can't be a name of host keys", hint="give it a pool_vm_id")
    return name


def openssh_options(host_keys: HostKeys, host: Host | Hop) -> dict[str, str]:
    """Return the options that make OpenSSH check a host against the same file; it never learns a first key."""
    return {
        "HostKeyAlias": known_as(host),
        "UserKnownHostsFile": f'"{host_keys.path}"',
        "GlobalKnownHostsFile": "none",
        "StrictHostKeyChecking": "yes",
        "CheckHostIP": "no",
        "UpdateHostKeys": "no",
    }


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as OpenSSH shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def parse(text: str, where: str) -> tuple[Entry, ...]:
    """Return the lines of a known_hosts file; raises UsageError with all lines that aren't understood.

    Hashed names and negated patterns are refused: people must be able to read a list of keys to trust.
    """
    entries: list[Entry] = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        try:
            entries.append(_entry(fields))
        except ValueError as error:
            problems.append(f"{where}:{number}: {error}")
    if problems:
        raise UsageError(
            "\n".join(problems), hint="a line is: [@cert-authority|@revoked] NAME[,NAME...] TYPE KEY"
        )
    return tuple(entries)


def _entry(fields: Sequence[str]) -> Entry:
    marker = ""
    if fields[0].startswith("@"):
        if fields[0] not in _MARKERS:
            raise ValueError(f"unknown marker {fields[0]}")
        marker, fields = _MARKERS[fields[0]], fields[1:]
    if len(fields) < 3:
        raise ValueError("not a name, a type and a key")
    names = tuple(fields[0].lower().split(","))
    if any(not name or name[0] in "|!" for name in names):
        raise ValueError("a hashed, negated or empty name")
    if not marker and set("*?") & set(fields[0]):
        raise ValueError("a key of more hosts than one")
    try:
        blob = base64.b64decode(fields[2], validate=True)
        forms.load_ssh_public_key(f"{fields[1]} {fields[2]}".encode())
    except (ValueError, binascii.Error, UnsupportedAlgorithm) as error:
        raise ValueError(f"not a key of type {fields[1]}: {error}") from error
    return Entry(marker, names, fields[1], blob)


def _is_named(entry: Entry, name: str) -> bool:
    """Return whether a line is about a host; its names may contain ``*`` and ``?``."""
    patterns = (re.escape(n).replace(r"\*", ".*").replace(r"\?", ".") for n in entry.names)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def check_certificate(blob: bytes, authorities: Iterable[bytes], name: str, now: float) -> bytes:
    """Return the key that a host certificate is for.

    ``authorities`` are the keys (blobs) that may sign for ``name``, ``now`` is in seconds since 1970. Raises
    HostKeyError if it isn't a certificate, or is one of another kind, from another authority, badly signed, for other
    hosts, outside its validity period, or with a critical option (there are none for hosts).
    """
    try:
        kind = _first_string(blob)
        shown = forms.load_ssh_public_identity(kind + b" " + base64.b64encode(blob))
        if not isinstance(shown, forms.SSHCertificate):
            raise HostKeyError(f"shows a key without a certificate, {fingerprint(blob)}")
        authority, algorithm = _signer(shown, blob)
        if shown.type is not forms.SSHCertificateType.HOST:
            raise HostKeyError("shows a user's certificate")
        if authority not in authorities:
            raise HostKeyError(
                f"its certificate is signed by {fingerprint(authority)}, which may not sign for it"
            )
        if algorithm not in _SIGNATURES:
            raise HostKeyError(f"its certificate is signed by {algorithm}")
        shown.verify_cert_signature()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise HostKeyError(f"its certificate can't be read: {error}") from error
    except InvalidSignature:
        raise HostKeyError("its certificate's signature is wrong") from None
    if name.encode() not in shown.valid_principals:
        others = b", ".join(shown.valid_principals[:3]).decode("utf-8", "replace") or "no host"
        raise HostKeyError(f"its certificate is for {others}, not for {name}")
    if not shown.valid_after <= now < shown.valid_before:
        raise HostKeyError("its certificate is not valid now")
    if shown.critical_options:
        raise HostKeyError("its certificate has critical options")
    return _blob(shown.public_key())


def _blob(key: forms.SSHPublicKeyTypes) -> bytes:
    line = key.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    return base64.b64decode(line.split()[1])


def _first_string(data: bytes) -> bytes:
    length = int.from_bytes(data[:4], "big")
    if not 0 < length <= len(data) - 4:
        raise ValueError("cut short")
    return data[4 : 4 + length]


def _signer(shown: forms.SSHCertificate, blob: bytes) -> tuple[bytes, str]:
    """Return the key that signed a certificate, and the algorithm of its signature.

    The library also accepts RSA with SHA-1 and doesn't report the algorithm, so its name is read here. The signature is
    a certificate's last string, and the key that made it the one before.
    """
    key = _blob(shown.signature_key())
    marked = len(key).to_bytes(4, "big") + key
    signature = _first_string(blob[blob.rindex(marked) + len(marked) :])
    return key, _first_string(signature).decode("ascii")


class Verifier:
    """Knows which keys to request from a host, and checks the one that it shows. Threads may share it."""

    def __init__(self, host_keys: HostKeys) -> None:
        """Read the file. Raises UsageError if it doesn't exist, or has lines that don't belong in its kind of file."""
        self._source = host_keys
        self._guard = threading.Lock()
        self._marked: tuple[Entry, ...] = ()
        self._keys: dict[str, list[Entry]] = {}
        if isinstance(host_keys, FirstUse):
            _make(host_keys.path)
        self._size = self._whole = 0  # bytes of the file, and of its complete lines
        self._read()

    def _read(self) -> None:
        path = self._source.path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="it holds the hosts' keys") from error
        self._size = len(data)
        self._whole = data.rfind(b"\n") + 1
        if isinstance(self._source, FirstUse):
            # A crash may have truncated the last line; there was no login to its host.
            data = data[: self._whole]
        entries = parse(data.decode("utf-8", "replace"), str(path))
        marker = "cert-authority" if isinstance(self._source, CertificateAuthority) else ""
        other = sorted({e.marker for e in entries} - {marker, "revoked"})
        if other:
            content = "pinned keys" if marker else "@cert-authority lines"
            raise UsageError(f"{path}: holds {content}, which the chosen option does not accept")
        if marker and not any(e.marker == marker for e in entries):
            raise UsageError(f"{path}: has no @cert-authority line")
        keys = defaultdict(list)
        for entry in entries:
            for name in entry.names if entry.marker == "" else ():
                keys[name].append(entry)
        self._marked = tuple(entry for entry in entries if entry.marker)
        self._keys = dict(keys)

    def algorithms(self, host: Host | Hop) -> tuple[str, ...]:
        """Return the algorithms to request from a host; raises HostKeyError if no key of it could be right."""
        if isinstance(self._source, CertificateAuthority):
            return _CERTIFICATES
        kinds = {entry.kind for entry in self._keys.get(known_as(host), ())}
        if not kinds and isinstance(self._source, Pinned):
            raise HostKeyError(f"no key is pinned for {known_as(host)}")
        return tuple(name for name, kind in _SIGNATURES.items() if not kinds or kind in kinds)

    def check(self, host: Host | Hop, blob: bytes) -> bytes:
        """Return a host's key if it may show this key or certificate; raises HostKeyError otherwise.

        A learned key is on disk when this returns. Raises UsageError if it can't be written.
        """
        name = known_as(host)
        marked = [(entry.marker, entry.blob) for entry in self._marked if _is_named(entry, name)]
        revoked = {blob for marker, blob in marked if marker == "revoked"}
        if isinstance(self._source, CertificateAuthority):
            signing = {blob for marker, blob in marked if marker == "cert-authority"}
            blob = check_certificate(blob, signing - revoked, name, time.time())
        if blob in revoked:
            raise HostKeyError(f"shows a revoked key, {fingerprint(blob)}")
        if isinstance(self._source, FirstUse) and name not in self._keys:
            try:
                self._learn(name, blob)
            except OSError as error:
                raise UsageError(f"{self._source.path}: can't be written: {error.strerror}") from error
        if not isinstance(self._source, CertificateAuthority):
            pinned = [entry.blob for entry in self._keys.get(name, ())]
            if blob not in pinned:
                expected = ", ".join(fingerprint(k) for k in pinned)
                raise HostKeyError(f"shows {fingerprint(blob)}, known is {expected}")
        return blob

    def _learn(self, name: str, blob: bytes) -> None:
        """Add a host's first key to the file, unless another process has already added one."""
        path = self._source.path
        line = f"{name} {_first_string(blob).decode('ascii')} {base64.b64encode(blob).decode()}\n"
        with self._guard, files.lock(path.with_name(f".{path.name}.lock")):
            if path.stat().st_size != self._size:
                self._read()
            if name in self._keys:
                return
            with path.open("r+b") as file:
                file.truncate(self._whole)
                file.seek(self._whole)
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
                self._size = self._whole = file.tell()
            self._keys[name] = [_entry(line.split())]


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(path.with_name(f".{path.name}.lock")):
            if not path.exists():
                files.write(path, b"", 0o600)
    except OSError as error:
        raise UsageError(f"{path}: can't be made: {error.strerror}") from error
