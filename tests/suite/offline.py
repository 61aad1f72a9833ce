"""The damage that each check must detect, so that the suite can't pass vacuously.

A mutation changes a root filesystem from outside, by other means than those by which the check reads it: it writes,
removes and changes bytes and modes, while the check runs programs or lists files. ``tests/bake/test_mutations.py``
gives each check a fresh overlay of a good image with one of its mutations, and the check must fail.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[Path, dict[str, Any]], None]
"""Called with the mounted root and the image's variables."""

MUTATIONS: dict[str, tuple[Mutation, ...]] = {}


def record(check: str, *mutations: Mutation) -> None:
    """Record the mutations of a check; each one by itself must turn it red."""
    if check in MUTATIONS:
        raise ValueError(f"{check} is recorded twice")
    MUTATIONS[check] = mutations


def outside(root: Path, path: str) -> Path:
    """Return the host's path for a path in the image; its last component may be a link.

    Raises ValueError if a link along the path leads out of the root, so that nothing on the host is ever written.
    """
    place = root / path.lstrip("/")
    parent = Path(os.path.realpath(place.parent))
    if parent != root and root not in parent.parents:
        raise ValueError(f"{path} leads out of the image")
    return parent / place.name


def write(path: str, text: str = "x\n", mode: int = 0o644) -> Mutation:
    """Put a new file in place of whatever is there."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        place = outside(root, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.write_text(text, encoding="utf-8")
        place.chmod(mode)

    return mutate


def append(path: str, text: str) -> Mutation:
    """Append text to an existing file."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        with outside(root, path).open("r+", encoding="utf-8") as stream:
            stream.seek(0, os.SEEK_END)
            stream.write(text)

    return mutate


def change(path: str, pattern: str, replacement: str) -> Mutation:
    """Replace every match of a regular expression in a file; there must be at least one."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        place = outside(root, path)
        text, number = re.subn(pattern, replacement, place.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if not number:
            raise ValueError(f"{path} has nothing that matches {pattern!r}")
        place.write_text(text, encoding="utf-8")

    return mutate


def edit_json(path: str, edit: Callable[[dict[str, Any]], object]) -> Mutation:
    """Change the object in a JSON file, in place."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        place = outside(root, path)
        content = json.loads(place.read_text(encoding="utf-8"))
        edit(content)
        place.write_text(json.dumps(content), encoding="utf-8")

    return mutate


def remove(*paths: str) -> Mutation:
    """Remove files or links that exist; a path may be a glob."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        for path in paths:
            # A literal name may be a link that dangles on the host, which glob doesn't find.
            found = list(root.glob(path.lstrip("/"))) if "*" in path else [root / path.lstrip("/")]
            if not found:
                raise ValueError(f"{path} is not there")
            for place in found:
                outside(root, str(place.relative_to(root))).unlink()

    return mutate


def link(path: str, target: str) -> Mutation:
    """Put a symbolic link in place of whatever is there."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        place = outside(root, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)

    return mutate


def chmod(path: str, mode: int) -> Mutation:
    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        outside(root, path).chmod(mode)

    return mutate


def chown(path: str, uid: int, gid: int) -> Mutation:
    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        os.chown(outside(root, path), uid, gid, follow_symlinks=False)

    return mutate


def mkdir(path: str, mode: int = 0o755) -> Mutation:
    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        place = outside(root, path)
        place.mkdir(parents=True)
        place.chmod(mode)

    return mutate


def uninstall(*packages: str) -> Mutation:
    """Remove packages from dpkg's status file; their files stay."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        status = root / "var/lib/dpkg/status"
        blocks = status.read_text(encoding="utf-8").split("\n\n")
        kept = [b for b in blocks if not b.startswith(tuple(f"Package: {name}\n" for name in packages))]
        if len(kept) != len(blocks) - len(packages):
            raise ValueError(f"not all of {packages} are installed")
        status.write_text("\n\n".join(kept), encoding="utf-8")

    return mutate


def given(build: Callable[[dict[str, Any]], Mutation]) -> Mutation:
    """Make a mutation that depends on the image's variables."""
    return lambda root, variables: build(variables)(root, variables)


def both(*mutations: Mutation) -> Mutation:
    """Apply several mutations as one."""

    def mutate(root: Path, variables: dict[str, Any]) -> None:
        for mutation in mutations:
            mutation(root, variables)

    return mutate


# The records are in one module per topic, like the checks.
import tests.suite.cloud  # noqa: E402
import tests.suite.container_runtime  # noqa: E402
import tests.suite.gate  # noqa: E402
import tests.suite.gpu  # noqa: E402
import tests.suite.gpu_containers  # noqa: E402
import tests.suite.hygiene  # noqa: E402
import tests.suite.join  # noqa: E402
import tests.suite.kernel  # noqa: E402
import tests.suite.kubelet  # noqa: E402
import tests.suite.local_disk  # noqa: E402
import tests.suite.node_health  # noqa: E402
import tests.suite.preload  # noqa: E402
import tests.suite.preload_store  # noqa: E402
import tests.suite.system  # noqa: E402, F401
