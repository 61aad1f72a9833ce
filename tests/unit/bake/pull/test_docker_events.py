"""The parsing of Docker's pull stream."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.bake.pull.docker_events import Digest, Ended, Failed, Finished, parse
from image_builder.bake.pull.model import Event, Limits
from tests.unit.bake.pull.deadline_rows import judge_all

BASE, A, B = "9b829b73a52f", "1fe172e4850f", "44d3aa8d0766"
SHA = "sha256:82302b06360729842acd27ab8a91c90e244f17e464fcfd366b7427af652c5559"


def layer(id: str, status: str, current: int | None = None, total: int | None = None) -> dict[str, Any]:
    """Return a layer's message as Docker 20.10 to 28 write it; the progress bar is there to be ignored."""
    if current is None:
        return {"status": status, "progressDetail": {}, "id": id}
    bar = f"[====>      ]  {current}B/{total}B"
    return {
        "status": status,
        "progressDetail": {"current": current, "total": total},
        "progress": bar,
        "id": id,
    }


# Modeled on moby's sources and known recordings, for an image of three layers: one that already exists, one that
# breaks off once, and one that waits for it in the daemon's queue. One message per second.
STREAM: list[dict[str, Any]] = [
    {"status": "Pulling from library/mongo", "id": "latest"},
    layer(BASE, "Already exists"),
    layer(A, "Pulling fs layer"),
    layer(B, "Pulling fs layer"),
    layer(B, "Waiting"),
    layer(A, "Downloading", 527_700, 28_572_632),
    layer(A, "Downloading", 14_000_000, 28_572_632),
    layer(A, "Retrying in 2 seconds"),
    layer(A, "Retrying in 1 second"),
    layer(A, "Downloading", 540_672, 28_572_632),
    layer(A, "Downloading", 28_572_632, 28_572_632),
    layer(A, "Verifying Checksum"),
    layer(A, "Download complete"),
    layer(B, "Downloading", 1834, 1834),
    layer(A, "Extracting", 294_912, 28_572_632),
    layer(B, "Download complete"),
    layer(A, "Extracting", 28_572_632, 28_572_632),
    layer(A, "Pull complete"),
    layer(B, "Extracting", 1834, 1834),
    layer(B, "Pull complete"),
    {"status": f"Digest: {SHA}"},
    {"status": "Status: Downloaded newer image for mongo:latest"},
]

UNDERSTOOD: list[Event | Ended] = [
    Event(0, "", "waiting", text="Pulling from library/mongo"),
    Event(1, BASE, "done", text="Already exists"),
    Event(2, A, "waiting", text="Pulling fs layer"),
    Event(3, B, "waiting", text="Pulling fs layer"),
    Event(4, B, "waiting", text="Waiting"),
    Event(5, A, "downloading", 527_700, 28_572_632, "Downloading"),
    Event(6, A, "downloading", 14_000_000, 28_572_632, "Downloading"),
    Event(7, A, "retrying", text="Retrying in 2 seconds"),
    Event(8, A, "retrying", text="Retrying in 1 second"),
    Event(9, A, "downloading", 540_672, 28_572_632, "Downloading"),
    Event(10, A, "downloading", 28_572_632, 28_572_632, "Downloading"),
    Event(11, A, "downloaded", text="Verifying Checksum"),
    Event(12, A, "downloaded", text="Download complete"),
    Event(13, B, "downloading", 1834, 1834, "Downloading"),
    Event(14, A, "extracting", 294_912, 28_572_632, "Extracting"),
    Event(15, B, "downloaded", text="Download complete"),
    Event(16, A, "extracting", 28_572_632, 28_572_632, "Extracting"),
    Event(17, A, "done", text="Pull complete"),
    Event(18, B, "extracting", 1834, 1834, "Extracting"),
    Event(19, B, "done", text="Pull complete"),
    Digest(SHA),
    Finished("Downloaded newer image for mongo:latest"),
]


def test_a_whole_stream() -> None:
    assert [parse(message, at) for at, message in enumerate(STREAM)] == UNDERSTOOD


def test_the_stream_of_version_29_differs_in_nothing() -> None:
    """It no longer has progress bars, and omits an empty ``progressDetail``."""
    newer = [
        {key: value for key, value in message.items() if key != "progress" and value != {}}
        for message in STREAM
    ]
    assert [parse(message, at) for at, message in enumerate(newer)] == UNDERSTOOD


