"""This project's own checks, quick ones first: lint and types, then pytest, part by part.

pytest puts its tests in the order of the parts and stops at the end of a part in which something failed
(``tests/conftest.py``); here it is started, what it took is compared with the ceilings, and its closing line is
printed last.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from image_builder import process
from image_builder.errors import CommandError, UsageError
from image_builder.host import nearest_existing
from image_builder.settings import REPO_ROOT

# Minutes on 2 cores with an empty store. `fast` is lint, types and unit tests; `bake` is everything up to an
# artefact, `preload` the pulls of container images, `disk` the local disk with the preload store, and the booted
# machine, `gpu` the drivers' build, the booted machine with them, and the gate, `pools` hundreds of hosts with sshd.
CEILINGS = {"fast": 2.0, "bake": 15.0, "preload": 8.0, "disk": 15.0, "gpu": 12.0, "pools": 10.0}
CEILING_GB = 25.0
# The parts that tests/conftest.py tells apart, and the ceiling that each counts for.
PARTS = {
    "unit": "fast",
    "root": "bake",
    "preload": "preload",
    "pools": "pools",
    "disk": "disk",
    "e2e": "bake",
    "boot": "disk",
    "gpu": "gpu",
}
_CLOSING = re.compile(r"^(=+ )?(.*\d (passed|failed|error|skipped|deselected)|no tests ran).* in [\d.:]+")
_ANY = tuple(range(-64, 256))
_SHELL_SCRIPTS = ("image-builder", ".ci/run")


@dataclass(frozen=True)
class Linter:
    """A program of the venv and its arguments; it says nothing when all is well."""

    name: str
    argv: tuple[str, ...]


def linters(cache: Path) -> list[Linter]:
    """Return the linters, the slow ones first; what they keep goes to ``cache``."""
    scripts = [*_SHELL_SCRIPTS, *sorted(os.fspath(p.relative_to(REPO_ROOT)) for p in _shell_files())]
    return [
        Linter("ansible-lint", ("ansible-lint", "--offline", "-q", "--nocolor")),
        Linter("mypy", ("mypy", f"--cache-dir={cache / 'mypy'}")),
        Linter("import-linter", ("lint-imports", "--no-cache")),
        Linter("ruff", ("ruff", "check", f"--cache-dir={cache / 'ruff'}", "--quiet", ".")),
        Linter(
            "ruff format",
            ("ruff", "format", f"--cache-dir={cache / 'ruff'}", "--check", "--output-format=concise", "."),
        ),
        Linter("shellcheck", ("shellcheck", *scripts)),
    ]


def _shell_files() -> Iterator[Path]:
    for folder in ("roles", "tests", "docs"):
        yield from (REPO_ROOT / folder).rglob("*.sh")


def run(arguments: Sequence[str], *, fast: bool, store: Path, as_json: bool) -> int:
    """Run the checks and return the exit status: 0 when all passed.

    With ``arguments`` (for pytest) only pytest runs. ``fast`` leaves out what needs root. Everything is told
    on standard output, or on standard error when ``as_json`` wants that for the result.
    """
    if not fast and os.geteuid() != 0:
        raise UsageError("the whole suite needs root", hint="image-builder test --fast needs none")
    sink = sys.stderr if as_json else sys.stdout

    def write(text: str) -> None:
        print(text, file=sink, flush=True)

    cache = _cache()
    started = time.monotonic()
    clean = bool(arguments) or lint(cache, write)
    linted = time.monotonic() - started
    with _peak_disk(store) as disk:
        status, parts, closing = _pytest(arguments, fast or not clean, store, cache, write)
    minutes = dict.fromkeys(CEILINGS, 0.0) | {"fast": linted / 60}
    for part, seconds in parts.items():
        minutes[PARTS[part]] += seconds / 60
    passed = clean and status == 0
    for line in _summary(minutes, disk[0] / 1e9, fast):
        write(line)
    if not clean:
        write("lint failed: see above" + ("" if fast else "; what needs root was not run"))
    write(closing or f"pytest ended with status {status} and no closing line")
    if as_json:
        told = {k: round(v, 2) for k, v in minutes.items()}
        print(
            json.dumps(
                {"passed": passed, "minutes": told, "disk_gb": round(disk[0] / 1e9, 2), "closing": closing}
            )
        )
    return 0 if passed else 1


def lint(cache: Path, write: Callable[[str], None]) -> bool:
    """Run the linters, two at a time; tell what they say. Returns whether all were content."""
    content = True
    with ThreadPoolExecutor(2) as pool:
        for linter, (status, output, seconds) in zip(
            (found := linters(cache)), pool.map(lambda one: _lint(one, cache), found), strict=True
        ):
            if status:
                content = False
                write(output.rstrip())
            write(f"{linter.name}: {'failed' if status else 'clean'} ({seconds:.1f} s)")
    return content


def _lint(linter: Linter, cache: Path) -> tuple[int, str, float]:
    argv = [os.fspath(Path(sys.executable).parent / linter.argv[0]), *linter.argv[1:]]
    started = time.monotonic()
    try:
        done = process.run(argv, cwd=REPO_ROOT, env=_environment(cache), ok=_ANY)
    except CommandError as error:
        return 1, error.message, time.monotonic() - started
    return done.returncode, done.stdout + done.stderr, done.seconds


def _pytest(
    arguments: Sequence[str], fast: bool, store: Path, cache: Path, write: Callable[[str], None]
) -> tuple[int, dict[str, float], str]:
    """Run pytest; return its status, the seconds of each part, and its closing line, which is held back."""
    marks = "not root and not boot and not gpu" if fast else "not gpu"
    colour = "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "no"
    held: list[str] = []

    def show(line: str) -> None:
        if held and held[-1]:
            write(held.pop())
        (held.append if _CLOSING.match(_plain(line)) else write)(line)

    with tempfile.TemporaryDirectory(prefix="image-builder-test-") as folder:
        report = Path(folder) / "parts.json"
        argv = [sys.executable, "-m", "pytest", f"--color={colour}", f"--parts={report}", "-m", marks]
        done = process.run(
            [*argv, "-o", f"cache_dir={cache / 'pytest'}", *arguments],
            cwd=REPO_ROOT,
            env={**_environment(cache), "IMAGE_BUILDER_STORE": os.fspath(store)},
            ok=_ANY,
            on_line=show,
        )
        parts: dict[str, float] = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, parts, held[-1] if held else ""


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)


def _environment(cache: Path) -> dict[str, str]:
    """Return what the checks see of our environment."""
    kept = (
        "CI",
        "HOME",
        "COLUMNS",
        "IMAGE_BUILDER_ARTEFACT",
        "IMAGE_BUILDER_RANDOM_KILLS",
        "KUBELET_PROGRAMS",
        "IMAGE_BUILDER_MIRROR",
        "IMAGE_BUILDER_MOLECULE",
        "NO_COLOR",
        "TERM",
        "PYTHONPYCACHEPREFIX",
    )
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "ANSIBLE_HOME": os.fspath(cache / "ansible"),
        # A bake's tree doesn't belong on a tmpfs, which /tmp often is.
        "TMPDIR": os.environ.get("TMPDIR", "/var/tmp"),
        "PATH": f"{Path(sys.executable).parent}:{process.environment()['PATH']}",
    }


def _cache() -> Path:
    """Return where the linters and pytest keep things: not in the checkout, which may be someone else's."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(home) / "image-builder"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _peak_disk(store: Path) -> Iterator[list[float]]:
    """Watch the filesystems of the store and of temporary files; yields [bytes used at most beyond the start]."""
    places = [store, Path(_environment(store)["TMPDIR"])]
    devices = {}
    for place in places:
        there = nearest_existing(place)
        devices[there.stat().st_dev] = there

    def used() -> float:
        stats = [os.statvfs(place) for place in devices.values()]
        return float(sum((s.f_blocks - s.f_bfree) * s.f_frsize for s in stats))

    start, peak, over = used(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(2):
            peak[0] = max(peak[0], used() - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        peak[0] = max(peak[0], used() - start)


def _summary(minutes: dict[str, float], gigabytes: float, fast: bool) -> Iterator[str]:
    for name, taken in minutes.items():
        if name == "fast" or not fast:
            yield f"{name}: {taken:.1f} of {CEILINGS[name]:g} min{' (over)' if taken > CEILINGS[name] else ''}"
    over = " (over)" if gigabytes > CEILING_GB else ""
    yield f"disk: {gigabytes:.1f} of {CEILING_GB:g} GB{over}"
