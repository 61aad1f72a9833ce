"""Retries of the metadata service: which requests are retried, for how long, and with what pauses."""

from __future__ import annotations

import pytest

from image_builder.node.net import imds
from image_builder.node.net.fetch import Response
from image_builder.node.net.retry import Deadline


class Service:
    """A metadata service with prepared answers, and a clock that moves only while waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: int | Response) -> None:
        self.now, self.asked = 0.0, 0
        self.pauses: list[float] = []
        self._answers = list(answers)
        monkeypatch.setattr(imds, "ask", self._ask)

    def _ask(self, _path: str, *, address: str, seconds: float) -> Response:
        assert address == imds.ADDRESS and 0 < seconds <= 5
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer == 0:
            raise ConnectionRefusedError("refused")
        return answer if isinstance(answer, Response) else Response(answer, b"busy")

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def answer(self, seconds: float = 60.0) -> Response:
        return imds.answer(
            "/x", Deadline(self.now + seconds, lambda: self.now, self._sleep, chance=lambda: 0.999)
        )


@pytest.mark.parametrize("first", [0, 404, 408, 410, 429, 500, 503])
def test_what_may_pass_is_asked_again_after_a_pause(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    service = Service(monkeypatch, first, first, 200)
    assert service.answer().status == 200
    assert service.asked == 3 and [round(pause) for pause in service.pauses] == [0, 1]
    assert all(pause > 0.4 for pause in service.pauses), "refused three times within a millisecond"


@pytest.mark.parametrize("status", [400, 403, 405])
def test_what_it_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    service = Service(monkeypatch, status)
    with pytest.raises(imds.RefusedError, match=f"answered {status}: busy"):
        service.answer()
    assert service.asked == 1


def test_an_update_of_seventy_seconds_is_outlasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its documentation, the service answers 410 for that long."""
    service = Service(monkeypatch, *[410] * 14, 200)
    assert service.answer(120).status == 200
    assert 70 <= service.now <= 120 and max(service.pauses) <= 8


def test_time_that_is_over_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch, 0)
    with pytest.raises(OSError, match="does not answer: refused"):
        service.answer(20)
    assert 10 < service.now < 20


def test_what_it_asks_for_is_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch, Response(429, b"", retry_after=7.0), 200)
    assert service.answer().status == 200 and 7 <= service.pauses[0] < 8
    service = Service(monkeypatch, Response(429, b"", retry_after=90.0), 200)
    with pytest.raises(OSError, match="429"):
        service.answer()
    assert service.pauses == []
