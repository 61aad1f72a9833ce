"""Publications in simulated time: Resource Manager without a connection, and pages in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import parse_qsl

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError
from azure.storage.blob import BlobClient

from image_builder.definition.model import ImageGallery
from image_builder.errors import PublishError
from image_builder.events import Monitor
from image_builder.gallery import artefact, azure, pages, upload
from image_builder.gallery import run as publishing
from image_builder.gallery.azure import Service
from image_builder.gallery.journal import Done, Failed, Finished, Opened, open_journal
from image_builder.gallery.plan import GALLERY_API, Target
from image_builder.system import resource_manager
from tests.support.arm.limits import Limits
from tests.support.arm.model import Answer, Request, error
from tests.support.arm.place import MIB, SETTINGS, write_build
from tests.support.arm.service import Arm

SIZE = 20 * MIB
Effect = Literal["drop", "lose"] | Answer


@dataclass
class Blobs:
    """Upload disks. ``refusals`` are the statuses of the next writes, ``before_list`` comes before each list."""

    disks: dict[str, bytearray] = field(default_factory=dict)
    written: dict[str, set[int]] = field(default_factory=dict)
    kept: dict[str, bytes] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    before_list: Callable[[str], None] = lambda _: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def create(self, name: str, size: int) -> None:
        self.disks[name], self.written[name] = bytearray(size), set()

    def sas(self, name: str, _seconds: int) -> str:
        self.urls.append(f"https://disks/{name}?sig={len(self.urls)}")
        return self.urls[-1]

    def footer(self, name: str) -> bytes:
        return bytes(self.disks[name][-512:])

    def delete(self, name: str) -> None:
        self.kept[name] = bytes(self.disks.pop(name))

    def write(self, name: str, offset: int, data: bytes | None, length: int) -> None:
        with self.lock:
            status = self.refusals.pop(0) if self.refusals else 0
            if status == 1:
                raise ServiceRequestError("no answer")
            if status:
                response: Any = SimpleNamespace(status_code=status, reason="", headers={"Retry-After": "7"})
                raise HttpResponseError("refused", response=response)
            numbers = range(offset // 512, (offset + length) // 512)
            self.disks[name][offset : offset + length] = data or bytes(length)
            change = self.written[name].update if data else self.written[name].difference_update
            change(numbers)


@dataclass
class Blob:
    """The SDK's client of one disk, by one signed URL."""

    blobs: Blobs
    name: str

    def list_page_ranges(self, **_: object) -> Iterator[SimpleNamespace]:
        self.blobs.before_list(self.name)
        for number in sorted(self.blobs.written[self.name]):
            yield SimpleNamespace(start=512 * number, end=512 * number + 511, cleared=False)

    def upload_page(self, data: bytes, offset: int, length: int, **_: object) -> None:
        self.blobs.write(self.name, offset, data, length)

    def clear_page(self, offset: int, length: int, **_: object) -> None:
        self.blobs.write(self.name, offset, None, length)


