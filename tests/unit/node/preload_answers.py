"""The common parts of the tests of ``node-agent preload``: one image, and a list of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from image_builder.node.store import Image

TWO = "registry.lab.internal/two/layers:2.0"
PAUSE = "registry.lab.internal/pause:1.0"
INDEX = "sha256:9b0091696d9ceaeb02a37cd4c3f77809679b764855440e98767ad3cc2378806d"
MANIFEST = "sha256:05a5fcafafd184be090e4143385e82edf69d12327c5736db45bb871422f76d96"
CONFIG = "sha256:81e631c3594f2fbff5967d16c3332b7876b627ac3da6cecaaae7550b039d2a13"
LAYERS = (
    "sha256:39deb792fec018860ec8dc27afad21a68618abf5f7993e62e1505641b69603a0",
    "sha256:c134da85c433125ffe673e063111ac80d1f38e4f43b350fd759053921c394656",
)
PAUSE_MANIFEST = "sha256:6a0dbc1a2bb597d9ea0ae506edc1a2fa153fd1a7d4ed376a6583dfbc6240c1c7"
IMAGE = Image(TWO, INDEX, MANIFEST, CONFIG, True, LAYERS)


def document(archive: Path, engine: str = "docker", **image: Any) -> dict[str, Any]:
    """Return a list with one image, in an archive that exists."""
    content = archive.read_bytes()
    one = {
        "ref": TWO,
        "digest": INDEX,
        "manifest": MANIFEST,
        "id": CONFIG,
        "platform": "linux/amd64",
        "pin": False,
        "bytes": 5_000_000,
        "diff_ids": list(LAYERS),
        **image,
    }
    return {
        "format": 1,
        "engine": engine,
        "archive": {
            "path": str(archive),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        },
        "images": [one],
    }
