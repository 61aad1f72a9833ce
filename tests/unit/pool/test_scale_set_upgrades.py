"""Instances of a scale set are upgraded together: one request at a time, for all that came while another was open."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from image_builder.errors import PoolError
from image_builder.pool.scale_set.model import Instance, Version
from image_builder.pool.scale_set.upgrades import Member, Upgrades
from tests.support.arm.fleet import NEW, OLD

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
