"""Wait until the kubelet is up: until then every byte of the disk belongs to the boot."""

from __future__ import annotations

import shutil
import time

from image_builder.node.child import ENVIRONMENT
from image_builder.node.net import fetch

_PATH = f"{ENVIRONMENT['PATH']}:/opt/bin"
_BETWEEN_SECONDS = 2.0
_ANSWER_SECONDS = 5.0


def wait(healthz: str, seconds: float) -> bool:
    """Wait for an answer 200 from ``healthz``, at most ``seconds``; tell whether it came.

    A node without a kubelet, or an empty ``healthz``, has nothing to wait for.
    """
    if not healthz or shutil.which("kubelet", path=_PATH) is None:
        return True
    return wait_for_answer(healthz, seconds)


def wait_for_answer(healthz: str, seconds: float) -> bool:
    """Ask until 200 is answered, at most ``seconds``; tell whether it was. No proxy is asked."""
    end = time.monotonic() + seconds
    while not _answers(healthz):
        if (remaining := end - time.monotonic()) <= 0:
            return False
        time.sleep(min(_BETWEEN_SECONDS, remaining))
    return True


def _answers(healthz: str) -> bool:
    try:
        return fetch.ask(healthz, headers={}, seconds=_ANSWER_SECONDS).status == 200
    except OSError:
        return False
