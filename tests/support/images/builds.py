"""Runs of the real command against a store of its own, and checks of what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from image_builder.bake.lock import repository
from image_builder.bake.lock.model import Lock
from image_builder.bake.store import Store
from image_builder.definition.model import record_name
from image_builder.settings import REPO_ROOT, REPOSITORY_ID
from image_builder.system import sparse

REPO = REPO_ROOT
IMAGE = "tiny"


def make_tiny(project: Path) -> None:
    """Let the image of a repository that `init` made be as small as the lab's smallest one.

    All of these are checkouts of one repository: a test uses the lock, and so the stages, of another one.
    """
    (project / REPOSITORY_ID).write_text("of tests\n")
    lab = yaml.safe_load((REPO / "inventories/lab/hosts.yml").read_text())
    path = project / "inventories/site/host_vars/node.yml"
    path.parent.mkdir()
    path.write_text(json.dumps(lab["all"]["children"]["images"]["hosts"][IMAGE]))


@contextmanager
def offered_packages(built: Workplace) -> Iterator[Path]:
    """Make a flat repository of those packages of an image's own release that its lock names and the store has."""
    store = Store(built.store)
    lock = Lock.load(built.lock)
    suite = lock.group("base").suite
    locked = {p.sha256: p for group in lock.groups.values() if group.suite == suite for p in group.packages}
    debs = built.store / "debs"
    with store.staging() as staging:
        present = [package for package in locked.values() if (debs / package.sha256).exists()]
        repository.write_repository(present, suite, debs, staging / "repo")
        yield staging / "repo"


@dataclass(frozen=True)
class Ended:
    """A finished command: its exit status, its result on stdout, its messages on stderr."""

    status: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found


