"""A kubeconfig, read with only the standard library.

The format is YAML, of which client-go and kubeadm write only a subset: blocks of mappings and lists, plain and quoted
scalars. This module reads that subset, and JSON, which is YAML too; anything else is rejected, not guessed. An image
without cloud-init has no python3-yaml.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from image_builder.node.errors import NodeError

_KEY = re.compile(
    r"""^(?P<key>"(?:[^"\\]|\\.)*"|'[^']*'|[^\s'"#\[\]{},&*!|>%@`][^#]*?)\s*:(?:\s+(?P<value>.*))?$"""
)
_SPECIAL = ("&", "*", "!", "|", ">", "%", "@", "`", "?")
# What a name looks like in a certificate: UTF8String or PrintableString, its length, the bytes.
_IDENTITY = b"system:node:"
_STRINGS = (0x0C, 0x13)
# A certificate's validity: two times, each a UTCTime (until 2049) or a GeneralizedTime (RFC 5280, 4.1.2.5).
_VALIDITY = re.compile(rb"(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z(?:\x17\x0d(\d{12})|\x18\x0f(\d{14}))Z")


@dataclass(frozen=True)
class Pem:
    """A PEM text from the kubeconfig itself, or the path of a file that contains it and may be replaced at any time."""

    text: str = ""
    path: Path | None = None

    def read(self) -> str:
        """Return the current text. Raises NodeError (``kube.config``)."""
        if self.path is None:
            return self.text
        try:
            return self.path.read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            raise NodeError("kube.config", f"{self.path} can't be read: {error}") from error


@dataclass(frozen=True)
class Access:
    """An API server's address, whom to trust, and who we are: a certificate with its key, or a token."""

    server: str
    authority: Pem
    certificate: Pem | None = None
    key: Pem | None = None
    token: Pem | None = None
    server_name: str = ""

    @property
    def node(self) -> str:
        """Return the node that the certificate was issued to; empty if it isn't a kubelet's."""
        return _node_of(self.certificate.read()) if self.certificate else ""


