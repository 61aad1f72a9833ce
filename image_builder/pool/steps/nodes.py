"""A roll's queries to a node itself over SSH, whatever the cluster says: what it runs, and whether it is busy."""

from __future__ import annotations

import os
from pathlib import Path

from image_builder.node.health import application
from image_builder.node.settings import DIRECTORY, RELEASE
from image_builder.pool.plan.model import Outcome, ended
from image_builder.pool.reach.reach import Answer
from image_builder.pool.scale_set.verdict import Node

ASK_SECONDS = 20.0
# A host's boot ID, and the build of its image (node/settings.py).
ASK_IMAGE = (
    "sh",
    "-c",
    f"cat /proc/sys/kernel/random/boot_id; sed -n 's/^IMAGE_BUILD=//p' {RELEASE} | tr -d '\"'",
)
_NAMELESS = "it doesn't report which image it runs"
# Uses only what every image has. The HTTP status is about the node's health, so it is ignored here.
_ASK_WORK = f"""\
import json, os, sys, urllib.error, urllib.request
if os.path.exists(sys.argv[1]):
    with open(sys.argv[1]) as file:
        port = json.load(file).get("port", {application.Settings.port})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
    try:
        answer = opener.open(f"http://{application.ADDRESS}:{{port}}{application.PATH}", timeout=5)
    except urllib.error.HTTPError as error:
        answer = error
    for line in json.load(answer)["busy"]:
        print(line)
"""


def ask_work(settings: Path = DIRECTORY / "health-endpoint.json") -> tuple[str, ...]:
    """Return the command that asks a node's health endpoint what the node works on, if it has an endpoint."""
    return ("python3", "-I", "-c", _ASK_WORK, os.fspath(settings))


def image_in(answer: Answer) -> Node | Outcome:
    """Return what a node runs, by its answer to ``ASK_IMAGE``, or why that isn't known."""
    lines = answer.stdout.decode("utf-8", "replace").split()
    if answer.status == 0 and len(lines) == 2:
        return Node(lines[0], lines[1])
    return answer.outcome if not answer.outcome.ok else ended("timeout", _NAMELESS)


def work_in(answer: Answer) -> str:
    """Return what a node says it is working on, by its answer to ``ask_work``.

    This is what also keeps it out of Azure's own upgrades: leases, and users of its GPUs, including those that no pod
    shows. For a node without the endpoint, or whose endpoint doesn't answer, this is empty: only its pods count then.
    """
    lines = answer.stdout.decode("utf-8", "replace").splitlines() if answer.status == 0 else []
    return f"its node says: {', '.join(lines)}" if lines else ""
