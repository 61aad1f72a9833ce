"""The ConfigMap of bad physical hosts, and what identifies a host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from image_builder.drain import hosts
from image_builder.drain.hosts import BadHost
from image_builder.node.status import PHYSICAL_HOST

BAD = BadHost("GGBB90904476", "gpu-17", "GpuLost", "gpu.lost: 3", 1_767_225_600.0)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("GGBB90904476", "GGBB90904476"),
        ("a.b-c_d", "a.b-c_d"),
        ("", ""),
        (".a", ""),
        ("a/b", ""),
        ("a" * 64, ""),
    ],
)
def test_a_name_is_a_key_of_a_config_map_or_none(name: str, host: str) -> None:
    assert hosts.host_of({"metadata": {"annotations": {PHYSICAL_HOST: name}}}) == host


def test_a_node_without_annotations_names_none() -> None:
    assert hosts.host_of({"metadata": {"annotations": None}}) == hosts.host_of({"metadata": {}}) == ""


def test_an_entry_is_read_as_it_was_written() -> None:
    assert hosts.parse({"data": {BAD.name: BAD.text()}}) == {BAD.name: BAD}
    assert BAD.words == "GGBB90904476 is known as bad: gpu-17, GpuLost at 2026-01-01T00:00:00Z: gpu.lost: 3"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "[" * 9999),
        *(
            f'{{"since": {since}, "node": "", "reason": "", "detail": ""}}'
            for since in ("NaN", "1e300", "-1", "1" + "0" * 400)
        ),
    ],
    ids=range(8),
)
def test_a_malformed_entry_is_none(text: str) -> None:
    assert hosts.parse({"data": {"A": text, BAD.name: BAD.text()}}) == {BAD.name: BAD}


class Recorder:
    """A client that records its requests to the API server."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []

    def request(self, method: str, path: str, body: Any, content_type: str = "") -> None:  # noqa: ARG002
        self.asked.append((method, path, body))


def test_only_what_changed_is_written() -> None:
    other = BadHost("B", "n", "r", "d", 1.0)
    client: Any = Recorder()
    hosts.write(client, {"B": other}, {"B": other})
    assert client.asked == []
    hosts.write(client, {"B": other}, {BAD.name: BAD})
    hosts.write(client, None, {BAD.name: BAD})
    (patch, post) = client.asked
    assert patch == ("PATCH", hosts.PATH, {"data": {"B": None, BAD.name: BAD.text()}})
    assert (
        post[:2] == ("POST", hosts.COLLECTION) and json.loads(post[2]["data"][BAD.name])["node"] == "gpu-17"
    )
