"""JSON becomes dataclasses without conversion, and every problem is reported with its field's path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from image_builder.node.decode import DecodeError, absolute, at_least, decode, host_and_port, one_of, within


def _upper(value: Any, path: str) -> str:
    return decode(str, value, path).upper()


@dataclass(frozen=True)
class Part:
    kind: Literal["a", "b"]
    size: int = 1

    def problems(self) -> Iterator[str]:
        yield from at_least("size", self.size, 0)


@dataclass(frozen=True)
class Whole:
    name: str
    ratio: float = 1.5
    on: bool = False
    place: Path = Path("/")
    parts: tuple[Part, ...] = ()
    by_name: Mapping[str, int] = field(default_factory=dict)
    maybe: Part | None = None
    either: int | str | None = None
    source: str = field(default="", metadata={"key": "from"})
    shouted: str = field(default="", metadata={"read": _upper})
    anything: Any = None

    def problems(self) -> Iterator[str]:
        yield from within("ratio", self.ratio, 0, 10)


def test_everything() -> None:
    document = {
        "name": "x",
        "ratio": 2,
        "on": True,
        "place": "/a",
        "parts": [{"kind": "a"}, {"kind": "b", "size": 3}],
        "by_name": {"one": 1},
        "maybe": {"kind": "b"},
        "either": "text",
        "from": "here",
        "shouted": "loud",
        "anything": [1],
    }
    whole = decode(Whole, document)
    parts = (Part("a"), Part("b", 3))
    assert whole == Whole(
        *("x", 2.0, True, Path("/a"), parts, {"one": 1}, Part("b"), "text", "here", "LOUD", [1])
    )
    assert isinstance(whole.ratio, float)
    assert decode(Whole, {"name": "x", "maybe": None, "either": None}) == Whole("x")


WRONG: dict[str, tuple[Any, list[str]]] = {
    "no object": ([], ["the document must be an object, not []"]),
    "missing": ({}, ["name is missing"]),
    "unknown": ({"name": "x", "nam": 1}, ["nam is not a known key"]),
    "the field's name for its key": ({"name": "x", "source": "a"}, ["source is not a known key"]),
    "text for a truth": ({"name": "x", "on": "false"}, ['on must be true or false, not "false"']),
    "a number for a truth": ({"name": "x", "on": 1}, ["on must be true or false, not 1"]),
    "a truth for a number": ({"name": "x", "ratio": True}, ["ratio must be a number, not true"]),
    "a fraction for an integer": (
        {"name": "x", "by_name": {"a": 1.0, "b": "2", "c": 3}},
        ["by_name.a must be an integer, not 1.0", 'by_name.b must be an integer, not "2"'],
    ),
    "a number for text": ({"name": 5}, ["name must be a string, not 5"]),
    "text for a list": ({"name": "x", "parts": "a"}, ['parts must be a list, not "a"']),
    "null": ({"name": None}, ["name must be a string, not null"]),
    "path": ({"name": "x", "place": 5}, ["place must be a string, not 5"]),
    "either": ({"name": "x", "either": 1.5}, ["either must be an integer or a string or null, not 1.5"]),
    "in an optional one": ({"name": "x", "maybe": {"kind": 1}}, ["maybe.kind must be one of a, b, not 1"]),
    "read": ({"name": "x", "shouted": 1}, ["shouted must be a string, not 1"]),
    "all at once": (
        {
            "parts": [{"kind": "c"}, {"size": 0, "kind": "a"}, {"size": -1, "kind": "a"}, {}],
            "on": 1,
            "zzz": 1,
        },
        [
            "name is missing",
            "on must be true or false, not 1",
            'parts[0].kind must be one of a, b, not "c"',
            "parts[2].size must be at least 0, not -1",
            "parts[3].kind is missing",
            "zzz is not a known key",
        ],
    ),
    "rules beside types": (
        {"name": "x", "ratio": 11, "on": 1},
        ["on must be true or false, not 1", "ratio must be 0 to 10, not 11.0"],
    ),
    "no number": ({"name": "x", "ratio": float("nan")}, ["ratio must be 0 to 10, not NaN"]),
    "long": ({"name": ["x" * 200]}, [f'name must be a string, not ["{"x" * 78}…']),
}


@pytest.mark.parametrize(("document", "problems"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_reported(document: Any, problems: list[str]) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Whole, document)
    assert caught.value.problems == problems and str(caught.value) == "; ".join(problems)


def test_path_of_a_part_of_a_document() -> None:
    with pytest.raises(DecodeError, match="^promote.kind is missing$"):
        decode(Part, {}, "promote")
    with pytest.raises(DecodeError, match=r"^tcp\[0\] must be a string, not 7$"):
        decode(tuple[str, ...], [7], "tcp")


def test_rules() -> None:
    assert [*one_of("a", "x", ("", "y", "z"))] == ['a must be one of y, z, not "x"']
    assert [*within("a", 5, 1, 4.5)] == ["a must be 1 to 4.5, not 5"]
    assert [*at_least("a", float("nan"), 0)] == ["a must be at least 0, not NaN"]
    assert [*absolute("a", "b/c")] == ['a must be an absolute path, not "b/c"']
    for place in ("host", "host:", ":1", "host:0", "host:65536", "host:x", "host:²"):
        assert len([*host_and_port("a", place)]) == 1, place
    for no_problem in (
        one_of("a", "", ("", "y")),
        within("a", 1, 1, 4.5),
        at_least("a", 0, 0),
        absolute("a", "/"),
        host_and_port("a", "host:65535"),
        host_and_port("a", "[::1]:1"),
    ):
        assert [*no_problem] == []
