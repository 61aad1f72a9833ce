"""The decision table: every row is reached, and nothing foreign is ever touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_builder.node import mounts
from image_builder.node.disk import apply, layout, probe
from image_builder.node.disk.decide import TABLE, decide, nature
from image_builder.node.disk.model import (
    Array,
    Decision,
    Disk,
    Marker,
    Observation,
    Places,
    Raid,
    Signature,
    Survey,
    Volume,
)
from image_builder.node.disk.settings import Selector, Settings
from image_builder.node.errors import NodeError

UUID = "6e6f6465-2d64-8000-8123-456789abcdef"
OTHER = "6e6f6465-2d64-8000-8123-456789abcd00"
README = Path(__file__).resolve().parents[3] / "roles/local_disk/README.md"
SETTINGS = Settings()


def disk(number: int = 0, **values: object) -> Disk:
    made = Disk(f"nvme{number}n1", Path(f"/dev/nvme{number}n1"), 10**12, "Direct", f"S{number}", local=True)
    return replace(made, **values)  # type: ignore[arg-type]


def blank(number: int = 0) -> Observation:
    return Observation(disk(number), ends_zero=True)


def signed(kind: str, number: int = 0) -> Observation:
    return Observation(disk(number), (Signature(kind),))


def marker(*disks: Disk, image: str = "one", uuid: str = UUID) -> Marker:
    return Marker(uuid, image, tuple(one.member for one in disks))


def ours(state: str = "marked", number: int = 0, image: str = "one", filesystem: str = "xfs") -> Observation:
    one = disk(number)
    known = marker(one, image=image) if state == "marked" else None
    volume = Volume(one.path, filesystem, UUID, state, known)  # type: ignore[arg-type]
    return Observation(one, (Signature(filesystem, UUID, "local"),), volume=volume)


def named(number: int, **values: object) -> Observation:
    return replace(blank(number), disk=disk(number, **values))


def mounted_at(target: str) -> Observation:
    volume = Volume(disk().path, "xfs", UUID, "marked", marker(disk()), target)
    return replace(ours(), mounts=(target,), volume=volume)


def member(number: int, devices: int = 2, uuid: str = UUID, name: str = "local") -> Observation:
    raid = Raid(uuid, name, 0, devices, number)
    return Observation(disk(number), (Signature("linux_raid_member"),), raid=raid)


def array(*disks: Disk, image: str = "one", state: str = "marked", mounted: str = "") -> dict[str, Array]:
    known = marker(*disks, image=image) if state == "marked" else None
    volume = Volume(Path("/dev/md127"), "xfs", UUID, state, known, mounted)  # type: ignore[arg-type]
    return {UUID: Array(UUID, "md127", volume)}


def resized() -> Observation:
    one = ours()
    return replace(one, disk=replace(one.disk, bytes=2 * 10**12))


PLATFORM = replace(signed("dos"), partitions=("sdb1",), platform="blank")
TWO = array(disk(0), disk(1))
ONE_EXPECTED = replace(SETTINGS, expected_disks=1)
REBUILD = replace(SETTINGS, incomplete_array="rebuild")
WIPE = replace(SETTINGS, wipe=("crypto_LUKS", "gpt"))

# The settings, what is seen, and the row that applies.
CASES: dict[str, tuple[Settings, Survey, str]] = {
    "nothing": (SETTINGS, Survey(), "none"),
    "system disk": (SETTINGS, Survey((Observation(disk(system=True)),)), "system"),
    "two for one": (ONE_EXPECTED, Survey((blank(0), blank(1))), "ambiguous"),
    "ours and a blank one for one": (ONE_EXPECTED, Survey((ours(), blank(1))), "ambiguous"),
    "one for two": (replace(SETTINGS, expected_disks=2), Survey((blank(0),)), "missing"),
    "error": (SETTINGS, Survey((replace(blank(), error="Input/output error"),)), "error"),
    "error beside ours": (SETTINGS, Survey((ours(), replace(blank(1), error="x"))), "error"),
    "array that fails": (SETTINGS, Survey((member(0), member(1)), {UUID: Array(UUID, error="x")}), "error"),
    "mounted": (SETTINGS, Survey((replace(signed("xfs"), mounts=("/data",)),)), "busy"),
    "blank but held": (SETTINGS, Survey((replace(blank(), holders=("dm-0",)),)), "busy"),
    "swap": (SETTINGS, Survey((replace(signed("swap"), swap=True),)), "busy"),
    "ours, mounted elsewhere": (SETTINGS, Survey((mounted_at("/data"),)), "busy"),
    "array of ours, mounted elsewhere": (
        SETTINGS,
        Survey(
            tuple(replace(member(n), mounts=("/data",), holders=("md127",)) for n in (0, 1)),
            array(disk(0), disk(1), mounted="/data"),
        ),
        "busy",
    ),
    "two names of one disk": (SETTINGS, Survey((blank(0), named(1, serial="S0"))), "paths"),
    "two names of one disk of ours": (SETTINGS, Survey((ours(), named(1, serial="S0"))), "paths"),
    "two paths by WWID": (SETTINGS, Survey((named(0, wwid="naa.6"), named(1, wwid="naa.6"))), "paths"),
    "one serial, two WWIDs": (
        SETTINGS,
        Survey((named(0, serial="S", wwid="naa.6"), named(1, serial="S", wwid="naa.7"))),
        "blank",
    ),
    "one serial, two models": (
        SETTINGS,
        Survey((named(0, serial="S"), named(1, serial="S", model="Other"))),
        "blank",
    ),
    "no serials": (SETTINGS, Survey((named(0, serial=""), named(1, serial=""))), "blank"),
    "RAID member with partitions": (
        SETTINGS,
        Survey((replace(member(0), partitions=("p1",)), member(1))),
        "mixed",
    ),
    "RAID member of another level": (
        SETTINGS,
        Survey(tuple(replace(member(n), raid=Raid(UUID, "local", 1, 2, n)) for n in (0, 1))),
        "foreign",
    ),
    "RAID member with another signature": (
        SETTINGS,
        Survey((replace(member(0), signatures=(Signature("linux_raid_member"), Signature("gpt"))),)),
        "foreign",
    ),
    "foreign": (SETTINGS, Survey((signed("ext4"),)), "foreign"),
    "foreign beside blank": (SETTINGS, Survey((blank(0), signed("zfs_member", 1))), "foreign"),
    "data without a signature": (SETTINGS, Survey((Observation(disk()),)), "foreign"),
    "a partition that nothing explains": (
        SETTINGS,
        Survey((replace(blank(), partitions=("x1",)),)),
        "foreign",
    ),
    "platform's, with files": (SETTINGS, Survey((replace(PLATFORM, platform="files"),)), "foreign"),
    "platform's, unreadable": (SETTINGS, Survey((replace(PLATFORM, platform="unreadable"),)), "foreign"),
    "unreadable, may be wiped": (
        replace(SETTINGS, wipe=("dos",)),
        Survey((replace(PLATFORM, platform="unreadable"),)),
        "foreign",
    ),
    "label and UUID without a marker": (SETTINGS, Survey((ours("unmarked"),)), "foreign"),
    "somebody's array": (
        SETTINGS,
        Survey((member(0, uuid="0" * 32), member(1, uuid="0" * 32))),
        "foreign",
    ),
    "array of ours with another name": (
        SETTINGS,
        Survey((member(0, name="x"), member(1, name="x"))),
        "foreign",
    ),
    "foreign filesystem on an array of ours": (
        SETTINGS,
        Survey((member(0), member(1)), {UUID: Array(UUID, "md127", foreign="ext4")}),
        "foreign",
    ),
    "files without a marker on an array of ours": (
        SETTINGS,
        Survey((member(0), member(1)), array(state="unmarked")),
        "foreign",
    ),
    "foreign beside ours": (SETTINGS, Survey((ours(), signed("btrfs", 1))), "mixed"),
    "wipe: another kind": (WIPE, Survey((signed("ext4"),)), "foreign"),
    "wipe: not local": (WIPE, Survey((replace(signed("gpt"), disk=disk(local=False)),)), "foreign"),
    "wipe: one of two kinds": (
        WIPE,
        Survey((replace(signed("gpt"), signatures=(Signature("gpt"), Signature("ext4"))),)),
        "foreign",
    ),
    "blank": (SETTINGS, Survey((blank(),)), "blank"),
    "four blank": (SETTINGS, Survey(tuple(blank(n) for n in range(4))), "blank"),
    "blank beside the system's": (
        SETTINGS,
        Survey((Observation(disk(0, system=True)), blank(1), blank(2))),
        "blank",
    ),
    "platform's blank": (SETTINGS, Survey((PLATFORM,)), "platform"),
    "wipe: table": (
        WIPE,
        Survey((replace(signed("gpt"), signatures=(Signature("gpt"), Signature("PMBR"))),)),
        "wipe",
    ),
    "wipe: beside blank": (WIPE, Survey((signed("crypto_LUKS"), blank(1))), "wipe"),
    "only mkfs": (SETTINGS, Survey((ours("empty"),)), "unfinished"),
    "erased in part": (SETTINGS, Survey((replace(signed("gpt"), erasing=True), blank(1))), "unfinished"),
    "mkfs cut short": (SETTINGS, Survey((Observation(disk(), making=True),)), "unfinished"),
    "array without a filesystem": (
        SETTINGS,
        Survey((member(0), member(1)), {UUID: Array(UUID, "md127")}),
        "unfinished",
    ),
    "array, only mkfs": (SETTINGS, Survey((member(0), member(1)), array(state="empty")), "unfinished"),
    "ours": (SETTINGS, Survey((ours(),)), "current"),
    "ours, mounted already": (
        SETTINGS,
        Survey(
            (
                replace(
                    ours(),
                    mounts=("/mnt/local", "/var/lib/kubelet/pods"),
                    volume=Volume(disk().path, "xfs", UUID, "marked", marker(disk()), "/mnt/local"),
                ),
            )
        ),
        "current",
    ),
    "array of ours": (SETTINGS, Survey((member(0), member(1)), TWO), "current"),
    "array of ours, assembled, in another order": (
        SETTINGS,
        Survey((replace(member(1), holders=("md127",)), replace(member(0), holders=("md127",))), TWO),
        "current",
    ),
    "other image": (SETTINGS, Survey((ours(image="zero"),)), "reuse"),
    "image without an id": (SETTINGS, Survey((ours(image=""),)), "reuse"),
    "array, other image": (
        SETTINGS,
        Survey((member(0), member(1)), array(disk(0), disk(1), image="zero")),
        "reuse",
    ),
    "a member is missing": (SETTINGS, Survey((member(0),)), "incomplete"),
    "seven of eight": (SETTINGS, Survey(tuple(member(n, devices=8) for n in range(7))), "incomplete"),
    "a member was replaced": (SETTINGS, Survey((member(0), blank(1))), "incomplete"),
    "one member twice": (
        SETTINGS,
        Survey((member(0), replace(member(1), disk=disk(2)), member(1)), TWO),
        "incomplete",
    ),
    "parts of two arrays": (SETTINGS, Survey((member(0), member(1, uuid=OTHER))), "incomplete"),
    "part of an array beside ours": (SETTINGS, Survey((ours(), member(1, uuid=OTHER))), "several"),
    "part of an array beside a whole one": (
        SETTINGS,
        Survey((member(0), member(1), member(2, uuid=OTHER)), TWO),
        "several",
    ),
    "two filesystems of ours": (SETTINGS, Survey((ours(), ours(number=1))), "several"),
    "two filesystems of ours, one damaged": (SETTINGS, Survey((ours(), ours("damaged", 1))), "several"),
    "part of an array beside ours, rebuild": (REBUILD, Survey((ours(), member(1, uuid=OTHER))), "members"),
    "a member is missing, rebuild": (REBUILD, Survey((member(0),)), "members"),
    "two filesystems, rebuild": (REBUILD, Survey((ours(), ours(number=1))), "members"),
    "a disk was added, rebuild": (REBUILD, Survey((ours(), blank(1))), "members"),
    "a disk was added": (SETTINGS, Survey((ours(), blank(1))), "more"),
    "a disk was added, other image": (SETTINGS, Survey((ours(image="zero"), blank(1))), "more"),
    "an array's disk was added": (SETTINGS, Survey((member(0), member(1), blank(2)), TWO), "more"),
    "an array, and an erasure that was begun": (
        SETTINGS,
        Survey((member(0), member(1), replace(blank(2), erasing=True)), TWO),
        "more",
    ),
    "an array that was being erased": (
        SETTINGS,
        Survey((member(0), replace(blank(1), erasing=True, ends_zero=False))),
        "unfinished",
    ),
    "an array that was being made": (
        SETTINGS,
        Survey((replace(member(0), making=True), replace(blank(1), making=True, ends_zero=False))),
        "unfinished",
    ),
    "a file with our words in it, in an array that lacks a member": (
        SETTINGS,
        Survey((replace(member(0), making=True),)),
        "incomplete",
    ),
    "the same beside a blank disk": (
        SETTINGS,
        Survey((replace(member(0), making=True), blank(1))),
        "incomplete",
    ),
    "larger": (SETTINGS, Survey((resized(),)), "current"),
    "called otherwise": (
        SETTINGS,
        Survey((replace(ours(), disk=disk(model="Direct v2", serial="S0 ")),)),
        "current",
    ),
    "newer": (SETTINGS, Survey((ours("newer"),)), "newer"),
    "damaged": (SETTINGS, Survey((ours("damaged"),)), "damaged"),
    "other filesystem": (SETTINGS, Survey((ours(filesystem="ext4"),)), "filesystem"),
}


@pytest.mark.parametrize(("settings", "seen", "row"), CASES.values(), ids=CASES)
def test_row(settings: Settings, seen: Survey, row: str) -> None:
    found = decide(settings, "one", seen)
    assert (found.row, found.action, found.code) == (row, TABLE[row].action, TABLE[row].code)
    assert found.reason
    usable = tuple(one.disk for one in seen.observations if not one.disk.system)
    if row == "more":
        assert set(found.disks) < set(usable) and not any("used" in str(one) for one in found.disks)
    else:
        assert found.disks == (() if found.code else usable)
    assert (found.volume is not None) == (found.action in ("mount", "reuse"))


@pytest.mark.parametrize(
    ("settings", "seen", "of_size", "row"),
    [
        (SETTINGS, tuple(map(blank, range(3))), 8, "missing"),
        (SETTINGS, tuple(map(blank, range(8))), 8, "blank"),
        (SETTINGS, tuple(map(blank, range(9))), 8, "blank"),
        (SETTINGS, tuple(map(blank, range(3))), 0, "blank"),
        (SETTINGS, (PLATFORM,), 8, "missing"),
        (WIPE, (signed("crypto_LUKS"),), 8, "missing"),
        (SETTINGS, (ours("damaged"),), 8, "missing"),
        (SETTINGS, (ours(),), 8, "current"),
        (SETTINGS, (member(0),), 8, "incomplete"),
        (SETTINGS, (signed("xfs"), blank(1)), 8, "foreign"),
        (replace(SETTINGS, expected_disks=3), tuple(map(blank, range(3))), 8, "blank"),
        (REBUILD, tuple(map(blank, range(3))), 8, "blank"),
    ],
)
def test_no_filesystem_is_made_of_fewer_disks_than_the_size_has(
    settings: Settings, seen: tuple[Observation, ...], of_size: int, row: str
) -> None:
    found = decide(settings, "one", Survey(seen), of_size)
    assert (found.row, found.code) == (row, TABLE[row].code)


def test_every_row_is_reached() -> None:
    assert {row for _, _, row in CASES.values()} == set(TABLE)


def test_rows_without_a_disk_have_codes_of_their_own() -> None:
    codes = [row.code for row in TABLE.values() if row.action == "none"]
    assert len(set(codes)) == len(codes) and all(code.startswith("disk.") for code in codes)
    assert {name for name, row in TABLE.items() if row.action != "none" and row.code} == {"more"}


def test_readme_shows_the_table() -> None:
    lines = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    shown = [(cells[1].strip(), cells[3].strip(" `")) for line in lines if len(cells := line.split("|")) == 5]
    assert shown[1:] == [(row.when, row.code) for row in TABLE.values()]


def test_a_mounted_filesystem_is_not_made_anew() -> None:
    volume = Volume(disk().path, "ext4", UUID, "marked", marker(disk()), "/mnt/local")
    seen = Survey((replace(ours(filesystem="ext4"), volume=volume, mounts=("/mnt/local",)),))
    assert decide(SETTINGS, "one", seen).row == "busy"


# Everything that one disk can be; all pairs and triples are tried.
KINDS: dict[str, Callable[[int], Observation]] = {
    "blank": blank,
    "ours": lambda n: ours(number=n),
    "empty": lambda n: ours("empty", n),
    "damaged": lambda n: ours("damaged", n),
    "member": member,
    "platform": lambda n: replace(PLATFORM, disk=disk(n)),
    "erasing": lambda n: replace(blank(n), erasing=True),
    "making": lambda n: Observation(disk(n), making=True),
    "foreign": lambda n: signed("ext4", n),
    "foreign, over a mkfs of ours": lambda n: replace(signed("ext4", n), making=True),
    "partitions, over a mkfs of ours": lambda n: Observation(disk(n), partitions=("p1",), making=True),
    "nameless": lambda n: Observation(disk(n)),
    "unmarked": lambda n: ours("unmarked", n),
    "busy": lambda n: replace(blank(n), holders=("dm-0",)),
    "error": lambda n: replace(blank(n), error="x"),
}
BAD = {
    "foreign",
    "foreign, over a mkfs of ours",
    "partitions, over a mkfs of ours",
    "nameless",
    "unmarked",
    "busy",
    "error",
}


EMPTY = {"blank", "platform", "erasing", "making", "empty"}


def mixes() -> Iterator[tuple[str, ...]]:
    for count in (1, 2, 3):
        yield from combinations_with_replacement(KINDS, count)


def test_one_bad_disk_keeps_all_from_being_touched() -> None:
    for kinds in mixes():
        seen = Survey(tuple(KINDS[kind](n) for n, kind in enumerate(kinds)))
        found = decide(SETTINGS, "one", seen)
        used = [kind for kind in kinds if kind in ("ours", "damaged", "member")]
        apart = len(used) > 1 or "member" in used
        begun = set(used) == {"member"} and set(kinds) & {"erasing", "making"}
        assert (found.action == "none") == bool(set(kinds) & BAD or (apart and not begun)), kinds
        if found.action in ("mount", "reuse"):
            assert kinds.count("ours") == 1 and set(kinds) <= {"ours", *EMPTY}
        if found.action in ("format", "rebuild"):
            assert (
                not found.disks
                or not {"ours", "member"} & set(kinds)
                or set(kinds) & {"damaged", "erasing", "making"}
            )


def test_the_systems_disk_is_never_a_member() -> None:
    for kinds in mixes():
        disks = [KINDS[kind](n) for n, kind in enumerate(kinds)]
        disks[0] = replace(disks[0], disk=replace(disks[0].disk, system=True))
        assert disks[0].disk not in decide(SETTINGS, "one", Survey(tuple(disks))).disks


words = st.sampled_from(
    ["xfs", "ext4", "gpt", "dos", "PMBR", "crypto_LUKS", "linux_raid_member", "zfs_member"]
)
observations = st.builds(
    Observation,
    st.builds(disk, st.integers(0, 3), local=st.booleans(), system=st.booleans()),
    st.lists(st.builds(Signature, words), max_size=3).map(tuple),
    st.lists(st.just("p1"), max_size=2).map(tuple),
    st.lists(st.just("dm-0"), max_size=1).map(tuple),
    st.lists(st.just("/data"), max_size=1).map(tuple),
    st.booleans(),
    st.booleans(),
    platform=st.sampled_from(["", "files", "unreadable"]),
    error=st.sampled_from(["", "x"]),
)


@given(st.lists(observations, max_size=4), st.sampled_from([0, 1, 2]))
def test_without_proof_nothing_is_touched(seen: list[Observation], expected: int) -> None:
    """None of these is ours: one disk that isn't blank by every mark keeps all of them from being touched."""
    found = decide(replace(SETTINGS, expected_disks=expected), "one", Survey(tuple(seen)))
    if found.action != "none":
        assert found.action == "format"
        for one in (one for one in seen if one.disk in found.disks and not one.disk.system):
            marks = (one.signatures, one.partitions, one.holders, one.mounts, one.swap, one.error)
            assert not any(marks) and one.ends_zero


