"""UUIDs derived from a build's id, so that the same build always has the same ones.

Every UUID is a version 5 UUID (RFC 9562) in a namespace of this project over the build's id, which is the
id of its seal stage.
"""

from __future__ import annotations

import hmac
import uuid
from typing import Literal

_NAMESPACE = uuid.UUID("5f0c7f43-2c5b-5a1e-9c55-0d3f0f6f9a52")


def _derive(build_id: str, purpose: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{build_id}/{purpose}"))


def disk_seed(build_id: str) -> str:
    """Return the seed that systemd-repart derives its UUIDs from."""
    return _derive(build_id, "disk")


def disk_uuid(build_id: str) -> str:
    """Return the GPT disk GUID that systemd-repart (since 251) derives from the seed.

    This is HMAC-SHA256 of ``disk-uuid`` under the seed's bytes, truncated to 16 bytes and marked as version 4.
    """
    seed = uuid.UUID(disk_seed(build_id)).bytes
    return str(uuid.UUID(bytes=hmac.digest(seed, b"disk-uuid", "sha256")[:16], version=4))


def partition_uuid(build_id: str, partition: Literal["root", "esp"]) -> str:
    """Return the PARTUUID of a partition."""
    return _derive(build_id, f"partition/{partition}")


def filesystem_uuid(build_id: str, partition: Literal["root", "esp", "preload"]) -> str:
    """Return the UUID of the filesystem in a partition, or of the preload store."""
    return _derive(build_id, f"filesystem/{partition}")
