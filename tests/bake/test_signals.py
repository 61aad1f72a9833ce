"""A signal is noticed at any moment: right before a wait, in the middle of one, between two."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.images.builds import REPO

pytestmark = pytest.mark.root

MANY = 3000
# The interval until the next signal is random and about as long as an iteration, so that signals hit it everywhere.
WAIT = f"""\
import random, signal
from image_builder.system.signals import listening
drawn = random.Random(1)
with listening(signal.SIGALRM, signal.SIGTERM) as wait:
    for _ in range({MANY}):
        signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-6, 2e-4))
        wait()
    print("heard", flush=True)
    wait()
print("ended")
"""
# As a driver waits: a lock with a deadline, and Python signal handlers.
WAKE = f"""\
import queue, random, signal
from image_builder.system.signals import waking
drawn, woken, came = random.Random(1), queue.SimpleQueue(), []
signal.signal(signal.SIGALRM, lambda *_: came.append(1))
with waking(lambda: woken.put(None)):
    for number in range({MANY}):
        signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-6, 2e-4))
        woken.get()
        assert len(came) == number + 1, (number, came)
print("heard")
"""


def test_none_is_missed_and_none_is_made_up() -> None:
    argv = [sys.executable, "-c", WAIT]
    with subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "heard\n"
            # A signal that it doesn't listen for.
            child.send_signal(signal.SIGCONT)
            child.send_signal(signal.SIGTERM)
            out, _ = child.communicate()
        finally:
            child.kill()
    assert (child.returncode, out) == (0, "ended\n")


def test_who_waits_for_something_else_is_woken() -> None:
    done = subprocess.run([sys.executable, "-c", WAKE], cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("heard\n", "")
