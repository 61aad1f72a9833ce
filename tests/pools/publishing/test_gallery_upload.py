"""Pages to the import host: whatever it does, the disk ends up with the image's ranges, and nothing else."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builder.errors import PublishError
from image_builder.gallery import pages, upload
from image_builder.gallery.pages import Range
from image_builder.gallery.upload import STREAMS, Upload
from tests.support.arm.import_host import Fault, ImportHost, Page, import_host
from tests.support.arm.pages import Store
from tests.support.arm.place import MIB, write_disk

pytestmark = pytest.mark.root

SIZE, DATA = 64 * MIB, 12 * MIB


@pytest.fixture
def host(store: Store) -> Iterator[ImportHost]:
    with import_host(store) as serving:
        yield serving


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "worker.vhd"
    write_disk(path, SIZE, DATA)
    return path


class Attempt:
    """An upload to a separate disk; ``granted`` counts the addresses that were requested."""

    def __init__(self, host: ImportHost, disk: Path) -> None:
        self.host, self.disk, self.name = host, disk, f"upload-{uuid.uuid4().hex[:8]}"
        self.ranges = pages.data_ranges(disk)
        self.granted = 0
        host.store.create(self.name, SIZE + 512)
        self.upload = Upload(self._grant)

    def _grant(self) -> str:
        self.granted += 1
        return self.host.store.sas(self.name, 3600)

    def write(self, ranges: list[Range] | None = None) -> None:
        self.upload.write(self.disk, self.ranges if ranges is None else ranges, lambda *_: None)

    def require_fidelity(self) -> None:
        """Assert that the disk has the same ranges as the file, with the same bytes."""
        assert pages.merged(self.host.store.ranges(self.name)) == pages.merged(self.ranges)
        with self.disk.open("rb") as file:
            for start, end in self.ranges:
                file.seek(start)
                assert self.host.store.read(self.name, start, end - start) == file.read(end - start)


def _first(count: int, effect: int | str) -> Fault:
    """Return a fault for the first pages."""
    numbers = itertools.count()
    return lambda _: effect if next(numbers) < count else None  # type: ignore[return-value]


def test_only_data_is_sent_and_each_range_once(host: ImportHost, disk: Path) -> None:
    attempt = Attempt(host, disk)
    attempt.write()
    attempt.require_fidelity()
    assert attempt.upload.sent == host.received == DATA
    assert attempt.granted == 1


@pytest.mark.parametrize("effect", [503, 500, "reset", "lose", "flip"])
def test_what_is_refused_lost_or_altered_is_sent_again(
    host: ImportHost, disk: Path, effect: int | str
) -> None:
    host.faults = [_first(3, effect)]
    attempt = Attempt(host, disk)
    attempt.write()
    attempt.require_fidelity()
    assert DATA < attempt.upload.sent <= DATA + 3 * pages.LARGEST


def test_a_connection_that_stalls_is_given_up(
    host: ImportHost, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_READ_SECONDS", 1)
    host.faults = [_first(1, "stall")]
    attempt = Attempt(host, disk)
    attempt.write()
    attempt.require_fidelity()


def test_an_address_that_ends_is_asked_for_again_and_no_range_is_sent_twice_beyond_those_in_flight(
    host: ImportHost, disk: Path
) -> None:
    attempt = Attempt(host, disk)
    host.store.longest = 1.5
    try:
        attempt.write(list(attempt.ranges[:4]))
        time.sleep(2)
        attempt.write(list(attempt.ranges[4:]))
    finally:
        host.store.longest = 1e9
    attempt.require_fidelity()
    assert attempt.granted >= 2
    assert host.received <= DATA + STREAMS * pages.LARGEST


def test_a_host_that_is_busy_is_given_the_time_that_it_asks_for(host: ImportHost, disk: Path) -> None:
    host.faults, host.retry_after = [_first(1, 503)], "1"
    attempt = Attempt(host, disk)
    started = time.monotonic()
    attempt.write()
    assert time.monotonic() - started >= 1
    attempt.require_fidelity()


def test_a_host_that_refuses_for_good_ends_the_upload_without_its_address_in_the_error(
    host: ImportHost, disk: Path
) -> None:
    host.faults = [lambda _: 403]
    attempt = Attempt(host, disk)
    with pytest.raises(PublishError, match="Put Page") as caught:
        attempt.write()
    assert "sig=" not in caught.value.message
    assert host.log == []


def test_what_another_attempt_left_is_cleared(host: ImportHost, disk: Path) -> None:
    attempt = Attempt(host, disk)
    stale = next(
        (n * MIB, n * MIB + 1024)
        for n in range(SIZE // MIB)
        if not any(start <= n * MIB < end for start, end in attempt.ranges)
    )
    host.store.blob(attempt.name).upload_page(b"s" * 1024, stale[0], 1024)
    attempt.upload.clear(pages.beyond(attempt.upload.present(), attempt.ranges))
    attempt.write(pages.lacking(attempt.ranges, attempt.upload.present()))
    attempt.require_fidelity()


def test_what_is_there_is_not_sent_again(host: ImportHost, disk: Path) -> None:
    attempt = Attempt(host, disk)
    attempt.write(list(attempt.ranges[:5]))
    assert pages.lacking(attempt.ranges, attempt.upload.present()) == list(attempt.ranges[5:])


def test_the_import_host_refuses_what_azures_refuses(host: ImportHost, disk: Path) -> None:
    """These are the proxy's own refusals: Azurite accepts all of them."""
    assert host.refusal("PUT", {}, "d", None) == 403  # Put Blob
    assert host.refusal("DELETE", {}, "d", None) == 403
    assert host.refusal("PUT", {"comp": ["properties"]}, "d", None) == 403
    host.store.sizes["d"] = MIB
    assert host.refusal("PUT", {"comp": ["page"]}, "d", Page(0, (4 << 20) + 512)) == 413
    assert host.refusal("PUT", {"comp": ["page"]}, "d", Page(MIB - 512, 1024)) == 416
    assert host.refusal("PUT", {"comp": ["page"]}, "d", Page(MIB - 512, 512)) == 0
