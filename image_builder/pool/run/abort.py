"""Ask the process that drives a run to stop, from any other one of the same machine.

The kernel knows that process by the lock of the journal. No file names it, so none can be stale.
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

    Raises UsageError where no run has begun or none is at work, PoolError where its process can't be found or told.
    """
    if not journal.exists():
        raise UsageError(f"no run has started: {journal} does not exist", hint="image-builder pool run")
    for pid in holders(journal):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            # It is still the one that writes, now that its number can't become another one's.
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
    """Return when nobody drives the run any more; ``tell`` is called meanwhile."""
    while in_use(journal):
        tell()
        time.sleep(_POLL_SECONDS)
