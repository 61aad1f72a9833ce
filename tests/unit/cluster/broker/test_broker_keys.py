"""The provider's keys: when they are requested, and what happens when the provider doesn't answer."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from image_builder.cluster.broker.keys import (
    BUSY_PAUSE,
    FIRST_PAUSE,
    LONGEST_WITHOUT,
    PAUSE,
    Keys,
    parse_keys,
    source,
)
from image_builder.cluster.broker.refusal import RefusedError
from image_builder.node.net import fetch
from tests.support.azure import identities


class Provider:
    """A provider whose keys change, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now, self.asked, self.names = 0.0, 0, ["one"]
        self.is_up = True
        self.told: list[str] = []
        self.keys = Keys(self.fetch, 1000, tell=self.told.append, clock=lambda: self.now)

    def fetch(self) -> bytes:
        self.asked += 1
        if not self.is_up:
            raise OSError("no route to host")
        return identities.jwks(*self.names)


@pytest.fixture
def provider() -> Provider:
    return Provider()


def test_keys_are_kept(provider: Provider) -> None:
    for _ in range(5):
        assert provider.keys.find("one")
    assert provider.asked == 1
    provider.now = 1001
    assert provider.keys.find("one") and provider.asked == 2


def test_an_unknown_key_is_asked_for_once_a_minute(provider: Provider) -> None:
    assert provider.keys.find("one")
    for number in range(50):
        assert provider.keys.find(f"made up {number}") is None
    assert provider.asked == 1
    # The provider has changed its key meanwhile: the first token that names the new one makes it known.
    provider.names, provider.now = ["two"], PAUSE
    assert provider.keys.find("two") and provider.asked == 2
    # A key that was withdrawn is no longer known.
    provider.now = 2 * PAUSE
    assert provider.keys.find("one") is None and provider.asked == 3
    assert provider.keys.find("one") is None and provider.asked == 3


def test_known_keys_serve_on_while_the_provider_takes_its_time(provider: Provider) -> None:
    requested, answer = threading.Event(), threading.Event()

    def fetch() -> bytes:
        requested.set()
        assert answer.wait(60)
        return identities.jwks("one")

    keys = Keys(fetch, 1000, tell=provider.told.append, clock=lambda: provider.now)
    answer.set()
    assert keys.find("one")
    requested.clear()
    answer.clear()
    provider.now = 1001
    slow = threading.Thread(target=keys.find, args=("one",))
    slow.start()
    try:
        assert requested.wait(60)
        assert keys.find("one") and slow.is_alive(), "the provider still hasn't answered"
    finally:
        answer.set()
        slow.join()


def test_an_unknown_key_waits_for_nobody(provider: Provider) -> None:
    """While one thread queries the provider, all others answer at once: with a key they know, or "later"."""
    requested, answer = threading.Event(), threading.Event()
    names = ["one"]

    def fetch() -> bytes:
        requested.set()
        assert answer.wait(10)
        return identities.jwks(*names)

    keys = Keys(fetch, 1000, tell=provider.told.append, clock=lambda: provider.now)
    answer.set()
    assert keys.find("one")
    requested.clear()
    answer.clear()
    provider.now, names = PAUSE, ["one", "two"]
    slow = threading.Thread(target=keys.find, args=("two",))
    slow.start()
    try:
        assert requested.wait(10)
        with pytest.raises(RefusedError) as caught:
            keys.find("two")
        assert (caught.value.status, caught.value.retry_after) == (503, BUSY_PAUSE)
        assert keys.find("one")
    finally:
        answer.set()
        slow.join()
    assert keys.find("two")


def test_keys_that_nobody_confirms_end_after_a_day(provider: Provider) -> None:
    assert provider.keys.find("one")
    provider.is_up, provider.now = False, 1000 + LONGEST_WITHOUT
    assert provider.keys.find("one") and provider.keys.is_ready()
    provider.now += 1
    with pytest.raises(RefusedError) as caught:
        provider.keys.find("one")
    assert caught.value.status == 503 and not provider.keys.is_ready()
    provider.is_up, provider.now = True, provider.now + FIRST_PAUSE
    assert provider.keys.find("one")


def test_known_keys_serve_on_while_nobody_answers(provider: Provider) -> None:
    assert provider.keys.find("one")
    provider.is_up, provider.now = False, 1001
    assert provider.keys.find("one") and provider.keys.find("one") and provider.asked == 2
    assert provider.told == ["the identity provider's keys can't be fetched: no route to host"]


def test_keys_that_were_replaced_by_none_serve_on(provider: Provider) -> None:
    assert provider.keys.find("one")
    provider.names, provider.now = [], 1001
    assert provider.keys.find("one") and "no usable key" in provider.told[0]


def test_without_any_keys_nobody_is_proven_and_nobody_is_refused(provider: Provider) -> None:
    provider.is_up = False
    for _ in range(3):
        with pytest.raises(RefusedError) as caught:
            provider.keys.find("one")
        assert caught.value.status == 503 and caught.value.retry_after == FIRST_PAUSE
    assert provider.asked == 1 and not provider.keys.is_ready()
    provider.is_up, provider.now = True, FIRST_PAUSE
    assert provider.keys.is_ready() and provider.keys.find("one")


def test_keys_of_a_file(tmp_path: Path) -> None:
    path, lines = tmp_path / "jwks.json", list[str]()
    now = 0.0
    keys = Keys(source(str(path), None), 1000, tell=lines.append, clock=lambda: now)
    assert not keys.is_ready() and "No such file" in lines[0]
    path.write_text("<html>")
    now = FIRST_PAUSE
    assert not keys.is_ready() and len(lines) == 2
    path.write_bytes(identities.jwks("one"))
    now = 2 * FIRST_PAUSE
    assert keys.is_ready() and keys.find("one")


@pytest.mark.parametrize(("status", "is_read"), [(200, True), (204, False), (404, False), (500, False)])
def test_keys_of_an_address_are_those_of_a_good_answer(
    monkeypatch: pytest.MonkeyPatch, status: int, is_read: bool
) -> None:
    monkeypatch.setattr(fetch, "ask", lambda *_, **__: fetch.Response(status, b"{}"))
    ask = source("https://login.example/keys", None)
    if is_read:
        assert ask() == b"{}"
        return
    with pytest.raises(OSError, match=str(status)):
        ask()


def _jwks(**changes: object) -> bytes:
    document = json.loads(identities.jwks("one"))
    document["keys"][0] |= changes
    return json.dumps({"keys": [*document["keys"], 7]}).encode()


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True),
        ({"kty": "EC"}, False),
        ({"use": "enc"}, False),
        ({"alg": "RS512"}, False),
        ({"kid": 7}, False),
    ],
)
def test_only_keys_that_sign_with_rs256_are_taken(changes: dict[str, object], is_taken: bool) -> None:
    assert list(parse_keys(_jwks(**changes))) == ["one"] * is_taken


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"keys": {}}'])
def test_what_is_no_jwks_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_keys(data)
