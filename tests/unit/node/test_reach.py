"""The parts of reachability, without a network: tasks with a shared deadline, and what counts as an address."""

from __future__ import annotations

import threading

import pytest

from image_builder.node.net import reach


def test_tasks_run_at_once() -> None:
    both = threading.Barrier(2)
    results = reach.together({name: lambda: both.wait(60) >= 0 for name in ("one", "other")}, 60)
    assert results == {"one": True, "other": True}


def test_a_task_that_is_late_has_no_result_and_is_left_behind() -> None:
    release = threading.Event()
    try:
        results = reach.together({"late": lambda: release.wait(60), "done": lambda: True}, 0.1)
        assert results == {"done": True}
    finally:
        release.set()


def test_a_task_whose_thread_can_not_start_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    start, is_full = threading.Thread.start, iter([True, False])

    def limited(thread: threading.Thread) -> None:
        if next(is_full):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert reach.together({"too many": lambda: True, "done": lambda: True}, 60) == {"done": True}


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("10.0.0.1", True),
        ("::1", True),
        ("fe80::1", True),
        ("10.0.0.256", False),
        ("10.1", False),
        ("registry.example", False),
        ("", False),
    ],
)
def test_an_address_is_no_name(text: str, is_one: bool) -> None:
    assert reach.is_address(text) is is_one