class Direct(Service):
    """A service whose requests end in the simulator; ``effects`` says what becomes of changes, by number."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.clock_lag, self._last, self._say = arm, 0.0, None, lambda _: None

    def _request(self, method: str, url: str, query: Any, body: Any, *_: Any, **__: Any) -> Any:
        path, _mark, more = url.partition("?")
        answer = self.arm.answer(Request(method, path, {**dict(parse_qsl(more)), **query}, body))
        if answer is None:
            raise ServiceRequestError("no answer")
        content = json.dumps(answer.body)
        return SimpleNamespace(
            status_code=answer.status,
            headers=answer.headers,
            content=content if answer.body else "",
            reason="",
            json=lambda: json.loads(content),
        )


class World:
    """A subscription with a gallery, a build of 20 MiB with 2 MiB of data, and a clock that only waits move."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.blobs, self.now, self.changes = folder, Blobs(), time.time(), 0
        self.arm = Arm(self.blobs, limits=Limits.boundless())
        self.arm.faults = [self._fault]
        self.effects: dict[int, Effect] = {}
        self.target = Target(ImageGallery.model_validate_json(json.dumps(SETTINGS)))
        self.arm.add(self.target.gallery)
        build = write_build(folder, size=SIZE, data=2 * MIB).build_id[:12]
        self.built = artefact.read(folder / "worker" / build, folder / "boot" / build, unverified=False)
        features = [
            {"name": "IsAcceleratedNetworkSupported", "value": "True"},
            {"name": "DiskControllerTypes", "value": "SCSI, NVMe"},
        ]
        properties = {"osType": "Linux", "osState": "Generalized", "hyperVGeneration": "V2"}
        self.arm.add(
            self.target.definition,
            properties={**properties, "architecture": "x64", "features": features, "identifier": {}},
        )
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self.wait)
        for module in (azure, upload, publishing, resource_manager):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(BlobClient, "from_blob_url", self._blob)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def _blob(self, url: str, **_: object) -> Blob:
        return Blob(self.blobs, url.rpartition("/")[2].partition("?")[0])

    def _fault(self, request: Request) -> Effect | None:
        if request.method == "GET":
            return None
        self.changes += 1
        return self.effects.get(self.changes - 1)

    def __call__(self, *, restart: bool = False, replace_failed: bool = False) -> dict[str, Any]:
        service = Direct(self.arm)
        with open_journal(self.folder / "journal.jsonl") as journal:
            records = () if restart else journal.records
            plan = publishing.plan(service, self.target, self.built, records)
            return publishing.Run(plan, service, journal, Monitor(), restart, replace_failed).perform()

    def records(self, kind: type) -> list[Any]:
        with open_journal(self.folder / "journal.jsonl") as journal:
            return [record for record in journal.records if isinstance(record, kind)]

    def sent(self) -> list[str]:
        """Return the changes that arrived, as method and last part of the path."""
        return [f"{e.method} {e.path.rsplit('/', 1)[1]}".lower() for e in self.arm.log if e.status]

    def check(self, done: dict[str, Any], *, opened: int = 1) -> None:
        """Check what holds after every publication that ends well; ``opened``: how often one began."""
        assert done["regions"] == {"westus3": "Completed", "eastus": "Completed"}
        (version,) = Direct(self.arm).list(f"{self.target.definition}/versions", GALLERY_API)
        assert version["id"] == done["version"] and version["name"] == self.records(Opened)[-1].version
        assert not self.blobs.disks, "the disk is deleted"
        (whole,) = {self.blobs.kept[name] for name in self.blobs.kept}
        assert whole == self.built.disk.read_bytes()
        assert len(self.records(Finished)) >= 1 and len(self.records(Opened)) == opened


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_build_becomes_a_version_and_what_exists_is_not_sent_again(world: World) -> None:
    done = world()
    world.check(done)
    disk = next(iter(world.blobs.kept)).lower()
    version = done["version"].rsplit("/", 1)[1]
    assert world.sent() == [
        f"put {disk}",
        "post begingetaccess",
        "post endgetaccess",
        f"put {version}",
        f"delete {disk}",
    ]
    ranges = pages.data_ranges(world.built.disk)
    assert done["bytes_sent"] == sum(end - start for start, end in ranges) + 512
    assert done["requests"] == len(world.sent()) + len(ranges) + 1
    steps = ["disk", "access", "pages", "footer", "release", "version", "clean"]
    assert [record.step for record in world.records(Done)] == steps
    log = list(world.arm.log)
    again = world()
    assert (again["bytes_sent"], again["requests"], world.arm.log) == (0, 0, log)


@pytest.mark.parametrize(
    "effect", ["drop", "lose", error(500, "x", "y"), error(429, "x", "y"), error(409, "x", "y")]
)
@pytest.mark.parametrize("number", range(5))
def test_a_change_whose_answer_is_lost_or_refused_is_made_once(
    world: World, number: int, effect: Effect
) -> None:
    world.effects = {number: effect}
    world.check(world())
    made = [entry for entry in world.arm.log if 200 <= entry.status < 300]
    # An answer with a URL that was lost can't be read again.
    assert len(made) == 5 + (number == 1 and effect == "lose")


@pytest.mark.parametrize("number", range(5))
def test_a_change_that_is_refused_for_good_ends_and_the_next_run_goes_on(world: World, number: int) -> None:
    world.effects = {number: error(403, "AuthorizationFailed", "no right")}
    with pytest.raises(PublishError):
        world()
    (failed,) = world.records(Failed)
    assert failed.step == ("disk", "access", "release", "version", "clean")[number]
    world.check(world())
    assert len([entry for entry in world.arm.log if 200 <= entry.status < 300]) == 5 + (number == 2)


