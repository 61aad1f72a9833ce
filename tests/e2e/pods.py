"""The pods of ``pending_pods``, and what happened to them, from the kubelet's events and the registry's requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from image_builder.lab.registry import HOST

# kubelet 1.20's structured log of an event (k8s.io/client-go tools/record, StartStructuredLogging): strings are
# quoted in Go's syntax, which for these messages is valid JSON.
_EVENT = re.compile(
    r'"Event occurred" object="default/(?P<object>[^"]+)" .*'
    r'reason="(?P<reason>\w+)" message=(?P<message>"(?:[^"\\]|\\.)*")'
)
_PULL_FAILED = "Failed to pull image"


@dataclass(frozen=True)
class Pod:
    """A static pod of one container: repository and tag of its image, and its command, empty for the image's own."""

    name: str
    repository: str
    tag: str
    shown: str
    command: tuple[str, ...] = ()

    @property
    def image(self) -> str:
        return f"{HOST}/{self.repository}:{self.tag}"


QUOTA = Pod("quota", "tiny", "1", "registry refuses the pause image (429)")
BIG = Pod("big", "large", "1.0", "large image, 1.1 GB unpacked", ("sleep", "infinity"))
SMALL = Pod("small", "small", "1", "small image, behind the large one")
STALLED = Pod("stalled", "stalled", "1", "the link stands still in the middle of the pull")
PODS = (QUOTA, BIG, SMALL, STALLED)


def manifest(pod: Pod) -> str:
    """Return the static pod's manifest, as JSON."""
    container: dict[str, Any] = {"name": "main", "image": pod.image, "imagePullPolicy": "IfNotPresent"}
    if pod.command:
        container["command"] = list(pod.command)
    told = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": "default"},
        # No pod network is part of an image: a CNI comes with the cluster.
        "spec": {"hostNetwork": True, "terminationGracePeriodSeconds": 1, "containers": [container]},
    }
    return json.dumps(told, indent=1) + "\n"


@dataclass(frozen=True)
class Event:
    """One event of a pod; ``seconds`` are by the clock that the reader was told to use."""

    seconds: float
    pod: str
    reason: str
    message: str


def read_events(journal: str, offset: float) -> Iterator[Event]:
    """Yield the events in a kubelet's journal (``journalctl -o json``, one per line), in order.

    ``offset`` (seconds) is added to the journal's monotonic time. A static pod's name there is NAME-HOST.
    """
    for line in journal.splitlines():
        told = json.loads(line)
        if not isinstance(message := told.get("MESSAGE"), str) or not (found := _EVENT.search(message)):
            continue
        at = int(told["__MONOTONIC_TIMESTAMP"]) / 1e6 + offset
        pod = found["object"].partition("-")[0]
        yield Event(at, pod, found["reason"], json.loads(found["message"], strict=False))


@dataclass(frozen=True)
class Trouble:
    """A failure: of a pull, or of creating a sandbox."""

    seconds: float
    reason: str
    message: str


@dataclass(frozen=True)
class Story:
    """What happened to a pod, in seconds since the node got it: when its image was pulled, when its container started.

    A pull is from the first request that the registry got for the image until the kubelet had it, or gave up.
    """

    pod: str
    running: float
    pulls: tuple[tuple[float, float], ...]
    troubles: tuple[Trouble, ...]

    @property
    def failed_pulls(self) -> list[Trouble]:
        return [t for t in self.troubles if t.reason == "Failed"]

    @property
    def failed_sandboxes(self) -> list[Trouble]:
        return [t for t in self.troubles if t.reason == "FailedCreatePodSandBox"]

    @property
    def pulling(self) -> float:
        """Seconds during which its image was being pulled."""
        return sum(end - start for start, end in self.pulls)

    @property
    def first_pull(self) -> float | None:
        """When its image was first requested; None if it never was."""
        return self.pulls[0][0] if self.pulls else None


def story_from_json(told: dict[str, Any]) -> Story:
    """Return the story whose fields are in a JSON object."""
    pulls = tuple((start, end) for start, end in told["pulls"])
    return Story(told["pod"], told["running"], pulls, tuple(Trouble(**one) for one in told["troubles"]))


def tell(pod: Pod, given: float, events: Iterable[Event], requests: Sequence[float]) -> Story:
    """Return the story of ``pod``.

    ``given`` is when the node got its manifest, ``requests`` when the registry got requests for any part of its image;
    all are by the same clock. The kubelet's own event "Pulling" doesn't help: it comes before the image's turn in the
    queue. Raises ValueError for a pod that never ran.
    """
    mine = [event for event in events if event.pod == pod.name]
    started = next((e.seconds for e in mine if e.reason == "Started"), None)
    if started is None:
        raise ValueError(f"the pod {pod.name} did not run")
    ends = [
        e.seconds
        for e in mine
        if e.reason == "Pulled" or (e.reason == "Failed" and e.message.startswith(_PULL_FAILED))
    ]
    pulls: list[tuple[float, float]] = []
    at = given
    for end in ends:
        begun = next((r for r in sorted(requests) if at <= r < end), None)
        if begun is not None:
            pulls.append((round(begun - given, 1), round(end - given, 1)))
            at = end
    troubles = [
        Trouble(round(e.seconds - given, 1), e.reason, e.message)
        for e in mine
        if e.reason == "FailedCreatePodSandBox"
        or (e.reason == "Failed" and e.message.startswith(_PULL_FAILED))
    ]
    return Story(pod.name, round(started - given, 1), tuple(pulls), tuple(troubles))
