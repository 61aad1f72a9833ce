"""A fetch: what it reports, and how long it waits for a server."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import urllib3

from image_builder.bake.lock import fetch as fetching
from image_builder.bake.lock.fetch import Download, fetch
from image_builder.errors import FetchError, SpaceError


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, SpaceError), (errno.EDQUOT, SpaceError), (errno.EIO, FetchError)]
)
def test_a_full_disk_is_not_the_mirrors_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def write(_pools: object, _url: str, target: Path, _stop: object) -> tuple[int, str]:
        target.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fetching, "_copy", write)
    (tmp_path / "cache").mkdir()
    file = Download("p", "https://mirror.example/p.deb", hashlib.sha256(b"p").hexdigest(), 1)
    with pytest.raises(expected) as raised:
        fetch([file], tmp_path / "cache", tmp_path)
    assert ("store gc" in (getattr(raised.value, "hint", None) or "")) == (expected is SpaceError)
    assert [path.name for path in tmp_path.rglob("*")] == ["cache"]


@pytest.mark.parametrize(("asked", "seconds"), [("30", 30.0), ("21600", 120.0)])
def test_a_server_gets_two_minutes_at_most(asked: str, seconds: float) -> None:
    response = urllib3.HTTPResponse(status=429, headers={"Retry-After": asked})
    assert fetching._retries(threading.Event()).get_retry_after(response) == seconds


def test_a_fetch_that_ends_waits_for_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is busy a second time when another file finds the disk full."""
    asked: list[str] = []
    busy = threading.Event()

    def answer(*arguments: object, **_: object) -> urllib3.HTTPResponse:
        asked.append(str(arguments[3]))
        if len(asked) == 2:
            busy.set()
        seconds = "0" if len(asked) == 1 else "60"
        return urllib3.HTTPResponse(io.BytesIO(), {"Retry-After": seconds}, 503, preload_content=False)

    copy = fetching._copy

    def write(pools: urllib3.PoolManager, url: str, target: Path, stop: threading.Event) -> tuple[int, str]:
        if "full" not in url:
            return copy(pools, url, target, stop)
        assert busy.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(urllib3.HTTPConnectionPool, "_make_request", answer)
    monkeypatch.setattr(fetching, "_copy", write)
    (tmp_path / "cache").mkdir()
    files = [Download(name, f"http://mirror.example/{name}", name[0] * 64) for name in ("busy", "full")]
    ended, wait = list[bool](), threading.Event.wait

    def note(event: threading.Event, timeout: float | None = None) -> bool:
        is_set = wait(event, timeout)
        ended.extend([is_set] if timeout == 60 else [])
        return is_set

    monkeypatch.setattr(threading.Event, "wait", note)
    with pytest.raises(SpaceError):
        fetch(files, tmp_path / "cache", tmp_path)
    assert ended == [True], "by the end of the fetch, before the server's minute is over"
    assert asked == ["/busy"] * 2


@pytest.mark.parametrize(("size", "is_slow"), [(16 << 10, False), ((16 << 10) - 1, True)])
def test_a_mirror_that_drips_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, is_slow: bool
) -> None:
    """A chunk a second; the rate counts over five minutes, and only those count that came in them."""
    clock = [0.0]

    def chunks(*_: object) -> Iterator[bytes]:
        for _second in range(599):
            clock[0] += 1.0
            yield bytes(size)

    monkeypatch.setattr(fetching, "_chunks", chunks)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with pytest.raises(FetchError) if is_slow else nullcontext():
        fetching._copy(urllib3.PoolManager(), "http://a/b", tmp_path / "file", threading.Event())
    assert clock[0] == (300.0 if is_slow else 599.0)