@dataclass(frozen=True)
class Workplace:
    """A test's store and output directory; the store is filled with the stages of a finished build.

    ``made`` are the stage ids of a build that stopped early: the store remembers only complete builds.
    """

    store: Path
    output: Path
    image: str = IMAGE
    made: tuple[str, ...] = ()

    @property
    def artefact(self) -> Path:
        """Return the directory of the last published build."""
        return (self.output / self.image / "latest").resolve()

    def published(self) -> dict[str, str]:
        """Map every published file to its SHA-256."""
        return {
            os.fspath(path.relative_to(self.output)): sparse.sha256(path)
            for path in sorted(self.output.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }

    def take_artefact(self, original: Workplace) -> dict[str, str]:
        """Hard-link what another workplace published under this image's name; return it as ``published`` does."""
        self.output.mkdir(parents=True)
        subprocess.run(["cp", "-al", original.output / original.image, self.output / self.image], check=True)
        found = self.published()
        assert any(name.endswith("manifest.json") for name in found)
        return found

    def command(self, *argv: str | Path, inventory: Path | None = None) -> list[str]:
        words = [os.fspath(REPO / "image-builder"), *(os.fspath(a) for a in argv)]
        if inventory:
            words += ["-i", os.fspath(inventory)]
        return words

    def build(
        self, *argv: str | Path, inventory: Path | None = None, env: dict[str, str] | None = None
    ) -> Ended:
        """Build the test image; return how it ended, successfully or not."""
        done = subprocess.run(
            [*self.command("build", self.image, *argv, inventory=inventory), *self._places(), "--json"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "CI": "true", **(env or {})},
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def _places(self) -> list[str]:
        return ["--store", os.fspath(self.store), "--output", os.fspath(self.output)]

    @property
    def lock(self) -> Path:
        """Return the lock of the last build, as the store remembers it."""
        return self.record(".lock.json")

    def record(self, suffix: str) -> Path:
        """Return the store's record of the image: for the lab's inventory, or for the inventory that took it over.

        A copy of a store has the record under the image's name until the first build there, of any inventory.
        """
        locks = self.store / "locks"
        names = (record_name(self.image, [REPO / "inventories/lab"], REPO), self.image)
        known = [locks / f"{name}{suffix}" for name in names]
        return next((p for p in (*known, *locks.glob(f"{self.image}@*{suffix}")) if p.exists()), known[0])

    def start(self, *argv: str | Path, enter: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Start a build through the command ``enter``; its stderr is to be read by ``wait_for_line``."""
        return subprocess.Popen(
            [*enter, *self.command("build", self.image, *argv), *self._places()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CI": "true"},
        )

    def forget(self, *names: str) -> None:
        """Remove stages from the store by name, so that the next build has to make them."""
        for path in list((self.store / "objects").iterdir()):
            meta = json.loads((path / "meta.json").read_text())
            if meta["name"] in names:
                subprocess.run(["rm", "-rf", "--one-file-system", path], check=True)

    def forget_id(self, stage_id: str) -> None:
        """Remove one stage from the store."""
        subprocess.run(["rm", "-rf", "--one-file-system", self.store / "objects" / stage_id], check=True)

    def sealed(self) -> tuple[tuple[Path, ...], Path]:
        """Return the layers of the sealed image that was published last, topmost first, and its facts."""
        facts = self.artefact / "facts.json"
        return self.layers(json.loads(facts.read_bytes())["build_id"]), facts

    def layers(self, stage_id: str) -> tuple[Path, ...]:
        """Return the trees that make up a stage's root, topmost first."""
        store = Store(self.store)
        return tuple(store.product(i) / "tree" for i in (stage_id, *store.meta(stage_id)["lowers"]))

    def trees(self, name: str) -> tuple[Path, ...]:
        """Return the trees of the stage called ``name`` of the image's last build, topmost first."""
        return self.layers(self.object(name).name)

    def build_until(self, stage: str, *argv: str | Path) -> tuple[Path, ...]:
        """Build the image up to and including a stage; return the layers that exist then."""
        done = self.build("--stop-after", stage, *argv)
        assert done.status == 0, done.stderr
        return self.layers(next(one["id"] for one in done.result["stages"] if one["name"] == stage))

    def object(self, name: str) -> Path:
        """Return the directory of the stage called ``name`` of the image's last build."""
        for path in (self.store / "objects" / stage_id for stage_id in self.ids()):
            if path.exists() and json.loads((path / "meta.json").read_text())["name"] == name:
                return path
        raise KeyError(name)

    def ids(self) -> Sequence[str]:
        """Return the stage ids of the image's last build."""
        builds: list[list[str]] = [] if self.made else json.loads(self.record(".builds").read_text())
        return self.made or builds[-1]

    def restore(self, original: Workplace, name: str) -> None:
        """Restore a forgotten stage from the store that this one was copied from."""
        path = original.object(name)
        self.forget_id(path.name)
        subprocess.run(["cp", "-al", path, self.store / "objects" / path.name], check=True)


def wait_for_line(child: subprocess.Popen[str], wanted: Callable[[str], bool]) -> bool:
    """Read the child's stderr until a wanted line appears; return False if stderr ends first.

    The lines are printed, so that a failing test shows them. Later lines are drained until no process holds the pipe
    any longer, and then it is closed.
    """
    stream = child.stderr
    assert stream is not None
    for line in stream:
        print(line, end="")
        if wanted(line):
            threading.Thread(target=_drain, args=(stream,), daemon=True).start()
            return True
    stream.close()
    return False


def _drain(stream: IO[str]) -> None:
    with stream:
        stream.read()


def is_drained(child: subprocess.Popen[str], seconds: float = 120) -> bool:
    """Wait until a dead build's pipe is closed, that is, until none of its processes is left to write to it."""
    deadline = time.monotonic() + seconds
    while not (child.stderr and child.stderr.closed) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(child.stderr and child.stderr.closed)


def left_behind(store: Path, process: int | str = "self") -> list[str]:
    """Return what a dead build left outside its staging area: mounts (in a process's namespace), loop devices,
    processes, files.
    """
    found = [
        line for line in Path(f"/proc/{process}/mounts").read_text().splitlines() if os.fspath(store) in line
    ]
    loops = Path("/sys/block").glob("loop*/loop/backing_file")
    found += [p.read_text() for p in loops if os.fspath(store) in p.read_text()]
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if os.fspath(store) in words:
            found.append(words.replace("\0", " "))
    for folder in ("debs", "files", "locks"):
        found += [os.fspath(p) for p in (store / folder).glob("*partial*")]
    return found


def wait_until_clean(store: Path, process: int | str = "self") -> list[str]:
    """Give the kernel a moment to take down a killed namespace; return what is still left."""
    deadline = time.monotonic() + 120
    while (left := left_behind(store, process)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
