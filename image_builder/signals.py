"""Waiting for a signal, without missing one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def listening(*numbers: signal.Signals) -> Iterator[Callable[[], None]]:
    """Yield what waits until one of these signals has come, from now on. For the main thread.

    Python's own handlers can't do that: they run between two instructions of this thread. It may hold the lock of the
    event that they are to set, and one that comes right before it goes to sleep doesn't wake it. So the interpreter
    writes each signal's number to a pipe, at once. They are not blocked: what is started meanwhile would inherit that.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(theirs, False)  # as the interpreter demands
    unheard = signal.set_wakeup_fd(theirs)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def wait() -> None:
        while not {*numbers}.intersection(os.read(ours, 1)):
            pass

    try:
        yield wait
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(unheard)
        os.close(ours)
        os.close(theirs)
