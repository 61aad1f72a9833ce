"""A step's context: where it writes, how much time it has, and where the machine's files are."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node import files
from image_builder.node.gpu.machine import Places

# The time limit of the whole run on any machine; a shorter run does proportionally less of everything.
TOTAL_SECONDS = 540.0
FACTS, RESULT = "facts.json", "result.json"
_LIBRARY_PATH = "LD_LIBRARY_PATH"


@dataclass(frozen=True)
class Context:
    """One step's context. ``end`` is by the monotonic clock; ``pace`` is 1, or less in a shorter run.

    ``root`` is where the machine's own files are: /proc, /sys and /dev are expected below it.
    """

    out: Path
    name: str
    end: float
    pace: float = 1.0
    root: Path = Path("/")
    vm_size: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def directory(self) -> Path:
        """Return the step's own directory."""
        return self.out / "steps" / self.name

    @property
    def places(self) -> Places:
        """Return the machine's paths; what the agent would write below /run goes to the step's directory."""
        root = self.root
        return Places(
            root=root,
            proc=root / "proc",
            sys=root / "sys",
            dev=root / "dev",
            run=self.directory / "run",
            cdi=(root / "run/cdi", root / "etc/cdi"),
        )

    def left(self, most: float = TOTAL_SECONDS) -> float:
        """Return the seconds that this step still has, at most ``most``."""
        return max(0.0, min(most, self.end - time.monotonic()))

    def facts(self) -> dict[str, Any]:
        """Return the findings of the first step; empty if it didn't get that far."""
        return read_json(self.out / FACTS)

    def result_of(self, step: str) -> dict[str, Any]:
        """Return the findings of another step; empty if it didn't get that far."""
        return read_json(self.out / "steps" / step / RESULT)


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if it is missing or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def append(path: Path, value: Any) -> None:
    """Append a line of JSON to a file. It is written when this returns, whatever happens to the process."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, up to a line that was cut off."""
    objects = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            objects.append(json.loads(line))
        except ValueError:
            break
    return objects


def write_result(context: Context, value: dict[str, Any]) -> None:
    """Write a step's result; it may be incomplete."""
    files.write_json(context.directory / RESULT, value)


def program() -> list[str]:
    """Return the command that starts this program again: its archive, or the checkout's module."""
    archive: Any = getattr(__spec__.loader if __spec__ else None, "archive", None)
    if isinstance(archive, str):
        return [sys.executable, "-I", archive]
    return [sys.executable, "-m", "tests.bench.first_contact"]


def checkout() -> Path | None:
    """Return the directory that the module is run from; None for an archive."""
    return None if "-I" in program() else Path(__file__).resolve().parents[3]


def worker_argv(context: Context, gpu: str, seed: int, *more: str, tier: str = "boot-quick") -> list[str]:
    """Return the command of one GPU's worker: the agent's own, at this run's pace."""
    path = os.environ.get(_LIBRARY_PATH)
    # A worker starts with an empty environment; if the driver's libraries are elsewhere, it must be told.
    environment = ["/usr/bin/env", f"{_LIBRARY_PATH}={path}"] if path else []
    arguments = ["--gpu", gpu, "--tier", tier, "--seed", str(seed), "--pace", f"{context.pace:.6f}"]
    return [*environment, *program(), "worker", *arguments, "--scratch", str(context.out / "scratch"), *more]


def peers(gpus: Sequence[str]) -> list[str]:
    """Return the options that name a worker's peers."""
    return [word for gpu in gpus for word in ("--peer", gpu)]


def step_argv(context: Context) -> list[str]:
    """Return the command of a step."""
    arguments = [
        "--out",
        str(context.out),
        "--seconds",
        f"{context.left():.3f}",
        "--pace",
        f"{context.pace:.6f}",
    ]
    return [
        *program(),
        "step",
        context.name,
        *arguments,
        "--root",
        str(context.root),
        "--vm-size",
        context.vm_size,
    ]


def from_options(options: argparse.Namespace) -> Context:
    """Return the context that ``step_argv`` put on the command line."""
    end = time.monotonic() + options.seconds
    return Context(options.out, options.name, end, options.pace, options.root, options.vm_size)
