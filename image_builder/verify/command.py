"""Verify something that already exists: an unpacked image, a published build, a live machine.

The suite is the one that every build runs; a facts.json says what the target must be.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from image_builder.bake import manifest
from image_builder.bake.store import Store
from image_builder.definition.connection import Connection
from image_builder.errors import UsageError, VerifyError
from image_builder.events import Monitor, shown_stage
from image_builder.machine import ssh
from image_builder.settings import Settings
from image_builder.system import process, sparse
from image_builder.system.sandbox import open_root
from image_builder.verify.boot import SUITE_SECONDS
from image_builder.verify.result import SuiteResult
from image_builder.verify.runner import clear_records, observe_suite, read_facts

_REMOTE = "ssh://"
FACTS = "facts.json"
MANIFEST = "manifest.json"


def is_remote(target: str) -> bool:
    """Return whether ``target`` is a machine to connect to, rather than a local directory."""
    return target.startswith(_REMOTE)


def report_name(target: str) -> str:
    """Return the name of a target's reports: ``admin@node7-2222``, or a directory's whole path as one word."""
    place = (
        target.removeprefix(_REMOTE).partition("?")[0] if is_remote(target) else str(Path(target).resolve())
    )
    # A name of a file has at most 255 bytes. The end of a path tells more than its beginning.
    return re.sub(r"[^\w.@-]+", "-", place)[-80:].strip("-.") or "root"


def verify(
    target: str,
    facts: Path | None,
    out_dir: Path,
    *,
    settings: Settings,
    monitor: Monitor,
    inventory: Callable[[str], Connection] = lambda _: Connection(),
) -> SuiteResult:
    """Run the suite on ``target`` and return its results, including failed checks.

    ``target`` is ``ssh://user@host:port?key=FILE&known_hosts=FILE``, the root directory of an unpacked image, or the
    directory of a published build; for a directory, the caller must be in its own namespaces. ``facts`` defaults to
    the facts.json in or next to the directory. ``inventory`` returns how to connect to a machine of this name, where
    the URL doesn't say. Reports go to ``out_dir``. Raises VerifyError, UsageError.
    """
    if facts is not None and not facts.is_file():
        raise UsageError(f"no such file: {facts}")
    if is_remote(target):
        if facts is None:
            raise UsageError("for a machine, --facts FILE is required: the facts.json of its build")
        return _run(_address(target, inventory).url, facts, out_dir, settings, monitor)
    folder = Path(target).resolve()
    facts = facts or next((p / FACTS for p in (folder, folder.parent) if (p / FACTS).is_file()), None)
    if not folder.is_dir() or facts is None:
        raise UsageError(
            f"not a directory: {target}" if not folder.is_dir() else f"no {FACTS} in or beside {target}",
            hint="give the directory of a build, or of an unpacked image with --facts FILE",
        )
    clear_records(out_dir)
    store = Store(settings.store)
    store.prepare()
    with store.staging() as staging:
        tree = folder
        if (folder / MANIFEST).is_file():
            tree = _unpack(folder, staging / "tree", monitor)
        with open_root([tree], staging / "work") as root:
            return _run(f"sandbox:{root.path}", facts, out_dir, settings, monitor)


def _address(target: str, inventory: Callable[[str], Connection]) -> ssh.SshAddress:
    """Return the address of a machine, with its files as the suite needs them. Raises UsageError."""
    address = ssh.parse(target, inventory)
    if any(hop.key for hop in address.jump):
        raise UsageError(f"{target}: its bastion has a key of its own", hint="image-builder pool verify")
    if address.key is None or address.known_hosts is None:
        raise UsageError(
            f"{target}: a key to log in with and the file that knows the machine's own key are needed",
            hint="'ssh://user@host:22?key=FILE&known_hosts=FILE'; the latter may be ~/.ssh/known_hosts",
        )
    key, known_hosts = (path.expanduser().absolute() for path in (address.key, address.known_hosts))
    for path in (key, known_hosts):
        if not path.is_file():
            raise UsageError(f"{target}: no such file: {path}")
    return replace(address, key=key, known_hosts=known_hosts)


def _run(url: str, facts: Path, out_dir: Path, settings: Settings, monitor: Monitor) -> SuiteResult:
    read_facts(facts)  # the suite would report a damaged file without its name
    out_dir.mkdir(parents=True, exist_ok=True)
    with shown_stage(monitor, "verify"):
        # Failed checks are part of the result, so that they can be shown; ``require_passed`` judges it.
        return observe_suite(
            url,
            facts,
            out_dir,
            marker="booted" if is_remote(url) else "offline",
            python=settings.python,
            log=out_dir / "suite.log",
            checks=settings.checks,
            timeout=SUITE_SECONDS,
            on_progress=lambda _name, done, total: monitor.stage_progress("verify", done, total, "checks"),
        )


def _unpack(build: Path, tree: Path, monitor: Monitor) -> Path:
    """Check the hash of every file of a published build, and unpack its tar into ``tree``."""
    published = manifest.load((build / MANIFEST).read_bytes())
    with shown_stage(monitor, "hash"):
        for file in (*published.artefacts, *published.documents):
            monitor.stage_doing("hash", file.name)
            try:
                sha256 = sparse.sha256(build / file.name)
            except FileNotFoundError:
                raise VerifyError(f"{build / file.name} is missing, which the manifest names") from None
            if sha256 != file.sha256:
                raise VerifyError(
                    f"{build / file.name} is not what the manifest says: its SHA-256 is {sha256}"
                )
    archive = next((a for a in published.artefacts if a.format == "tar"), None)
    if archive is None:
        raise VerifyError(
            f"every byte of {build} is what its manifest says, but it holds no tar for the checks to look into",
            hint=f"image-builder boot {build} --verify",
        )
    tree.mkdir()
    argv = ["tar", "--extract", f"--file={build / archive.name}", f"--directory={tree}", "--numeric-owner"]
    process.run([*argv, "--same-permissions", "--xattrs", "--xattrs-include=*", "--acls"])
    return tree
