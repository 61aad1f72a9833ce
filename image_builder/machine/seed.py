"""The cloud-init NoCloud seed of a test machine: a directory with ``meta-data`` and ``user-data``.

The user is the image's own default user (cloud-init's ``default``); the seed only adds a fresh key. Nothing of
it is ever part of an image.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


@dataclass(frozen=True)
class Seed:
    """Where the seed's parts are. ``directory`` holds what the guest sees, ``key`` is not in it."""

    directory: Path
    key: Path


def write_key(path: Path, comment: str) -> str:
    """Write a new ed25519 private key (OpenSSH's format, mode 0600) to ``path``; return the public line."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return f"{public.decode('ascii')} {comment}"


def user_data(public_key: str) -> str:
    """Return cloud-init's user data: JSON is YAML, and can't be quoted wrong."""
    return "#cloud-config\n" + json.dumps({"ssh_authorized_keys": [public_key]}, indent=1) + "\n"


def meta_data(instance_id: str, hostname: str) -> str:
    """Return cloud-init's meta data."""
    return json.dumps({"instance-id": instance_id, "local-hostname": hostname}, indent=1) + "\n"


def write_seed(directory: Path, *, instance_id: str, hostname: str) -> Seed:
    """Make a seed below ``directory``: ``seed/`` for the guest and ``id_ed25519`` beside it."""
    seed = directory / "seed"
    seed.mkdir()
    key = directory / "id_ed25519"
    public = write_key(key, f"image-builder {instance_id}")
    (seed / "meta-data").write_text(meta_data(instance_id, hostname), encoding="utf-8")
    (seed / "user-data").write_text(user_data(public), encoding="utf-8")
    return Seed(seed, key)
