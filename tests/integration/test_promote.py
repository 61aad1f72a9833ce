"""Promotion of real EROFS layers to a real disk: exact copies, crashes, full and broken disks, a damaged store.

A scenario runs in a process and namespaces of its own, asserts nothing and returns JSON, as in ``tests/pulls.py``. The
disk is ext4 on a loop device.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from image_builder import namespace
from image_builder.node.promote import batches, command
from image_builder.node.promote.copy import copy_tree
from image_builder.node.promote.links import find
from image_builder.node.promote.settings import BYTES_PER_SECOND, Places
from image_builder.settings import DEFAULT_STORE

pytestmark = pytest.mark.root

REPO = Path(__file__).resolve().parents[2]
MB = 1 << 20
_CHILD = "import sys, importlib; m = importlib.import_module(sys.argv[1]); sys.exit(m.child(sys.argv[2]))"
_PROMOTE = "import sys; from tests.integration import test_promote as t; sys.exit(t.promote_at(sys.argv[1]))"
Result = dict[str, Any]


# -- the place of a scenario -------------------------------------------------------------------------------------


@pytest.fixture
def isolated(tools_tree: Path) -> Callable[..., Any]:
    """Return a function that runs a scenario and returns its JSON; nothing of it is left on disk."""

    def run(scenario: Callable[..., object], *words: str, seconds: float = 300) -> Any:
        # Beside the store: neither EROFS nor a loop device can have its file on an overlay or a tmpfs everywhere.
        parent = Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE)).parent
        base = parent / f"promote-{os.getpid()}-{secrets.token_hex(3)}"
        base.mkdir()
        told = {"name": scenario.__name__, "words": words, "tools": os.fspath(tools_tree)}
        try:
            (base / "scenario.json").write_text(json.dumps(told))
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, "tests.integration.test_promote", base],
                cwd=REPO,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
            )
            assert done.returncode == 0, done.stdout
            return json.loads((base / "result.json").read_text())
        finally:
            subprocess.run(["rm", "-rf", "--one-file-system", base], check=True)

    return run


def child(path: str) -> int:
    """Be the process of one scenario."""
    base = Path(path)
    told = json.loads((base / "scenario.json").read_text())

    def work() -> int:
        scenario = getattr(importlib.import_module(__name__), told["name"])
        result = scenario(Node(base, Path(told["tools"])), *told["words"])
        (base / "result.json").write_text(json.dumps(result))
        return 0

    return namespace.run_isolated(work)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node: a store to be packed from ``files``, a disk, and what the roles and the bake told the agent."""

    base: Path
    tools: Path

    @property
    def files(self) -> Path:
        return self.base / "files"

    @property
    def disk(self) -> Path:
        return self.base / "disk"

    @property
    def root(self) -> Path:
        return self.disk / "docker"

    @property
    def erofs(self) -> Path:
        return self.base / "store.erofs"

    @property
    def places(self) -> Places:
        base = self.base
        return Places(base / "store.json", base / "rehearsal.json", base / "preload", base / "run", base)

    def layer(self, name: str) -> Path:
        made = self.files / "layers" / hex_of(name)
        made.mkdir(parents=True)
        return made

    def pack(self) -> None:
        """Make the EROFS of ``files`` with the tools' mkfs, and mount it."""
        libraries = self.tools / "usr/lib/x86_64-linux-gnu"
        loader = libraries / "ld-linux-x86-64.so.2"
        argv: list[str | Path] = [loader, "--library-path", libraries, self.tools / "usr/bin/mkfs.erofs"]
        subprocess.run(
            [*argv, "-zlz4", "-C65536", "--quiet", self.erofs, self.files],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.mount_store()

    def mount_store(self) -> None:
        self.places.store.mkdir(exist_ok=True)
        namespace.mount("erofs", os.fspath(self.erofs), os.fspath(self.places.store), "ro")

    def make_disk(self, size: int, image: Path | None = None, options: str = "") -> None:
        """Make and mount the local disk; its image goes with the namespace's mount."""
        image = image or self.base / "disk.img"
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m0", "-Ediscard", image], check=True)
        self.disk.mkdir(exist_ok=True)
        _mount_loop(image, self.disk, options)
        (self.disk / ".node").mkdir(mode=0o700)
        self.root.mkdir()

    def tell(self, names: list[str], *, sizes: dict[str, int] | None = None, **promote: Any) -> None:
        """Write what a bake and the roles leave: an image for each layer."""
        places, sizes = self.places, sizes or {}
        images = [
            dict.fromkeys(("digest", "manifest", "id"), "")
            | {"ref": f"lab/{name}:1", "mode": "reference", "pin": False, "required": False}
            | {"diff_ids": [diff_id(name)]}
            for name in names
        ]
        layers = [{"diff_id": diff_id(n), "bytes": sizes.get(n, self.size_of(n))} for n in names]
        manifest = {"format": 1, "id": "feed", "file": str(self.erofs), "bytes": 1, "verity": None}
        places.manifest.write_text(json.dumps(manifest | {"engines": {}, "images": images, "layers": layers}))
        wanted = {"bytes_per_second": 0, "settle_seconds": 0, "reserve_percent": 0} | promote
        settings = {"mount_point": str(self.disk), "data_root": str(self.root), "kubelet_healthz": ""}
        settings["engine"] = "docker" if self.root.name == "docker" else "containerd"
        (self.base / "preload.json").write_text(json.dumps(settings | {"promote": wanted}))
        places.status.mkdir(exist_ok=True)
        self.tell_disk({"state": "ok"})

    def tell_disk(self, section: Result) -> None:
        (self.places.status / "status.json").write_text(json.dumps({"format": 1, "disk": section}))

    def size_of(self, name: str) -> int:
        return sum(p.lstat().st_size for p in (self.files / "layers" / hex_of(name)).rglob("*"))

    def seed_docker(self, names: list[str]) -> None:
        """Make the links that the seed makes."""
        for name in names:
            place = self.root / "overlay2" / f"cache-{name}"
            place.mkdir(parents=True)
            (place / "diff").symlink_to(self.places.store / "layers" / hex_of(name))

    def promote(self) -> Result:
        """Run the command here; return the section of the status."""
        assert command.run(self.places) == 0
        return self.section()

    def section(self) -> Result:
        found: Result = json.loads((self.places.status / "status.json").read_text())["promotion"]
        return found

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command as a process of its own."""
        return subprocess.Popen([sys.executable, "-c", _PROMOTE, self.base], cwd=REPO)

    def left(self) -> list[str]:
        return sorted(link.path.parent.name for link in find("docker", self.root, self.places.store))

    def differences(self, names: list[str]) -> list[str]:
        """Return what differs from the store, of the layers that are no link."""
        found = []
        for name in names:
            diff = self.root / "overlay2" / f"cache-{name}" / "diff"
            if not diff.is_symlink():
                found += compare(self.places.store / "layers" / hex_of(name), diff)
        return found

    def scraps(self) -> list[str]:
        """Return what lies in the staging directory."""
        return [str(p) for p in (self.disk / ".node/staging").rglob("*")]


def promote_at(base: str) -> int:
    """Be a process of ``node-agent promote``."""
    return command.run(Node(Path(base), Path()).places)


def _mount_loop(image: Path, target: Path, options: str = "") -> None:
    with suppress(FileExistsError):
        os.mknod("/dev/loop-control", 0o20600, os.makedev(10, 237))
    for number in range(64):
        with suppress(FileExistsError):
            os.mknod(f"/dev/loop{number}", 0o60600, os.makedev(7, number))
    done = subprocess.run(["losetup", "-f", "--show", image], check=True, capture_output=True, text=True)
    try:
        namespace.mount("ext4", done.stdout.strip(), os.fspath(target), options)
    finally:  # the device goes with the mount
        subprocess.run(["losetup", "-d", done.stdout.strip()], check=True)


def hex_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def diff_id(name: str) -> str:
    return f"sha256:{hex_of(name)}"


# -- trees -------------------------------------------------------------------------------------------------------


def describe(top: Path) -> dict[str, tuple[object, ...]]:
    """Return every fact of every entry that a copy must keep, the top's included."""
    first: dict[int, str] = {}
    found: dict[str, tuple[object, ...]] = {}
    for path in [top, *sorted(top.rglob("*"))]:
        name, info = str(path.relative_to(top)), path.lstat()
        attributes = {
            key: os.getxattr(path, key, follow_symlinks=False).hex()
            for key in os.listxattr(path, follow_symlinks=False)
        }
        content = ""
        if stat.S_ISREG(info.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(path)
        linked = None if stat.S_ISDIR(info.st_mode) else (info.st_nlink, first.setdefault(info.st_ino, name))
        size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
        facts = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_rdev, size)
        found[name] = (*facts, sorted(attributes.items()), content, linked)
    return found


def compare(one: Path, other: Path) -> list[str]:
    """Return a line for each entry that differs."""
    left, right = describe(one), describe(other)
    names = sorted({*left, *right})
    return [f"{n}: {left.get(n)} != {right.get(n)}" for n in names if left.get(n) != right.get(n)]


def _capability() -> bytes:
    """Return cap_net_bind_service=ep as ``security.capability`` (struct vfs_cap_data, revision 2)."""
    return (0x02000001).to_bytes(4, "little") + (1 << 10).to_bytes(4, "little") + bytes(12)


def _acl(*entries: tuple[int, int, int]) -> bytes:
    """Return an ACL as an extended attribute: (tag, permissions, id) each."""
    words = b"".join(
        t.to_bytes(2, "little") + p.to_bytes(2, "little") + i.to_bytes(4, "little") for t, p, i in entries
    )
    return (2).to_bytes(4, "little") + words


_NOBODY = 0xFFFFFFFF
_ACL = _acl((1, 7, _NOBODY), (2, 5, 1234), (4, 5, _NOBODY), (16, 5, _NOBODY), (32, 4, _NOBODY))


def fill_with_everything(top: Path) -> None:
    """Make every kind of entry that a layer can have."""
    chance = random.Random(11)
    for name in ("usr/bin", "opaque", "sticky", "closed", "acl", "setgid/below", "a/" * 60, "ümläut"):
        (top / name).mkdir(parents=True)
    (top / "plain").write_bytes(b"plain")
    (top / "empty").touch()
    with open(os.fsencode(top) + b"/\xff\xfe no utf-8 \n", "wb") as file:
        file.write(b"odd")
    (top / "ümläut/ß").write_text("x")
    (top / ("a/" * 60) / "deep").write_text("deep")
    (top / "big").write_bytes(chance.randbytes(5 * MB + 123))
    (top / "exact").write_bytes(chance.randbytes(MB))
    with (top / "sparse").open("wb") as file:
        file.truncate(48 * MB)
        file.seek(20 * MB + 5)
        file.write(b"in the middle")
    (top / "zeros").write_bytes(bytes(8 * MB))
    (top / "usr/bin/su").write_bytes(b"suid")
    (top / "usr/bin/ping").write_bytes(b"capable")
    os.setxattr(top / "usr/bin/ping", "security.capability", _capability())
    (top / "usr/bin/owned").write_bytes(b"owned and capable")
    os.chown(top / "usr/bin/owned", 1000, 1001)
    os.setxattr(top / "usr/bin/owned", "security.capability", _capability())
    os.setxattr(top / "plain", "user.note", b"\x00\x01binary")
    os.setxattr(top / "opaque", "trusted.overlay.opaque", b"y")
    (top / "opaque/inside").write_text("x")
    os.setxattr(top / "acl", "system.posix_acl_default", _ACL)
    os.setxattr(top / "plain", "system.posix_acl_access", _ACL)
    os.mknod(top / "whiteout", 0o20000, os.makedev(0, 0))
    os.mknod(top / "null", 0o20666, os.makedev(1, 3))
    os.mknod(top / "disk", 0o60660, os.makedev(8, 17))
    os.chown(top / "disk", 0, 6)
    os.mkfifo(top / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(top)
        listener.bind("socket")
        os.chdir(here)
    (top / "link").symlink_to("usr/bin")
    (top / "dangling").symlink_to("/nowhere/" + "x" * 200)
    os.lchown(top / "dangling", 77, 78)
    os.setxattr(top / "link", "trusted.test", b"1", follow_symlinks=False)
    os.link(top / "plain", top / "usr/plain too")
    os.link(top / "plain", top / "opaque/plain three")
    os.link(top / "fifo", top / "usr/fifo too")
    os.link(top / "dangling", top / "usr/dangling too")
    os.link(top / "whiteout", top / "opaque/whiteout too")
    for name in ("acl/in", "acl/sub", "setgid/file"):
        (top / name).mkdir() if name.endswith("sub") else (top / name).touch()
        os.removexattr(top / name, "system.posix_acl_access") if name == "acl/in" else None
    for name, mode in (
        ("acl/in", 0o604),
        ("closed", 0),
        ("sticky", 0o1777),
        ("setgid", 0o2750),
        ("empty", 0),
    ):
        (top / name).chmod(mode)
    os.chown(top / "usr/bin/su", 12, 34)
    (top / "usr/bin/su").chmod(0o6755)
    os.chown(top / "setgid/below", 100_000, 165_536)
    top.chmod(0o750)
    for number, path in enumerate([*top.rglob("*"), top]):
        moment = 1_500_000_000_000_000_000 + number * 86_400_000_000_321
        os.utime(path, ns=(moment, moment), follow_symlinks=False)


def fill_with_files(top: Path, seed: int, count: int = 200, size: int = 40_000) -> None:
    """Make many files of random bytes."""
    chance = random.Random(seed)
    for number in range(count):
        folder = top / f"d{number % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(chance.randbytes(chance.randrange(size)))


# -- exactly -----------------------------------------------------------------------------------------------------


def everything(node: Node) -> Result:
    fill_with_everything(node.layer("all"))
    fill_with_files(node.layer("more"), 1)
    node.layer("nothing")
    record = node.files / "docker/image/overlay2/layerdb/sha256/chain"
    record.mkdir(parents=True)
    (record / "tar-split.json.gz").write_bytes(random.Random(3).randbytes(70_000))
    names = ["all", "more", "nothing"]
    node.make_disk(256 * MB)
    node.tell(names)
    node.pack()
    node.seed_docker(names)
    mine = node.root / "image/overlay2/layerdb/sha256/chain"
    mine.mkdir(parents=True)
    (mine / "diff").write_text(diff_id("all"))
    (mine / "tar-split.json.gz").symlink_to(
        node.places.store / "docker/image/overlay2/layerdb/sha256/chain/tar-split.json.gz"
    )
    # A container's own link into the store is its own business.
    own = node.root / "overlay2/container/diff"
    own.mkdir(parents=True)
    (own / "diff").symlink_to(node.places.store / "layers")
    old = node.disk / ".node/trash/docker.0/overlay2/x"
    old.mkdir(parents=True)
    (old / "file").write_bytes(bytes(MB))
    (old / "out").symlink_to(node.base)
    before = describe(node.places.store / "layers" / hex_of("all"))
    split = compare(record, node.places.store / "docker/image/overlay2/layerdb/sha256/chain")
    copy = node.base / "compared"
    packed = node.base / "again"
    packed.mkdir()
    namespace.bind(os.fspath(node.places.store), os.fspath(packed), read_only=True)
    section = node.promote()
    diff = node.root / "overlay2/cache-all/diff"
    kinds = {oct(stat.S_IFMT(p.lstat().st_mode)) for p in diff.rglob("*")}
    result = {
        "section": section,
        "kinds": sorted(kinds),
        "entries": len(before),
        "differences": [
            d
            for n in names
            for d in compare(packed / "layers" / hex_of(n), node.root / f"overlay2/cache-{n}/diff")
        ],
        "split": compare(packed / "docker/image/overlay2/layerdb/sha256/chain", mine)[1:],
        "split before": split,
        "blocks": {n: (diff / n).stat().st_blocks * 512 for n in ("sparse", "zeros", "big")},
        "left": node.left(),
        "scraps": node.scraps(),
        "trash": os.listdir(node.disk / ".node/trash"),
        "outside": node.base.exists() and node.erofs.exists(),
        "mounted": os.path.ismount(node.places.store),
        "container": (own / "diff").is_symlink(),
        "marker": json.loads((node.disk / ".node/promote.json").read_text()),
        "compared": copy.exists(),
    }
    return result | {"again": node.promote()}


def test_a_copy_is_what_the_store_has(isolated: Callable[..., Any]) -> None:
    found = isolated(everything)
    assert found["entries"] > 90
    assert found["kinds"] == sorted(
        oct(k) for k in (0o10000, 0o20000, 0o40000, 0o60000, 0o100000, 0o120000, 0o140000)
    )
    assert found["differences"] == []
    assert [line for line in found["split"] if line.startswith("tar-split")] == []
    assert found["blocks"]["sparse"] < MB and found["blocks"]["zeros"] == 0
    assert found["blocks"]["big"] >= 5 * MB
    assert found["left"] == [] and found["scraps"] == [] and found["trash"] == [] and found["container"]
    assert found["outside"] and not found["mounted"]
    section = found["section"]
    assert section["state"] == "ok" and section["layers_left"] == [] and section["store"] == "released"
    assert (section["done"], section["total"]) == (4, 4)
    assert found["marker"]["store"] == "feed" and found["marker"]["done"] == 4
    assert found["again"]["state"] == "ok" and found["again"]["done"] == 4


def containerd(node: Node) -> Result:
    fill_with_everything(node.layer("all"))
    blobs = node.files / "containerd/io.containerd.content.v1.content/blobs/sha256"
    blobs.mkdir(parents=True)
    (blobs / "b10b").write_bytes(random.Random(3).randbytes(3 * MB))
    (blobs / "b10b").chmod(0o444)
    node.make_disk(256 * MB)
    node.tell(["all"])
    wanted = json.loads((node.base / "preload.json").read_text()) | {"engine": "containerd"}
    (node.base / "preload.json").write_text(json.dumps(wanted))
    node.pack()
    fs = [node.root / "io.containerd.snapshotter.v1.overlayfs/snapshots" / n / "fs" for n in ("1", "17")]
    for path in fs:
        path.parent.mkdir(parents=True)
        path.symlink_to(node.places.store / "layers" / hex_of("all"))
    blob = node.root / "io.containerd.content.v1.content/blobs/sha256/b10b"
    blob.parent.mkdir(parents=True)
    blob.symlink_to(node.places.store / "containerd" / blob.relative_to(node.root))
    section = node.promote()
    node.mount_store()
    return {
        "section": section,
        "differences": [
            d for path in fs for d in compare(node.places.store / "layers" / hex_of("all"), path)
        ],
        "apart": fs[0].stat().st_ino != fs[1].stat().st_ino,
        "blob": blob.read_bytes() == (blobs / "b10b").read_bytes() and not blob.is_symlink(),
        "mode": stat.S_IMODE(blob.stat().st_mode),
    }


def test_snapshots_and_blobs_of_containerd(isolated: Callable[..., Any]) -> None:
    found = isolated(containerd)
    assert found["section"]["state"] == "ok" and found["section"]["done"] == 3
    assert found["differences"] == [] and found["apart"] and found["blob"] and found["mode"] == 0o444


def part(one: Path, other: Path) -> None:
    """Make two names of one file two equal files."""
    other.unlink()
    shutil.copy2(one, other)


CHANGES: dict[str, Callable[[Path], object]] = {
    "mode": lambda t: (t / "usr/bin/su").chmod(0o755),
    "owner": lambda t: os.lchown(t / "dangling", 77, 79),
    "time": lambda t: os.utime(t / "big", ns=(1, (t / "big").stat().st_mtime_ns + 1)),
    "time of a directory": lambda t: os.utime(t / "usr", ns=(1, 1)),
    "attribute": lambda t: os.removexattr(t / "usr/bin/ping", "security.capability"),
    "opaque": lambda t: os.removexattr(t / "opaque", "trusted.overlay.opaque"),
    "content": lambda t: (t / "exact").open("r+b").write(b"??"),
    "hard link": lambda t: part(t / "plain", t / "usr/plain too"),
    "entry": lambda t: (t / "whiteout").unlink(),
}


def changes(node: Node) -> Result:
    fill_with_everything(node.layer("all"))
    node.make_disk(512 * MB)
    top = node.files / "layers" / hex_of("all")
    found = {}
    for name, change in CHANGES.items():
        copy = node.disk / name
        copy_tree(top, copy)
        same = compare(top, copy)
        change(copy)
        found[name] = [len(same), len(compare(top, copy))]
    return found


def test_the_comparison_sees_every_kind_of_change(isolated: Callable[..., Any]) -> None:
    found = isolated(changes)
    assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(CHANGES, 0)
    assert [name for name, (_, changed) in found.items() if not changed] == []


# -- interrupted -------------------------------------------------------------------------------------------------


def killed(node: Node, seed: str) -> Result:
    names = [f"layer{n}" for n in range(8)]
    fill_with_everything(node.layer("layer0"))
    for number, name in enumerate(names[1:]):
        fill_with_files(node.layer(name), number, count=400)
    node.make_disk(512 * MB)
    node.tell(names, bytes_per_second=24 * MB)
    node.pack()
    node.seed_docker(names)
    chance, differences, counts = random.Random(int(seed)), [], [len(node.left())]
    for _ in range(6):
        child = node.start()
        time.sleep(chance.uniform(0.1, 1.6))
        child.kill()
        child.wait()
        counts.append(len(node.left()))
        differences += node.differences(names)
    node.tell(names)
    last = node.promote()
    node.mount_store()
    differences += node.differences(names)
    return {
        "counts": counts,
        "differences": differences,
        "last": last,
        "scraps": node.scraps(),
        "left": node.left(),
    }


@pytest.mark.parametrize("seed", ["1", "2"])
def test_killed_at_any_moment_a_name_leads_to_a_whole_layer(isolated: Callable[..., Any], seed: str) -> None:
    found = isolated(killed, seed)
    assert found["differences"] == []
    assert found["counts"] == sorted(found["counts"], reverse=True), "a copy became a link again"
    assert found["left"] == [] and found["scraps"] == []
    assert found["last"]["state"] == "ok" and found["last"]["layers_left"] == []


def terminated(node: Node) -> Result:
    fill_with_files(node.layer("one"), 1, count=800)
    node.make_disk(256 * MB)
    node.tell(["one"], bytes_per_second=1 * MB)
    node.pack()
    node.seed_docker(["one"])
    child = node.start()
    deadline = time.monotonic() + 20
    while len(node.scraps()) < 20 and time.monotonic() < deadline:
        time.sleep(0.02)
    under_way = len(node.scraps())
    child.send_signal(signal.SIGTERM)
    status = child.wait(10)
    return {"under way": under_way, "status": status, "scraps": node.scraps(), "left": node.left()}


def test_a_stopped_agent_leaves_no_half_copy(isolated: Callable[..., Any]) -> None:
    found = isolated(terminated)
    assert found["under way"] >= 20
    assert (found["status"], found["scraps"], found["left"]) == (0, [], ["cache-one"])


def two_agents(node: Node) -> Result:
    names = ["one", "two", "three"]
    for number, name in enumerate(names):
        fill_with_files(node.layer(name), number, count=300)
    node.make_disk(256 * MB)
    node.tell(names, bytes_per_second=8 * MB)
    node.pack()
    node.seed_docker(names)
    first, second = node.start(), node.start()
    statuses = [first.wait(60), second.wait(60)]
    section = node.section()
    node.mount_store()
    return {
        "statuses": statuses,
        "section": section,
        "differences": node.differences(names),
        "left": node.left(),
    }


def test_of_two_agents_one_does_the_work(isolated: Callable[..., Any]) -> None:
    found = isolated(two_agents)
    assert found["statuses"] == [0, 0]
    assert found["section"]["state"] == "ok" and found["section"]["done"] == 3
    assert found["differences"] == [] and found["left"] == []


# -- a container that runs ---------------------------------------------------------------------------------------

_READER = """
import hashlib, os, sys, time
top, stop = sys.argv[1:]
kept = open(top + "/d1/f1", "rb")
wanted = {n: hashlib.sha256(open(f"{top}/d1/{n}", "rb").read()).hexdigest() for n in os.listdir(top + "/d1")}
rounds = wrong = 0
print("ready", flush=True)
while not os.path.exists(stop):
    kept.seek(0)
    wrong += hashlib.sha256(kept.read()).hexdigest() != wanted["f1"]
    for name, digest in wanted.items():
        wrong += hashlib.sha256(open(f"{top}/d1/{name}", "rb").read()).hexdigest() != digest
    open(top + "/written", "a").write("x")
    rounds += 1
print(rounds, wrong)
"""


def container(node: Node) -> Result:
    fill_with_files(node.layer("below"), 1)
    above = node.layer("above")
    fill_with_everything(above)
    # In a directory that is opaque, overlay lists a whiteout that it then does not find.
    (above / "opaque/whiteout too").unlink()
    node.make_disk(256 * MB)
    node.tell(["below", "above"])
    node.pack()
    node.seed_docker(["below", "above"])
    merged = node.base / "merged"
    layers = [str(node.root / f"overlay2/cache-{n}/diff") for n in ("above", "below")]
    for name in ("upper", "work"):
        (node.disk / name).mkdir()
    merged.mkdir()
    options = f"lowerdir={':'.join(layers)},upperdir={node.disk}/upper,workdir={node.disk}/work"
    namespace.mount("overlay", "overlay", os.fspath(merged), options)
    before = describe(merged)
    stop = node.base / "stop"
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, merged, stop], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout and reader.stdout.readline() == "ready\n"
    time.sleep(0.2)
    section = node.promote()
    time.sleep(0.3)
    stop.touch()
    rounds, wrong = map(int, reader.communicate()[0].split())
    (merged / "written").unlink()
    os.utime(merged, ns=(before["."][3],) * 2)  # type: ignore[arg-type]
    left = describe(merged)
    namespace.unmount(os.fspath(merged))
    new = node.base / "new"
    new.mkdir()
    (node.disk / "upper2").mkdir()
    namespace.mount("overlay", "overlay", os.fspath(new), f"lowerdir={':'.join(layers)}")
    after = describe(new)
    return {
        "section": section,
        "rounds": rounds,
        "wrong": wrong,
        "kept": sorted(n for n in before if n != "." and left.get(n) != before[n]),
        "new": sorted(n for n in before if n != "." and _seen(after.get(n)) != _seen(before[n])),
        "entries": len(before),
    }


def _seen(facts: tuple[object, ...] | None) -> tuple[object, ...]:
    """Leave out what overlay makes up: the number of a directory's links."""
    return facts[:8] if facts else ()


def test_a_running_container_does_not_notice(isolated: Callable[..., Any]) -> None:
    found = isolated(container)
    assert found["section"]["state"] == "ok" and found["section"]["layers_left"] == []
    assert found["rounds"] >= 2 and found["wrong"] == 0
    assert found["entries"] > 200 and found["kept"] == [] and found["new"] == []


# -- what goes wrong ---------------------------------------------------------------------------------------------


def full(node: Node, how: str) -> Result:
    """A disk with room for the first layer alone; the manifest may not know how big the second is."""
    fill_with_files(node.layer("fits"), 1)
    (node.layer("large") / "file").write_bytes(random.Random(1).randbytes(90 * MB))
    node.make_disk(96 * MB)
    reserve = 15 if how == "guard" else 0
    node.tell(["fits", "large"], sizes={"large": 1} if how == "enospc" else {}, reserve_percent=reserve)
    node.pack()
    node.seed_docker(["fits", "large"])
    if how == "trash":
        node.tell(["fits", "large"], sizes={"large": 20 * MB}, reserve_percent=15)
        (node.files / "layers" / hex_of("large") / "file").write_bytes(bytes(MB))
        old = node.disk / ".node/trash/old.0/sub"
        old.mkdir(parents=True)
        (old / "file").write_bytes(random.Random(2).randbytes(70 * MB))
        (old / "fifo").parent.chmod(0)
        namespace.unmount(os.fspath(node.places.store))
        node.erofs.unlink()
        node.pack()
    section = node.promote()
    free = os.statvfs(node.disk)
    if not section["layers_left"]:
        node.mount_store()
    return {
        "section": section,
        "left": node.left(),
        "scraps": node.scraps(),
        "differences": node.differences(["fits", "large"]),
        "free": free.f_bavail / free.f_blocks,
        "reads": (node.root / "overlay2/cache-large/diff/file").stat().st_size,
    }


@pytest.mark.parametrize("how", ["guard", "enospc"])
def test_a_full_disk_keeps_its_links(isolated: Callable[..., Any], how: str) -> None:
    found = isolated(full, how)
    section = found["section"]
    assert (section["state"], section["code"]) == ("degraded", "promote.space"), section
    assert section["done"] == 1 and section["layers_left"] == [diff_id("large")]
    assert found["left"] == ["cache-large"] and found["scraps"] == [] and found["differences"] == []
    assert found["reads"] == 90 * MB and found["free"] > 0.5


def test_what_was_set_aside_makes_room(isolated: Callable[..., Any]) -> None:
    found = isolated(full, "trash")
    assert found["section"]["state"] == "ok", found["section"]
    assert found["left"] == [] and found["differences"] == []


def broken_disk(node: Node) -> Result:
    """The disk's image lies on a tmpfs that is full: what is written out fails with EIO."""
    (node.layer("one") / "file").write_bytes(random.Random(1).randbytes(60 * MB))
    small = node.base / "small"
    small.mkdir()
    namespace.mount("tmpfs", "tmpfs", os.fspath(small), "size=40m")
    node.make_disk(256 * MB, small / "disk.img", "errors=continue")
    node.tell(["one"])
    node.pack()
    node.seed_docker(["one"])
    section = node.promote()
    return {"section": section, "left": node.left(), "mounted": os.path.ismount(node.places.store)}


def test_a_disk_that_fails_gets_no_layer(isolated: Callable[..., Any]) -> None:
    found = isolated(broken_disk)
    assert (found["section"]["state"], found["section"]["code"]) == ("degraded", "promote.io"), found[
        "section"
    ]
    assert found["left"] == ["cache-one"] and found["mounted"]


def damaged_store(node: Node) -> Result:
    """Bytes of the store's file are overwritten beneath the mount; the kernel can't unpack them."""
    chance = random.Random(5)
    for name in ("one", "two"):
        words = [chance.randbytes(6) for _ in range(500)]
        (node.layer(name) / "file").write_bytes(b"".join(chance.choice(words) for _ in range(2_000_000)))
    node.make_disk(256 * MB)
    node.tell(["one", "two"], workers=1)
    node.pack()
    node.seed_docker(["one", "two"])
    namespace.unmount(os.fspath(node.places.store))
    size = node.erofs.stat().st_size
    with node.erofs.open("r+b") as file:
        file.seek(size * 3 // 4)
        file.write(b"\xff" * (size // 8))
    node.mount_store()
    section = node.promote()
    marker = node.disk / ".node/store-damaged.json"
    return {
        "section": section,
        "left": node.left(),
        "scraps": node.scraps(),
        "marker": json.loads(marker.read_text()) if marker.exists() else None,
        "mounted": os.path.ismount(node.places.store),
    }


def test_a_damaged_store_is_named_for_the_next_boot(isolated: Callable[..., Any]) -> None:
    found = isolated(damaged_store)
    section, marker = found["section"], found["marker"]
    assert (section["state"], section["code"]) == ("degraded", "promote.store"), section
    assert os.strerror(errno.EIO) in section["reason"] or os.strerror(errno.EUCLEAN) in section["reason"]
    assert len(found["left"]) >= 1 and found["scraps"] == [] and found["mounted"]
    assert marker["store"] == "feed" and marker["layer"] in section["layers_left"]
    assert marker["reason"] == section["reason"]


def refused(node: Node) -> Result:
    fill_with_files(node.layer("one"), 1)
    node.make_disk(96 * MB)
    node.tell(["one"])
    node.pack()
    node.seed_docker(["one"])
    found = {}
    node.tell_disk({"state": "degraded", "code": "disk.foreign", "reason": "somebody else's"})
    found["no disk"] = node.promote()
    node.tell_disk({"state": "ok"})
    node.tell(["one"], enabled=False)
    found["disabled"] = node.promote()
    node.tell(["one"])
    namespace.unmount(os.fspath(node.places.store))
    found["not mounted"] = node.promote()
    wanted = json.loads((node.base / "preload.json").read_text())
    (node.base / "elsewhere").mkdir()
    (node.base / "preload.json").write_text(json.dumps(wanted | {"data_root": str(node.base / "elsewhere")}))
    found["elsewhere"] = node.promote()
    return {"found": found, "left": node.left(), "damaged": (node.disk / ".node/store-damaged.json").exists()}


def test_it_says_why_nothing_is_promoted(isolated: Callable[..., Any]) -> None:
    got = isolated(refused)
    found = got["found"]
    assert {name: section.get("code") for name, section in found.items()} == {
        "no disk": "promote.no-disk",
        "disabled": None,
        "not mounted": "promote.store",
        "elsewhere": "promote.no-disk",
    }
    assert "somebody else's" in found["no disk"]["reason"]
    assert found["disabled"]["state"] == "ok" and found["disabled"]["layers_left"] == [diff_id("one")]
    assert found["not mounted"]["layers_left"] == [diff_id("one")]
    assert got["left"] == ["cache-one"] and not got["damaged"]


def changed_names(node: Node) -> Result:
    """What an engine may do between the search for links and the exchange."""
    node.make_disk(96 * MB)
    store, found = Path("/store/layers/x"), {}
    for name in ("link", "gone", "pulled"):
        copy, link = node.disk / f"copy-{name}", node.disk / name
        copy.mkdir()
        (copy / "copy").touch()
        if name == "link":
            link.symlink_to(store)
        elif name == "pulled":
            link.mkdir()
            (link / "pulled").touch()
        exchanged = batches.exchange(copy, link, store)
        found[name] = [exchanged, os.listdir(link) if link.is_dir() else None, os.path.lexists(copy)]
    return found


def test_the_engines_own_changes_stay(isolated: Callable[..., Any]) -> None:
    assert isolated(changed_names) == {
        "link": [True, ["copy"], False],
        "gone": [False, None, True],
        "pulled": [False, ["pulled"], True],
    }


def test_the_default_rate_is_a_number_of_megabytes() -> None:
    assert 16 * MB <= BYTES_PER_SECOND <= 128 * MB
