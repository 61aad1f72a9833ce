"""The facts that a record of ``slices`` must show. There are no time limits here: an emulated machine is slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from image_builder.node.preflight.model import CONDITION
from tests.e2e.command import Facts, machine
from tests.support import slices_howto


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Return where it ran, how long it took, and how much went to and from the pods, in words."""
    node, image, disks, sizes = record["node"], record["image"], record["disks"], record["bytes"]
    to, back = (
        " and ".join(f"{size / 1000:.1f} kB" for size in sizes[way].values()) for way in ("streams", "told")
    )
    return {
        "where": f"{machine(record, node['info'])}; {record['kubectl']}",
        "from power-on to an admitted node": f"{node['seconds']['admitted']:.0f} s",
        "import of the image": f"{image['bytes'] / 1e6:.0f} MB in {image['seconds']:.0f} s",
        "from the last `kubectl apply` to the Job's last output": f"{record['jobs_seconds']:.0f} s",
        "streams to the pods, and back": f"{to}; {back}",
        "searched for the key and the streams": (
            f"{disks['bytes'] / 1e9:.1f} GB of disks, {disks['secrets_wanted']} pieces"
        ),
    }


def facts(record: Mapping[str, Any]) -> Facts:
    """Return each fact in words, and whether it holds."""
    return {**_asked(record), **_jobs(record), **_hosts(record), **_key(record)}


def _asked(record: Mapping[str, Any]) -> Facts:
    conditions = record["node"]["conditions"]
    return {
        "the commands and the Job are word for word those of the page": record["commands"]
        == list(slices_howto.commands())
        and record["manifest"] == slices_howto.manifest(),
        "the node is a member of the cluster, Ready, and passed its preflight": conditions.get("Ready")
        == conditions.get(CONDITION)
        == "True",
        "there are at least two slices, and one of them has the dead host": len(record["slices"]) > 1
        and [record["dead"] in names for names in record["slices"]].count(True) == 1,
    }


def _jobs(record: Mapping[str, Any]) -> Facts:
    job, pods, processed = record["job"], record["pods"], record["processed"]
    dead, well = _numbers(record)
    ends = {number: pods[number]["ends"] for number in (*dead, *well)}
    return {
        "each slice had one pod, started once, on this node": all(
            pod["pods"] == 1 and len(pod["ends"]) == 1 and pod["ends"][0]["restarts"] == 0
            for pod in pods.values()
        )
        and {name for pod in pods.values() for name in pod["nodes"]}
        == {record["node"]["labels"]["kubernetes.io/hostname"]},
        "the other slices completed": job["completed"] == ",".join(well)
        and all(ends[number][0]["status"] == 0 for number in well),
        "the slice with the dead host failed, with Ansible's exit status": job["failed"] == ",".join(dead)
        and all(ends[number][0]["status"] == 4 for number in dead),
        "the Job failed because of that slice, and only after all slices had ended": [
            "Failed",
            "FailedIndexes",
        ]
        in job["conditions"]
        and job["last_end"] <= job["failed_at"],
        "the last command prints which slices failed": record["last_line"]
        == f"done: {job['completed']} failed: {job['failed']}",
        "ansible-runner processed every stream to its end, with the same status": all(
            processed[number] == {"rc": str(end[0]["status"]), "status": _WORDS[end[0]["status"]]}
            for number, end in ends.items()
        ),
    }


# ansible-runner's names for Ansible's exit statuses.
_WORDS = {0: "successful", 4: "failed"}


def _hosts(record: Mapping[str, Any]) -> Facts:
    names = sorted(name for part in record["slices"] for name in part)
    return {
        "the Job told every host to join once, except the dead one": record["told_by_jobs"]
        == {name: int(name != record["dead"]) for name in names},
        "`pool run` with the same plan then told the formerly dead host, and no host twice": record[
            "told_in_the_end"
        ]
        == dict.fromkeys(names, 1),
        "every host ended as `ok`": record["ends"] == dict.fromkeys(names, "ok"),
    }


def _key(record: Mapping[str, Any]) -> Facts:
    disks = record["disks"]
    return {
        "the stream, and the directory into which the key is unpacked, were in memory": record["volumes"]
        == ["tmpfs empty-dir work", "tmpfs secret streams"],
        "none of the pods' volumes is left on the node, and no Secret in the cluster": record["left"] == [],
        "no line of the key and no piece of a stream is on the machine's disks": disks["secrets_wanted"] > 0
        and disks["secrets_found"] == 0,
        "the same search does find the pods' output": disks["controls_found"]
        == disks["controls_wanted"]
        == len(record["slices"]),
    }


def _numbers(record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the numbers of the slices with the dead host, and of the others."""
    parts: tuple[list[str], list[str]] = [], []
    for number, names in enumerate(record["slices"]):
        parts[record["dead"] not in names].append(str(number))
    return parts