def test_reason_names_every_disk_that_is_the_reason() -> None:
    found = decide(SETTINGS, "one", Survey((signed("ext4", 0), blank(1), signed("zfs_member", 2))))
    assert found.reason == (
        "nvme0n1 (Direct S0, 1000000000000 bytes): ext4; nvme2n1 (Direct S2, 1000000000000 bytes): zfs_member"
    )


def test_reason_names_every_part_of_several_filesystems() -> None:
    found = decide(SETTINGS, "one", Survey((ours(), member(1, uuid=OTHER))))
    assert found.reason == (
        "a whole filesystem: nvme0n1 (Direct S0, 1000000000000 bytes); "
        f"array {OTHER}: 1 of 2 members: nvme1n1 (Direct S1, 1000000000000 bytes)"
    )


def test_content_is_named() -> None:
    table = replace(signed("gpt"), partitions=("a1", "a2"))
    assert nature(SETTINGS, table, {}).content == "gpt with 2 partitions"
    files = replace(PLATFORM, platform="files")
    assert (
        nature(SETTINGS, files, {}).content
        == "dos with 1 partition, with more or less than the platform's readme"
    )


def test_uuids_of_ours() -> None:
    made = {layout.new_uuid() for _ in range(100)}
    assert len(made) == 100 and all(layout.is_ours(uuid) for uuid in made)
    assert {(uuid[14], uuid[19] in "89ab") for uuid in made} == {("8", True)}
    assert layout.is_ours("6e6f6465:2d648000:8123456789:abcdef") and layout.normal(UUID.upper()) == UUID
    for other in ("", "x", "6e6f6465-2d64-4000-8123-456789abcdef", "4307D7D253B6CAF3"):
        assert not layout.is_ours(other)


