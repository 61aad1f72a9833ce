"""A publisher that is killed at any moment leaves what readers see unchanged."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from image_builder.bake import manifest as manifests
from image_builder.bake.publish import publish_files
from image_builder.events import Monitor
from image_builder.system import sparse
from tests.support.images.manifests import DOCUMENTS, manifest, write

# Doesn't need root, but starts processes.
pytestmark = pytest.mark.root

REPO = Path(__file__).resolve().parents[2]
OLD_ID, NEW_ID = "aa" * 32, "bb" * 32
FILES = {"worker.raw": os.urandom(1 << 20) * 4, "worker.vhd": os.urandom(1 << 20) * 4}
# Publishes again and again, with different bytes under one ID each time, so that every step is hit, including the
# exchange.
_PUBLISHER = """
import sys
from pathlib import Path
from image_builder.events import Monitor
from image_builder.bake.manifest import load
from image_builder.bake.publish import publish_files
output, sources = Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]]
documents = {name: (sources[0] / name).read_bytes() for name in ("verify.json", "facts.json")}
print("ready", flush=True)
while True:
    for source in sources:
        made = load((source / "manifest").read_bytes())
        publish_files(made, source, documents, output, Monitor())
"""


def _source(folder: Path, files: dict[str, bytes]) -> Path:
    write(folder, {**files, **DOCUMENTS})
    (folder / "manifest").write_bytes(manifest(files, build_id=NEW_ID).render())
    return folder


def _assert_whole(path: Path) -> None:
    """Assert that what is visible has a manifest, and that every file it names is there with the right bytes."""
    told = manifests.load((path / "manifest.json").read_bytes())
    names = {f.name for f in (*told.artefacts, *told.documents)}
    assert {p.name for p in path.iterdir()} == {*names, "manifest.json"}
    for file in (*told.artefacts, *told.documents):
        assert sparse.sha256(path / file.name) == file.sha256


def test_sigkill_leaves_only_whole_publications(tmp_path: Path) -> None:
    output, rng = tmp_path / "output", random.Random(1)
    old = {"worker.raw": b"the earlier one"}
    write(tmp_path / "old", old)
    publish_files(manifest(old, build_id=OLD_ID), tmp_path / "old", DOCUMENTS, output, Monitor())
    sources = [
        _source(tmp_path / "one", FILES),
        _source(tmp_path / "two", {"worker.raw": FILES["worker.raw"][::-1]}),
    ]
    folder = output / "worker"
    kills = leftovers = 0
    while kills < 10 or not leftovers:
        kills += 1
        child = subprocess.Popen(
            [sys.executable, "-c", _PUBLISHER, output, *sources], cwd=REPO, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.25))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        visible = [p for p in folder.iterdir() if not p.name.startswith(".")]
        leftovers += sum(p.name.startswith(".staging-") for p in folder.iterdir())
        assert (folder / "latest").resolve() in visible
        for path in visible:
            if not path.is_symlink():
                _assert_whole(path)
        assert (folder / OLD_ID[:12] / "worker.raw").read_bytes() == old["worker.raw"]
    publish_files(manifest(FILES, build_id=NEW_ID), tmp_path / "one", DOCUMENTS, output, Monitor())
    assert sorted(p.name for p in folder.iterdir()) == [OLD_ID[:12], NEW_ID[:12], "latest"]
    assert os.readlink(folder / "latest") == NEW_ID[:12]


def test_two_publishers_of_one_build_do_not_meet(tmp_path: Path) -> None:
    output = tmp_path / "output"
    sources = [
        _source(tmp_path / "one", FILES),
        _source(tmp_path / "two", {"worker.raw": FILES["worker.raw"]}),
    ]
    children = [
        subprocess.Popen([sys.executable, "-c", _PUBLISHER, output, source], cwd=REPO, stdout=subprocess.PIPE)
        for source in sources
    ]
    try:
        seen: set[tuple[int, int]] = set()
        while len(seen) < 10 and all(child.poll() is None for child in children):
            if (path := output / "worker" / NEW_ID[:12]).exists():
                seen.add(_assert_whole_while_held(path))
        assert all(child.poll() is None for child in children), "a publisher failed"
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _assert_whole_while_held(path: Path) -> tuple[int, int]:
    """Assert that one open directory is one publication, whatever happens to its name; return its identity."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    info = os.fstat(fd)
    try:
        stream = os.open("manifest.json", os.O_RDONLY, dir_fd=fd)
        with os.fdopen(stream, "rb") as reader:
            told = manifests.load(reader.read())
        for file in told.artefacts:
            assert os.stat(file.name, dir_fd=fd).st_size == file.bytes
    except FileNotFoundError:
        # Only a publication that was replaced may lose its files.
        assert path.stat().st_ino != info.st_ino
    finally:
        os.close(fd)
    return info.st_ino, info.st_mtime_ns
