"""A store moves to another machine as an ordinary user's files, whole or not at all, and a build continues there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake import export as exporting
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.store import Store
from image_builder.canonical import digest
from image_builder.errors import StoreError
from image_builder.events import Monitor
from image_builder.settings import REPO_ROOT, Settings
from image_builder.system.trees import sha256
from tests.support.images.builds import Workplace

pytestmark = pytest.mark.root

IMAGE = "image@inventory-0"
NOBODY = 65534
_MIB = 1 << 20


def _fill(tree: Path) -> None:
    """Make a tree with everything that a stage's tree can have."""
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/su").write_text("program")
    os.chown(tree / "usr/bin/su", 0, 42)
    (tree / "usr/bin/su").chmod(0o4750)
    (tree / "usr/bin/su2").hardlink_to(tree / "usr/bin/su")
    (tree / "usr/bin/ping").write_text("program")
    capability = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep
    os.setxattr(tree / "usr/bin/ping", "security.capability", capability)
    (tree / "etc").mkdir()
    os.setxattr(tree / "etc", "trusted.overlay.opaque", b"y")
    os.setxattr(tree / "etc", "trusted.overlay.origin", b"of the place")
    os.mknod(tree / "etc/deleted", stat.S_IFCHR, os.makedev(0, 0))
    os.mknod(tree / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(tree / "pipe")
    (tree / "absolute").symlink_to("/etc/passwd")
    (tree / "upward").symlink_to("../../../etc/passwd")
    (tree / os.fsdecode(b"b\xfcro -> etc\nnext")).write_text("no UTF-8, and a line of its own")
    (tree / ("x" * 200)).write_text("a long name")
    with (tree / "disk").open("wb") as disk:
        disk.truncate(64 * _MIB)
        disk.seek(32 * _MIB)
        disk.write(b"data")
    os.utime(tree / "usr/bin/ping", ns=(1, 1_700_000_000_123_456_789))


def _commit(store: Store, name: str, kind: str = "layer", **options: str) -> str:
    plan = StagePlan(name, kind, options)
    with store.staging() as staging:
        tree = staging / "object/product/tree"
        tree.mkdir(parents=True)
        _fill(tree)
        store.commit(plan, staging / "object", 1.0, {})
    return plan.id


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Make a store with a build of two stages."""
    store = Store(tmp_path / "store")
    store.prepare()
    store.record(IMAGE, [_commit(store, "system"), _commit(store, "seal", "seal")])
    return Settings(store=store.path)


@pytest.fixture
def cache(settings: Settings, tmp_path: Path) -> Path:
    """Export that store."""
    _export(settings, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def blank(tmp_path: Path) -> Store:
    return Store(tmp_path / "blank")


def _export(settings: Settings, directory: Path) -> exporting.Transfer:
    from image_builder.bake.plan.resolve import kinds

    return exporting.export({IMAGE: ()}, directory, settings, kinds(), Monitor())


def _times(directory: Path) -> dict[str, tuple[int, int]]:
    """Return which file each name refers to, and when it was written."""
    return {
        os.fspath(path.relative_to(directory)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_tree_comes_back_with_all_that_it_has(settings: Settings, cache: Path, blank: Store) -> None:
    exporting.take_over(cache, blank, Monitor())
    assert blank.verify() == []
    original = Store(settings.store)
    assert blank.ids() == original.ids() and len(blank.ids()) == 2
    assert list(blank.last_build(IMAGE)) == ["system", "seal"]
    for stage_id in blank.ids():
        assert stat.S_IMODE(blank.product(stage_id).stat().st_mode) == 0o700
        tree = blank.product(stage_id) / "tree"
        assert (tree / "usr/bin/su").samefile(tree / "usr/bin/su2")
        assert (tree / "disk").stat().st_blocks * 512 < _MIB
        assert os.listxattr(tree / "etc") == ["trusted.overlay.opaque"]
        assert (blank.object(stage_id) / "manifest.gz").read_bytes() == (
            original.object(stage_id) / "manifest.gz"
        ).read_bytes()
    again = exporting.take_over(cache, blank, Monitor())
    assert (again.stages, again.present) == ([], 2)


def test_links_that_builds_make_beside_it_change_nothing(
    settings: Settings, tmp_path: Path, blank: Store
) -> None:
    """A link to a file changes its times: tar notices, even though it read all of it."""
    store = Store(settings.store)
    plan = StagePlan("system", "layer", {"size": "large"})
    with store.staging() as staging:
        (staging / "object/product/tree").mkdir(parents=True)
        (staging / "object/product/tree/disk").write_bytes(os.urandom(48 * _MIB))
        store.commit(plan, staging / "object", 1.0, {})
    store.record(IMAGE, [plan.id])
    disk, ended = store.object(plan.id) / "product/tree/disk", threading.Event()

    def link() -> None:
        while not ended.is_set():
            (tmp_path / "link").hardlink_to(disk)
            (tmp_path / "link").unlink()

    linker = threading.Thread(target=link)
    linker.start()
    try:
        _export(settings, tmp_path / "cache")
    finally:
        ended.set()
        linker.join()
    exporting.take_over(tmp_path / "cache", blank, Monitor())


def test_an_ordinary_user_can_copy_it(cache: Path, blank: Store) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chown(home, NOBODY, NOBODY)
        copy = shutil.move(cache, home)
        subprocess.run(
            ["cp", "-r", copy, f"{home}/restored"], check=True, user=NOBODY, group=NOBODY, extra_groups=[]
        )
        exporting.take_over(Path(home, "restored"), blank, Monitor())
    assert blank.verify() == [] and len(blank.ids()) == 2


def test_an_export_writes_what_is_new_and_drops_what_is_not_needed(settings: Settings, cache: Path) -> None:
    store = Store(settings.store)
    before = _times(cache)
    assert _export(settings, cache).stages == []
    assert _times(cache) == before
    (system, _) = store.last_build(IMAGE).values()
    changed = _commit(store, "seal", "seal", option="changed")
    store.record(IMAGE, [system["id"], changed])
    # As a killed export leaves it: a draft, and a truncated archive.
    (cache / "objects/.draft.tar.zst.new").touch()
    archive = next(cache.glob(f"objects/{system['id']}*"))
    archive.write_bytes(archive.read_bytes()[:-1])
    transfer = _export(settings, cache)
    assert sorted(transfer.stages) == sorted([changed, system["id"]])
    assert len(transfer.removed) == 2
    assert sorted(path.name.split(".")[0] for path in (cache / "objects").iterdir()) == sorted(
        transfer.stages
    )


def test_a_damaged_stage_is_not_exported(settings: Settings, tmp_path: Path) -> None:
    store = Store(settings.store)
    (store.product(store.ids()[0]) / "tree/usr/bin/ping").unlink()
    with pytest.raises(StoreError, match="usr/bin/ping is missing"):
        _export(settings, tmp_path / "out")
    assert not (tmp_path / "out/index.json").exists()


def test_a_stage_that_a_build_is_making_is_waited_for(cache: Path, blank: Store) -> None:
    waits = threading.Event()

    class Waiting(Monitor):
        def stage_doing(self, stage: str, action: str) -> None:
            assert (stage, action) == ("import", "another build makes a stage")
            waits.set()

    blank.prepare()
    first = exporting.read_index(cache).objects[0].id
    thread = threading.Thread(target=exporting.take_over, args=(cache, blank, Waiting()))
    with blank.claim(first):
        thread.start()
        assert waits.wait(60)
        assert not blank.has(first)
    thread.join()
    assert blank.verify() == [] and len(blank.ids()) == 2


def test_what_the_store_remembers_itself_stays(cache: Path, blank: Store) -> None:
    blank.prepare()
    own = _commit(blank, "system", option="own")
    blank.record(IMAGE, [own])
    exporting.take_over(cache, blank, Monitor())
    assert [stage["id"] for stage in blank.last_build(IMAGE).values()] == [own]
    assert len(blank.ids()) == 3


# -- bad archives ----------------------------------------------------------------------------------------


def _replace(cache: Path, change: Callable[[Path, list[tarfile.TarInfo]], None]) -> None:
    """Replace the first archive with a foreign one, with an index that agrees with it."""
    index = json.loads((cache / "index.json").read_bytes())
    entry = index["objects"][0]
    work = cache.parent / "work"
    work.mkdir()
    subprocess.run(["tar", "-xf", cache / entry["file"], "-C", work, "--xattrs-include=*"], check=True)
    plain = cache.parent / "plain.tar"
    pack = ("tar", "-cf", plain, "--format=posix", "--xattrs-include=*", "-C", work)
    subprocess.run([*pack, "product", "manifest.gz", "meta.json"], check=True)
    members: list[tarfile.TarInfo] = []
    change(work, members)
    if not members:
        names = sorted(os.listdir(work))
        subprocess.run([*pack, *names], check=True)
    with tarfile.open(plain, "a") as archive:
        for member in members:
            archive.addfile(member, BytesIO(b"evil") if member.isreg() else None)
    entry["file"] = f"objects/{entry['id']}.tar"
    shutil.copyfile(plain, cache / entry["file"])
    entry |= {"sha256": sha256(plain), "bytes": plain.stat().st_size}
    del index["sha256"]
    (cache / "index.json").write_text(json.dumps({**index, "sha256": digest(index)}))


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", device: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.devmajor = kind, link, device
    member.size = 4 if kind == tarfile.REGTYPE else 0
    return member


def _add(*members: tarfile.TarInfo) -> Callable[[Path, list[tarfile.TarInfo]], None]:
    return lambda _work, added: added.extend(members)


def _in_place_of(name: str) -> Callable[[Path, list[tarfile.TarInfo]], None]:
    def change(work: Path, _added: list[tarfile.TarInfo]) -> None:
        (work / name).rename(work.parent / "aside")
        (work / name).symlink_to(work.parent / "aside")

    return change


def _of_another_stage(work: Path, _added: list[tarfile.TarInfo]) -> None:
    meta = json.loads((work / "meta.json").read_bytes())
    meta["options"] = {"option": "another"}
    (work / "meta.json").write_text(json.dumps(meta))


def _with_another_manifest(work: Path, _added: list[tarfile.TarInfo]) -> None:
    (work / "product/tree/usr/bin/ping").chmod(0o4755)


_VICTIM = f"/var/tmp/image-builder-victim-{os.getpid()}"
FOREIGN = {
    "an absolute path": (_add(_member(f"{_VICTIM}/file")), "it has .*var"),
    "a path upward": (_add(_member("../../victim")), "can't be unpacked"),
    "a path upward from within": (_add(_member("product/../../../victim")), "can't be unpacked"),
    "a link out, and a file behind it": (
        _add(_member("product/tree/out", tarfile.SYMTYPE, _VICTIM), _member("product/tree/out/file")),
        "can't be unpacked",
    ),
    "a relative link out, and a file behind it": (
        _add(
            _member("product/tree/out", tarfile.SYMTYPE, "../../../../.."),
            _member("product/tree/out/victim"),
        ),
        "can't be unpacked",
    ),
    "a hard link out": (
        _add(_member("product/tree/out", tarfile.LNKTYPE, f"{_VICTIM}/kept")),
        "can't be unpacked",
    ),
    "a file twice": (_add(_member("product/tree/usr/bin/ping")), "can't be unpacked"),
    "a device": (_add(_member("product/tree/sda", tarfile.BLKTYPE, device=8)), "tree/sda is a device"),
    "memory": (_add(_member("product/tree/mem", tarfile.CHRTYPE, device=1)), "tree/mem is a device"),
    "a file beside": (_add(_member("more")), "it has .*more"),
    "a file that no manifest has": (_add(_member("product/tree/more")), "tree/more was added"),
    "a link for the product": (_in_place_of("product"), "it has"),
    "a link for the record": (_in_place_of("meta.json"), "it has"),
    "the record of another stage": (_of_another_stage, "not what its id says"),
    "a file that was changed": (_with_another_manifest, "usr/bin/ping was changed"),
}


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Make a directory outside that foreign archives target."""
    victim = Path(_VICTIM)
    victim.mkdir()
    (victim / "kept").write_text("kept")
    yield victim
    shutil.rmtree(victim)


def _all(path: Path) -> dict[str, str]:
    return {os.fspath(p): sha256(p) if p.is_file() and not p.is_symlink() else "" for p in path.rglob("*")}


@pytest.mark.parametrize(("change", "reason"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_archive_changes_nothing(
    cache: Path,
    blank: Store,
    victim: Path,
    change: Callable[[Path, list[tarfile.TarInfo]], None],
    reason: str,
) -> None:
    _replace(cache, change)
    blank.prepare()
    outside = _all(victim), _all(cache.parent / "store")
    with pytest.raises(StoreError, match=f"(?s){reason}") as raised:
        exporting.take_over(cache, blank, Monitor())
    assert raised.value.exit_code == 11 and raised.value.hint
    assert (_all(victim), _all(cache.parent / "store")) == outside
    assert blank.ids() == [] and list((blank.path / "staging").iterdir()) == []
    assert not list(cache.parent.parent.glob("**/victim"))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(_cut, "of .* bytes"), (_alter, "not the ones that were written"), (Path.unlink, "is missing")],
)
def test_a_damaged_export_is_noticed_before_anything_is_unpacked(
    cache: Path, blank: Store, damage: Callable[[Path], None], reason: str
) -> None:
    damage(cache / exporting.read_index(cache).objects[-1].file)
    with pytest.raises(StoreError, match=reason):
        exporting.take_over(cache, blank, Monitor())
    assert blank.ids() == [] and list((blank.path / "staging").iterdir()) == []


# -- a real image ----------------------------------------------------------------------------------------


@pytest.fixture
def runner(tiny: Workplace, tmp_path: Path) -> Iterator[Workplace]:
    """Provide a machine without a store."""
    folder = tiny.store.parent / f"{tiny.store.name}-runner-{os.getpid()}"
    yield Workplace(folder / "store", tmp_path / "output")
    subprocess.run(["rm", "-rf", "--one-file-system", folder], check=True)


def _store(place: Workplace, *argv: str | Path) -> list[str]:
    return [*place.command("store", *argv), "--store", os.fspath(place.store), "--json"]


def _run(place: Workplace, *argv: str | Path) -> dict[str, Any]:
    done = subprocess.run(_store(place, *argv), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="session")
def exported(tiny: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export an image."""
    directory = tmp_path_factory.mktemp("exported") / "cache"
    assert _run(tiny, "export", "--to", directory, tiny.image)["stages"]
    return directory


def test_a_blank_runner_has_nothing_to_do(tiny: Workplace, runner: Workplace, exported: Path) -> None:
    before = _times(exported)
    assert _run(tiny, "export", "--to", exported, tiny.image)["stages"] == []
    assert _times(exported) == before
    assert _run(runner, "import", exported)["present"] == 0
    # The mirror is unreachable: nothing is fetched.
    unreachable = {"IMAGE_BUILDER_MIRROR": "http://127.0.0.1:9/debian"}
    built = runner.build(env=unreachable)
    assert built.status == 0, built.stderr
    assert all(stage["cached"] for stage in built.result["stages"])
    assert {name: built_sha for name, built_sha in runner.published().items() if name.endswith(".tar")} == {
        name: sha for name, sha in tiny.published().items() if name.endswith(".tar")
    }
    # Nor for a changed layer: its packages came along.
    runner.forget("system", "seal", "verify", "convert")
    built = runner.build("--stop-after", "system", env=unreachable)
    assert built.status == 0, built.stderr
    assert [stage["name"] for stage in built.result["stages"] if not stage["cached"]] == ["system"]


def test_an_import_that_was_killed_is_gone_on_with(runner: Workplace, exported: Path) -> None:
    store = Store(runner.store)
    store.prepare()
    last = exporting.read_index(exported).objects[-1].id
    with store.claim(last):  # the import waits for it, so it can't end before it is killed
        child = subprocess.Popen(_store(runner, "import", exported), stdout=subprocess.DEVNULL)
        while child.poll() is None and not store.ids():
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    taken = store.ids()
    assert taken and store.verify() == []
    result = _run(runner, "import", exported)
    assert result["present"] >= len(taken) and last in result["stages"]
    assert list((runner.store / "staging").iterdir()) == []
    assert runner.build().status == 0


def test_the_command_says_what_is_wrong(tiny: Workplace, runner: Workplace, tmp_path: Path) -> None:
    argv = (REPO_ROOT / "image-builder", "store", "import", tmp_path, "--store", runner.store)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == StoreError.exit_code
    assert f"{tmp_path} is no export of a store" in done.stderr and "store export --to" in done.stderr
    assert not runner.store.exists()
