"""Test files that this host has proven: all their tests passed, and everything they depend on is unchanged.

A proof is a small file in the cache directory, named by a digest of the checkout's files, the host's packages, kernel
and programs, and the selection of tests. Files that a test file certainly doesn't depend on are excluded
(``depends_on``): other tests, documents, and the wings of the product that neither its imports nor its text refer to.
A proof is valid for a week, since Debian's mirrors change; ``--no-proofs`` and nightly runs ignore proofs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.plan.closure import closure
from image_builder.settings import REPO_ROOT
from image_builder.system import process
from image_builder.system.trees import code_digests

SECONDS = 7 * 86400.0
# Directories that matter only to tests that import from them or whose text matches the pattern. Debian's archives
# contain a directory `pool/`, too.
WINGS: Mapping[str, tuple[str, ...]] = {
    r"\bpools?\b(?!/)": ("image_builder/pool/", "image_builder/cli/pool/", "tests/support/pools/"),
    r"\bcluster\b": ("image_builder/cluster/", "image_builder/cli/gate.py", "tests/support/control_plane/"),
    r"\bdrains?\b": ("image_builder/drain/", "image_builder/cli/pool/drain.py"),
    r"\bpublish": ("image_builder/gallery/", "image_builder/cli/publish.py", "tests/support/arm/"),
    r"\bexport": ("image_builder/bake/export.py", "image_builder/cli/store.py"),
    r"\bselftest\b": ("tests/selftest/",),
    r"\bmutations\b": ("tests/mutations/",),
    r"\bbench\b": ("tests/bench/",),
    r"\bdocs\b|\.md\b|README|CHANGELOG": ("docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
}
# Other tests, and files that no test depends on.
_OTHERS = re.compile(
    r"tests/unit/.*|tests/\w+/test_\w+\.py|tests/selftest/ceilings\.py|docs/reference/ci-durations\.json"
    r"|tests/boot/record\.json"
)
_PACKAGES = Path("/var/lib/dpkg/status")
_FILE = "proofs.json"


def depends_on(
    test_file: str, files: Mapping[str, str], imported: frozenset[str], text: str
) -> dict[str, str]:
    """Return those ``files`` of the checkout, with their digests, that a test file may depend on.

    ``imported`` are the files that it imports, directly or not; ``text`` is its source.
    """
    left_out = tuple(
        prefix
        for pattern, prefixes in WINGS.items()
        if not any(file.startswith(prefixes) for file in imported) and not re.search(pattern, text)
        for prefix in prefixes
    )
    own = imported | {test_file}
    return {
        name: digest
        for name, digest in files.items()
        if name in own or not (name.startswith(left_out) or _OTHERS.fullmatch(name))
    }


@dataclass(frozen=True)
class Proofs:
    """The proofs of a run: their directory, their names by test file, and the days of those that are valid."""

    folder: Path
    names: Mapping[str, str]
    days: Mapping[str, str]

    @classmethod
    def look_up(cls, folder: Path, choice: str, root: Path = REPO_ROOT) -> Proofs:
        """Return the proofs for a ``choice`` of tests; remove those that are no longer valid."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not 0 <= time.time() - path.stat().st_mtime < SECONDS:
                path.unlink()
        paths = (path.relative_to(root).as_posix() for path in sorted(root.glob("tests/*/**/test_*.py")))
        test_files = [path for path in paths if not path.startswith("tests/unit/")]
        names = dict(zip(test_files, _names(test_files, choice, root), strict=False))
        days = {}
        for test_file, name in names.items():
            with suppress(OSError, ValueError, KeyError):
                days[test_file] = str(json.loads((folder / name).read_bytes())["day"])
        return cls(folder, names, days)

    @classmethod
    def read(cls, directory: Path) -> Proofs:
        """Return the proofs that ``write`` wrote into a directory; empty ones if it didn't."""
        path = directory / _FILE
        if not path.exists():
            return cls(Path(), {}, {})
        content = json.loads(path.read_bytes())
        return cls(Path(content["folder"]), content["names"], content["days"])

    def write(self, directory: Path) -> None:
        """Write the proofs for the lanes of a run."""
        content = {"folder": os.fspath(self.folder), "names": dict(self.names), "days": dict(self.days)}
        (directory / _FILE).write_text(json.dumps(content), encoding="utf-8")

    def add(self, test_file: str) -> None:
        """Record that all tests of a file have passed."""
        if name := self.names.get(test_file):
            draft = self.folder / f"{name}.{os.getpid()}"
            day = time.strftime("%Y-%m-%d", time.gmtime())
            draft.write_text(json.dumps({"file": test_file, "day": day}), encoding="utf-8")
            draft.replace(self.folder / name)


def _names(test_files: Iterable[str], choice: str, root: Path) -> Iterator[str]:
    """Yield the name of each file's proof; nothing if git can't list the checkout's files."""
    files = _checkout(root)
    host = _host()
    for test_file in test_files if files else ():
        folders = [root / folder for folder in Path(test_file).parents]
        starts = {root / test_file, *(f / "conftest.py" for f in folders if (f / "conftest.py").is_file())}
        imported = frozenset(
            file.relative_to(root).as_posix()
            for package in ("tests", "image_builder")
            for file in closure(starts, package, root)
        )
        text = (root / test_file).read_text(encoding="utf-8")
        content = depends_on(test_file, files, imported, text)
        yield _digest(host, choice, json.dumps(content, sort_keys=True))


def _checkout(root: Path) -> dict[str, str]:
    """Map the files of a checkout to digests that ignore comments and docstrings; empty if git can't list them."""
    argv: list[str | Path] = [
        "git",
        "-C",
        root,
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = process.run(argv, ok=range(256))
    names = [name for name in listed.stdout.split("\0") if (root / name).is_file()]
    return code_digests(root, [root / name for name in names]) if not listed.returncode else {}


def _host() -> str:
    """Return a digest of the host's packages, kernel, Python and today's programs."""
    programs = os.environ.get("IMAGE_BUILDER_PROGRAMS")
    sums = [Path(programs, "SHA256SUMS").read_text()] if programs else []
    packages = [_PACKAGES.read_text()] if _PACKAGES.exists() else []
    return _digest(platform.release(), platform.python_version(), *packages, *sums)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