def test_a_change_that_never_gets_an_answer_is_tried_eight_times(world: World) -> None:
    world.effects = dict.fromkeys(range(8), "drop")
    with pytest.raises(PublishError):
        world()
    assert len(world.arm.log) == 8 and not world.sent()
    world.check(world())


@pytest.mark.parametrize(
    ("refusals", "grants", "seconds"),
    [
        ([403], 2, 0.0),
        ([400, 500], 1, 14.0),
        ([1, 1], 1, 0.2),
        ([429] * 7, 1, 49.0),
    ],
)
def test_a_page_that_is_refused_is_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch, refusals: list[int], grants: int, seconds: float
) -> None:
    monkeypatch.setattr(upload, "STREAMS", 1)
    world.blobs.refusals = list(refusals)
    began = world.now
    done = world()
    world.check(done)
    assert len(world.blobs.urls) == grants and world.now - began >= seconds
    once = sum(end - start for start, end in pages.data_ranges(world.built.disk)) + 512
    assert done["bytes_sent"] > once, "each request counts"


@pytest.mark.parametrize(("refusals", "tries"), [([404], 1), ([429] * 8, 8), ([403] * 5, 5)])
def test_a_page_that_is_refused_for_good_ends_the_upload(
    world: World, monkeypatch: pytest.MonkeyPatch, refusals: list[int], tries: int
) -> None:
    monkeypatch.setattr(upload, "STREAMS", 1)
    world.blobs.refusals = [*refusals, *[404] * 9]
    with pytest.raises(PublishError):
        world()
    assert len(refusals) + 9 - len(world.blobs.refusals) == tries
    world.blobs.refusals.clear()
    world.check(world())


def test_pages_of_another_attempt_are_cleared_and_those_that_are_there_are_not_sent(world: World) -> None:
    ranges = pages.data_ranges(world.built.disk)
    (start, end), *_ = ranges
    foreign = next(at for at in range(0, SIZE, MIB) if all(at + MIB <= a or at >= b for a, b in ranges))

    def before(name: str) -> None:
        if not world.blobs.written[name]:
            world.blobs.write(name, start, world.built.disk.read_bytes()[start:end], end - start)
            world.blobs.write(name, foreign, b"x" * 512, 512)

    world.blobs.before_list = before
    done = world()
    world.check(done)
    assert done["bytes_sent"] == sum(b - a for a, b in ranges) - (end - start) + 512


@pytest.mark.parametrize("is_lacking", [False, True])
def test_no_footer_is_written_on_other_ranges_than_the_images(world: World, is_lacking: bool) -> None:
    """Another attempt works on the same disk until the second list."""
    ranges, lists = pages.data_ranges(world.built.disk), list[str]()
    foreign = next(at for at in range(0, SIZE, MIB) if all(at + MIB <= a or at >= b for a, b in ranges))

    def before(name: str) -> None:
        lists.append(name)
        if len(lists) == 2 and is_lacking:
            world.blobs.write(name, ranges[0][0], None, 512)
        elif len(lists) == 2:
            world.blobs.write(name, foreign, b"x" * 512, 512)

    world.blobs.before_list = before
    with pytest.raises(PublishError):
        world()
    assert [world.blobs.footer(name) for name in world.blobs.disks] == [bytes(512)]
    assert [record.step for record in world.records(Failed)] == ["footer"]
    world.check(world())


@pytest.mark.parametrize(
    "monitors", [("Azure-AsyncOperation", "Location"), ("Location",), ("Azure-AsyncOperation",)]
)
@pytest.mark.parametrize(("looks", "lag"), [(1, 0), (3, 2)])
def test_operations_are_followed_to_their_end(
    world: World, monitors: tuple[str, ...], looks: int, lag: int
) -> None:
    world.arm.monitors, world.arm.looks, world.arm.lag = monitors, looks, lag
    world.check(world())


