"""The age of machines' images, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from image_builder.gallery.age import ages
from image_builder.gallery.packages import Behind
from image_builder.gallery.uses import Use
from image_builder.gallery.versions import Version

NOW = datetime(2026, 11, 25, tzinfo=UTC)
VERSION = Version(
    "1.0.0", "ab" * 6, True, "2026-11-15T00:00:00.1234567Z", "2027-05-24T00:00:00Z", "Succeeded", {}
)


@pytest.mark.parametrize(
    ("version", "longest", "problem"),
    [
        (VERSION, 10, ""),
        (VERSION, 8, "older than 8 days"),
        (replace(VERSION, withdrawn="bad"), 90, "withdrawn: bad"),
        (replace(VERSION, end_of_life="2026-11-24T00:00:00Z"), 90, "its life ended 2026-11-24"),
        (replace(VERSION, published=""), 90, "its publication date is unknown"),
        (replace(VERSION, name="2.0.0"), 90, "the gallery has no such version"),
    ],
)
def test_a_problem_is_named(version: Version, longest: int, problem: str) -> None:
    (age,) = ages([version], [Use("/x/gpu-a", "machines", "1.0.0", 4)], NOW, longest)
    assert (age.owner, age.machines, age.problem) == ("gpu-a", 4, problem)


def test_the_oldest_comes_first_and_models_run_nothing() -> None:
    old = replace(VERSION, name="0.9.0", published="2026-01-01T00:00:00Z")
    uses = [
        Use("/x/a", "machines", "1.0.0", 1),
        Use("/x/b", "machines", "0.9.0", 1),
        Use("/x/c", "model", "1.0.0"),
    ]
    assert [age.owner for age in ages([VERSION, old], uses, NOW, 900)] == ["b", "a"]


def test_packages_are_compared_once_a_version_that_machines_run() -> None:
    asked: list[str] = []

    def behind(version: Version) -> Behind:
        asked.append(version.name)
        return Behind(("openssl 1 -> 2",), 1)

    uses = [Use(f"/x/{name}", "machines", "1.0.0", 1) for name in "ab"]
    table = ages([VERSION, replace(VERSION, name="2.0.0")], uses, NOW, 8, behind)
    assert asked == ["1.0.0"]
    problem = "older than 8 days; 1 packages are behind, 1 of them security updates: openssl 1 -> 2"
    assert [(age.problem, age.behind) for age in table] == [(problem, ("openssl 1 -> 2",))] * 2
