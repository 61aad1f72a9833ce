"""Waiting for a signal without missing one.

Python's own handlers can't wake a waiting thread: they run between two instructions of the main thread. That thread
may hold the lock of the event that a handler is to set, and a signal that arrives just before the thread goes to sleep
doesn't wake it. So the interpreter writes each signal's number to a pipe immediately. No signals are blocked, since
programs started meanwhile would inherit that.
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
    """Yield a function that waits until one of these signals has arrived, from now on. For the main thread."""
    with _written(numbers) as pipe:

        def wait() -> None:
            while not {*numbers}.intersection(os.read(pipe.reader, 1)):
                pass

        yield wait


@contextmanager
def waking(wake: Callable[[], None], *numbers: signal.Signals) -> Iterator[None]:
    """Call ``wake`` in a separate thread after each of these signals. For the main thread.

    It is also called after every other signal that has a Python handler: if ``wake`` lets the main thread continue,
    that handler runs there before anything else.
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
    """Make the interpreter write signals' numbers to a pipe, a byte each; the given signals do nothing else."""
    pipe = _Pipe(*os.pipe2(os.O_CLOEXEC))
    os.set_blocking(pipe.writer, False)  # as the interpreter requires
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