@pytest.mark.parametrize("fails", [1, 2])
def test_a_region_that_fails_is_repaired_once(world: World, fails: int) -> None:
    world.arm.failing_regions = {"eastus": fails}
    if fails == 1:
        world.check(world())
        return
    with pytest.raises(PublishError):
        world()
    assert [entry.method for entry in world.arm.log].count("PATCH") == 2 and len(world.records(Failed)) == 1


def test_the_first_region_can_not_be_repaired(world: World) -> None:
    world.arm.failing_regions = {"westus3": 1}
    with pytest.raises(PublishError):
        world()
    assert [record.step for record in world.records(Failed)] == ["replicate"]
    assert "PATCH" not in [entry.method for entry in world.arm.log]


def test_a_definition_is_made_if_it_may_be(world: World) -> None:
    del world.arm.resources[world.target.definition.lower()]
    with pytest.raises(PublishError, match="create: true"):
        world()
    world.target = Target(ImageGallery.model_validate_json(json.dumps({**SETTINGS, "create": True})))
    world.arm.quotas = {("westus3", "GalleryImage"): 0}
    with pytest.raises(PublishError, match="Gallery Images: 0 of 0"):
        world()
    assert not world.arm.log
    world.arm.quotas = {("westus3", "GalleryImage"): 1}
    world.check(world())
    assert world.sent()[0] == f"put {SETTINGS['definition']}"


def test_a_version_that_failed_everywhere_is_replaced_when_asked(world: World) -> None:
    world.arm.failing_regions = {"westus3": 1, "eastus": 3}
    for _ in range(2):
        with pytest.raises(PublishError):
            world()
    version = world.records(Opened)[0].version
    assert f"delete {version}" not in world.sent()
    world.arm.failing_regions.clear()
    world.check(world(replace_failed=True))
    assert world.sent().count(f"delete {version}") == 1


@pytest.mark.parametrize(
    ("counter", "label"),
    [
        ("GalleryImageVersion", "Gallery Image Versions"),
        ("StandardDiskCount", "Standard Storage Managed Disks"),
    ],
)
def test_a_counter_may_be_filled_and_not_exceeded(world: World, counter: str, label: str) -> None:
    world.arm.quotas = {("westus3", counter): 0}
    with pytest.raises(PublishError, match=f"westus3: .*{label}: 0 of 0"):
        world()
    assert not world.arm.log
    world.arm.quotas = {("westus3", counter): 1, ("eastus", "StandardDiskCount"): 0}
    world.check(world())


@pytest.mark.parametrize("lag", [-301.0, 301.0, 300.0])
def test_a_clock_that_is_far_off_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, lag: float
) -> None:
    with open_journal(world.folder / "journal.jsonl") as journal:
        service = Direct(world.arm)
        service.clock_lag = lag
        if abs(lag) <= 300.0:
            assert publishing.plan(service, world.target, world.built, journal.records).steps
            return
        with pytest.raises(PublishError, match="301 s"):
            publishing.plan(service, world.target, world.built, journal.records)


def test_rights_that_are_missing_are_noticed_before_anything_is_sent(world: World) -> None:
    world.arm.actions = ["Microsoft.Compute/*/read"]
    with pytest.raises(PublishError, match="Microsoft.Compute/disks/write"):
        world()
    assert not world.arm.log


def test_a_journal_of_other_bytes_is_refused_until_it_is_restarted(world: World) -> None:
    with open_journal(world.folder / "journal.jsonl") as journal:
        journal.append(Opened(at=1.0, version="2025.101.0", sha256="0" * 64, unverified=""))
    with pytest.raises(PublishError, match="0" * 64):
        world()
    assert not world.arm.log
    world.check(world(restart=True), opened=2)
    assert world.records(Opened)[-1].sha256 == world.built.sha256
    world.check(world(), opened=2)


def test_a_restart_discards_what_was_uploaded(world: World) -> None:
    world.effects = {2: error(403, "AuthorizationFailed", "no right")}
    with pytest.raises(PublishError):
        world()
    (disk,) = world.blobs.disks
    done = world(restart=True)
    world.check(done, opened=2)
    changes = world.sent()[3:5]
    assert changes == [f"delete {disk}".lower(), f"put {disk}".lower()]
    assert done["bytes_sent"] == sum(b - a for a, b in pages.data_ranges(world.built.disk)) + 512
