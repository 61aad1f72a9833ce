"""Text for people: long lists of names, and times."""

from __future__ import annotations

from datetime import datetime

import pytest

from image_builder.text import short_list, stamp


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["gpu-0"], "gpu-0"),
        (["a", "b", "c"], "a, b, c"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
        (list("abcdefgh"), "a, b, c and 5 more"),
    ],
)
def test_a_short_list_has_the_first_names_and_the_number_of_the_rest(names: list[str], text: str) -> None:
    assert short_list(names, 3) == text


def test_a_stamp_is_in_utc_to_the_second_and_is_read_back() -> None:
    assert stamp(1.8e9 + 0.9) == "2027-01-15T08:00:00Z"
    assert datetime.fromisoformat(stamp(1.8e9)).timestamp() == 1.8e9
