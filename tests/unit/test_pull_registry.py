"""Which of the manifests of an index is taken."""

from __future__ import annotations

import itertools

import pytest

from image_builder.errors import PullError
from image_builder.pull.registry import _choose


def _index(names: tuple[str, ...]) -> dict[str, list[dict[str, object]]]:
    found: list[dict[str, object]] = []
    for name in names:
        os, architecture, *variant = name.split("/")
        platform = {"os": os, "architecture": architecture, **({"variant": variant[0]} if variant else {})}
        found.append({"digest": f"digest of {name}", "platform": platform})
    return {"manifests": found}


@pytest.mark.parametrize(
    ("wanted", "names", "taken"),
    [
        ("linux/amd64", ("linux/amd64/v3", "linux/amd64", "linux/arm64/v8"), "linux/amd64"),
        ("linux/amd64", ("linux/amd64/v3", "linux/amd64/v1"), "linux/amd64/v1"),
        ("linux/arm64", ("linux/arm64/v9", "linux/arm64/v8"), "linux/arm64/v8"),
        ("linux/arm64/v8", ("linux/amd64", "linux/arm64"), "linux/arm64"),
        ("linux/amd64/v3", ("linux/amd64", "linux/amd64/v3"), "linux/amd64/v3"),
    ],
)
def test_the_platform_that_runtimes_take_is_taken_in_any_order(
    wanted: str, names: tuple[str, ...], taken: str
) -> None:
    for order in itertools.permutations(names):
        assert _choose("x", _index(order), wanted) == f"digest of {taken}"


def test_what_no_runtime_would_take_is_not_taken() -> None:
    with pytest.raises(PullError, match="none for linux/amd64; the registry has linux/amd64/v3"):
        _choose("x", _index(("linux/amd64/v3",)), "linux/amd64")
