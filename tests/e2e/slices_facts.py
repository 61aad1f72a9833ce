"""What a record of ``slices`` must show. Nothing here is a number of seconds: an emulated machine is slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from image_builder.node.preflight.model import CONDITION
from tests.support import slices_howto

Facts = dict[str, bool]


def broken(record: Mapping[str, Any]) -> list[str]:
    """Return what does not hold, in words; nothing when all is as it must be."""
    return [text for text, holds in facts(record).items() if not holds]


def facts(record: Mapping[str, Any]) -> Facts:
    """Return each fact in words, and whether it holds."""
    return {**_asked(record), **_jobs(record), **_hosts(record), **_key(record)}


def _asked(record: Mapping[str, Any]) -> Facts:
    conditions = record["node"]["conditions"]
    return {
        "the commands and the Job are those of the page, word for word": record["commands"]
        == list(slices_howto.commands())
        and record["manifest"] == slices_howto.manifest(),
        "the node is a member of the cluster, Ready, and passed its preflight": conditions.get("Ready")
        == conditions.get(CONDITION)
        == "True",
        "there are two slices or more, and one of them has the dead host": len(record["slices"]) > 1
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
        "the other slices are completed": job["completed"] == ",".join(well)
        and all(ends[number][0]["status"] == 0 for number in well),
        "the slice with the dead host is failed, with Ansible's status": job["failed"] == ",".join(dead)
        and all(ends[number][0]["status"] == 4 for number in dead),
        "the Job is failed for that slice, and not before all have ended": ["Failed", "FailedIndexes"]
        in job["conditions"]
        and job["last_end"] <= job["failed_at"],
        "the last command says which slices failed": record["last_line"]
        == f"done: {job['completed']} failed: {job['failed']}",
        "ansible-runner took in every stream to its end, with that same status": all(
            processed[number] == {"rc": str(end[0]["status"]), "status": _WORDS[end[0]["status"]]}
            for number, end in ends.items()
        ),
    }


# What ansible-runner calls a status of Ansible's.
_WORDS = {0: "successful", 4: "failed"}


def _hosts(record: Mapping[str, Any]) -> Facts:
    names = sorted(name for part in record["slices"] for name in part)
    return {
        "the Job told every host once, and the dead one not": record["told_by_jobs"]
        == {name: int(name != record["dead"]) for name in names},
        "`pool run` of the same plan then told the dead one, which lives again, and nobody twice": record[
            "told_in_the_end"
        ]
        == dict.fromkeys(names, 1),
        "and every host has ended well": record["ends"] == dict.fromkeys(names, "ok"),
    }


def _key(record: Mapping[str, Any]) -> Facts:
    disks = record["disks"]
    return {
        "the stream and the directory that the key is unpacked to were in memory": record["volumes"]
        == ["tmpfs empty-dir work", "tmpfs secret streams"],
        "no volume of the pods is left on the node, and no Secret in the cluster": record["left"] == [],
        "no line of the key and no piece of a stream is on the machine's disks": disks["secrets_wanted"] > 0
        and disks["secrets_found"] == 0,
        "where what the pods said is found": disks["controls_found"]
        == disks["controls_wanted"]
        == len(record["slices"]),
    }


def _numbers(record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the numbers of the slices with the dead host, and of the others."""
    parts: tuple[list[str], list[str]] = [], []
    for number, names in enumerate(record["slices"]):
        parts[record["dead"] not in names].append(str(number))
    return parts
