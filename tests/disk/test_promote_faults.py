"""Promotion that is interrupted, and failing disks and stores: a full disk, a broken one, a damaged store."""

from __future__ import annotations

import errno
import http.server
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest

from image_builder.node import mounts
from image_builder.node.errors import ProgramError
from image_builder.node.net import fetch
from image_builder.node.net.retry import Deadline
from image_builder.node.preload.archive import load
from image_builder.node.promote import trash
from image_builder.system import namespace
from tests.support.stores.promotion import (
    MB,
    Node,
    Result,
    diff_id,
    fill_with_everything,
    fill_with_files,
    hex_of,
    isolated,
)

pytestmark = pytest.mark.root


# -- interrupted -------------------------------------------------------------------------------------------------


def killed(node: Node) -> Result:
    names = [f"layer{n}" for n in range(8)]
    fill_with_everything(node.layer("layer0"))
    for number, name in enumerate(names[1:]):
        fill_with_files(node.layer(name), number, count=150)
    node.make_disk(256 * MB)
    node.tell(names, bytes_per_second=9 * MB)
    node.pack()
    node.seed_docker(names)
    chance, differences, counts = random.Random(1), [], [len(node.left())]
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


def test_killed_at_any_moment_a_name_leads_to_a_whole_layer(tools_tree: Path) -> None:
    found = isolated(killed, tools_tree)
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
    while len(node.scraps()) < 20 and child.poll() is None:
        time.sleep(0.02)
    under_way = len(node.scraps())
    child.send_signal(signal.SIGTERM)
    status = child.wait()
    return {"under way": under_way, "status": status, "scraps": node.scraps(), "left": node.left()}


def test_a_stopped_agent_leaves_no_half_copy(tools_tree: Path) -> None:
    found = isolated(terminated, tools_tree)
    assert found["under way"] >= 20
    assert (found["status"], found["scraps"], found["left"]) == (0, [], ["cache-one"])


def two_agents(node: Node) -> Result:
    names = ["one", "two", "three"]
    for number, name in enumerate(names):
        fill_with_files(node.layer(name), number, count=100)
    node.make_disk(256 * MB)
    node.tell(names, bytes_per_second=2 * MB)
    node.pack()
    node.seed_docker(names)
    first, second = node.start(), node.start()
    statuses = [first.wait(), second.wait()]
    section = node.section()
    node.mount_store()
    return {
        "statuses": statuses,
        "section": section,
        "differences": node.differences(names),
        "left": node.left(),
    }


def test_of_two_agents_one_does_the_work(tools_tree: Path) -> None:
    found = isolated(two_agents, tools_tree)
    assert found["statuses"] == [0, 0]
    assert found["section"]["state"] == "ok" and found["section"]["done"] == 3
    assert found["differences"] == [] and found["left"] == []


# -- what goes wrong ---------------------------------------------------------------------------------------------


def full(node: Node, how: str) -> Result:
    """Promote to a disk with room for only the first layer; the manifest may not know how big the second is."""
    fill_with_files(node.layer("fits"), 1)
    (node.layer("large") / "file").write_bytes(random.Random(1).randbytes(90 * MB))
    node.make_disk(96 * MB)
    if how == "enospc":
        # With two workers, the one with the layer that fits could run into the disk that the other one has just
        # filled.
        node.tell(["fits", "large"], sizes={"large": 1}, workers=1)
    else:
        node.tell(["fits", "large"], reserve_percent=15 if how == "guard" else 0)
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
def test_a_full_disk_keeps_its_links(tools_tree: Path, how: str) -> None:
    found = isolated(full, tools_tree, how)
    section = found["section"]
    assert (section["state"], section["code"]) == ("degraded", "promote.space"), section
    assert section["done"] == 1 and section["layers_left"] == [diff_id("large")]
    assert found["left"] == ["cache-large"] and found["scraps"] == [] and found["differences"] == []
    assert found["reads"] == 90 * MB and found["free"] > 0.5


