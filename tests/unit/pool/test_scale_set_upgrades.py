"""Instances of a scale set are upgraded together: one request at a time, for all that came while another was open."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from image_builder.errors import FetchError, PoolError
from image_builder.pool.scale_set.model import Instance, Version
from image_builder.pool.scale_set.records import Replacement
from image_builder.pool.scale_set.roll import NoJournal, driving, roll_instance
from image_builder.pool.scale_set.upgrades import Ending, Member, Upgrades
from tests.support.arm.fleet import NEW, OLD
from tests.support.arm.model import Answer, Request, error
from tests.support.arm.rolling import PATIENCE, Rolling

_SECONDS = 5.0


def member(number: str, version: str = NEW, *, is_single: bool = False) -> Member:
    return Member(
        Instance(number, "vm", OLD, "Succeeded"), Version(version), None, lambda: "", is_single=is_single
    )


class Sender:
    """The requests sent, in order; while the first block is open, the others wait."""

    def __init__(self, error: Exception | None = None) -> None:
        self.upgrades, self.sent = Upgrades(), list[list[str]]()
        self.error, self.raised = error, list[BaseException]()

    def send(self, members: Sequence[Member]) -> None:
        self.sent.append([member.instance.id for member in members])
        if self.error and len(self.sent) > 1:
            raise self.error

    def _join(self, each: Member) -> None:
        try:
            with self.upgrades.joined(each, self.send):
                pass
        except PoolError as error:
            self.raised.append(error)

    def __call__(self, *others: Member) -> list[list[str]]:
        """Make others wait, in this order, while instance 0 is upgraded; return the requests after that one."""
        threads = [threading.Thread(target=self._join, args=(each,)) for each in others]
        with self.upgrades.joined(member("0"), self.send):
            for waiting, thread in enumerate(threads, 1):
                thread.start()
                deadline = time.monotonic() + _SECONDS
                while len(self.upgrades._waiting) < waiting and time.monotonic() < deadline:
                    time.sleep(0.001)
            assert self.sent == [["0"]]
        for thread in threads:
            thread.join(_SECONDS)
            assert not thread.is_alive()
        return self.sent[1:]


def test_those_that_wait_go_together() -> None:
    assert Sender()(*(member(number) for number in "1234")) == [["1", "2", "3", "4"]]


def test_another_version_is_another_request() -> None:
    sent = Sender()(member("1"), member("2", OLD), member("3"))
    assert sorted(sent) == [["1", "3"], ["2"]]


def test_one_that_was_refused_goes_by_itself() -> None:
    sent = Sender()(member("1"), member("2", is_single=True), member("3"))
    assert sorted(sent) == [["1", "3"], ["2"]]


def test_an_error_is_raised_for_each_and_the_next_ones_go_on() -> None:
    sender = Sender(PoolError("it is driven by run-2", hint="wait"))
    assert sender(*(member(number) for number in "12")) == [["1", "2"]]
    assert len(sender.raised) == 2
    sender.error = None
    with sender.upgrades.joined(member("3"), sender.send):
        assert sender.sent[-1] == ["3"]


class Pair(Upgrades):
    """The upgrades of two instances, neither of which is sent before the other waits too, unless it is single."""

    def __init__(self) -> None:
        super().__init__(self._await_both)

    def _await_both(self, first: Member) -> None:
        deadline = time.monotonic() + 30
        while not first.is_single and len(self._waiting) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("refusals", "sizes"),
    [
        # Too many requests: more of them would make it worse.
        ([429, 429], [2, 2, 2]),
        ([409], [2, 2]),
        ([409, 429, 409], [2, 2, 2, 1, 1]),
        ([400], [2, 1, 1]),
    ],
)
def test_instances_stay_together_unless_one_may_be_the_reason_for_a_refusal(
    tmp_path: Path, refusals: list[int], sizes: list[int]
) -> None:
    rolling, statuses = Rolling(tmp_path, upgrade_replaces=True), iter(refusals)

    def refused(request: Request) -> Answer | None:
        status = next(statuses, 0) if request.path.endswith("/manualupgrade") else 0
        return error(status, "Code", "why") if status else None

    rolling.fleet.arm.faults = [refused]
    client, path = rolling.client, rolling.fleet.path
    with driving(client, path, "run-1", NoJournal(), patience=PATIENCE) as drive:
        drive.upgrades = Pair()
        drive.set_image(client.scale_set(path), NEW)
        version = client.version(NEW)
        assert version is not None

        def roll(number: str) -> Ending:
            machine = rolling.fleet.machine(number)
            return roll_instance(drive, number, machine.vm_id, version, rolling.fleet.node(number))

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(roll, ("1", "2"))) == [Ending("ok"), Ending("ok")]
        # What was refused once isn't held against them later, such as in a rollback.
        assert not drive.singles and not drive.conflicted
    assert [len(body["instanceIds"]) for body in rolling.fleet.posts("/manualupgrade")] == sizes


def test_an_instance_that_is_sent_by_itself_does_not_wait_for_others(tmp_path: Path) -> None:
    rolling = Rolling(tmp_path, upgrade_replaces=True)
    client, path = rolling.client, rolling.fleet.path
    with driving(client, path, "run-1", NoJournal(), patience=PATIENCE) as drive:
        drive.set_image(client.scale_set(path), NEW)
        version = client.version(NEW)
        assert version is not None
        drive.singles = {"1", "2"}
        for number in ("1", "2"):
            machine, node = rolling.fleet.machine(number), rolling.fleet.node(number)
            assert roll_instance(drive, number, machine.vm_id, version, node) == Ending("ok")
        first, second = (record.at for record in drive.records if isinstance(record, Replacement))
    assert second - first < 5 * PATIENCE.look


def test_a_run_that_ends_does_not_wait_until_azure_accepts_more_requests(tmp_path: Path) -> None:
    rolling, refusals = Rolling(tmp_path), list[float]()

    def refused(request: Request) -> Answer | None:
        if not request.path.endswith("/manualupgrade"):
            return None
        refusals.append(rolling.clock())
        return error(429, "TooManyRequests", "wait", Retry_After="300")

    def wait(seconds: float) -> None:
        if refusals:
            raise FetchError("the run ends")
        rolling.clock.wait(seconds)

    rolling.fleet.arm.faults = [refused]
    client, path = rolling.client, rolling.fleet.path
    with driving(client, path, "run-1", NoJournal(), patience=PATIENCE, wait=wait) as drive:
        drive.set_image(client.scale_set(path), NEW)
        version = client.version(NEW)
        assert version is not None
        vm_id, node = rolling.fleet.machine("1").vm_id, rolling.fleet.node("1")
        with pytest.raises(FetchError, match="the run ends"):
            roll_instance(drive, "1", vm_id, version, node)
        assert rolling.clock() - refusals[0] < 1
