"""Seeds by a baked image's own agent and engines: a preload store made by the stages, a disk, a worker's root.

Based on ``tests/support/registries/pulls.py``: a scenario bakes a store from images that it pushed (``bake``), boots a
node (``node``) and starts an engine on what the agent made (``Node.engine``). Nothing is mocked: the stages' own
functions pull and pack, the agent is the shipped zipapp, compiled by the image's Python. dm-verity is off, since the
kernel that runs tests may not have it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.pull.reference import parse
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.preload import run as preload
from image_builder.bake.stages.preload_store import run as preload_store
from image_builder.canonical import JSON
from image_builder.definition.model import ImagePull
from image_builder.errors import CommandError
from image_builder.events import Monitor
from image_builder.lab import images, pause
from image_builder.lab.registry import HOST
from image_builder.node import layout, status, zipapp
from image_builder.settings import Settings
from image_builder.system import cgroups, namespace, process
from image_builder.system.sandbox import Root, bound, open_root
from image_builder.system.trees import remove_tree
from tests.support.registries.pulls import Lab

EPOCH = 1_700_000_000
AGENT = "/usr/local/bin/node-agent"
DISK = "/mnt/local"
DATA = f"{DISK}/data"
_SOURCE = "/run/image-builder/node-agent.pyz"

Result = dict[str, Any]


@dataclass(frozen=True)
class Baked:
    """A preload store: ``opt`` is the image's /opt, ``state`` the data root that was pulled."""

    opt: Path
    state: Path
    images: tuple[LockedImage, ...]
    options: list[dict[str, JSON]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Return the directory with the store and its manifest."""
        return self.opt / "preload"

    @property
    def file(self) -> Path:
        return self.folder / layout.STORE_FILE.name

    def manifest(self) -> Result:
        found: Result = json.loads((self.folder / layout.MANIFEST.name).read_bytes())
        return found


def runnable(lab: Lab, name: str, *trees: Path, tag: str = "1", program: Path | None = None) -> LockedImage:
    """Push and lock an image of the lab's pause program and a layer for each tree.

    It runs ``/pause``, or ``program`` with every layer's files in place.
    """
    work = lab.folder("image")
    layers = [images.pause_image(work / "pause.tar.gz").layers[0]]
    for number, tree in enumerate(trees):
        layers.append(images.layer_from_tree(tree, work / f"{number}.tar.gz", process.run))
    config = dict(pause.configuration()["config"])
    if program:
        config = {"Entrypoint": [os.fspath(program)]}
    image = images.make_image(layers, config, [f"layer {n}" for n, _ in enumerate(layers)])
    images.push(lab.registry, name, tag, image)
    remove_tree(work)
    return lab.locate(f"{HOST}/{name}:{tag}")


def bake(
    lab: Lab,
    locked: Sequence[LockedImage],
    *,
    modes: Mapping[str, str] | None = None,
    pins: Sequence[str] = (),
    verity: bool = True,
    salt: str = "",
    archive: bool = True,
) -> Baked:
    """Pull and pack with the stages' own functions. ``modes`` has modes by image; all others are ``reference``.

    Without ``archive`` there is only the store. Another ``salt`` makes another store of the same images.
    """
    base = lab.folder("bake")
    listed = [
        {
            **cast("dict[str, JSON]", json.loads(image.model_dump_json())),
            "pin": image.ref in pins,
            "mode": (modes or {}).get(image.ref, "reference"),
            "required": True,
        }
        for image in locked
    ]
    pulled = stage(
        lab, base, "preload", {"engine": lab.engine, "images": listed, "list": True, "save": archive}, {}
    )
    preload.run(pulled)
    inputs = {lab.engine: pulled.product, "tools": lab.tools.parent}
    options = {"images": listed, "verity": verity, "source_date_epoch": EPOCH, "salt": salt}
    packed = stage(lab, base, "preload_store", options, inputs)
    preload_store.run(packed)
    opt = packed.product / "tree/opt"
    for path in (pulled.product / "tree/opt").iterdir():
        path.rename(opt / path.name)
    return Baked(opt, pulled.product / "state", tuple(locked), listed)


def stage(
    lab: Lab, base: Path, name: str, options: Mapping[str, Any], inputs: Mapping[str, Path]
) -> StageContext:
    """Return the context of a stage that has its directories below ``base``."""
    product = base / name / "product"
    product.mkdir(parents=True)
    work = base / name / "work"
    work.mkdir()
    definition: Any = SimpleNamespace(
        preload=[SimpleNamespace(ref=i["ref"], required=True) for i in options["images"]],
        pull=ImagePull.model_validate({}),
    )
    return StageContext(
        plan=StagePlan(name, name, options),
        definition=definition,
        work=work,
        product=product,
        lowers=(),
        ground=tuple(lab.trees),
        inputs=inputs,
        repo=None,
        files=None,
        monitor=Monitor(),
        log=lab.base / f"{name}.log",
        settings=Settings(),
        endpoints=lab.endpoints,
        stop=threading.Event(),
    )


@dataclass
class Node:
    """A worker's root with a store at /opt/preload and a disk at ``DISK``."""

    lab: Lab
    root: Root
    disk: Path
    _mounts: ExitStack = field(default_factory=ExitStack)

    @property
    def data(self) -> Path:
        return self.disk / "data"

    @property
    def store(self) -> Path:
        """Return where the agent mounts the store."""
        return self.root.path / layout.MOUNT_POINT.relative_to("/")

    def marker(self) -> str:
        """Return the text of the marker of a complete seed, empty if there is none."""
        path = self.disk / f".node/seed/{self.lab.engine}.json"
        return path.read_text() if path.exists() else ""

    def settings(self, **values: Any) -> None:
        """Write preload.json."""
        document = {"engine": self.lab.engine, "data_root": DATA, "mount_point": DISK, "verity": "off"}
        folder = self.root.path / "etc/node-agent"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "preload.json").write_text(json.dumps({**document, **values}))

    def told_of_disk(self) -> None:
        """Write the status that ``node-agent disk`` writes for a good disk."""
        status.update(
            "disk", {"state": status.OK, "action": "reuse"}, status.Places(self.root.path / "run/node")
        )

    def agent(self, *words: str) -> subprocess.Popen[bytes]:
        """Start the agent, in a process group of its own; the seed comes after the disk."""
        if not words and "disk" not in self.status():
            self.told_of_disk()
        return subprocess.Popen(
            self.root.argv([AGENT, *(words or ("seed",))]),
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def seed(self) -> Result:
        """Run ``node-agent seed`` as at a boot; return its section of the status, its exit status and its output."""
        child = self.agent()
        said = child.communicate()[0].decode()
        return {**self.status().get("seed", {}), "exit": child.returncode, "said": said}

    def status(self) -> Result:
        path = self.root.path / "run/node/status.json"
        found: Result = json.loads(path.read_bytes()) if path.exists() else {}
        return found

    def shut_down(self) -> None:
        """Leave only what a node that is off has: its disks."""
        while os.path.ismount(self.store):
            namespace.unmount(os.fspath(self.store))
        if (self.root.path / "run/node").exists():
            remove_tree(self.root.path / "run/node")

    def blank(self) -> None:
        """Empty the disk, as a deallocation does."""
        self.shut_down()
        for path in self.disk.iterdir():
            if path.name != "lost+found":
                process.run(["rm", "-rf", "--one-file-system", path])

    @contextmanager
    def engine(self) -> Iterator[Any]:
        """Run the engine on the data root, as the node's unit would."""
        where = self.root.path / self.lab.module.DATA_ROOT.lstrip("/")
        self.data.mkdir(exist_ok=True)
        with (
            cgroups.held(),
            # An engine takes a data root for its own that is a mount.
            bound(self.data, where, read_only=False),
            self.lab.module.running(
                self.root, downloads=8, endpoints=self.lab.endpoints, log=self.lab.log
            ) as engine,
        ):
            yield engine

    def use(self, opt: Path) -> None:
        """Put another image's /opt in place, as a reimage does."""
        where = self.root.path / "opt"
        self._mounts.close()
        namespace.bind(os.fspath(opt), os.fspath(where), read_only=True)
        # Lazily: the kernel may hold the store's file a moment longer than its mount.
        self._mounts.callback(process.run, ["umount", "--lazy", where])


@contextmanager
def node(lab: Lab, opt: Path, disk: Path | None = None) -> Iterator[Node]:
    """Open a worker's root with the agent installed and the settings written; ``opt`` is its /opt."""
    disk = disk or lab.folder("disk")
    with open_root(
        lab.trees, lab.folder("root"), writable_binds={DISK: disk}, network=True, writable_cgroups=True
    ) as root:
        preload.write_names(root.path, lab.endpoints)
        made = Node(lab, root, disk)
        (root.path / "opt").mkdir(exist_ok=True)
        made.use(opt)
        install(root)
        made.settings()
        try:
            yield made
        finally:
            made.shut_down()
            made._mounts.close()


def install(root: Root) -> None:
    """Install the agent as the role does: the shipped archive, compiled by the image's own Python."""
    source = root.path / _SOURCE.lstrip("/")
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_bytes(zipapp.archive())
    source.chmod(0o755)
    root.run([_SOURCE, "compile", AGENT])


# -- comparing -------------------------------------------------------------------------------------------------


def listing(tree: Path, *, follow: bool = False) -> dict[str, list[Any]]:
    """Return a tree's entries: type, mode, owner, and a file's hash, a link's target or a device's number.

    With ``follow`` a link to an existing file or directory counts as its target.
    """
    found: dict[str, list[Any]] = {".": _entry(tree, follow=True)}
    for folder, folders, names in os.walk(tree, followlinks=follow):
        for name in (*folders, *names):
            path = Path(folder, name)
            # An overlay lists a whiteout that hides nothing, but has no file there.
            if os.path.lexists(path):
                found[os.fspath(path.relative_to(tree))] = _entry(path, follow=follow)
    return found


def _entry(path: Path, *, follow: bool) -> list[Any]:
    info = path.stat() if follow and path.exists() else path.lstat()
    mode = info.st_mode
    what: Any = None
    if stat.S_ISREG(mode):
        with path.open("rb") as stream:
            what = hashlib.file_digest(stream, "sha256").hexdigest()
    elif stat.S_ISLNK(mode):
        what = os.readlink(path)
    elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        what = info.st_rdev
    return [stat.S_IFMT(mode), stat.S_IMODE(mode), info.st_uid, info.st_gid, what]


def exact(tree: Path) -> dict[str, list[Any]]:
    """Return a layer's files in full: as ``listing``, plus times (ns), sizes, hard links and extended attributes."""
    found = {}
    first: dict[int, str] = {}
    for name, entry in sorted(listing(tree).items()):
        path = tree / name
        info = path.lstat()
        kept = {
            key: os.getxattr(path, key, follow_symlinks=False).hex()
            for key in os.listxattr(path, follow_symlinks=False)
        }
        size = info.st_size if stat.S_ISREG(info.st_mode) else 0
        group = first.setdefault(info.st_ino, name) if not stat.S_ISDIR(info.st_mode) else ""
        found[name] = [*entry, info.st_mtime_ns, size, group, kept]
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the first names in which two listings differ."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return [f"{name}: {one.get(name)} != {other.get(name)}" for name in sorted(names)[:20]]


def kill_when(child: subprocess.Popen[bytes], happened: Callable[[], bool]) -> bool:
    """SIGKILL a process as soon as something has happened; return False if it ended before that."""
    try:
        while child.poll() is None:
            if happened():
                os.kill(child.pid, signal.SIGKILL)
                return child.wait() == -signal.SIGKILL
        return False
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


@contextmanager
def full_disk(lab: Lab, megabytes: int, inodes: int = 100_000) -> Iterator[Path]:
    """Mount a filesystem with only so many megabytes and inodes."""
    where = lab.base / f"small-{secrets.token_hex(3)}"
    where.mkdir()
    namespace.mount("tmpfs", "small", os.fspath(where), f"size={megabytes}m,nr_inodes={inodes},mode=755")
    try:
        yield where
    finally:
        namespace.unmount(os.fspath(where))


def docker(node: Node, *words: str, ok: Sequence[int] = (0,)) -> str:
    """Run the docker command in the node's root; return what it printed."""
    done = node.root.run(["docker", *words], ok=ok)
    return done.stdout + done.stderr


def ctr(node: Node, *words: str, ok: Sequence[int] = (0,)) -> str:
    """Run ctr in the kubelet's namespace; return what it printed."""
    try:
        done = node.root.run(["ctr", "-n", "k8s.io", *words], ok=ok)
    except CommandError as error:
        raise AssertionError(f"{error.message}\n{error.tail}") from error
    return done.stdout + done.stderr


def as_json(image: LockedImage) -> Result:
    found: Result = json.loads(image.model_dump_json())
    return found


def at_digest(image: LockedImage) -> str:
    """Return an image's reference by digest."""
    return parse(image.ref).at(image.digest)


def fields(value: Any) -> Result:
    """Return a frozen record as JSON."""
    return dataclasses.asdict(value)
