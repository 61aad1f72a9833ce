"""A node's requests. How an API server handles them is tested in tests/gpu/test_gate.py."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from image_builder.node.net.kube import Client, KubeError, condition, each_item
from image_builder.node.net.kubeconfig import Access, Pem


@pytest.mark.parametrize("status", [0, 401, 403, 404, 409, 429, 500, 503])
def test_what_may_pass_is_not_hopeless(status: int) -> None:
    assert not KubeError("", status).is_hopeless


def test_a_condition_is_at_most_a_kilobyte_and_whole_characters() -> None:
    made = condition("A", "True", "Passed", "boot=1 " + "é" * 2000, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert len(made["message"].encode()) == 1023 and made["message"].endswith("é")
    assert made["lastTransitionTime"] == made["lastHeartbeatTime"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize("items", [[], [{"a": 1}], [{"a": '"items":[{'}, {"b": [1, {"c": "]"}]}, {}]])
def test_a_list_is_read_item_by_item(items: list[dict[str, Any]]) -> None:
    text = json.dumps({"kind": "NodeList", "metadata": {"resourceVersion": "7"}, "items": items})
    seen: list[dict[str, Any]] = []
    assert each_item(text.replace(": ", ":").replace(", ", ","), seen.append) == "7"
    assert seen == items


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("names", [("metadata", "items", "kind"), ("items", "kind", "metadata")])
def test_a_list_that_a_proxy_has_rewritten_is_read(names: tuple[str, ...], indent: int | None) -> None:
    """No item is lost or read twice, whatever the order of the fields and the spaces between them."""
    fields = {"kind": "NodeList", "metadata": {"resourceVersion": "7"}, "items": [{"a": 1}, {"b": {}}, {}]}
    for separators in ((",", ":"), (", ", ": ")):
        seen: list[dict[str, Any]] = []
        text = json.dumps({name: fields[name] for name in names}, indent=indent, separators=separators)
        assert each_item(text, seen.append) == "7" and seen == fields["items"]


def test_what_a_reader_raises_is_not_taken_for_another_form() -> None:
    seen: list[dict[str, Any]] = []

    def take(item: dict[str, Any]) -> None:
        seen.append(item)
        raise KeyError("a reader's own")

    with pytest.raises(KeyError, match="own"):
        each_item('{"metadata":{"resourceVersion":"7"},"items":[{},{}]}', take)
    assert seen == [{}]


def test_a_list_of_nothing_may_be_null() -> None:
    assert each_item('{"metadata":{"resourceVersion":"7"},"items":null}', lambda _: None) == "7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"metadata":{"resourceVersion":"7"},"items":[{"a":1},',
        '{"metadata":{"resourceVersion":"7"},"items":[{"a":1}',
        '{"metadata":{"resourceVersion":"7"},"items":{}}',
    ],
)
def test_a_list_that_broke_off_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        each_item(text, lambda _: None)


class Answer(io.BytesIO):
    """An answer as http.client returns it."""

    status: int
    headers: dict[str, str]


class Sent(Client):
    """A client whose requests get answers that a test names."""

    def __init__(self, status: int, body: bytes = b"{}", token: str = "") -> None:
        super().__init__(Access("https://api", Pem(text=""), token=Pem(text=token) if token else None))
        self.status, self.body = status, body
        self.sent: list[tuple[str, str, bytes | None, dict[str, str]]] = []

    def _send(self, method: str, path: str, body: bytes | None, headers: Any, _timeout: float) -> Any:
        self.sent.append((method, path, body, dict(headers)))
        if self.status == 0:
            raise ConnectionResetError("gone")
        answer = Answer(self.body)
        answer.status, answer.headers = self.status, {}
        return answer


@pytest.mark.parametrize(
    ("status", "fails"), [(200, False), (201, False), (299, False), (300, True), (409, True), (0, True)]
)
def test_an_answer_below_300_is_one(status: int, fails: bool) -> None:
    client = Sent(status, b'{"message": "no", "a": 1}')
    if fails:
        with pytest.raises(KubeError) as caught:
            client.request("GET", "/x")
        assert caught.value.status == status
    else:
        assert client.request("GET", "/x")["a"] == 1


@pytest.mark.parametrize("token", ["", "secret\n"])
def test_a_request_says_what_it_has(token: str) -> None:
    client = Sent(200, token=token)
    client.request("PATCH", "/x", {"a": 1}, "application/merge-patch+json")
    client.request("GET", "/y")
    (_, path, body, headers), (_, _, none, plain) = client.sent
    assert (path, body, headers["Content-Type"]) == ("/x", b'{"a": 1}', "application/merge-patch+json")
    assert none is None and "Content-Type" not in plain
    assert plain.get("Authorization") == ("Bearer secret" if token else None)
