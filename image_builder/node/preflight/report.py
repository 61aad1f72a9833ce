"""``node-agent preflight --report``: report this boot's verdict to the API server, once a transition.

One PATCH. Nothing is asked, nothing is watched, nothing is repeated while the node runs: the boot id in the message
tells whether it is stale.
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

# What is waited for the kubelet's own answer, which costs the API server nothing: seconds between two questions.
_POLL = 2.0
_KUBELET_SECONDS = 3600.0
# The early word of a failure keeps the kubelet from starting, or the node from its reboot, for so long at most. A
# question takes no longer.
_EARLY_SECONDS = 10.0


@dataclass(frozen=True)
class Places(status.Places):
    """And how time passes. ``chance`` gives numbers in [0, 1)."""

    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random


def run(places: Places = Places()) -> int:
    """Report the verdict of this boot unless it was reported already. Raises NodeError: there is nothing to report."""
    settings = parse(settings_files.load("preflight", places.etc))
    document = model.read_verdict(places)
    if not settings.kubeconfig:
        raise NodeError("preflight.none", "nowhere to report to: the settings name no kubeconfig")
    if files.read_json(places.run / model.REPORTED) == _key(document):
        status.tell("preflight: already reported")
        return 0
    _await_kubelet(settings, Deadline(time.monotonic() + _KUBELET_SECONDS, sleep=places.sleep))
    # Nodes that were started together don't report together.
    places.sleep(places.chance() * settings.jitter_seconds)

    def send() -> None:
        # The kubelet may have got its certificate only now, or a new one: read it at every attempt.
        try:
            _send(settings, document, kube.TIMEOUT)
        except KubeError as error:
            if error.is_hopeless:
                raise
            raise NotYet(error, error.retry_after) from error
        except NodeError as error:  # a kubeconfig that isn't there yet, or half written
            raise NotYet(error) from error

    never = Deadline(math.inf, sleep=places.sleep, chance=places.chance)
    patiently(
        send, never, cap=LONGEST_WAIT, tell=lambda text: status.tell(f"preflight: not reported yet: {text}")
    )
    _remember(places.run, document)
    status.tell(f"preflight: reported: {model.message(document)}")
    return 0


def try_now(settings: Settings, directory: Path) -> None:
    """Report at once, before the kubelet starts, and only once: for a boot that did not pass on a known node.

    Its Node object may have no taint, and the kubelet can't give it one; the controller does when it hears of this. A
    node that isn't known yet registers with the taint. A thread reports and is left behind when the time is over: a
    resolver has no deadline.
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
    """Tell whether pods may be scheduled to this node: it has joined, and the taint is gone, as ``gate admit`` has it.

    Where the API server doesn't say, they may.
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
    """Be the kubelet: return a client, and the node's name there. Raises NodeError (``kube.config``)."""
    return kube.as_kubelet(Path(settings.kubeconfig), settings.node_name, timeout)


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
    """Wait until the kubelet answers: before, the node may not be registered, and each refusal costs a request.

    A node without a configuration to join has no kubeconfig, and nowhere to report to. Raises NodeError
    (``preflight.kubelet``) after an hour: the unit begins again, with the verdict as it is by then.
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
