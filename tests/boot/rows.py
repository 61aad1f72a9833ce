"""The boot matrix as data: what happens to a node and its local disks, and the required result.

Rows with the same ``machine`` share one instance with one OS disk and run in this order; a row builds on those before
it. Disks are files that outlive an instance: the same name means the same disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.boot import probes, steps
from tests.boot.node import MIB, Local
from tests.boot.steps import Step


@dataclass(frozen=True)
class Row:
    """A row. ``disks`` None: those that the machine has. ``needs``: rows of other machines that must run first.

    ``expected`` maps facts to values, where a tuple means any of its members; ``of_engine`` has those that differ by
    engine.
    """

    name: str
    machine: str
    disks: tuple[Local, ...] | None
    steps: tuple[Step, ...]
    expected: Mapping[str, Any]
    what: str
    needs: tuple[str, ...] = field(default=())
    of_engine: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def wanted(self, engine: str) -> dict[str, Any]:
        """Return the facts that nodes with an engine must have."""
        return {**self.expected, **self.of_engine.get(engine, {})}


# The required facts of every boot, and of every boot with a local disk.
_UP = {"system": "running", "console": [], "preload": "ok", "archive": [], "broken_links": 0}
UP = {**_UP, "ready": True, "disk_state": "ok", "tainted": False}
RUNS = {"images": "run"}
WHOLE = {"layers": True, "empty_files": 0, "different": []}
PROMOTED = {"promotion": "ok", "links": 0}
CHECKED = {"checks": True, "failed": []}

SOFTWARE = "registry.lab.internal/software:1.0"
SLOW = 8 * MIB  # a second: slow enough to interrupt a write
_ONE, _TWO, _THREE = Local("one"), Local("two"), Local("three")
_SLOW = Local("one", rate=SLOW)

LIFE: tuple[Row, ...] = (
    Row(
        "power cut while formatting",
        "a",
        (_SLOW,),
        (steps.cut_while_formatting,),
        {"formatted": False},
        "A blank disk; QEMU killed while mkfs.xfs writes.",
    ),
    Row(
        "power cut while seeding",
        "a",
        (_SLOW,),
        (steps.cut_while_seeding,),
        # No marker yet, or a filesystem that can't be mounted, depending on the write.
        {"disk": ("format", "rebuild"), "seeded": False, "copies": True},
        "The half-made filesystem is known for ours and made anew; QEMU killed at the seed's first writes.",
    ),
    Row(
        "power cut while promoting",
        "a",
        (Local("one", rate=SLOW // 2),),
        (steps.copy_while_seeding, steps.wait_until_up, steps.cut_while_promoting),
        {**UP, "disk": "mount", "seed": ("seeded", "current"), "promoting": True, "copies": True},
        "The half-made seed is dropped and made anew; QEMU killed when 160 MiB lie on the disk.",
    ),
    Row(
        "boot after the power cuts",
        "a",
        (_ONE,),
        (steps.boot, steps.run_images, steps.promoted, steps.whole, steps.remember),
        {**UP, **RUNS, **PROMOTED, **WHOLE, "disk": "mount", "seed": "current"},
        "Promotion goes on where it was; every layer on the disk is compared with the store.",
    ),
    Row(
        "booted suite after the power cuts",
        "a",
        None,
        (steps.suite,),
        CHECKED,
        "The verification suite on that machine.",
    ),
    Row(
        "reboot",
        "a",
        None,
        (steps.restart, steps.run_images, steps.promoted),
        {**UP, **RUNS, **PROMOTED, "disk": "mount", "seed": "current"},
        "Shut down in order and booted: nothing leads to the OS disk, nothing is done again.",
    ),
    Row(
        "deallocation",
        "a",
        (_TWO,),
        (steps.boot, steps.run_images),
        {**UP, **RUNS, "disk": "format", "seed": "seeded"},
        "The same OS disk, a blank local disk.",
    ),
    Row(
        "booted suite after the deallocation",
        "a",
        None,
        (steps.suite,),
        CHECKED,
        "The verification suite on that machine.",
    ),
    Row(
        "disk pressure",
        "a",
        None,
        (steps.evict,),
        {"deleted": [steps.MORE, SOFTWARE]},
        "The kubelet deletes every image that no pod uses: not the pause image, which it was told of.",
    ),
    Row(
        "boot after the disk pressure",
        "a",
        None,
        (steps.restart, steps.run_images),
        {**UP, **RUNS, "disk": "mount", "seed": "repaired"},
        "What was deleted is back: with Docker as links into the store again, with containerd from the archive, since "
        "nothing can be added to its databases before it runs.",
        of_engine={"containerd": {"seed": "current", "preload": "degraded", "archive": [SOFTWARE]}},
    ),
    Row(
        "disk pressure, images pinned",
        "a",
        None,
        (steps.pin_images, steps.evict, steps.run_images),
        {"deleted": [steps.MORE], **RUNS},
        "The same with `pin: true` for each preloaded image: none is deleted.",
    ),
)

OTHERS: tuple[Row, ...] = (
    Row(
        "no local disk, required",
        "b",
        (Local("other", 64 * MIB, "other", bus="scsi"),),
        (steps.boot,),
        {**_UP, "ready": False, "disk": "disk.none", "disk_state": "failed", "tainted": True},
        "A second machine of the image, with a disk that its selector doesn't mean.",
    ),
    Row(
        "two boots of one image",
        "b",
        None,
        (steps.differs,),
        {"compared": 1, "shared": [], "empty": []},
        "SSH host keys, machine id and random seed of both machines.",
        needs=("boot after the power cuts",),
    ),
    Row(
        "power cuts at every write",
        "b",
        None,
        (probes.plug_copies, probes.recover),
        {"copies": True, "failed": {}},
        "The local disk as it was at each write while it was formatted and seeded: the agent goes on with each copy, "
        "and its data root is compared byte by byte with a fresh one.",
        needs=("power cut while promoting",),
    ),
    Row(
        "damaged preload store",
        "b",
        None,
        (probes.damage_store,),
        {"offsets": 20, "detected": 20, "undetected": {}},
        "One bit flipped at 20 offsets, data and hash tree: an I/O error or a refused mount, never other bytes.",
    ),
    Row(
        "no local disk, preferred",
        "b",
        (),
        (steps.prefer, steps.boot, steps.run_images, steps.be_another_image),
        {**_UP, **RUNS, "ready": True, "disk": "disk.none", "disk_state": "degraded", "tainted": False},
        "The same machine with the policy `prefer`: it works on the OS disk, degraded.",
    ),
    Row(
        "reimage with a stale disk",
        "b",
        (_ONE,),
        (steps.boot, steps.run_images),
        {**UP, **RUNS, "disk": "reuse", "seed": ("current", "repaired")},
        "The first machine's disk in the second, whose OS disk was given another build id and store id.",
        needs=("boot after the power cuts",),
        # Its databases can't be merged, so the whole data root is moved aside.
        of_engine={"containerd": {"seed": "reseeded"}},
    ),
    Row(
        "disk that fails while it runs",
        "b",
        (Local("five", rate=SLOW),),
        (steps.boot, steps.break_disk),
        {**UP, "disk": "format", "seed": "seeded", "promotion": "promote.io", "reason": True},
        "A blank disk: from the middle of the promotion on, every access is answered with an error.",
    ),
    Row(
        "boot after the failure, more disks, clock at 1970",
        "b",
        (Local("five"), Local("three", serial="local1")),
        (steps.rebuild, steps.boot_in_1970, steps.run_images, steps.promoted, steps.whole),
        {**UP, **RUNS, **PROMOTED, **WHOLE, "disk": "rebuild", "members": 2, "seed": "seeded"},
        "Two disks, the old one among them: RAID0. The hardware clock says 1970.",
    ),
    Row(
        "fewer disks",
        "b",
        (_THREE,),
        (steps.boot, steps.run_images),
        {**UP, **RUNS, "disk": "rebuild", "members": 1, "seed": "seeded"},
        "One disk of the two, under another serial.",
    ),
    Row(
        "power cut after cloud-init made the user",
        "c",
        (Local("four"),),
        (steps.cut_after_users, steps.boot, steps.first_boot_again),
        {**UP, "first_boot_again": True},
        "cloud-init's notes survive, what it wrote need not. The next boot begins the first one anew, and sudo works.",
    ),
    Row(
        "larger disk",
        "b",
        (_THREE,),
        (steps.grow, steps.boot, steps.run_images),
        {**UP, **RUNS, "disk": "mount", "members": 1, "seed": "current"},
        "The same content on a disk of 24 GiB instead of 16.",
    ),
)

_AGAIN = {
    "ready": True,
    "disk": "format",
    "disk_state": "ok",
    "seed": "seeded",
    "preload": "ok",
    "archive": [],
    "tainted": False,
    "broken_links": 0,
    "restarts": "1",
    "condemned": [],
}


def _second_attempt(unit: str, what: str, *first: Step) -> Row:
    return Row(
        f"{unit} fails once",
        "d",
        (Local("six"),),
        (*first, steps.fail_once(unit), steps.boot_blank, steps.recovered(unit), steps.run_images),
        {**_AGAIN, **RUNS},
        what,
    )


SECOND_ATTEMPTS: tuple[Row, ...] = (
    _second_attempt(
        "local-disk",
        "The first attempt of the disk's unit fails: nothing is seeded on the OS disk, all else follows the second.",
        steps.boot,
    ),
    _second_attempt(
        "preload-seed",
        "The first attempt of the seed fails in an image without an archive: the engine waits for the second.",
        steps.drop_archive,
    ),
    _second_attempt(
        "image-preload", "The first attempt of the preload fails: the kubelet waits for the second."
    ),
)

ROWS = LIFE + OTHERS + SECOND_ATTEMPTS


def _of_life(name: str, *more: Step, **facts: Any) -> Row:
    row = next(row for row in LIFE if row.name == name)
    return replace(row, machine="ci", steps=(*row.steps, *more), expected={**row.expected, **facts})


# Those of tests/disk/test_boot_local_disk.py: a power cut, a disk that fails, and the events in a node's life.
CUT = Row(
    "power cut while seeding a blank disk",
    "ci",
    (Local("ci", rate=SLOW),),
    (steps.cut_while_seeding,),
    {"disk": "format", "seeded": False, "copies": True},
    "QEMU killed at the seed's first writes.",
)
NIGHT: tuple[Row, ...] = (
    CUT,
    Row(
        "boot after it",
        "ci",
        (Local("ci", rate=SLOW),),
        (steps.boot, steps.first_boot_again, steps.run_images),
        {**UP, **RUNS, "disk": "mount", "seed": ("seeded", "current"), "first_boot_again": True},
        "The half-made seed is made anew, and so is what cloud-init had made. The slow disk keeps the promotion busy.",
    ),
    Row(
        "disk that fails while it runs",
        "ci",
        (Local("ci", rate=SLOW),),
        (steps.break_disk,),
        {"promotion": "promote.io", "reason": True},
        "From the middle of the promotion on, every access of the local disk is answered with an error.",
    ),
    _of_life("deallocation", steps.promoted, **PROMOTED),
    _of_life("disk pressure"),
    _of_life("boot after the disk pressure"),
)


def chain(names: Sequence[str]) -> list[Row]:
    """Return the named rows and those that they depend on, in order. Raises KeyError for a name that no row has."""
    if unknown := sorted(set(names) - {row.name for row in ROWS}):
        raise KeyError(", ".join(unknown))
    wanted = set(names)
    for row in reversed(ROWS):
        machines = {one.machine for one in ROWS if one.name in wanted and ROWS.index(one) > ROWS.index(row)}
        if row.machine in machines and row.steps != (steps.suite,):
            wanted.add(row.name)
        if row.name in wanted:
            wanted.update(row.needs)
    return [row for row in ROWS if row.name in wanted]