def test_what_was_set_aside_makes_room(tools_tree: Path) -> None:
    found = isolated(full, tools_tree, "trash")
    assert found["section"]["state"] == "ok", found["section"]
    assert found["left"] == [] and found["differences"] == []


def broken_disk(node: Node) -> Result:
    """Promote to a disk whose image is on a full tmpfs: writeback fails with EIO."""
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


def test_a_disk_that_fails_gets_no_layer(tools_tree: Path) -> None:
    found = isolated(broken_disk, tools_tree)
    assert (found["section"]["state"], found["section"]["code"]) == ("degraded", "promote.io"), found[
        "section"
    ]
    assert found["left"] == ["cache-one"] and found["mounted"]


def damaged_store(node: Node) -> Result:
    """Overwrite bytes of the store's file beneath the mount, so that the kernel can't decompress them."""
    chance = random.Random(5)
    for name in ("one", "two"):
        words = [chance.randbytes(6) for _ in range(500)]
        # Repeated beyond what LZ4 looks back.
        (node.layer(name) / "file").write_bytes(b"".join(chance.choices(words, k=200_000)) * 10)
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


def test_a_damaged_store_is_named_for_the_next_boot(tools_tree: Path) -> None:
    found = isolated(damaged_store, tools_tree)
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
    node.tell_disk({"state": "ok", "action": "mount"})
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


def test_it_says_why_nothing_is_promoted(tools_tree: Path) -> None:
    got = isolated(refused, tools_tree)
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


# -- what else it meets ------------------------------------------------------------------------------------------


def _nothing_listed(proc: Path = Path("/proc")) -> list[mounts.Mount]:
    return []


def mount_below_the_trash(node: Node) -> Result:
    """Mount something below the trash after the list of mounts was read."""
    node.make_disk(96 * MB)
    aside = node.disk / ".node/trash/data.0"
    (aside / "merged").mkdir(parents=True)
    namespace.mount("tmpfs", "tmpfs", os.fspath(aside / "merged"))
    (aside / "merged/precious").write_text("precious")
    said = ""
    mounts.listed = _nothing_listed
    try:
        trash.empty(aside.parent, 0, "now")
    except OSError as error:
        said = os.strerror(error.errno or 0)
    return {"said": said, "kept": (aside / "merged/precious").read_text()}


def test_no_mount_below_the_trash_is_crossed(tools_tree: Path) -> None:
    found = isolated(mount_below_the_trash, tools_tree)
    assert found["kept"] == "precious" and found["said"] == os.strerror(errno.ENOTEMPTY)


class _Kubelet(http.server.BaseHTTPRequestHandler):
    """A kubelet that is unhealthy at first."""

    answers: ClassVar[list[int]] = []
    left: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        code = self.left.pop(0) if self.left else 200
        self.answers.append(code)
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_kubelet_that_is_not_well_is_waited_for() -> None:
    _Kubelet.left[:], _Kubelet.answers[:] = [500, 503], []
    with http.server.HTTPServer(("127.0.0.1", 0), _Kubelet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        healthz = f"http://127.0.0.1:{server.server_port}/healthz"
        try:
            assert fetch.wait_until_up(healthz, Deadline.after(30), pause=0.05)
            assert _Kubelet.answers == [500, 503, 200]
            _Kubelet.left[:] = [500] * 100
            assert not fetch.wait_until_up(healthz, Deadline.after(0.2), pause=0.05)
        finally:
            server.shutdown()
            thread.join()


_STALLED = "import sys, time; f = open(sys.argv[1], 'rb'); f.read(10); time.sleep(60)"


def test_a_program_that_gets_no_further_is_ended(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(bytes(100))
    said: list[str] = []
    with pytest.raises(ProgramError) as caught:
        # A directory without filesystem statistics: only what is read counts.
        load(
            [sys.executable, "-c", _STALLED, str(archive)], archive, tmp_path / "none", said.append, 0.1, 0.5
        )
    assert caught.value.status == 124 and "got no further for 0.5 s" in caught.value.message and said
