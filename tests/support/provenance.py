"""The code that the record of a manual run is about, and whether the checkout still has that code.

A record's ``code`` is the digest of the files that determine its results. If they have changed since, its page says so:
what the page shows was true then, and is unproven now.

Which files these are follows from imports: of the program's modules that the run is about, and of the test modules
that judge it. The builder, which makes the image and starts the machine, isn't among them, nor is the verification
suite: CI runs both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.bake.plan.closure import closure
from image_builder.settings import REPO_ROOT
from image_builder.system.trees import code_digests, files_in

# These only present results.
_PRESENTS = ("page.py", "provenance.py")


@dataclass(frozen=True)
class Subject:
    """What determines the results of a run.

    ``program`` are modules or folders of modules, and ``judge`` is the test module that is run: each counts with
    everything that it imports, from the program and from the tests respectively. ``data`` are files and folders that no
    import leads to.
    """

    program: tuple[str, ...]
    judge: str
    data: tuple[str, ...]

    def files(self, root: Path = REPO_ROOT) -> set[Path]:
        """Return the files. Raises FileNotFoundError if one of the places doesn't exist."""
        places = [root / name for name in (*self.program, self.judge, *self.data)]
        for place in places:
            if not place.exists():
                raise FileNotFoundError(place)
        given = {file for name in self.program for file in files_in(root / name) if file.suffix == ".py"}
        modules = closure(given, "image_builder", root)
        # Modules read the other files in their folder.
        beside = {p for m in modules for p in m.parent.iterdir() if p.is_file() and p.suffix != ".py"}
        judges = closure([root / self.judge], "tests", root, lambda file: file.name.endswith(_PRESENTS))
        data = {file for name in self.data for file in files_in(root / name)}
        return modules | beside | judges | data


def _node(*names: str) -> tuple[str, ...]:
    return tuple(f"image_builder/node/{name}" for name in names)


# Where the images of the runs are declared.
_LAB = "inventories/lab"
_ROLES = ("roles/image_preload", "roles/local_disk", "roles/node_agent")
_DISK_COMMANDS = _node(
    *(f"{name}/command.py" for name in ("disk", "preload", "promote", "seed")), "report.py"
)
JOIN = Subject(
    (
        *_node("join/command.py", "preflight/command.py"),
        "image_builder/cluster/broker",
        "image_builder/cluster/gate",
    ),
    "tests/e2e/join.py",
    (
        _LAB,
        "deploy/token-broker.yml",
        "tests/e2e/large.yml",
        *(f"roles/{name}" for name in ("gpu_preflight", "kubelet", "node_agent", "node_join")),
    ),
)
SLICES = Subject(
    ("image_builder/pool", "image_builder/cli/pool/exports.py"),
    "tests/e2e/slices.py",
    (_LAB, "playbooks/bootstrap.yml"),
)
ROLL = Subject(
    ("image_builder/pool/rollout.py", *_node("join/command.py"), "image_builder/cluster/gate"),
    "tests/e2e/roll.py",
    (_LAB, "deploy/roll.yml", "tests/e2e/roll.yml", *_ROLES),
)
LOCAL_DISK = Subject(
    _DISK_COMMANDS, "tests/boot/matrix.py", (_LAB, "tests/boot/guest", "tests/data/ntfs", *_ROLES)
)
PENDING_PODS = Subject(
    ("image_builder/bake/pull", *_DISK_COMMANDS),
    "tests/e2e/pending_pods.py",
    (_LAB, "tests/e2e/large.yml", "tests/e2e/inventory", *_ROLES, "roles/container_runtime", "roles/kubelet"),
)


def digest(subject: Subject, root: Path = REPO_ROOT) -> str:
    """Return the SHA-256 of the files' names and contents; comments and docstrings of Python files don't count."""
    return hashlib.sha256(repr(sorted(code_digests(root, subject.files(root)).items())).encode()).hexdigest()


def note(record: Mapping[str, Any], subject: Subject) -> list[str]:
    """Return a page's note, in Markdown, about a record of other code; nothing if it is of this code."""
    if record.get("code") == digest(subject):
        return []
    return [
        "**From earlier code:** the code that decides these results has changed since, without a new run.",
        "",
    ]
