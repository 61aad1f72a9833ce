"""The controller's threads: all of them end with it."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from image_builder.cluster.gate.controller import Controller, Settings
from image_builder.cluster.gate.model import Node, Rules
from image_builder.cluster.gate.remedies import Remedies
from image_builder.cluster.gate.triage import Step
from image_builder.drain import quarantine
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from tests.unit.drain.manifests import node_object
from tests.unit.drain.test_drain_quarantine import RECORD, applied


class Informer:
    """A watch that blocks in a request until it is interrupted."""

    def __init__(self) -> None:
        self.synced, self.over = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def run(self, _stop: threading.Event) -> None:
        self.threads.append(threading.current_thread())
        self.over.wait(60)

    def interrupt(self) -> None:
        self.over.set()


def _controller(informer: Informer) -> Controller:
    made = Controller(lambda: Client(Access("https://lab", Pem(text=""))), "us", Settings(), print)
    made.informer = cast("Any", informer)
    made._elect = cast("Any", threading.Event.wait)  # type: ignore[method-assign]
    return made


def test_a_watch_that_blocks_is_interrupted_at_the_end() -> None:
    informer, stop = Informer(), threading.Event()
    stop.set()
    _controller(informer).run(stop)
    assert informer.over.is_set() and informer.threads
    assert not any(thread.is_alive() for thread in informer.threads)


def test_a_part_that_dies_ends_all_others() -> None:
    informer, stop = Informer(), threading.Event()
    with pytest.raises(NodeError):
        _controller(informer).run(stop, lambda _: None)
    assert stop.is_set() and informer.over.is_set()


@pytest.mark.parametrize(
    ("error", "waiting", "failures"),
    [
        (KubeError("gone", 404), 0, 0),
        (KubeError("conflict", 409), 1, 0),
        (KubeError("invalid", 422), 1, 0),
        (KubeError("unavailable", 503), 1, 2),
        (NodeError("kube", "no answer"), 1, 2),
    ],
)
def test_what_failed_waits_by_itself_or_makes_all_wait(error: NodeError, waiting: int, failures: int) -> None:
    controller, now = _controller(Informer()), time.monotonic()
    controller._queue.add("n", now)
    pauses = [controller._put_back(Node("n"), error) for _ in range(2)]
    assert (len(controller._queue), controller._failures) == (waiting, failures)
    assert any(pauses) is bool(failures)


@pytest.mark.parametrize(("step", "stage"), [(Step.TAKE_OUT, "out"), (Step.ASK, "asked")])
def test_a_mark_comes_with_its_event(step: Step, stage: str) -> None:
    posted: list[Any] = []

    class Api:
        def request(self, _method: str, _path: str, body: Any, _kind: str = "") -> None:
            posted.append(body)

    node = node_object()
    before = applied(node, quarantine.take_out(node, RECORD)) if step is Step.ASK else node
    remedies = Remedies(cast("Client", Api()), Rules(), print, lambda: 0.0)
    remedies._mark(before, step, RECORD, 1.0)
    event, patch = posted
    marked = quarantine.record_of(applied(before, patch))
    assert marked and (event["type"], marked.stage) == ("Warning", stage)
