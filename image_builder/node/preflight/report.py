"""``node-agent preflight --report``: report this boot's verdict to the API server, once per transition.

One PATCH. Nothing is watched or repeated while the node runs: the boot id in the message shows whether the condition is
stale. A kubelet that has started again may have made a new Node object, without the condition: one GET tells.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import files, status
from image_builder.node import settings as settings_files
from image_builder.node.errors import NodeError
from image_builder.node.net import fetch, kube
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.retry import LONGEST_WAIT, Deadline, NotYet, patiently
from image_builder.node.preflight import model
from image_builder.node.preflight.settings import Settings, parse

# Waiting for the kubelet's own health endpoint, which costs the API server nothing: the interval, and the limit
# (seconds).
_POLL = 2.0
_KUBELET_SECONDS = 3600.0
# An early report of a failure delays the kubelet's start, or the node's reboot, for at most this long (seconds). A
# request for the node's taints has the same limit.
_EARLY_SECONDS = 10.0


@dataclass(frozen=True)
class Places(status.Places):
    """Also how time passes. ``chance`` returns numbers in [0, 1)."""

    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random


def run(places: Places = Places()) -> int:
    """Report this boot's verdict unless the Node object has it. Raises NodeError if there is nothing to report."""
    settings = parse(settings_files.load("preflight", places.etc))
    model.read_verdict(places)
    if not settings.kubeconfig:
        raise NodeError("preflight.none", "nowhere to report to: the settings name no kubeconfig")
    _await_kubelet(settings, Deadline(time.monotonic() + _KUBELET_SECONDS, sleep=places.sleep))
    # Nodes that started at the same time must not report at the same time.
    places.sleep(places.chance() * settings.jitter_seconds)

    def send() -> tuple[dict[str, Any], bool]:
        """Return the verdict, and whether sending it was necessary."""
        # Since the last attempt a re-test may have replaced the verdict, and the kubelet received a certificate.
        try:
            document = model.read_verdict(places)
            was_reported = files.read_json(places.run / model.REPORTED) == _key(document)
            is_missing = not (was_reported and _is_known(settings, document))
            if is_missing:
                _send(settings, document, kube.TIMEOUT)
        except KubeError as error:
            if error.is_hopeless:
                raise
            raise NotYet(error, error.retry_after) from error
        except NodeError as error:
            # No verdict during another test, or a kubeconfig that is missing or half written.
            raise NotYet(error) from error
        return document, is_missing

    never = Deadline(math.inf, sleep=places.sleep, chance=places.chance)
    document, is_new = patiently(
        send, never, cap=LONGEST_WAIT, tell=lambda text: status.tell(f"preflight: not reported yet: {text}")
    )
    _remember(places.run, document)
    status.tell(f"preflight: {'' if is_new else 'already '}reported: {model.message(document)}")
    return 0


def try_now(settings: Settings, directory: Path) -> None:
    """Try once to report before the kubelet starts: for a boot that didn't pass, on a node that has already joined.

    Its Node object may have no taint, and the kubelet can't add one; the controller does when it sees the report. A
    node that hasn't joined yet registers with the taint. A thread reports, and is abandoned when the time is up: name
    resolution has no timeout.
    """
    if not settings.has_joined:
        return

    def work() -> None:
        try:
            document = json.loads((directory / model.FILE).read_bytes())
            _send(settings, document, _EARLY_SECONDS)
            _remember(directory, document)
        except (NodeError, OSError, ValueError) as error:
            status.tell(f"preflight: not reported yet: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_EARLY_SECONDS)
    if thread.is_alive():
        status.tell(f"preflight: not reported yet: no answer within {_EARLY_SECONDS:g} s")


def may_have_pods(settings: Settings) -> bool:
    """Return whether pods may be scheduled to this node: it has joined, and ``gate admit`` has removed the taint.

    If the API server doesn't answer, assume that they may.
    """
    if not settings.has_joined:
        return False
    try:
        client, name = connect(settings, _EARLY_SECONDS)
        with client:
            taints = client.node(name)["spec"].get("taints") or []
    except (NodeError, OSError, ValueError, KeyError) as error:
        status.tell(f"preflight: the node's taints can't be read: {error}")
        return True
    return all((taint["key"], taint["effect"]) != (settings.taint, "NoSchedule") for taint in taints)


def connect(settings: Settings, timeout: float) -> tuple[Client, str]:
    """Return a client with the kubelet's identity, and the node's name. Raises NodeError (``kube.config``)."""
    return kube.as_kubelet(Path(settings.kubeconfig), settings.node_name, timeout)


def _is_known(settings: Settings, document: Mapping[str, Any]) -> bool:
    """Return whether the Node object has this verdict: it may be another one than was reported to."""
    client, node = connect(settings, kube.TIMEOUT)
    with client:
        conditions = client.node(node).get("status", {}).get("conditions") or ()
    message = kube.condition(model.CONDITION, "", "", model.message(document))["message"]
    return (model.CONDITION, message) in {(each["type"], each.get("message")) for each in conditions}


def _send(settings: Settings, document: Mapping[str, Any], timeout: float) -> None:
    client, node = connect(settings, timeout)
    with client:
        client.patch_condition(
            node,
            model.CONDITION,
            model.condition_status(document["state"]),
            model.condition_reason(document["code"]),
            model.message(document),
            labels={status.PREFLIGHT_LABEL: status.label_of(document["state"])},
        )


def _await_kubelet(settings: Settings, deadline: Deadline) -> None:
    """Wait until the kubelet answers: before that, the node may not be registered, and each refusal costs a request.

    A node without a join configuration has no kubeconfig, and nowhere to report to. Raises NodeError
    (``preflight.kubelet``) after an hour: the unit starts over, with the verdict at that time.
    """
    while not (settings.has_joined and fetch.is_up(settings.healthz, _POLL)):
        if not deadline.poll(_POLL):
            message = (
                f"{settings.healthz} did not answer within {_KUBELET_SECONDS:g} s, or there is no kubeconfig"
            )
            raise NodeError("preflight.kubelet", message)


def _remember(directory: Path, document: Mapping[str, Any]) -> None:
    files.write_json(directory / model.REPORTED, _key(document))


def _key(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in ("boot_id", "state", "code", "started")}
