"""Shell commands that break the subject of a check; a user's are in ``checks/mutations.yml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from testinfra.host import Host


class Breakage(NamedTuple):
    """A command that breaks a check's subject and, if needed, one that repairs it; both for ``sh -euc``."""

    command: str
    mend: str = ""


def read(file: Path) -> dict[str, list[Breakage]]:
    """Return a user's breakages by check, in the file's order; the file has been validated (definition/checks.py)."""
    recorded: Mapping[str, list[str | dict[str, str]]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {check: [_breakage(entry) for entry in entries] for check, entries in recorded.items()}


def _breakage(entry: str | Mapping[str, str]) -> Breakage:
    return Breakage(entry) if isinstance(entry, str) else Breakage(entry["break"], entry["mend"])


def run(host: Host, command: str) -> None:
    """Run a command as root. Raises RuntimeError, which isn't a failed check, if any part of it fails."""
    done = host.run("sh -euc %s", command)
    if done.rc != 0:
        raise RuntimeError(f"{command}: ended with {done.rc}: {(done.stdout + done.stderr)[-500:]}")
