"""The last measurements of `pending_pods`, which are in the docs; and its parts, without any machine.

The measurement itself boots two machines and takes half an hour: `.venv/bin/python -m tests.e2e.pending_pods`.
"""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e import facts, page
from tests.e2e.link import Link
from tests.e2e.pending_pods import RECORD
from tests.e2e.pods import BIG, PODS, SMALL, Span, manifest, read_events, story_from_json, tell

pytestmark = [pytest.mark.root, pytest.mark.process]

KB = 1000
PULLED = 'I1121 12:00:00.000000     700 event.go:291] "Event occurred" object="default/%s-node-1" kind="Pod"'


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


# -- what was measured -----------------------------------------------------------------------------------------


def test_every_fact_holds_in_the_record(record: dict[str, Any]) -> None:
    assert len(facts.facts(record)) >= 14
    assert facts.broken(record) == []


def _swap(record: dict[str, Any]) -> None:
    record["before"], record["ours"] = record["ours"], record["before"]


def _never_refused(record: dict[str, Any]) -> None:
    record["before"]["containers_while_refused"] = 1


def _never_cancelled(record: dict[str, Any]) -> None:
    record["before"]["pods"]["stalled"]["troubles"] = []


def _nothing_in_the_way(record: dict[str, Any]) -> None:
    small = record["before"]["pods"]["small"]
    small["spans"], small["running"] = [{"kind": "pulling", "start": 0.5, "end": 2.0}], 3.0


def _asked_for_pause(record: dict[str, Any]) -> None:
    record["ours"]["requests"]["pause"] = 1


@pytest.mark.parametrize(
    ("change", "least"),
    [(_swap, 6), (_never_refused, 1), (_never_cancelled, 1), (_nothing_in_the_way, 2), (_asked_for_pause, 1)],
)
def test_facts_see_what_is_wrong(
    record: dict[str, Any], change: Callable[[dict[str, Any]], None], least: int
) -> None:
    other = copy.deepcopy(record)
    change(other)
    assert len(facts.broken(other)) >= least


def test_the_plot_has_each_pod_twice(record: dict[str, Any]) -> None:
    plot = ElementTree.fromstring(page.plot(record))
    titles = [title.text or "" for title in plot.iter("{http://www.w3.org/2000/svg}title")]
    running = [title for title in titles if ": runs from" in title]
    assert len(running) == 2 * len(PODS)
    for rect in plot.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= 860
    assert "seconds" in "".join(plot.itertext())


def test_a_page_without_marks_is_an_error(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="results: begin"):
        page.with_results("# Nothing\n", record)


# -- stories ---------------------------------------------------------------------------------------------------


def _line(seconds: float, pod: str, reason: str, message: str) -> str:
    words = f'type="Normal" reason="{reason}" message={json.dumps(message)}'
    text = f'{PULLED % pod} apiVersion="v1" {words}'
    return json.dumps({"__MONOTONIC_TIMESTAMP": str(int(seconds * 1e6)), "MESSAGE": text})


def test_events_are_read_from_the_journal() -> None:
    lines = [
        json.dumps({"__MONOTONIC_TIMESTAMP": "1", "MESSAGE": "something else"}),
        json.dumps({"__MONOTONIC_TIMESTAMP": "1", "MESSAGE": [1, 2]}),  # journald's form of non-text bytes
        _line(12.5, "big", "Failed", 'Failed to pull image "x": said "no"'),
    ]
    (event,) = read_events("\n".join(lines), 100.0)
    assert (event.seconds, event.pod, event.reason) == (112.5, "big", "Failed")
    assert event.message == 'Failed to pull image "x": said "no"'


def test_a_pull_begins_when_the_registry_is_asked() -> None:
    lines = [
        _line(1, "small", "Pulling", "Pulling image"),
        _line(9, "small", "Pulled", "Successfully pulled"),
    ]
    lines += [_line(10, "small", "Started", "Started container"), _line(4, "big", "Pulled", "")]
    story = tell(SMALL, 0.0, read_events("\n".join(lines), 0.0), [7.0, 8.0])
    assert story.spans == (Span("waiting", 0, 7), Span("pulling", 7, 9), Span("waiting", 9, 10))
    assert (story.running, story.first_pull, story.pulling) == (10.0, 7.0, 2.0)


