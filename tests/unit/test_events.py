"""Work that is shown as a stage: when it begins, and how it ends."""

from __future__ import annotations

import pytest

from image_builder.events import Monitor, shown_stage


class _Recorder(Monitor):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def stage_started(self, stage: str) -> None:
        self.events.append(("started", stage))

    def stage_finished(self, stage: str, seconds: float, cached: bool) -> None:
        assert seconds >= 0
        self.events.append(("cached" if cached else "finished", stage))

    def stage_failed(self, stage: str, seconds: float) -> None:
        assert seconds >= 0
        self.events.append(("failed", stage))


def test_work_that_ends_well_is_shown_from_its_beginning_to_its_end() -> None:
    monitor = _Recorder()
    with shown_stage(monitor, "fetch"):
        assert monitor.events == [("started", "fetch")]
    assert monitor.events == [("started", "fetch"), ("finished", "fetch")]


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_work_that_is_left_by_an_error_or_an_interrupt_has_failed(error: BaseException) -> None:
    monitor = _Recorder()
    with pytest.raises(type(error)), shown_stage(monitor, "fetch"):
        raise error
    assert monitor.events == [("started", "fetch"), ("failed", "fetch")]
