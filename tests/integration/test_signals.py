"""A signal at any moment is heard: right before a wait, in its middle, between two."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.builds import REPO

MANY = 3000
# The time until the next one is drawn from about what a turn takes, so that it comes everywhere in it.
WAIT = f"""\
import random, signal
from image_builder.signals import listening
drawn = random.Random(1)
with listening(signal.SIGALRM, signal.SIGTERM) as wait:
    for _ in range({MANY}):
        signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-6, 2e-4))
        wait()
    print("heard", flush=True)
    wait()
print("ended")
"""


def test_none_is_missed_and_none_is_made_up() -> None:
    argv = [sys.executable, "-c", WAIT]
    with subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "heard\n"
            # Another one than it listens to.
            child.send_signal(signal.SIGCONT)
            child.send_signal(signal.SIGTERM)
            out, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert (child.returncode, out) == (0, "ended\n")
