"""``node-agent preflight --retest``: test the GPUs of a node in service, if the gate grants it.

The node's timer asks once a day, and only if the last test is old enough, so nothing has to watch it. The node makes
the request with one API call, then looks for the answer every few minutes, for at most an hour. The gate takes the node
out of service before it grants the request; the result is reported like a boot's verdict, with the request's number.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from image_builder.node import files, status
from image_builder.node import settings as settings_files
from image_builder.node.gpu import settings as gpu_settings
from image_builder.node.net import kube
from image_builder.node.net.kube import KubeError
from image_builder.node.preflight import model, report, smoke
from image_builder.node.preflight.judge import judge
from image_builder.node.preflight.model import INCONCLUSIVE, PASSED, Check
from image_builder.node.preflight.settings import Settings, parse

TIER = "periodic"
# How often to look for the answer, and the longest pause in between (seconds).
LOOKS, LOOK_SECONDS = 12, 300.0
_DAY = 86400.0
# Codes that say that the GPUs are in use: neither a pass nor a failure.
_BUSY = "procs."


@dataclass(frozen=True)
class Places(report.Places):
    """Also what tests the GPUs."""

    smoke: Callable[[str], Sequence[str]] = smoke.command
    now: Callable[[], float] = time.time


def run(places: Places = Places()) -> int:
    """Ask, wait for the answer, test and report; return 0 whatever the result.

    Raises NodeError if this boot has no verdict, or if the settings or the kubeconfig are wrong.
    """
    settings = parse(settings_files.load("preflight", places.etc))
    before = model.read_verdict(places)
    why_not = reason_not_to_ask(before, settings, places.now(), gpu_settings.are_expected(places.etc))
    if why_not:
        status.tell(f"retest: not now: {why_not}")
        return 0
    wish = make_wish(before, places.now(), secrets.token_hex(8))
    answer = _answer(wish, settings, places)
    if answer != model.GRANTED:
        status.tell(f"retest: not now: {answer or 'the gate did not answer'}")
        return 0
    with files.lock(places.run / "preflight.lock"):
        check = smoke.run(places.smoke(TIER), settings.gpu_seconds, str(before["boot_id"]))
        started = datetime.fromtimestamp(places.now(), UTC).isoformat(timespec="seconds")
        document = after(before, check, str(wish["nonce"]), started)
        model.write_verdict(document, places)
        model.admit(document, places.run, hard=settings.hard)
    status.tell(f"retest: {check.state}: {check.code or check.reason}")
    return report.run(places)


def reason_not_to_ask(document: Mapping[str, Any], settings: Settings, now: float, has_gpus: bool) -> str:
    """Return why this node doesn't want a re-test; empty if it does."""
    if not settings.retest_days or not settings.kubeconfig:
        return "re-tests are disabled"
    if not has_gpus:
        return "there are no GPUs to test"
    if document["state"] != PASSED:
        return f"the last test: {document['state']}"
    age = now - datetime.fromisoformat(document["started"]).timestamp()
    # A time in the future means that the clock has been set since: it doesn't show when the test was.
    is_fresh = 0 <= age < settings.retest_days * _DAY
    return "" if not is_fresh else f"the last test was {age / 3600:.0f} h ago"


def make_wish(document: Mapping[str, Any], now: float, nonce: str) -> dict[str, Any]:
    """Return the node's request: ``tested`` and ``until`` (when it stops looking) are Unix times."""
    return {
        "boot_id": document["boot_id"],
        "nonce": nonce,
        "tested": int(datetime.fromisoformat(document["started"]).timestamp()),
        "until": int(now + LOOKS * LOOK_SECONDS),
    }


def answer_to(node: Mapping[str, Any], nonce: str) -> str:
    """Return the gate's answer to the request with this number from a Node object; empty if there is none yet."""
    try:
        answer = json.loads(node["metadata"]["annotations"][model.ANSWER])
        return str(answer["state"]) if answer["nonce"] == nonce else ""
    except (KeyError, TypeError, ValueError):
        return ""


def after(before: Mapping[str, Any], check: Check, nonce: str, started: str) -> dict[str, Any]:
    """Return the verdict after a re-test. If it was not made because the GPUs are in use, the old verdict stays."""
    if check.state == INCONCLUSIVE and check.code.startswith(_BUSY):
        return {**before, "retest": nonce, "started": started}
    verdict = judge([check])
    document = model.document(
        verdict,
        [check],
        boot_id=str(before["boot_id"]),
        image_build=str(before["image_build"]),
        started=started,
        seconds=check.seconds,
    )
    return {**document, "retest": nonce}


def _answer(wish: Mapping[str, Any], settings: Settings, places: Places) -> str:
    """Make the request, and return its answer; empty if none came in time. Raises NodeError.

    If the API server refuses the request, the next run tries again tomorrow: there is no hurry.
    """
    client, name = report.connect(settings, kube.TIMEOUT)
    with client:
        annotation = {"metadata": {"annotations": {model.WISH: json.dumps(wish)}}}
        try:
            client.request("PATCH", kube.path_of_node(name), annotation, kube.MERGE_PATCH)
        except KubeError as error:
            status.tell(f"retest: {error.message}")
            return ""
        for _ in range(LOOKS):
            places.sleep(LOOK_SECONDS * (0.5 + places.chance() / 2))
            try:
                state = answer_to(client.node(name), str(wish["nonce"]))
            except KubeError as error:
                status.tell(f"retest: {error.message}")
                continue
            if state not in ("", model.HELD):
                return state
    return ""
