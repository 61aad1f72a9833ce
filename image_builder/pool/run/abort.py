"""Ask the process that drives a run to stop, from any other process on the same machine.

It is found through the kernel's lock on the journal: there is no PID file that could be stale.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from image_builder.errors import PoolError, UsageError
from image_builder.pool.run.journal import in_use
from image_builder.system.journal import holders

_POLL_SECONDS = 0.2


def ask_to_stop(journal: Path) -> int:
    """Send SIGTERM to the process that writes ``journal``; return its id.

    Raises UsageError if no run has started or none is running, PoolError if its process can't be found or signaled.
    """
    if not journal.exists():
        raise UsageError(f"no run has started: {journal} does not exist", hint="image-builder pool run")
    for pid in holders(journal):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            # Check that it still is the writer, now that the pidfd rules out a reused PID.
            if pid in holders(journal):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                return pid
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise PoolError(f"process {pid} drives the run, and this user may not signal it") from error
        finally:
            os.close(pidfd)
    if in_use(journal):
        raise PoolError(
            f"the process that writes {journal} can't be seen from here",
            hint="send it SIGTERM on the machine where it runs",
        )
    raise UsageError("no process drives this run now", hint="image-builder pool status")


def wait_until_over(journal: Path, tell: Callable[[], None] = lambda: None) -> None:
    """Wait until no process drives the run any longer; ``tell`` is called meanwhile."""
    while in_use(journal):
        tell()
        time.sleep(_POLL_SECONDS)
