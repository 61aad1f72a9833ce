"""The page of ``slices``, made from its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from image_builder.settings import REPO_ROOT
from tests import provenance
from tests.e2e.results import held, machine
from tests.e2e.slices_facts import facts

PAGE = REPO_ROOT / "docs/reference/slices-results.md"
_HEAD = """\
# Slices as Kubernetes Jobs: last results

The commands and the Job of [run slices elsewhere](../how-to/run-slices-elsewhere.md#kubernetes), taken from that page
and run: by Debian's kubectl against the lab's etcd, API server, controller manager and scheduler, whose node is a
machine of the lab's image `worker_join` that joined by itself. Its Docker was given an image of Debian's Python and
OpenSSH with ansible-core and ansible-runner of `requirements.lock`, by `docker load`. The hosts are real sshds outside
of the cluster, each in a network namespace of its own, with a stand-in for the node agent that counts how often it is
told; packets to one of them vanish. Then the machine is switched off, and what its disks hold is searched for the key.
In the end the dead host is reachable again, and `pool run` drives the same plan.

Made by `.venv/bin/python -m tests.e2e.slices --update-docs`.
"""


def text(record: Mapping[str, Any]) -> str:
    """Return the page."""
    return f"{_HEAD}\n{results(record)}\n"


def write(record: Mapping[str, Any]) -> None:
    PAGE.write_text(text(record), encoding="utf-8")


def results(record: Mapping[str, Any]) -> str:
    """Return the results in Markdown."""
    return "\n".join(
        [
            *provenance.note(record, provenance.SLICES),
            _machine(record),
            "",
            "| slice | hosts | Job | status of its pod | stream there | stream back |",
            "|---|---|---|---|---|---|",
            *(_slice(record, number) for number in range(len(record["slices"]))),
            "",
            _seconds(record),
            "",
            *held("what was asked of the cluster, the hosts and the disks", facts(record)),
        ]
    )


def _machine(record: Mapping[str, Any]) -> str:
    return machine(record, record["node"]["info"], f"; {record['kubectl']}")


def _slice(record: Mapping[str, Any], number: int) -> str:
    job = record["jobs"][f"pool-slice-{number}"]
    names = (
        f"{name} (dead)" if name == record["dead"] else name for name in sorted(record["slices"][number])
    )
    sizes = record["bytes"]["streams"][f"pool-slice-{number}"], record["bytes"]["told"][f"told-{number}"]
    status = ", ".join(str(end["status"]) for end in job["ends"])
    return (
        f"| {number} | {', '.join(names)} | {', '.join(job['conditions'])} | {status} | "
        + " | ".join(f"{size / 1000:.1f} kB" for size in sizes)
        + " |"
    )


def _seconds(record: Mapping[str, Any]) -> str:
    image, disks = record["image"], record["disks"]
    return (
        f"Seconds: {record['node']['seconds']['admitted']:.0f} from the power to a node that is let in, "
        f"{image['seconds']:.0f} for an image of {image['bytes'] / 1e6:.0f} MB, "
        f"{record['jobs_seconds']:.0f} from the last `kubectl apply` to the last word of the Jobs. Searched: "
        f"{disks['bytes'] / 1e9:.1f} GB for {disks['secrets_wanted']} pieces of the key and its streams."
    )
