"""Facts that a record of ``pending_pods`` must show. Times are compared with each other, never with fixed limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.e2e.command import Facts
from tests.e2e.pods import BIG, PODS, QUOTA, SMALL, STALLED, Story, story_from_json

# The minimum factor by which a pod is pending longer on the old node.
FASTER = 3.0


def stories(record: Mapping[str, Any], machine: str) -> dict[str, Story]:
    """Return the story of each pod on the machine ``before`` or ``ours``."""
    return {name: story_from_json(told) for name, told in record[machine]["pods"].items()}


def figures(record: Mapping[str, Any]) -> dict[str, str]:
    """Return where it ran and what happened to each pod, before and ours, in words."""
    before, ours = record["before"], record["ours"]
    told = [stories(record, name) for name in ("before", "ours")]
    emulated = " (emulated)" if before["accelerator"] == "tcg" else ""
    rates = " and ".join(
        f"{before[f'{name}_bytes_per_second'] / 1e6:g} MB/s" for name in ("link", "connection")
    )
    return {
        "where": (
            f"QEMU machines of 2 cores{emulated}, a link of {rates} for each connection; until all was started, "
            f"{before['booted_seconds']:.0f} s before and {ours['booted_seconds']:.0f} s ours; load of the host "
            f"{before['load']} and {ours['load']}"
        ),
        **{
            f"`{name}`, before and ours": f"{value}; {ours['settings'][name]}"
            for name, value in before["settings"].items()
        },
        **{
            f"`{pod.name}`, {pod.shown}: from Pending to Running, before and ours": "; ".join(
                f"{story.running:.1f} s, {story.pulling:.1f} of them pulling"
                for story in (machine[pod.name] for machine in told)
            )
            for pod in PODS
        },
        "bytes over the link, before and ours": "; ".join(
            f"{sum(seen['bytes'].values()) / 1e6:.0f} MB" for seen in (before, ours)
        ),
        "sandboxes and pulls that failed, before and ours": "; ".join(
            f"{sum(len(s.failed_sandboxes) for s in machine.values())} and "
            f"{sum(len(s.failed_pulls) for s in machine.values())}"
            for machine in told
        ),
    }


def facts(record: Mapping[str, Any]) -> Facts:
    """Return each fact in words, and whether it holds."""
    before, ours = stories(record, "before"), stories(record, "ours")
    seen, seen_ours = record["before"], record["ours"]
    return {
        **_queue(before, ours, seen_ours),
        **_cancelled(before, ours, record),
        **_refused(seen, seen_ours),
    }


def _queue(before: Mapping[str, Story], ours: Mapping[str, Story], seen: Mapping[str, Any]) -> Facts:
    big, small = before[BIG.name], before[SMALL.name]
    return {
        "before: the small image is asked for only after the large one was pulled": (
            small.first_pull is not None and small.first_pull >= 0.5 * big.pulling
        ),
        "before: the small pod waits far longer than its own pull takes": (
            small.running >= FASTER * small.pulling
        ),
        "ours: the small pod runs sooner": FASTER * ours[SMALL.name].running <= small.running,
        "ours: the large pod runs sooner": FASTER * ours[BIG.name].running <= big.running,
        "ours: the large image is not asked for": seen["requests"][BIG.repository] == 0,
    }


def _cancelled(before: Mapping[str, Story], ours: Mapping[str, Story], record: Mapping[str, Any]) -> Facts:
    return {
        "before: the pull that stood still was cancelled": any(
            "cancel" in trouble.message for trouble in before[STALLED.name].failed_pulls
        ),
        "ours: no pull failed": not any(story.failed_pulls for story in ours.values()),
        "ours: the pull went through the same stall": (
            ours[STALLED.name].pulling >= record["ours"]["stall_seconds"]
        ),
        "ours: nothing of it was sent twice": (
            record["ours"]["bytes"][STALLED.repository] < record["before"]["bytes"][STALLED.repository]
        ),
    }


def _refused(before: Mapping[str, Any], ours: Mapping[str, Any]) -> Facts:
    was, story = (story_from_json(seen["pods"][QUOTA.name]) for seen in (before, ours))
    return {
        "before: no container runs while the pause image is refused": before["containers_while_refused"] == 0,
        "before: the sandbox fails with the registry's answer": any(
            "toomanyrequests" in trouble.message for trouble in was.failed_sandboxes
        ),
        "before: the pod starts only when the registry gives in": was.running > before["refused_seconds"],
        "ours: the pod starts while the pause image is refused": story.running <= ours["refused_seconds"],
        "ours: the pause image is not asked for": ours["requests"]["pause"] == 0,
        "ours: no sandbox fails": not story.failed_sandboxes,
    }
