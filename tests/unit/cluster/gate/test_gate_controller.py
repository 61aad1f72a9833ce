"""The controller's threads: all of them end with it."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from image_builder.cluster.gate.controller import Controller, Settings
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client
from image_builder.node.net.kubeconfig import Access, Pem


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
    made = Controller(lambda: Client(Access("https://lab", Pem(text=""))), "us", Settings(), [].append)
    made.informer = cast("Any", informer)
    made._elect = lambda stop: stop.wait()  # type: ignore[method-assign]
    return made


def test_a_watch_that_blocks_is_interrupted_at_the_end() -> None:
    informer, stop = Informer(), threading.Event()
    stop.set()
    _controller(informer).run(stop)
    assert informer.over.is_set() and not any(thread.is_alive() for thread in informer.threads)


def test_a_part_that_dies_ends_all_others() -> None:
    informer, stop = Informer(), threading.Event()
    with pytest.raises(NodeError):
        _controller(informer).run(stop, lambda _: None)
    assert stop.is_set() and informer.over.is_set()