def test_a_stream_that_breaks_off_is_judged() -> None:
    """The deadlines take the parsed events: progress ends during the retry, and the clock stands still in the queue."""
    limits = Limits(progress_seconds=60)
    until = {5: None, 7: f"no progress for 1:01 min; layer {A}: downloading, 14 MB of 28.6 MB"}
    for length, expected in until.items():
        parsed = [parse(message, at) for at, message in enumerate(STREAM[:length])]
        events = [seen for seen in parsed if isinstance(seen, Event)]
        verdict = judge_all(0, events, events[-1].at + 61, limits)
        assert (verdict and str(verdict)) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            {"errorDetail": {"message": "manifest unknown"}, "error": "manifest unknown"},
            Failed("manifest unknown"),
            id="both, without a code",
        ),
        pytest.param(
            {"errorDetail": {"code": 401, "message": "unauthorized"}, "error": "unauthorized"},
            Failed("unauthorized", 401),
            id="both, with a code",
        ),
        pytest.param(
            {"errorDetail": {"message": "no space left on device"}},
            Failed("no space left on device"),
            id="version 29",
        ),
        pytest.param({"error": "unexpected EOF"}, Failed("unexpected EOF"), id="the deprecated one alone"),
        pytest.param(
            {"errorDetail": {"code": 500}},
            Failed("Docker reported an error without a message", 500),
            id="no words",
        ),
        pytest.param({"errorDetail": "odd", "error": "told"}, Failed("told"), id="details of another shape"),
        pytest.param(
            {"status": "Downloading", "id": A, "errorDetail": {"message": "broken"}},
            Failed("broken"),
            id="an error beside a status",
        ),
    ],
)
def test_error(message: dict[str, Any], expected: Failed) -> None:
    found = parse(message, 3)
    assert found == expected and isinstance(found, Ended)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            {"status": "Pulling from library/x", "id": "0123456789ab"},
            Event(3, "", "waiting", text="Pulling from library/x"),
            id="a tag that looks like a layer",
        ),
        pytest.param(
            {"status": "Frobnicating", "id": A},
            Event(3, "", "waiting", text=f"{A}: Frobnicating"),
            id="a status of a layer that isn't known",
        ),
        pytest.param(
            {"status": "A word of warning"}, Event(3, "", "waiting", text="A word of warning"), id="a warning"
        ),
        pytest.param(
            {"status": "Downloading", "id": "latest", "progressDetail": {"current": 5}},
            Event(3, "", "downloading", 5, None, "Downloading"),
            id="a phase of what is no layer",
        ),
        pytest.param(
            {"status": "Extracting", "id": A, "progressDetail": {"current": 7, "units": "s"}},
            Event(3, A, "extracting", text="Extracting"),
            id="the containerd image store counts seconds",
        ),
        pytest.param(
            {"status": "Pulling layer fs", "id": A, "progressDetail": {"current": 7, "total": 9}},
            Event(3, A, "downloading", 7, 9, "Pulling layer fs"),
            id="the containerd image store by its transfer service",
        ),
        pytest.param(
            {"status": "Downloading", "id": A, "progressDetail": {"current": 7, "total": -1}},
            Event(3, A, "downloading", 7, None, "Downloading"),
            id="a size that isn't known",
        ),
        pytest.param(
            {"status": "Download complete", "id": A, "progressDetail": {"hidecounts": True}},
            Event(3, A, "downloaded", text="Download complete"),
            id="without numbers",
        ),
        pytest.param(
            {"status": "Downloading", "id": A, "progressDetail": None},
            Event(3, A, "downloading", text="Downloading"),
            id="no details",
        ),
        pytest.param(
            {"status": "Downloading", "id": A, "progressDetail": {"current": "7", "total": {}}},
            Event(3, A, "downloading", text="Downloading"),
            id="numbers of another shape",
        ),
        pytest.param(
            {"status": "Status: Image is up to date for x:1"},
            Finished("Image is up to date for x:1"),
            id="there",
        ),
        pytest.param({"status": f"Digest: {SHA}"}, Digest(SHA), id="digest"),
        pytest.param({}, None, id="nothing"),
        pytest.param({"status": ""}, None, id="no status"),
        pytest.param({"status": 7, "id": 7}, None, id="a status of another shape"),
        pytest.param({"stream": "text"}, None, id="the stream of a build"),
        pytest.param({"aux": {"ID": "x"}}, None, id="aux"),
        pytest.param(
            {"error": "", "errorDetail": None, "status": "Waiting", "id": A},
            Event(3, A, "waiting", text="Waiting"),
            id="an error that is none",
        ),
    ],
)
def test_message(message: dict[str, Any], expected: Event | Ended | None) -> None:
    assert parse(message, 3) == expected
