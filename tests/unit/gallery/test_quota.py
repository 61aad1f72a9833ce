"""Quota: which of a region's counters would exceed their limits."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.errors import FetchError
from image_builder.gallery.quota import exceeded


def _usage(name: str, current: int, limit: int) -> dict[str, Any]:
    return {
        "unit": "Count",
        "currentValue": current,
        "limit": limit,
        "name": {"value": name, "localizedValue": f"{name}s"},
    }


def test_a_counter_may_reach_its_limit_and_not_pass_it() -> None:
    needs = {"GalleryImageVersion": 1, "StandardDiskCount": 1}
    usages = [_usage("GalleryImageVersion", 9999, 10000), _usage("StandardDiskCount", 50000, 50000)]
    assert exceeded(usages, needs) == [
        "no quota for StandardDiskCounts: 50000 of 50000 are used, 1 more needed"
    ]


def test_what_is_not_needed_or_not_counted_is_no_problem() -> None:
    assert exceeded([_usage("cores", 9, 8), _usage("GalleryImage", 1000, 1000)], {"GalleryImage": 0}) == []
    assert exceeded([], {"GalleryImageVersion": 1}) == []


@pytest.mark.parametrize("broken", [{"limit": None}, {"currentValue": "many"}])
def test_a_counter_that_makes_no_sense_is_an_error(broken: dict[str, Any]) -> None:
    with pytest.raises(FetchError, match="is invalid"):
        exceeded([{**_usage("GalleryImage", 1, 2), **broken}], {"GalleryImage": 1})
