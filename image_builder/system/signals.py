"""Waiting for a signal without missing one.

Python's own handlers can't wake a thread that waits: they run between two instructions of the main thread. It may
hold the lock of the event that they are to set, and one that comes right before it goes to sleep doesn't wake it. So
the interpreter writes each signal's number to a pipe, at once. Nothing is blocked: what is started meanwhile would
inherit that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_OVER = b"\0"  # no signal has this number


class _Pipe(NamedTuple):
    reader: int
    writer: int


@contextmanager
def listening(*numbers: signal.Signals) -> Iterator[Callable[[], None]]:
    """Yield what waits until one of these signals has come, from now on. For the main thread."""
    with _written(numbers) as pipe:

        def wait() -> None:
            while not {*numbers}.intersection(os.read(pipe.reader, 1)):
                pass

        yield wait


@contextmanager
def waking(wake: Callable[[], None], *numbers: signal.Signals) -> Iterator[None]:
    """Call ``wake`` in a thread of its own after each of these signals. For the main thread.

    So it is after each other one that Python has a handler for: where ``wake`` lets the main thread go on, that handler
    runs before anything else there.
    """
    with _written(numbers) as pipe:

        def call() -> None:
            while os.read(pipe.reader, 1) != _OVER:
                wake()

        thread = threading.Thread(target=call, name="signals")
        thread.start()
        try:
            yield
        finally:
            os.write(pipe.writer, _OVER)
            thread.join()


@contextmanager
def _written(numbers: Iterable[signal.Signals]) -> Iterator[_Pipe]:
    """Let the interpreter write the numbers of signals to a pipe, each a byte; these do nothing else."""
    pipe = _Pipe(*os.pipe2(os.O_CLOEXEC))
    os.set_blocking(pipe.writer, False)  # as the interpreter demands
    unheard = signal.set_wakeup_fd(pipe.writer)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield pipe
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(unheard)
        os.close(pipe.reader)
        os.close(pipe.writer)
