"""The program that tests one GPU: its command, its environment, and the digest that a calibration names."""

from __future__ import annotations

import functools
import hashlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from image_builder.node import child
from image_builder.node.gpu.model import Tier

# Everything that the answers and the speeds depend on: the code that a worker runs, and the kernels.
SOURCES = (
    "bandwidth.py",
    "cuda.py",
    "known_answer.py",
    "memory.py",
    "reference.py",
    "tensor.py",
    "worker.py",
    "kernels/base.ptx",
    "kernels/memory.ptx",
    "kernels/tc_sm70.ptx",
    "kernels/tc_sm80.ptx",
)
_DIGITS = 12


def _archive() -> str | None:
    """Return the agent's archive if this runs from it, else None."""
    spec = sys.modules[__name__].__spec__
    archive: Any = getattr(spec.loader if spec else None, "archive", None)
    return archive if isinstance(archive, str) else None


def checkout() -> Path | None:
    """Return the directory that a worker runs in: the repository, or None for an archive."""
    return None if _archive() else Path(__file__).parents[4]


def worker_argv(uuid: str, tier: Tier, seed: int, peers: Sequence[str]) -> list[str]:
    """Return the command of one GPU's worker: this agent again."""
    archive = _archive()
    python = [sys.executable, "-I", archive] if archive else [sys.executable, "-m", "image_builder.node"]
    more = [word for peer in peers for word in ("--peer", peer)]
    return [*python, "gpu-worker", "--gpu", uuid, "--tier", tier, "--seed", str(seed), *more]


def environment(uuid: str, peers: Sequence[str]) -> dict[str, str]:
    """Return a worker's environment: it sees only its own GPU and peers, and doesn't use the compiler's cache."""
    return {
        **child.ENVIRONMENT,
        "CUDA_VISIBLE_DEVICES": ",".join([uuid, *peers]),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_CACHE_DISABLE": "1",
    }


@functools.cache
def digest() -> str:
    """Return the digest of the program that the workers run, shortened."""
    total = hashlib.sha256()
    for name in SOURCES:
        data = pkgutil.get_data(__package__, name)
        if data is None:  # the loader returns no data: no record may ever match
            return "unknown"
        total.update(f"{name} {len(data)}\n".encode() + data)
    return total.hexdigest()[:_DIGITS]
