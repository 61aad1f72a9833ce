"""The facts that a record of ``roll`` must show. There are no time limits here: an emulated machine is slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.e2e.command import Facts, machine
from tests.support.arm.fleet import NEW
from tests.support.control_plane import gates


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Return where it ran, and how long each step took, in words."""
    (result,) = record["report"]["results"].values()
    steps = [f"`{step}` {seconds:.0f}" for step, seconds in result["seconds"].items()]
    return {
        "where": machine(record, record["last"]["node"]["info"]),
        "seconds of each step, and of the whole run": f"{', '.join(steps)}; {record['roll_seconds']}",
    }


def facts(record: Mapping[str, Any]) -> Facts:
    """Return each fact in words, and whether it holds."""
    first, last, report = record["first"], record["last"], record["report"]
    (result,) = report["results"].values()
    old, new = record["builds"]
    node = last["node"]
    return {
        "the host ended as `ok`, verified by the whole suite": result["outcome"]["kind"] == "ok"
        and report["verified"] == 1,
        "it came back with its old build once, and was reimaged again": record["swaps"] == 2,
        "it reported the old build before the roll, and reports the new one now": f'"{old}"'
        in first["release"]
        and f'"{new}"' in last["release"],
        "it has a new boot ID, which the API server shows": first["boot"] != last["boot"] == node["boot"],
        "it has a new host key, which only the host CA vouches for": first["host_key"] != last["host_key"],
        "its local disk, set up by the old image, is used unchanged": last["disk"]["state"] == "ok"
        and last["disk"]["action"] == "reuse"
        and record["file_kept"],
        "it has joined again, with the same Node object": last["provision"]["state"] == "ok"
        and first["node"]["uid"] == node["uid"],
        "the gate has admitted it, and no cordon or taint from the roll is left": not node["cordoned"]
        and gates.TAINT["key"] not in node["taints"]
        and not any("roll" in taint for taint in node["taints"]),
        "the scale set's model names the new version, its services run, and no claim on it is left": record[
            "model"
        ]
        == NEW
        and set(record["services"].values()) == {"Running"}
        and not record["tags"],
    }