def load(path: Path) -> Access:
    """Return the access that the current context of a kubeconfig gives; raises NodeError (``kube.config``)."""
    try:
        return parse(path.read_text(encoding="utf-8"), path.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise NodeError("kube.config", f"{path} can't be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NodeError(
            "kube.config", f"{path} is not a kubeconfig that is understood here: {error}"
        ) from error


def parse(text: str, folder: Path) -> Access:
    """Return the current context's access; relative paths are below ``folder``. Raises ValueError and the like."""
    config = json.loads(text) if text.lstrip().startswith("{") else read_yaml(text)
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    if cluster.get("insecure-skip-tls-verify"):
        raise ValueError("insecure-skip-tls-verify: nothing is sent to an API server that isn't proven")
    access = Access(
        server=str(cluster["server"]).rstrip("/"),
        authority=_pem(cluster, "certificate-authority", folder) or Pem(),
        certificate=_pem(user, "client-certificate", folder),
        key=_pem(user, "client-key", folder),
        token=_token(user, folder),
        server_name=str(cluster.get("tls-server-name") or ""),
    )
    if not access.server.startswith("https://"):
        raise ValueError(f"the server must be an https address, not {access.server!r}")
    if not (access.certificate and access.key) and not access.token:
        raise ValueError("the user has neither a client certificate with its key nor a token")
    return access


def _named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for item in items:
        if item["name"] == name:
            return item
    raise KeyError(f"nothing is called {name!r}")


def _pem(owner: dict[str, Any], name: str, folder: Path) -> Pem | None:
    if data := owner.get(f"{name}-data"):
        try:
            return Pem(base64.b64decode(str(data), validate=True).decode("ascii"))
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{name}-data must be a PEM text in base64") from error
    return Pem(path=folder / str(owner[name])) if owner.get(name) else None


def _token(user: dict[str, Any], folder: Path) -> Pem | None:
    if user.get("tokenFile"):
        return Pem(path=folder / str(user["tokenFile"]))
    return Pem(str(user["token"])) if user.get("token") else None


def _node_of(pem: str) -> str:
    """Return NAME from the subject ``system:node:NAME`` of the first certificate that has one.

    The standard library decodes only the certificates of connections; the name in question can't be mistaken for
    anything else, so the bytes are searched for it.
    """
    for der in _certificates(pem):
        at = der.find(_IDENTITY)
        while at >= 2:
            if der[at - 2] in _STRINGS and der[at - 1] < 0x80:
                return der[at : at + der[at - 1]].removeprefix(_IDENTITY).decode("utf-8", "replace")
            at = der.find(_IDENTITY, at + 1)
    return ""


def has_expired(pem: str, now: datetime) -> bool:
    """Return whether a certificate in a PEM text has expired."""
    times = (match.groups() for der in _certificates(pem) if (match := _VALIDITY.search(der)))
    return any((b"20" + short if short else full).decode() < f"{now:%Y%m%d%H%M%S}" for short, full in times)


def _certificates(pem: str) -> Iterator[bytes]:
    for block in re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", pem, re.DOTALL):
        try:
            yield base64.b64decode(block)
        except binascii.Error:  # damaged, for example by a power cut: it identifies no node
            continue


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text of blocks and scalars. Raises ValueError for anything beyond that."""
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if not stripped or stripped.startswith("#") or stripped == "---":
            continue
        if "\t" in raw[: len(raw) - len(raw.lstrip())]:
            raise ValueError(f"line {number}: a tab")
        lines.append((len(raw) - len(raw.lstrip()), stripped, number))
    if not lines:
        return None
    value, rest = _block(lines, lines[0][0])
    if rest:
        raise ValueError(f"line {rest[0][2]}: it is indented like nothing before it")
    return value


_Lines = list[tuple[int, str, int]]


def _block(lines: _Lines, indent: int) -> tuple[Any, _Lines]:
    """Read the block that begins here; return it and the lines after it."""
    return _list(lines, indent) if _is_item(lines[0][1]) else _mapping(lines, indent)


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _list(lines: _Lines, indent: int) -> tuple[list[Any], _Lines]:
    items: list[Any] = []
    while lines and lines[0][0] == indent and _is_item(lines[0][1]):
        _, text, number = lines[0]
        inner = text[1:].lstrip()
        if not inner:
            value, lines = _nested(lines[1:], indent + 1)
        elif _is_item(inner) or _KEY.match(inner):
            # "- name: x": a block that begins after the dash.
            shifted = indent + len(text) - len(inner)
            value, lines = _block([(shifted, inner, number), *lines[1:]], shifted)
        else:
            value, lines = _scalar(inner, number), lines[1:]
        items.append(value)
    return items, lines


def _mapping(lines: _Lines, indent: int) -> tuple[dict[str, Any], _Lines]:
    mapping: dict[str, Any] = {}
    while lines and lines[0][0] == indent and not _is_item(lines[0][1]):
        _, text, number = lines[0]
        match = _KEY.match(text)
        if not match:
            raise ValueError(f"line {number}: no `key: value`")
        key = str(_scalar(match["key"], number))
        if match["value"] and not match["value"].startswith("#"):
            mapping[key], lines = _scalar(match["value"], number), lines[1:]
        else:
            # A list under a key may have the same indentation as the key.
            own = indent if len(lines) > 1 and lines[1][0] == indent and _is_item(lines[1][1]) else indent + 1
            mapping[key], lines = _nested(lines[1:], own)
    return mapping, lines


def _nested(lines: _Lines, least: int) -> tuple[Any, _Lines]:
    if not lines or lines[0][0] < least:
        return None, lines
    return _block(lines, lines[0][0])


def _scalar(text: str, number: int) -> Any:
    if text in ("{}", "[]"):
        return {} if text == "{}" else []
    if text.startswith('"'):
        value, end = json.JSONDecoder().raw_decode(text)
        rest = text[end:].strip()
    elif text.startswith("'"):
        end = text.replace("''", "\0\0").find("'", 1)
        value, rest = text[1:end].replace("''", "'"), text[end + 1 :].strip()
        if end < 0:
            raise ValueError(f"line {number}: a quote without an end")
    else:
        if text.startswith(("[", "{", *_SPECIAL)):
            raise ValueError(f"line {number}: {text[0]!r} is not understood here")
        value, rest = text.partition(" #")[0].rstrip(), ""
        return {"true": True, "false": False, "null": None, "~": None}.get(value, value)
    if rest and not rest.startswith("#"):
        raise ValueError(f"line {number}: words behind a quote")
    return value
