"""Promotion of real EROFS layers to a real disk: a node with a store and a disk, and layers to compare.

A scenario runs in its own process and namespaces, asserts nothing and returns JSON, as in
``tests/support/registries/pulls.py``. The disk is ext4 on a loop device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import random
import secrets
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from image_builder.node.data_root import find_links
from image_builder.node.promote import command
from image_builder.node.promote.command import Places
from image_builder.settings import DEFAULT_STORE
from image_builder.system import namespace
from tests.support.disks.power_cuts import mount_loop
from tests.support.images.builds import REPO

MB = 1 << 20
_CHILD = "import sys; from tests.support.stores import promotion; sys.exit(promotion.child(sys.argv[1]))"
_PROMOTE = (
    "import sys; from tests.support.stores import promotion; sys.exit(promotion.promote_at(sys.argv[1]))"
)
Result = dict[str, Any]


def isolated(scenario: Callable[..., object], tools: Path, *words: str) -> Any:
    """Run ``scenario(node, *words)`` in its own namespaces; return its JSON. Nothing is left on disk.

    ``tools`` is the tools tree, as a root.
    """
    # Next to the store: not every kernel lets EROFS or a loop device have its file on an overlay or a tmpfs.
    parent = Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE)).parent
    base = parent / f"promote-{os.getpid()}-{secrets.token_hex(3)}"
    base.mkdir()
    told = {
        "module": scenario.__module__,
        "name": scenario.__name__,
        "words": words,
        "tools": os.fspath(tools),
    }
    try:
        (base / "scenario.json").write_text(json.dumps(told))
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, base],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return json.loads((base / "result.json").read_text())
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", base], check=True)


def child(path: str) -> int:
    """Run as the process of one scenario."""
    base = Path(path)
    told = json.loads((base / "scenario.json").read_text())

    def work() -> int:
        scenario = getattr(importlib.import_module(told["module"]), told["name"])
        result = scenario(Node(base, Path(told["tools"])), *told["words"])
        (base / "result.json").write_text(json.dumps(result))
        return 0

    return namespace.run_isolated(work)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node: a store to be packed from ``files``, a disk, and what the roles and the bake leave for the agent."""

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
        return Places(
            run=base / "run",
            etc=base,
            manifest=base / "store.json",
            rehearsal=base / "rehearsal.json",
            store=base / "preload",
        )

    def layer(self, name: str) -> Path:
        made = self.files / "layers" / hex_of(name)
        made.mkdir(parents=True)
        return made

    def pack(self) -> None:
        """Make an EROFS from ``files`` with the tools' mkfs, and mount it."""
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
        """Make and mount the local disk; its loop device goes with the namespace's mount."""
        image = image or self.base / "disk.img"
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m0", "-Ediscard", image], check=True)
        self.disk.mkdir(exist_ok=True)
        mount_loop(image, self.disk, options)
        (self.disk / ".node").mkdir(mode=0o700)
        self.root.mkdir()

    def tell(self, names: list[str], *, sizes: dict[str, int] | None = None, **promote: Any) -> None:
        """Write the files that a bake and the roles leave, with an image for each layer."""
        places, sizes = self.places, sizes or {}
        images = [
            dict.fromkeys(("digest", "manifest", "id"), "")
            | {"ref": f"lab/{name}:1", "mode": "reference", "pin": False, "required": False, "bytes": 0}
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
        places.run.mkdir(exist_ok=True)
        self.tell_disk({"state": "ok", "action": "mount"})

    def tell_disk(self, section: Result) -> None:
        (self.places.run / "status.json").write_text(json.dumps({"format": 1, "disk": section}))

    def size_of(self, name: str) -> int:
        return sum(p.lstat().st_size for p in (self.files / "layers" / hex_of(name)).rglob("*"))

    def seed_docker(self, names: list[str]) -> None:
        """Make the links that a seed makes."""
        for name in names:
            place = self.root / "overlay2" / f"cache-{name}"
            place.mkdir(parents=True)
            (place / "diff").symlink_to(self.places.store / "layers" / hex_of(name))

    def promote(self) -> Result:
        """Run the command in this process; return its section of the status."""
        assert command.run(self.places) == 0
        return self.section()

    def section(self) -> Result:
        found: Result = json.loads((self.places.run / "status.json").read_text())["promotion"]
        return found

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command in a separate process."""
        return subprocess.Popen([sys.executable, "-c", _PROMOTE, self.base], cwd=REPO)

    def left(self) -> list[str]:
        return sorted(link.path.parent.name for link in find_links("docker", self.root, self.places.store))

    def differences(self, names: list[str]) -> list[str]:
        """Return the differences from the store in those layers that aren't links."""
        found = []
        for name in names:
            diff = self.root / "overlay2" / f"cache-{name}" / "diff"
            if not diff.is_symlink():
                found += compare(self.places.store / "layers" / hex_of(name), diff)
        return found

    def scraps(self) -> list[str]:
        """Return what is in the staging directory."""
        return [str(p) for p in (self.disk / ".node/staging").rglob("*")]


def promote_at(base: str) -> int:
    """Run as a process of ``node-agent promote``."""
    return command.run(Node(Path(base), Path()).places)


def hex_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def diff_id(name: str) -> str:
    return f"sha256:{hex_of(name)}"


# -- trees -------------------------------------------------------------------------------------------------------


def describe(top: Path) -> dict[str, tuple[object, ...]]:
    """Return every property that a copy must keep, for all entries including the top."""
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
    _make_files(top)
    _make_attributes(top)
    _make_devices_and_sockets(top)
    _make_links(top)
    _make_owners_and_modes(top)
    for number, path in enumerate([*top.rglob("*"), top]):
        moment = 1_500_000_000_000_000_000 + number * 86_400_000_000_321
        os.utime(path, ns=(moment, moment), follow_symlinks=False)


def _make_files(top: Path) -> None:
    """Make directories and files: odd names, deep, large, of exactly 1 MiB, sparse, empty."""
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
        file.truncate(8 * MB)
        file.seek(3 * MB + 5)
        file.write(b"in the middle")
    (top / "zeros").write_bytes(bytes(2 * MB))
    (top / "usr/bin/su").write_bytes(b"suid")
    (top / "usr/bin/ping").write_bytes(b"capable")
    (top / "usr/bin/owned").write_bytes(b"owned and capable")
    (top / "opaque/inside").write_text("x")


def _make_attributes(top: Path) -> None:
    """Set capabilities, ACLs, a user attribute and overlayfs's mark of an opaque directory."""
    os.setxattr(top / "usr/bin/ping", "security.capability", _capability())
    os.chown(top / "usr/bin/owned", 1000, 1001)  # before the capability, which it would remove
    os.setxattr(top / "usr/bin/owned", "security.capability", _capability())
    os.setxattr(top / "plain", "user.note", b"\x00\x01binary")
    os.setxattr(top / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(top / "acl", "system.posix_acl_default", _ACL)
    os.setxattr(top / "plain", "system.posix_acl_access", _ACL)


def _make_devices_and_sockets(top: Path) -> None:
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


def _make_links(top: Path) -> None:
    """Make symbolic links, one with an attribute, and a second name for each kind that can have one."""
    (top / "link").symlink_to("usr/bin")
    (top / "dangling").symlink_to("/nowhere/" + "x" * 200)
    os.lchown(top / "dangling", 77, 78)
    os.setxattr(top / "link", "trusted.test", b"1", follow_symlinks=False)
    os.link(top / "plain", top / "usr/plain too")
    os.link(top / "plain", top / "opaque/plain three")
    os.link(top / "fifo", top / "usr/fifo too")
    os.link(top / "dangling", top / "usr/dangling too")
    os.link(top / "whiteout", top / "opaque/whiteout too")


def _make_owners_and_modes(top: Path) -> None:
    """Set owners and modes; the kernel gives entries made below ``acl`` the directory's default ACL."""
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


def fill_with_files(top: Path, seed: int, count: int = 200, size: int = 40_000) -> None:
    """Make many files of random bytes."""
    chance = random.Random(seed)
    for number in range(count):
        folder = top / f"d{number % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(chance.randbytes(chance.randrange(size)))
