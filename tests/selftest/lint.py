"""The linters and the type checker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from image_builder.errors import CommandError
from image_builder.settings import REPO_ROOT
from image_builder.system import process
from tests.selftest.surroundings import ANY, environment

_SHELL_SCRIPTS = ("image-builder", ".ci/run")


@dataclass(frozen=True)
class Linter:
    """A program of the venv and its arguments; it prints nothing if there are no findings."""

    name: str
    argv: tuple[str, ...]


def linters(cache: Path) -> list[Linter]:
    """Return the linters, quick ones first; their caches are in ``cache``."""
    scripts = [*_SHELL_SCRIPTS, *sorted(os.fspath(p.relative_to(REPO_ROOT)) for p in _shell_files())]
    return [
        Linter("import-linter", ("lint-imports", "--no-cache")),
        Linter("ruff", ("ruff", "check", f"--cache-dir={cache / 'ruff'}", "--quiet", ".")),
        Linter(
            "ruff format",
            ("ruff", "format", f"--cache-dir={cache / 'ruff'}", "--check", "--output-format=concise", "."),
        ),
        Linter("shellcheck", ("shellcheck", *scripts)),
        Linter("ansible-lint", ("ansible-lint", "--offline", "-q", "--nocolor")),
        Linter("mypy", ("mypy", f"--cache-dir={cache / 'mypy'}")),
    ]


@contextmanager
def beside(cache: Path, write: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Run the linters, one after another, beside the block; yields a function that waits for them.

    It prints their output and returns whether all of them passed.
    """
    with ThreadPoolExecutor(1) as pool:
        found = linters(cache)
        ended = [pool.submit(_lint, linter, cache) for linter in found]

        def is_clean() -> bool:
            clean = True
            for linter, future in zip(found, ended, strict=True):
                status, output, seconds = future.result()
                if status:
                    clean = False
                    write(output.rstrip())
                write(f"{linter.name}: {'failed' if status else 'clean'} ({seconds:.1f} s)")
            return clean

        yield is_clean


def _shell_files() -> Iterator[Path]:
    for folder in ("roles", "tests", "docs"):
        yield from (REPO_ROOT / folder).rglob("*.sh")


def _lint(linter: Linter, cache: Path) -> tuple[int, str, float]:
    argv = [os.fspath(Path(sys.executable).parent / linter.argv[0]), *linter.argv[1:]]
    started = time.monotonic()
    try:
        done = process.run(argv, cwd=REPO_ROOT, env=environment(cache), ok=ANY)
    except CommandError as error:
        return 1, error.message, time.monotonic() - started
    return done.returncode, done.stdout + done.stderr, done.seconds