def test_selector_is_named_where_nothing_matches() -> None:
    settings = replace(SETTINGS, selector=Selector("configured", model="X*"))
    assert "configured" in decide(settings, "one", Survey()).reason


@pytest.mark.parametrize("size", [2 << 20, 320 << 20, (1 << 40) + 512])
def test_a_mkfs_is_told_of_where_an_erasure_takes_it_away_and_mkfs_writes_nothing(size: int) -> None:
    offset, data = layout.making(size)
    assert layout.is_making(data) and offset == size - (1 << 20)
    assert offset + len(data) < size - (64 << 10)
    assert not layout.is_making(bytes(1 << 20)) and not layout.is_erasing(data)


def test_a_mkfs_that_fails_leaves_word_and_one_that_ends_takes_it_back(tmp_path: Path) -> None:
    file = tmp_path / "disk"
    file.write_bytes(bytes(4 << 20))
    one = disk(path=file, bytes=4 << 20)

    def cut_short() -> None:
        with apply._announced([one]):
            assert layout.is_making(probe.read_ends(one)[1])
            raise NodeError("program", "mkfs was killed")

    with pytest.raises(NodeError, match="killed"):
        cut_short()
    assert layout.is_making(probe.read_ends(one)[1])
    with apply._announced([one]):
        pass
    assert file.read_bytes() == bytes(4 << 20)
    file.write_bytes(b"x" * (4 << 20))
    with apply._announced([one]):
        pass
    assert file.read_bytes() == b"x" * (4 << 20), "what somebody else has put there stays"


@pytest.mark.parametrize("size", [2 << 20, 320 << 20, (1 << 40) + 512])
def test_an_erasure_leaves_both_ends_zero(size: int) -> None:
    writes = layout.erasure(size)
    assert layout.is_erasing(writes[0][1]) and writes[-1] == (0, bytes(4096))
    covered = sorted((offset, offset + len(data)) for offset, data in writes[1:])
    assert covered[0][0] == 0 and covered[0][1] == covered[1][0] and covered[1][1] >= 1 << 20
    assert covered[-1] == (size - (1 << 20), size)
    assert all(data == bytes(len(data)) for _, data in writes[1:])


def test_a_disk_that_can_not_be_marked_is_unmounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmounted: list[Path] = []
    monkeypatch.setattr(mounts, "unmount", unmounted.append)
    (tmp_path / ".node").write_text("a file")
    decision = Decision(
        "", "reuse", "", "", (disk(),), Volume(disk().path, "xfs", UUID, "empty", mounted="/mnt")
    )
    settings = replace(SETTINGS, mount_point=str(tmp_path))
    with pytest.raises(FileExistsError):
        apply.carry_out(decision, Survey(()), settings, "one", Places(), list)
    assert unmounted == [tmp_path]
