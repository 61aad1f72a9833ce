"""Each page with the results of a manual run agrees with its record, and says when the code has changed since."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import join, join_page, page, pending_pods, roll, roll_page, slices, slices_page


def _read(record: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    ("place", "render", "record"),
    [
        pytest.param(join_page.PAGE, join_page.text, join.RECORD, id="join"),
        pytest.param(slices_page.PAGE, slices_page.text, slices.RECORD, id="slices"),
        pytest.param(roll_page.PAGE, roll_page.text, roll.RECORD, id="roll"),
    ],
)
def test_page_says_what_the_record_says(
    place: Path, render: Callable[[Mapping[str, Any]], str], record: Path
) -> None:
    assert place.read_text(encoding="utf-8") == render(_read(record))


def test_pending_pods_page_and_plot_say_what_the_record_says() -> None:
    record, text = _read(pending_pods.RECORD), page.PAGE.read_text(encoding="utf-8")
    assert page.with_results(text, record) == text
    assert page.PLOT.read_text(encoding="utf-8") == page.plot(record)
