"""The code in a stage's id: its ``run`` module and the files that it imports, except those that decide no bytes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from image_builder.settings import REPO_ROOT
from image_builder.system.trees import code_digests, files_in

PACKAGE = "image_builder"
# Packages and modules that decide how a stage is run, watched or refused, and why this affects none of the bytes that
# it makes. Their imports don't count, either.
NEUTRAL: Mapping[str, str] = {
    "bake/lock/model.py": "what is locked is in the options, by digest",
    "bake/pull": "asks registries, waits and gives up; what comes is held to the lock's digests",
    "bake/stages/__init__.py": "hands a stage its directories",
    "bake/trial.py": "asks the image's programs on a throwaway copy, and passes or refuses",
    "bake/verification.py": "the form of a verdict",
    "canonical.py": "the form of JSON values",
    "definition": "its values are in the options",
    "errors.py": "words of what failed",
    "node/mounts.py": "mounts by system calls: the arguments are its callers'",
    "settings.py": "where things are on this host",
    "system": "starts, watches and ends programs",
}
# Exceptions, which do decide bytes: how the engines keep images; what every program of a bake gets and runs in.
DECIDING = (
    "bake/pull/containerd_engine.py",
    "bake/pull/docker_engine.py",
    "bake/pull/engines.py",
    "bake/pull/reference.py",
    "system/environment.py",
    "system/sandbox.py",
    "system/sparse.py",
)
# An import on lines of its own; and a block that only a type checker reads.
_IMPORT = re.compile(
    r"^[ ]*(?:from (?P<module>[\w.]+) import (?P<names>\([^)]*\)|[^\n]*)|import (?P<plain>[\w.]+)[^\n]*)$",
    re.MULTILINE,
)
_FOR_TYPES = re.compile(r"^([ ]*)if TYPE_CHECKING:[^\n]*\n(?:\1[ ]+[^\n]*\n|\n)*", re.MULTILINE)


def is_neutral(name: str) -> bool:
    """Return whether a file decides no bytes; ``name`` is its path below the package."""
    return name not in DECIDING and any(name == part or name.startswith(f"{part}/") for part in NEUTRAL)


class Code:
    """Digests of code in a checkout, each file read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._digests: dict[str, str] = {}

    def of_stage(self, module: str, data: Iterable[str] = ()) -> dict[str, str]:
        """Map the files that count for a stage to their digests: its module, ``data``, and what both import."""
        sources = [self.root / f"{module.replace('.', '/')}.py", *(self.root / name for name in data)]
        own = {file for source in sources for file in files_in(source)}
        package = self.root / PACKAGE

        def is_left_out(file: Path) -> bool:
            return file not in own and is_neutral(file.relative_to(package).as_posix())

        scripts = [file for file in own if file.suffix == ".py"]
        files = own | closure(scripts, PACKAGE, self.root, is_left_out)
        names = sorted(file.relative_to(self.root).as_posix() for file in files)
        self._digests |= code_digests(self.root, [self.root / n for n in names if n not in self._digests])
        return {name: self._digests[name] for name in names}


def closure(
    starts: Iterable[Path],
    package: str,
    root: Path = REPO_ROOT,
    is_left_out: Callable[[Path], bool] = lambda _: False,
) -> set[Path]:
    """Return these files and all that they import, directly or not; a file that is left out isn't followed, either."""
    files: set[Path] = set()
    queue = set(starts)
    while queue:
        file = queue.pop()
        if not is_left_out(file):
            files.add(file)
            queue |= imported(file, package, root) - files
    return files


def imported(file: Path, package: str, root: Path = REPO_ROOT) -> set[Path]:
    """Return the files of a package that a file imports, anywhere in it, except for type checking."""
    imports = _imports(file.read_text(encoding="utf-8"), package)
    return {path for names in imports if (path := _file(names, root))}


@functools.lru_cache(maxsize=1024)
def _imports(source: str, package: str) -> frozenset[tuple[str, ...]]:
    """Return the possible meanings of each import of a package, most specific first.

    Imports are found by patterns, in a hundredth of the time that Python's parser takes; a test compares both.
    """
    if package not in source:
        return frozenset()
    imports: set[tuple[str, ...]] = set()
    for match in _IMPORT.finditer(_FOR_TYPES.sub("", source)):
        module, names = match["module"] or match["plain"], match["names"]
        if module.partition(".")[0] != package:
            continue
        if not names:
            imports.add((module,))
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#.*", "", names or "")):
            imports.add((f"{module}.{name}", module))
    return frozenset(imports)


def _file(names: Iterable[str], root: Path) -> Path | None:
    bases = (os.path.join(root, name.replace(".", "/")) for name in names)
    places = (place for base in bases for place in (f"{base}.py", f"{base}/__init__.py"))
    return next((Path(place) for place in places if os.path.isfile(place)), None)