def test_a_failed_pull_and_the_next_one() -> None:
    lines = [
        _line(5, "small", "Failed", 'Failed to pull image "x": context canceled'),
        _line(5, "small", "Failed", "Error: ErrImagePull"),
        _line(20, "small", "Pulled", "Successfully pulled"),
        _line(21, "small", "Started", ""),
    ]
    story = tell(SMALL, 0.0, read_events("\n".join(lines), 0.0), [1.0, 2.0, 16.0])
    assert [span.kind for span in story.spans] == ["waiting", "pulling", "waiting", "pulling", "waiting"]
    assert [trouble.seconds for trouble in story.failed_pulls] == [5.0]
    assert story_from_json(json.loads(json.dumps(story.as_json()))) == story


def test_an_image_that_is_there_is_not_pulled() -> None:
    lines = [_line(2, "big", "Pulled", "already present on machine"), _line(3, "big", "Started", "")]
    story = tell(BIG, 0.0, read_events("\n".join(lines), 0.0), [])
    assert story.spans == (Span("waiting", 0, 3),)
    assert story.first_pull is None


def test_a_pod_that_never_ran_is_an_error() -> None:
    with pytest.raises(ValueError, match="big did not run"):
        tell(BIG, 0.0, [], [])


def test_manifests_name_the_image_and_leave_the_network_alone() -> None:
    for pod in PODS:
        spec = json.loads(manifest(pod))["spec"]
        assert spec["containers"][0]["image"] == pod.image
        assert spec["hostNetwork"] is True


# -- the link --------------------------------------------------------------------------------------------------


def _fetch(address: tuple[str, int], got: list[bytes]) -> None:
    with socket.create_connection(address) as sock:
        sock.shutdown(socket.SHUT_WR)
        data = bytearray()
        while block := sock.recv(65536):
            data += block
    got.append(bytes(data))


def _serve(server: socket.socket, content: bytes) -> None:
    while True:
        try:
            near, _ = server.accept()
        except OSError:
            return
        with near:
            near.sendall(content)


@pytest.fixture
def served() -> Any:
    """Serve the same bytes to every client; yield the address and the bytes."""
    content = bytes(range(256)) * 1200  # 307 kB
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_serve, args=(server, content), daemon=True)
        thread.start()
        yield server.getsockname(), content
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def _timed(address: tuple[str, int], count: int) -> tuple[float, list[bytes]]:
    got: list[bytes] = []
    threads = [threading.Thread(target=_fetch, args=(address, got)) for _ in range(count)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started, got


def test_connections_share_the_rate(served: Any) -> None:
    (target, content), rate = served, 600.0 * KB
    with Link(("127.0.0.1", 0), target, rate) as link:
        one, _ = _timed(link.address, 1)
        three, got = _timed(link.address, 3)
        assert got == [content] * 3
        assert link.carried == 4 * len(content)
    # A link may be late, but never early.
    assert one >= 0.85 * len(content) / rate and three >= 0.85 * 3 * len(content) / rate


def test_a_frozen_link_delivers_later_and_closes_nothing(served: Any) -> None:
    target, content = served
    with Link(("127.0.0.1", 0), target, 20.0 * KB) as link:
        got: list[bytes] = []
        thread = threading.Thread(target=_fetch, args=(link.address, got))
        thread.start()
        while not link.carried:
            time.sleep(0.01)
        link.freeze()
        link.rate = 10_000.0 * KB
        thread.join(2.0)
        assert thread.is_alive() and got == []
        link.thaw()
        thread.join()
    assert got == [content]


def test_a_link_ends_with_connections_open(served: Any) -> None:
    target, _ = served
    with Link(("127.0.0.1", 0), target, 10.0 * KB) as link:
        sock = socket.create_connection(link.address)
        time.sleep(0.1)
        link.freeze()
    with sock:
        while sock.recv(65536):
            pass
    assert not any(thread.is_alive() for thread in link._threads)
